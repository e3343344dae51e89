"""Kernels that are broken or do more than they should: a reason in the report, and the next provider serves."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern import inject_optimized_kernels
from diffkern.hub.loader import load
from diffkern.hub.policy import HubError, Policy
from diffkern.hub.reference import KernelReference
from tests.hub import kernels
from tests.hub.conftest import new_process
from tests.hub.kernels import Gated, kernel, write
from tests.hub.server import Files, LoopbackHub

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mlp = nn.RMSNorm(16, eps=1e-6), Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


def served(model: nn.Module, config: dict[str, Any], path: str) -> tuple[str | None, str]:
    """Who serves a module, and what the report says of it."""
    report = inject_optimized_kernels(model, config=config)
    (site,) = (site for site in report.patched + report.failed if site.path == path)
    return site.provider, site.reason or ""


# --- modules that are broken ---------------------------------------------------------------------------------

RAISING_LOOKUP = """
    def __getattr__(name):
        raise ImportError(f"no {name} without a licence")
"""
LAYERS = textwrap.dedent("""
    from torch import nn

    class Nothing(nn.Module):
        forward = None
""")


@pytest.mark.filterwarnings("ignore:diffkern")
@pytest.mark.parametrize(
    ("init", "layers", "name", "said"),
    [
        (RAISING_LOOKUP, "", "", "ImportError: no apply_rms_norm without a licence"),
        (RAISING_LOOKUP, "", ":Norm", "ImportError: no layers without a licence"),
        ("layers = [1, 2]\n", "", ":Norm", "it has no such layer; its layers: none"),
        ("layers = [1, 2]\n", "", "", "it has no rms_norm"),
        ("", LAYERS, ":Nothing", "its forward is None"),
        ("class Stop(BaseException): pass\nraise Stop('no')\n", "", "", "failed (Stop: no)"),
        ("import sys\nsys.exit(3)\n", "", "", "failed (SystemExit: 3)"),
        ("raise GeneratorExit\n", "", "", "failed (GeneratorExit"),
        ("def apply_rms_norm(*args): raise SystemExit(4)\n", "", "", "it raised SystemExit: 4"),
        ("def apply_rms_norm(*args): return None\n", "", "", "it raised AttributeError"),
        ("def apply_rms_norm(x, weight, eps): return x, x\n", "", "", "it raised AttributeError"),
    ],
)
def test_a_broken_kernel_is_a_reason_and_the_next_provider_serves(
    hub: LoopbackHub, tmp_path: Path, x: Tensor, init: str, layers: str, name: str, said: str
) -> None:
    path = write(tmp_path / "kernel", kernel(init, layers))
    model = Model()
    expected = model(x)
    provider, reason = served(model, {"rms_norm": f"{path}{name}"}, "norm")
    assert provider in ("compiled", "eager") and said in reason
    torch.testing.assert_close(model(x), expected)


@pytest.mark.filterwarnings("ignore:diffkern")
def test_an_op_without_a_default_overload_is_none_of_ours(hub: LoopbackHub, tmp_path: Path, x: Tensor) -> None:
    init = """
        import torch
        torch.library.define("_overloads_cpu_1::rms_norm.only", "(Tensor x) -> Tensor")
    """
    path = write(tmp_path / "kernel", kernel(init, identity="_overloads_cpu_1"))
    provider, reason = served(Model(), {"rms_norm": path}, "norm")
    assert provider in ("compiled", "eager") and "it has no rms_norm" in reason


@pytest.mark.filterwarnings("ignore:diffkern")
@pytest.mark.parametrize("identity", ["sys", "json", "tests"])
def test_a_kernel_that_calls_itself_like_another_module_leaves_that_module(
    hub: LoopbackHub, tmp_path: Path, identity: str
) -> None:
    module = sys.modules[identity]
    path = write(tmp_path / "kernel", kernel(kernels.RMSNORM, identity=identity))
    _, reason = served(Model(), {"rms_norm": path}, "norm")
    assert f"calls itself {identity}, which is the name of another module" in reason
    assert sys.modules[identity] is module


def test_a_kernel_whose_import_failed_is_imported_again_once_it_can_be(hub: LoopbackHub, tmp_path: Path) -> None:
    files = kernel("class Stop(BaseException): pass\nraise Stop\n", identity="_again_cpu_1")
    reference = KernelReference.parse(write(tmp_path / "kernel", files))
    with pytest.raises(HubError, match="Stop"):
        load(reference, Policy(), CPU)
    assert "_again_cpu_1" not in sys.modules
    write(tmp_path / "kernel", kernel("VALUE = 7\n", identity="_again_cpu_1"))
    assert load(reference, Policy(), CPU).module.VALUE == 7


def test_an_interrupt_while_a_kernel_is_imported_reaches_the_user(hub: LoopbackHub, tmp_path: Path) -> None:
    path = write(tmp_path / "kernel", kernel("raise KeyboardInterrupt\n"))
    with pytest.raises(KeyboardInterrupt):
        inject_optimized_kernels(Model(), config={"rms_norm": path})


STATE = """
    import random
    import torch
    import numpy

    def change():
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
        torch.set_num_threads(1 + torch.get_num_threads())
        torch.use_deterministic_algorithms(True)

    def apply_rms_norm(x, weight, eps):
        change()
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
"""


def state() -> list[Any]:
    import random

    import numpy

    return [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    ]


@pytest.mark.filterwarnings("ignore:diffkern")
@pytest.mark.parametrize("when", ["import", "call"])
def test_the_state_of_the_process_is_as_before_whatever_a_kernel_sets(
    hub: LoopbackHub, tmp_path: Path, x: Tensor, when: str
) -> None:
    path = write(tmp_path / "kernel", kernel(STATE + "    change()\n" * (when == "import")))
    model, before = Model(), state()
    provider, reason = served(model, {"rms_norm": path}, "norm")
    assert state() == before
    assert provider in ("compiled", "eager") and "it changed the default dtype and the default device" in reason


@pytest.mark.filterwarnings("ignore:diffkern")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("weight.zero_(); return y", "it changed its input"),
        ("return x.copy_(y)", "it changed its input"),
        ("return BUFFER.setdefault((x.shape, x.dtype), y).copy_(y)", "it returns the same memory at every call"),
        ("COUNT.append(1); return y if len(COUNT) % 2 else 2 * y", "error 1.0e+00"),
    ],
)
def test_a_kernel_that_does_more_than_compute_is_refused(
    hub: LoopbackHub, tmp_path: Path, x: Tensor, body: str, said: str
) -> None:
    source = f"""
        import torch
        BUFFER, COUNT = {{}}, []

        def apply_rms_norm(x, weight, eps):
            y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
            {body}
    """
    provider, reason = served(Model(), {"rms_norm": write(tmp_path / "kernel", kernel(source))}, "norm")
    assert provider in ("compiled", "eager") and said in reason


# --- files beside those that were published --------------------------------------------------------------------


def with_digests(files: Files) -> Files:
    """The files with a metadata.json that gives their digests, as ``kernels`` writes them."""
    root = "build/torch-cpu/"
    metadata = json.loads(files[f"{root}metadata.json"])
    digests = {
        name.removeprefix(root): base64.b64encode(hashlib.sha256(data).digest()).decode()
        for name, data in files.items()
        if name.startswith(root) and not name.endswith("metadata.json")
    }
    metadata["digest"] = {"algorithm": "sha256", "files": digests}
    return {**files, f"{root}metadata.json": json.dumps(metadata).encode()}


def plant_bytecode(build: Path, tmp_path: Path) -> None:
    import py_compile

    source = tmp_path / "evil.py"
    source.write_text("VALUE = 666\n")
    (build / "layers").mkdir()
    py_compile.compile(str(source), cfile=str(build / "layers" / "__init__.pyc"))


def plant_link(build: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "__init__.py").write_text("VALUE = 666\n")
    (build / "layers").symlink_to(elsewhere, target_is_directory=True)


def plant_folder(build: Path, tmp_path: Path) -> None:
    (build / "empty").mkdir()


def plant_in_a_cache(build: Path, tmp_path: Path) -> None:
    (build / "__pycache__").mkdir(exist_ok=True)
    (build / "__pycache__" / "library.so").write_bytes(b"")


def plant_bytecode_beside_its_source(build: Path, tmp_path: Path) -> None:
    (build / "layers.pyc").write_bytes(b"")


def plant_broken_link(build: Path, tmp_path: Path) -> None:
    (build / "gone.py").symlink_to(tmp_path / "gone")


PLANTS = [
    (plant_bytecode, "layers is none of the files that were published"),
    (plant_link, "layers is a link to another folder, and none of the files that were published"),
    (plant_folder, "empty is none of the files"),
    (plant_in_a_cache, "__pycache__/library.so is none of the files"),
    (plant_bytecode_beside_its_source, "layers.pyc is none of the files"),
    (plant_broken_link, "gone.py is none of the files"),
]
INIT = "from . import layers\nVALUE = layers.VALUE\n"
LAYERS_FILE = {"build/torch-cpu/layers.py": b"VALUE = 1\n"}


@pytest.mark.parametrize(("plant", "said"), PLANTS)
def test_whatever_lies_beside_the_files_of_a_local_kernel_with_digests_refuses_it(
    hub: LoopbackHub, tmp_path: Path, plant: Any, said: str
) -> None:
    path = write(tmp_path / "kernel", with_digests({**kernel(INIT), **LAYERS_FILE}))
    plant(tmp_path / "kernel" / "build" / "torch-cpu", tmp_path)
    with pytest.raises(HubError, match=re.escape(said)):
        load(KernelReference.parse(path), Policy(), CPU)


@pytest.mark.parametrize(("plant", "said"), PLANTS)
def test_whatever_lies_beside_downloaded_files_refuses_the_kernel_and_is_found_by_verify(
    hub: LoopbackHub, tmp_path: Path, plant: Any, said: str
) -> None:
    from typer.testing import CliRunner

    from diffkern.cli import app

    hub.repository("org/tiny").commit({**kernel(INIT), **LAYERS_FILE}, "v1")
    assert CliRunner().invoke(app, ["hub", "lock", "org/tiny"]).exit_code == 0
    assert load(KernelReference.parse("org/tiny"), Policy(), CPU).module.VALUE == 1
    (source,) = (tmp_path / "cache").glob("**/snapshots/**/layers.py")
    plant(source.parent, tmp_path)
    new_process()
    with pytest.raises(HubError, match=re.escape(said)):
        load(KernelReference.parse("org/tiny"), Policy(), CPU)
    verified = CliRunner().invoke(app, ["hub", "verify"])
    assert verified.exit_code == 1 and said in verified.output and "as locked" not in verified.output


def test_bytecode_that_other_programs_wrote_beside_a_source_is_no_damage(hub: LoopbackHub, tmp_path: Path) -> None:
    import importlib.util
    import py_compile

    path = write(tmp_path / "kernel", with_digests({**kernel(INIT), **LAYERS_FILE}))
    source = str(tmp_path / "kernel" / "build" / "torch-cpu" / "layers.py")
    py_compile.compile(source, cfile=importlib.util.cache_from_source(source))
    assert load(KernelReference.parse(path), Policy(), CPU).module.VALUE == 1


# --- names -----------------------------------------------------------------------------------------------------


def test_a_file_whose_name_looks_like_a_pattern_is_downloaded(hub: LoopbackHub) -> None:
    files = kernel("from pathlib import Path\nVALUE = (Path(__file__).parent / 'a[64].txt').read_text()\n")
    hub.repository("org/tiny").commit({**files, "build/torch-cpu/a[64].txt": b"64"}, "v1")
    assert load(KernelReference.parse("org/tiny"), Policy(), CPU).module.VALUE == "64"


@pytest.mark.parametrize("folder", ["with#1", "with#", "a:b", "a[64]", "a b"])
def test_a_path_with_any_characters_can_be_named(hub: LoopbackHub, tmp_path: Path, x: Tensor, folder: str) -> None:
    write(tmp_path / folder, kernel(kernels.RMSNORM, kernels.LIGER_LAYERS))
    colon = ":" * (":" in folder)
    model = Model()
    expected = model(x)
    config = {"rms_norm": f"./{folder}{colon}", "Gated": f"./{folder}:LigerSwiGLUMLP"}
    report = inject_optimized_kernels(model, config=config)
    assert {site.provider for site in report.patched} == set(config.values())
    torch.testing.assert_close(model(x), expected)


def test_a_colon_that_belongs_to_the_path_is_asked_for(hub: LoopbackHub, tmp_path: Path) -> None:
    write(tmp_path / "a:b", kernel("VALUE = 3\n"))
    with pytest.raises(HubError, match=re.escape("For the directory ./a:b write './a:b:'")):
        load(KernelReference.parse("./a:b"), Policy(), CPU)
    reference = KernelReference.parse("./a:b:")
    assert load(reference, Policy(), CPU).module.VALUE == 3
    assert KernelReference.parse(str(reference)) == reference
