"""The kernels compiled by the real Triton for GPUs that this machine need not have."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch

from tests.ops.layouts import make, make_parameter
from tests.ops.triton_compile import (
    MAIN_TARGETS,
    OTHER_TARGETS,
    Launch,
    Recorder,
    Target,
    compile_launch,
    compiles,
    exhaustive_but_main,
    name_of,
)

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler in this process", allow_module_level=True)

_TARGETS: list[Target] = [
    *MAIN_TARGETS,
    *OTHER_TARGETS,
    ("cuda", 70, 32),
    ("cuda", 100, 32),
]

# what it is like: (layout, batch, rows, row length)
_INPUTS = {
    "whole rows": ("matrix", 1, 64, 2048),
    "heads": ("heads_first", 2, 64, 128),
    "long rows": ("matrix", 1, 4, 131072),
    "channels in front": ("channel_first", 2, 64, 96),
}


@pytest.fixture
def launches(
    triton: ModuleType, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[Launch]]:
    """The launches for each of the inputs, which compute nothing here."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    from diffkern.providers.triton import norm

    recorded: list[Launch] = []
    monkeypatch.setattr(norm, "norm_kernel", Recorder(norm.norm_kernel, recorded))
    launches: dict[str, list[Launch]] = {}
    for name, layout in _INPUTS.items():
        x = make(*layout, torch.bfloat16, "cpu")
        weight, bias = (make_parameter("plain", layout[-1], torch.float32, "cpu") for _ in range(2))
        norm.rms_norm(x, weight, bias, 1e-6, 1.0, torch.bfloat16, None, False, True)
        norm.rms_norm(x, weight, bias, 1e-6, 1.0, None, None, False, True)
        norm.layer_norm(x, weight, bias, 1e-6, None, True)
        launches[name], recorded[:] = list(recorded), []
    norm.rms_norm(x.float(), weight, bias, 1e-12, 1.0, None, None, True, True)
    launches["clamped"] = recorded
    return launches


@pytest.mark.parametrize("target", exhaustive_but_main(_TARGETS), ids=name_of)
def test_the_kernel_compiles_for_every_architecture(target: Target, launches: dict[str, list[Launch]]) -> None:
    assert [len(each) for each in launches.values()] == [3, 3, 3, 3, 1]
    for each in launches.values():
        for launch in each:
            assert compiles(launch, target)


@pytest.mark.parametrize("name", _INPUTS)
def test_aligned_inputs_are_read_and_written_in_16_byte_vectors(name: str, launches: dict[str, list[Launch]]) -> None:
    for launch in launches[name]:
        ptx = compile_launch(launch, ("cuda", 90, 32)).asm["ptx"]
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx
        assert "ld.global.b16" not in ptx, "some of the input is read one element at a time"
