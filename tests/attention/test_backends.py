"""The table of backends: what it says of each, against diffusers and against the exact result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from diffusers.models import attention_dispatch

from diffkern.attention import BACKENDS, AttentionCall, UnavailableError, accuracy, backend_of

Make = Callable[..., AttentionCall]

_TORCH = ("native", "_native_flash", "_native_math")


#: What diffkern brings along itself.
_OWN = {"cudnn_fp8"}


def test_the_names_are_those_of_diffusers() -> None:
    assert set(BACKENDS) - _OWN == {name.value for name in attention_dispatch.AttentionBackendName}


@pytest.mark.parametrize(
    "name", sorted(set(BACKENDS) - _OWN - {n for n in BACKENDS if n.startswith("_native_") or n == "native"})
)
def test_nothing_is_promised_that_diffusers_drops(name: str) -> None:
    """Its dispatcher leaves out what a backend has no parameter for, without a word."""
    member = attention_dispatch.AttentionBackendName(name)
    known = attention_dispatch._AttentionBackendRegistry._supported_arg_names[member]
    backend = BACKENDS[name]
    assert not backend.dropout or "dropout_p" in known
    assert not backend.causal or "is_causal" in known
    assert not backend.scale or "scale" in known
    assert backend.masks == {"none"} or "attn_mask" in known


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("flash", {}, "runs on cuda only"),
        ("flex", {"causal": True}, "has no causal mask"),
        ("flex", {"mask": "bool"}, "applies no mask"),
        ("flex", {"dropout": 0.1}, "has no dropout"),
        ("_native_flash", {"head_dim": 512}, "takes heads of up to 256 only, not 512"),
    ],
)
def test_what_a_backend_cannot_do_is_said(
    name: str, arguments: dict[str, object], reason: str, make_call: Make
) -> None:
    assert BACKENDS[name].refusal(make_call(**arguments).signature()) == reason


def test_sizes_dtypes_and_gradients_are_asked_about(make_call: Make) -> None:
    """The device aside, which this machine may not have."""

    def refusal(name: str, **arguments: object) -> str | None:
        signature = make_call(**arguments).signature()
        return replace(BACKENDS[name], device_types=None, capability=None).refusal(signature)

    assert refusal("sage", dtype=torch.float32) == "takes bfloat16 and float16 only, not float32"
    assert refusal("sage", dtype=torch.bfloat16, head_dim=192) == "takes heads of up to 128 only, not 192"
    assert refusal("sage", dtype=torch.bfloat16, gradients=True) == "has no backward"
    assert refusal("sage_blackwell_hub", dtype=torch.bfloat16, head_dim=96) == "takes heads of 64, 128 only, not 96"
    assert refusal("sage_blackwell_hub", dtype=torch.bfloat16, head_dim=64, scale=0.5) == "takes no scale"
    assert refusal("flash", dtype=torch.bfloat16, mask="additive") == "applies no mask"
    assert refusal("flash", dtype=torch.bfloat16, dropout=0.1) is None
    assert refusal("_flash_3", dtype=torch.bfloat16, dropout=0.1) == "has no dropout"


def test_a_typing_mistake_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean '_native_math'"):
        backend_of("_native_mth")
    with pytest.raises(ValueError, match="choose one of native"):
        backend_of("zzz")


def test_a_missing_package_is_a_reason() -> None:
    for backend in BACKENDS.values():
        missing = backend.missing()
        install = f": pip install 'diffkern[{backend.extra}]'" if backend.extra else ""
        assert missing is None or missing == f"needs the package {backend.package}, which is not installed{install}"
    if BACKENDS["flash"].missing() is not None:
        with pytest.raises(UnavailableError, match="flash"):
            BACKENDS["flash"].load()


def test_a_backend_that_would_be_downloaded_obeys_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFKERN_HUB", "0")
    with pytest.raises(UnavailableError, match="DIFFKERN_HUB=0"):
        BACKENDS["flash_hub"].load()


@pytest.mark.parametrize("name", _TORCH)
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_pytorchs_own_are_right(name: str, mask: str, kv_heads: int, make_call: Make) -> None:
    call = make_call(mask=mask, kv_heads=kv_heads, scale=0.3)
    assert accuracy.errors(call, (BACKENDS[name].compute,))[0] < 1e-6
    assert accuracy.gradient_errors(call, (BACKENDS[name].compute,))[0] < 1e-6


def test_heads_are_repeated_for_backends_that_do_not_group(make_call: Make) -> None:
    call = make_call(kv_heads=2)
    repeated = call.repeated()
    assert repeated.key.shape[2] == 4
    for head in range(4):
        assert torch.equal(repeated.key[:, :, head], call.key[:, :, head // 2])
    torch.testing.assert_close(BACKENDS["native"].compute(repeated), BACKENDS["native"].compute(call))


def test_flex_is_reached_through_diffusers(make_call: Make) -> None:
    with torch.no_grad():
        assert accuracy.errors(make_call(kv_heads=4), (BACKENDS["flex"].compute,))[0] < 1e-6
