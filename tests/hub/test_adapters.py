"""The interfaces of known kernels serve our ops, and a kernel that computes something else is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from diffkern import NoProviderError
from diffkern.hub import contract
from diffkern.hub.defaults import DEFAULTS
from diffkern.hub.policy import Policy
from diffkern.ops import gelu, glu, layer_norm, quick_gelu, rms_norm, rope, silu
from diffkern.providers import OPS, explain, select, use_provider
from diffkern.providers.hub import provider_for, refusals_raise, tagged
from tests.hub import kernels
from tests.hub.kernels import kernel
from tests.hub.server import Files, LoopbackHub

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def publish(hub: LoopbackHub, files: Files, name: str = "org/kernel") -> str:
    hub.repository(name).commit(files, "v1")
    return name


def error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return float((y.double() - reference.double()).norm() / reference.double().norm())


def test_the_samples_pass_with_plain_pytorch_and_cover_every_op_of_a_build() -> None:
    from diffkern.providers import get_provider

    # Rows of fp8 are not asked of kernels on the Hub.
    ops = {op for op in get_provider("compiled").support if not op.endswith("_fp8")}
    assert ops <= set(contract.EXAMINED) <= set(OPS)
    for op in contract.EXAMINED:
        kernel_of = get_provider("eager").kernel(op, CPU)
        for dtype in DTYPES:
            reasons = contract.examine(op, kernel_of, lambda args: None, CPU, dtype)
            assert reasons and not any(reasons.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("init", "layers", "name", "rounds"),
    [
        (kernels.RMSNORM, "", "", False),
        ("", kernels.MLX_RMSNORM, "", True),
        ("", kernels.LIGER_LAYERS, ":LigerRMSNorm", True),
        ("", kernels.LIGER_LAYERS, "", True),
    ],
    ids=["rmsnorm", "mlx-rmsnorm", "liger", "liger by its layers"],
)
def test_rms_norm(hub: LoopbackHub, init: str, layers: str, name: str, rounds: bool, dtype: torch.dtype) -> None:
    provider = publish(hub, kernel(init, layers)) + name
    x, weight = torch.randn(7, 64).to(dtype), torch.rand(64).to(dtype)
    reference = rms_norm(x.double(), weight.double(), eps=1e-5)
    rounding = dtype if rounds else None
    y = rms_norm(x, weight, eps=1e-5, round_dtype=rounding, provider=provider)
    stock = rms_norm(x, weight, eps=1e-5, round_dtype=rounding, provider="eager")
    assert y.dtype == dtype and error(y, reference) <= 1.05 * error(stock, reference) + 1e-6
    assert rms_norm(x.t().contiguous().t(), weight, eps=1e-5, round_dtype=rounding, provider=provider).is_contiguous()
    if rounds and dtype != torch.float32:  # once more than it may
        with pytest.raises(
            NoProviderError, match=r"org/kernel.*error \d\.\de-0\d against \d\.\de-0\d of plain PyTorch"
        ):
            rms_norm(x, weight, eps=1e-5, provider=provider)


def test_what_an_interface_has_no_room_for_is_refused_with_the_reason(hub: LoopbackHub) -> None:
    provider = publish(hub, kernel(kernels.RMSNORM))
    x, weight = torch.randn(7, 64), torch.rand(64)
    for options, said in (
        ({"weight": None}, "needs a weight"),
        ({"bias": weight}, "no bias"),
        ({"weight_offset": 1.0}, "no offset"),
        ({"clamp_eps": True}, "no lower bound"),
        ({"out_dtype": torch.float16}, "returns torch.float32"),
    ):
        with pytest.raises(NoProviderError, match=f"org/kernel: apply_rms_norm: .*{said}"):
            rms_norm(x, **{"weight": weight, **options}, provider=provider)  # type: ignore[arg-type]
    with pytest.raises(NoProviderError, match="org/kernel: it has no rope that diffkern knows how to call"):
        rope(torch.randn(1, 3, 2, 8), torch.randn(3, 1, 4), torch.randn(3, 1, 4), provider=provider)


def test_a_call_of_an_injection_that_has_no_room_runs_plainly_and_is_told_of_once(hub: LoopbackHub) -> None:
    provider = tagged(publish(hub, kernel(kernels.RMSNORM)), Policy())
    x, bias = torch.randn(7, 64), torch.rand(64)
    with pytest.warns(UserWarning, match=r"org/kernel: .*it has no bias.*plain PyTorch") as caught:
        y = rms_norm(x, bias, bias, provider=provider)
        rms_norm(x, bias, bias, provider=provider)
    assert len([w for w in caught if "plain PyTorch" in str(w.message)]) == 1
    torch.testing.assert_close(y, rms_norm(x, bias, bias, provider="eager"))
    assert sum(provider_for(provider).refused_calls.values()) == 2  # type: ignore[union-attr]
    with refusals_raise(), pytest.raises(NoProviderError, match="it has no bias"):
        rms_norm(x, bias, bias, provider=provider)
    with pytest.raises(NoProviderError, match="it has no bias"):
        rms_norm(x, bias, bias, provider=tagged("org/kernel", Policy(strict=True)))


def test_layer_norm(hub: LoopbackHub) -> None:
    provider = publish(hub, kernel("", kernels.LAYER_NORM))
    x, weight, bias = torch.randn(3, 5, 64), torch.rand(64), torch.randn(64)
    expected = layer_norm(x, weight, provider="eager")
    torch.testing.assert_close(layer_norm(x, weight, provider=provider), expected)
    torch.testing.assert_close(layer_norm(x.mT.contiguous().mT, weight, provider=provider), expected)
    with pytest.raises(NoProviderError, match=r"LayerNorm: error \d"):  # the layer ignores it
        layer_norm(x, weight, bias, provider=provider)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(hub: LoopbackHub, dtype: torch.dtype) -> None:
    provider = publish(hub, kernel("", kernels.ACTIVATION))
    x = torch.randn(3, 5, 16).to(dtype)
    for function in (silu, gelu, quick_gelu, lambda x, provider: gelu(x, approximate="tanh", provider=provider)):
        torch.testing.assert_close(function(x, provider=provider), function(x, provider="eager"))
    sliced = x[:, ::2]
    assert silu(sliced, provider=provider).stride() == silu(sliced, provider="eager").stride()


@pytest.mark.parametrize("first", ["gate", "value"])
def test_gated_units_take_the_halves_of_a_packed_tensor(hub: LoopbackHub, first: str) -> None:
    provider = publish(hub, kernel("", kernels.ACTIVATION))
    packed = torch.randn(3, 5, 32).bfloat16()
    gate, value = packed.chunk(2, -1) if first == "gate" else packed.chunk(2, -1)[::-1]
    expected = glu(value, gate, "silu", round_activation=True, provider="eager")
    torch.testing.assert_close(glu(value, gate, "silu", round_activation=True, provider=provider), expected)
    with pytest.raises(NoProviderError, match="not the halves of one packed tensor"):
        glu(value.clone(), gate.clone(), "silu", round_activation=True, provider=provider)
    if first == "value":
        with pytest.raises(NoProviderError, match=r"SiluAndMul: value and gate are not"):  # no MulAndGelu
            glu(value, gate, "gelu", round_activation=True, provider=provider)
    with pytest.raises(NoProviderError, match=r"error|not the halves"):  # it rounds the activation unasked
        glu(value, gate, "silu", provider=provider)


@pytest.mark.parametrize("interface", ["apply_rotary", "apply_rotary_transformers"])
@pytest.mark.parametrize("batch", [1, 2])
def test_rope(hub: LoopbackHub, interface: str, batch: int) -> None:
    provider = f"{publish(hub, kernel(kernels.ROTARY))}:{interface}"
    x, angles = torch.randn(2, 7, 3, 16), torch.randn(batch, 7, 1, 8)
    cos, sin = angles.cos(), angles.sin()
    for pairing in ("half", "interleaved"):
        if interface == "apply_rotary_transformers" and pairing == "interleaved":
            with pytest.raises(NoProviderError, match="rotates halves"):
                rope(x, cos, sin, pairing=pairing, provider=provider)
            continue
        expected = rope(x, cos, sin, pairing=pairing, provider="eager")
        torch.testing.assert_close(rope(x, cos, sin, pairing=pairing, provider=provider), expected)
        same = rope(x, cos, sin, pairing=pairing, arithmetic="input", provider=provider)  # float32 is float32
        torch.testing.assert_close(same, expected)
    with pytest.raises(NoProviderError, match="tables have the dtype of the input"):
        rope(x.bfloat16(), cos, sin, pairing="half", provider=provider)
    half = (x.bfloat16(), cos.bfloat16(), sin.bfloat16())
    with pytest.raises(NoProviderError, match=r"it computes in float32, and this rotation in torch\.bfloat16"):
        rope(*half, pairing="half", arithmetic="input", provider=provider)
    with pytest.raises(NoProviderError, match="one angle for each pair"):
        rope(x, cos.repeat(1, 1, 1, 2), sin.repeat(1, 1, 1, 2), pairing="half", provider=provider)


def test_a_rotary_kernel_that_reads_the_first_table_for_all_samples_serves_shared_tables_only(hub: LoopbackHub) -> None:
    source = kernels.ROTARY.replace("cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)",
                                    "cos[:1].unsqueeze(unsqueeze_dim), sin[:1].unsqueeze(unsqueeze_dim)")  # fmt: skip
    provider = f"{publish(hub, kernel(source))}:apply_rotary_transformers"
    x = torch.randn(2, 7, 3, 16)
    shared, own = torch.randn(1, 7, 1, 8), torch.randn(2, 7, 1, 8)
    rope(x, shared.cos(), shared.sin(), pairing="half", provider=provider)
    with pytest.raises(NoProviderError, match=r"error .* against .* of plain PyTorch"):
        rope(x, own.cos(), own.sin(), pairing="half", provider=provider)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("+ eps", "+ 2 * eps"), "error"),
        (("torch.rsqrt", "torch.sqrt"), "error"),
        (("weight * ", "(1 + weight) * "), "error"),
        (("return (", "input.mul_(2); return ("), "it changed its input"),
        ((".to(input.dtype)", ".double()"), r"returned torch.float64 .* in place of torch.float32"),
        (("wide = input.float()", "raise RuntimeError('no kernel image')"), "raised RuntimeError: no kernel image"),
        (("wide.pow(2)", "wide.abs()"), "error"),
    ],
    ids=["eps", "formula", "offset", "in place", "dtype", "raises", "another mean"],
)
def test_a_kernel_that_changed_its_meaning_is_refused_with_the_measured_error(
    hub: LoopbackHub, change: tuple[str, str], said: str
) -> None:
    assert change[0] in kernels.RMSNORM
    provider = publish(hub, kernel(kernels.RMSNORM.replace(*change)))
    with pytest.raises(NoProviderError, match=rf"org/kernel: it is no rms_norm: apply_rms_norm in float32: .*{said}"):
        select("rms_norm", CPU, (torch.float32,), provider)


def test_a_layer_is_what_it_computes_and_not_what_it_is_called(hub: LoopbackHub) -> None:
    layers = kernels.LIGER_LAYERS.replace("class LigerRMSNorm", "class LayerNorm")
    provider = publish(hub, kernel("", layers)) + ":LayerNorm"
    assert select("rms_norm", CPU, (torch.float32,), provider).provider == provider
    with pytest.raises(NoProviderError, match="it is no layer_norm"):
        select("layer_norm", CPU, (torch.float32,), provider)


def test_the_hub_serves_only_when_it_is_asked(hub: LoopbackHub) -> None:
    publish(hub, kernel(kernels.RMSNORM), "kernels-community/rmsnorm")
    assert "config=KernelConfig(hub='auto')" in (explain("rms_norm", CPU, (torch.float32,))["hub"] or "")
    select("rms_norm", CPU, (torch.float32,))
    rms_norm(torch.randn(3, 8))
    assert hub.requests == []
    choice = select("rms_norm", CPU, (torch.float32,), "hub")
    assert choice.provider == "kernels-community/rmsnorm@v1"
    assert hub.requests != []


def test_the_order_is_compiled_triton_hub_eager(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffkern.providers import compiled, registry, triton

    publish(hub, kernel(kernels.RMSNORM), "kernels-community/rmsnorm")
    asked = tagged("auto+hub", Policy())
    assert registry.ORDER == ("compiled", "triton", "hub", "eager")
    for provider in (compiled.PROVIDER, triton.PROVIDER):
        monkeypatch.setattr(provider, "unavailable_reason", lambda device: "not in this test", raising=False)
    registry.reset()
    choice = select("rms_norm", CPU, (torch.float32,), asked)
    assert choice.provider == "kernels-community/rmsnorm@v1"
    assert [name for name, _ in choice.declined] == ["compiled", "triton"]
    assert select("rms_norm", CPU, (torch.float32,)).provider == "eager"
    x = torch.randn(3, 64)
    with use_provider(asked):
        torch.testing.assert_close(rms_norm(x, torch.ones(64)), rms_norm(x, torch.ones(64), provider="eager"))
    # For what no kernel is listed, or the listed one does not do, plain PyTorch remains.
    assert select("layer_norm", CPU, (torch.float32,), asked).provider == "eager"
    registry.reset()


def test_every_kernel_that_auto_would_take_is_one_that_an_adapter_is_for() -> None:
    from diffkern.hub.reference import KernelReference

    interfaces = {
        "kernels-community/activation": ("activation", "glu"),
        "kernels-community/rmsnorm": ("rms_norm",),
        "kernels-community/mlx-rmsnorm": ("rms_norm",),
        "kernels-community/layer-norm": ("rms_norm", "layer_norm"),
        "kernels-community/rotary": ("rope",),
        "kernels-community/aiter-rope": ("rope",),
        "kernels-community/liger-kernels": ("rms_norm",),
    }
    for ops in DEFAULTS.values():
        for op, text in ops.items():
            reference = KernelReference.parse(text)
            assert op in interfaces[reference.source]
            assert re.fullmatch(r"v\d+", reference.revision)  # a version is always named


@pytest.mark.parametrize("value", ["0", "OFF", "no", "False"])
@pytest.mark.parametrize("variable", ["DIFFKERN_HUB", "USE_HUB_KERNELS"])
def test_the_environment_switches_the_hub_off(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    for provider in (publish(hub, kernel(kernels.RMSNORM)), str(tmp_path)):
        with pytest.raises(NoProviderError, match=f"switched off by {variable}={value}"):
            rms_norm(torch.randn(3, 8), torch.ones(8), provider=provider)
    assert hub.requests == []


@pytest.mark.parametrize("value", ["1", "ON", "", "auto"])
def test_other_values_of_the_environment_do_not(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("USE_HUB_KERNELS", value)
    monkeypatch.setenv("DIFFKERN_HUB", value)
    rms_norm(torch.randn(3, 8), torch.ones(8), provider=publish(hub, kernel(kernels.RMSNORM)))
