"""Modulated norms and gated residuals: every layout, broadcast and dtype mix against float64; the contract's rows."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from diffkern import ops
from tests.ops import modulation, reference
from tests.ops.checks import leaves_alone
from tests.ops.layouts import LAYOUTS, make, make_parameter
from tests.ops.modulation import MODULATIONS, gate_residual_chain, make_modulation, norm_modulate_chain
from tests.ops.reference import EXACT_HALF, INTERPRETED, relative_error

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LENGTHS = (1, 2, 3, 7, 8, 16, 31, 40, 64, 72, 127, 200, 256, 264, 512, 520, 1000, 1536, 2048)
_EXAMPLES = 12 if INTERPRETED or torch.cuda.is_available() else 80

inputs = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(sorted(LAYOUTS)),
        "batch": st.integers(1, 3),
        "rows": st.integers(1, 5 if INTERPRETED else 24),
        "length": st.sampled_from(_LENGTHS),
        "dtype": st.sampled_from(_DTYPES),
        "seed": st.integers(0, 2**16),
    }
)
modulations = st.tuples(st.sampled_from(["none", *sorted(MODULATIONS)]), st.sampled_from(_DTYPES))
optional_dtypes = st.sampled_from((None, *_DTYPES))
norms = st.sampled_from(("rms", "layer", None))
roundings = st.sampled_from(("once", "each"))
activations = st.sampled_from((None, "tanh", "sigmoid"))


def call(op: str, *tensors: Tensor | None, provider: str, **options: Any) -> Any:
    """Calls ``ops.<op>``; asserts that no input is changed, and that every output is new and contiguous."""
    given = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    with leaves_alone(*given):
        result = getattr(ops, op)(*tensors, provider=provider, **options)
    for y in result if isinstance(result, tuple) else (result,):
        assert y.is_contiguous()
        assert y.device == given[0].device
        pointers = [tensor.untyped_storage().data_ptr() for tensor in given]
        assert y.numel() == 0 or y.untyped_storage().data_ptr() not in pointers
    return result


@hypothesis.settings(max_examples=_EXAMPLES)
@hypothesis.given(
    spec=inputs,
    scale=modulations,
    shift=modulations,
    parameters=st.tuples(st.sampled_from(("none", "plain", "strided")), st.sampled_from(_DTYPES)),
    eps=st.sampled_from((1e-6, 1e-2)),
    norm=norms,
    scale_offset=st.sampled_from((0.0, 1.0)),
    rounding=roundings,
    out_dtype=optional_dtypes,
)
def test_norm_modulate_agrees_with_float64_for_any_layout_broadcast_and_dtypes(
    provider: str,
    device: str,
    spec: dict[str, Any],
    scale: Any,
    shift: Any,
    parameters: Any,
    eps: float,
    **options: Any,
) -> None:
    x = make(device=device, **spec)
    kind, dtype = parameters
    kind = kind if options["norm"] else "none"
    tensors = (
        x,
        make_modulation(scale[0], x.shape, scale[1], device, seed=1),
        make_modulation(shift[0], x.shape, shift[1], device, seed=2),
        make_parameter(kind, spec["length"], dtype, device, seed=3),
        make_parameter(kind, spec["length"], dtype, device, seed=4),
    )
    y = call("norm_modulate", *tensors, eps=eps, provider=provider, **options)
    assert y.dtype == (options["out_dtype"] or modulation.promoted(*(x.dtype, *tensors[1:3])))
    reference.assert_within(y, modulation.norm_modulate(*tensors, eps, **options))


@hypothesis.settings(max_examples=_EXAMPLES)
@hypothesis.given(
    spec=inputs,
    layout=st.sampled_from(("like", "contiguous")),
    other=st.sampled_from(_DTYPES),
    gate=modulations,
    gate_activation=activations,
    rounding=roundings,
    out_dtype=optional_dtypes,
)
def test_gate_residual_agrees_with_float64_for_any_layout_broadcast_and_dtypes(
    provider: str, device: str, spec: dict[str, Any], layout: str, other: torch.dtype, gate: Any, **options: Any
) -> None:
    x = make(device=device, **spec)
    residual = make(device=device, **{**spec, "dtype": other, "seed": 7})
    residual = residual.contiguous() if layout == "contiguous" else residual
    g = make_modulation(gate[0], x.shape, gate[1], device, seed=1)
    y = call("gate_residual", residual, x, g, provider=provider, **options)
    assert y.dtype == (options["out_dtype"] or modulation.promoted(residual.dtype, x, g))
    reference.assert_within(y, modulation.gate_residual(residual, x, g, **options))


@hypothesis.settings(max_examples=_EXAMPLES)
@hypothesis.given(
    spec=inputs,
    other=st.sampled_from(_DTYPES),
    gate=modulations,
    scale=modulations,
    shift=modulations,
    kind=st.sampled_from(("none", "plain")),
    norm=norms,
    gate_activation=activations,
    scale_offset=st.sampled_from((0.0, 1.0)),
    rounding=roundings,
    residual_dtype=optional_dtypes,
    out_dtype=optional_dtypes,
)
def test_gate_residual_norm_modulate_is_both_ops_one_after_the_other(
    provider: str,
    device: str,
    spec: dict[str, Any],
    other: Any,
    gate: Any,
    scale: Any,
    shift: Any,
    kind: str,
    **options: Any,
) -> None:
    x = make(device=device, **spec)
    residual = make(device=device, **{**spec, "dtype": other, "seed": 7})
    g, c, h = (
        make_modulation(*kind_and_dtype[:1], x.shape, kind_and_dtype[1], device, seed=seed)
        for seed, kind_and_dtype in enumerate((gate, scale, shift))
    )
    weight = make_parameter(kind if options["norm"] else "none", spec["length"], other, device)
    new, y = call("gate_residual_norm_modulate", residual, x, g, c, h, weight, provider=provider, **options)
    rounding, activation = options["rounding"], options.pop("gate_activation")
    residual_dtype = options.pop("residual_dtype")
    assert new.dtype == (residual_dtype or modulation.promoted(residual.dtype, x, g))
    reference.assert_within(
        new,
        modulation.gate_residual(
            residual, x, g, gate_activation=activation, rounding=rounding, out_dtype=residual_dtype
        ),
    )
    # The norm reads the new residual as it was written, rounded.
    assert y.dtype == (options["out_dtype"] or modulation.promoted(new.dtype, c, h))
    reference.assert_within(y, modulation.norm_modulate(new, c, h, weight, **options))


# --- the contract --------------------------------------------------------------------------------------

_OPS = ("norm_modulate", "gate_residual", "gate_residual_norm_modulate")
#: The rows that the tests below are about.
TESTED = {
    ("norm_modulate", "once"),
    ("norm_modulate", "each"),
    ("norm_modulate", "no norm, each"),
    ("gate_residual", "once"),
    ("gate_residual", "each"),
    ("gate_residual", "each, activation"),
    ("gate_residual", "no gate"),
    ("gate_residual_norm_modulate", "once"),
    ("gate_residual_norm_modulate", "each"),
}
_KINDS = ("sample", "token_unbind", "row")
#: Two samples of so many rows make 2^18 elements. The interpreter is quicker with several rows to a program.
_ROWS, _LENGTH = (512, 256) if INTERPRETED else (64, 2048)


def mixes() -> list[tuple[torch.dtype, torch.dtype]]:
    """Dtypes of the input and of what modulates it, as models mix them."""
    return [(torch.float32, torch.float32)] + [(half, other) for half in EXACT_HALF for other in (half, torch.float32)]


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("length", [64, 2048, 3072])
@pytest.mark.parametrize("rounding", ["once", "each"])
def test_norm_modulate_is_no_less_accurate_than_the_torch_chain(
    norm: str, length: int, rounding: str, provider: str, device: str
) -> None:
    for dtype, other in mixes():
        for kind in _KINDS:
            x = make("contiguous", 2, 32, length, dtype, device, seed=length)
            scale, shift = (make_modulation(kind, x.shape, other, device, seed=seed) for seed in (1, 2))
            for weight in (None, make_parameter("plain", length, dtype, device)):
                y = call("norm_modulate", x, scale, shift, weight, provider=provider, norm=norm, rounding=rounding)
                truth, _ = modulation.norm_modulate(x, scale, shift, weight, norm=norm)
                stock = norm_modulate_chain(x, scale, shift, weight, norm=norm)
                assert y.dtype == stock.dtype
                assert relative_error(y, truth) <= 1.05 * relative_error(stock, truth) + 1e-6


@pytest.mark.parametrize("activation", [None, "tanh", "sigmoid"])
@pytest.mark.parametrize("rounding", ["once", "each"])
def test_gate_residual_is_no_less_accurate_than_the_torch_chain(
    activation: str | None, rounding: str, provider: str, device: str
) -> None:
    for dtype, other in mixes():
        for kind in ("none", *_KINDS):
            x, residual = (make("contiguous", 2, 32, 1024, dtype, device, seed=seed) for seed in (1, 2))
            gate = make_modulation(kind, x.shape, other, device, seed=3)
            options = {"gate_activation": activation, "rounding": rounding}
            y = call("gate_residual", residual, x, gate, provider=provider, **options)
            truth, _ = modulation.gate_residual(residual, x, gate, gate_activation=activation)
            stock = gate_residual_chain(residual, x, gate, activation)
            assert y.dtype == stock.dtype
            assert relative_error(y, truth) <= 1.05 * relative_error(stock, truth) + 1e-6


@pytest.mark.parametrize("rounding", ["once", "each"])
def test_gate_residual_norm_modulate_is_no_less_accurate_than_the_torch_chain(
    rounding: str, provider: str, device: str
) -> None:
    for dtype, other in mixes():
        x, residual = (make("contiguous", 2, 32, 2048, dtype, device, seed=seed) for seed in (1, 2))
        gate, scale, shift = (make_modulation("sample", x.shape, other, device, seed=seed) for seed in (3, 4, 5))
        # Half residuals stay half, as the models that modulate in float32 cast them back.
        options = {"rounding": rounding, "residual_dtype": dtype, "out_dtype": dtype}
        new, y = call("gate_residual_norm_modulate", residual, x, gate, scale, shift, provider=provider, **options)
        stock_new = gate_residual_chain(residual, x, gate, None).to(dtype)
        truth, _ = modulation.gate_residual(residual, x, gate)
        assert relative_error(new, truth) <= 1.05 * relative_error(stock_new, truth) + 1e-6
        truth, _ = modulation.norm_modulate(truth, scale, shift)
        stock = norm_modulate_chain(stock_new, scale, shift).to(dtype)
        assert relative_error(y, truth) <= 1.05 * relative_error(stock, truth) + 1e-6


@pytest.mark.parametrize("kind", ["sample", "token_unbind", "ones", "column"])
def test_modulation_without_a_norm_is_bit_equal_to_the_chain(kind: str, provider: str, device: str) -> None:
    for dtype, other in mixes():
        x = make("contiguous", 2, _ROWS, _LENGTH, dtype, device)
        scale, shift = (make_modulation(kind, x.shape, other, device, seed=seed) for seed in (1, 2))
        options: dict[str, Any] = {"norm": None, "rounding": "each", "provider": provider}
        assert torch.equal(call("norm_modulate", x, scale, shift, **options), x * (1 + scale) + shift)
        assert torch.equal(call("norm_modulate", x, scale, **options), x * (1 + scale))
        assert torch.equal(call("norm_modulate", x, None, shift, **options), x + shift)
        assert torch.equal(call("norm_modulate", x, scale, shift, scale_offset=0.0, **options), x * scale + shift)
        cast = call("norm_modulate", x, scale, shift, out_dtype=dtype, **options)
        assert torch.equal(cast, (x * (1 + scale) + shift).to(dtype))
        if other == torch.float32:  # nothing is rounded on the way, so that once is each
            once = call("norm_modulate", x, scale, shift, norm=None, provider=provider)
            assert torch.equal(once, x * (1 + scale) + shift)


@pytest.mark.parametrize("kind", ["none", "sample", "token_unbind", "ones", "column"])
def test_gated_residuals_are_bit_equal_to_the_chain(kind: str, provider: str, device: str) -> None:
    for dtype, other in mixes():
        x, residual = (make("contiguous", 2, _ROWS, _LENGTH, dtype, device, seed=seed) for seed in (1, 2))
        gate = make_modulation(kind, x.shape, other, device, seed=3)
        stock = gate_residual_chain(residual, x, gate, None)
        assert torch.equal(call("gate_residual", residual, x, gate, rounding="each", provider=provider), stock)
        both = {"rounding": "each", "provider": provider}
        assert torch.equal(call("gate_residual_norm_modulate", residual, x, gate, **both)[0], stock)
        cast = call("gate_residual_norm_modulate", residual, x, gate, residual_dtype=dtype, **both)[0]
        assert torch.equal(cast, stock.to(dtype))
        if kind == "none":
            assert torch.equal(call("gate_residual", residual, x, provider=provider), stock)


def test_results_do_not_depend_on_the_batch_a_row_sits_in(provider: str, device: str) -> None:
    for dtype, other in mixes():
        x, residual = (make("contiguous", 3, 5, 1536, dtype, device, seed=seed) for seed in (1, 2))
        mods = [make_modulation("full", x.shape, other, device, seed=seed) for seed in (3, 4, 5)]
        new, y = ops.gate_residual_norm_modulate(residual, x, *mods, provider=provider)
        alone = [tensor[1:2, 2:3] for tensor in (residual, x, *mods)]  # type: ignore[index]
        new_row, y_row = ops.gate_residual_norm_modulate(*alone, provider=provider)
        assert torch.equal(new_row, new[1:2, 2:3])
        assert torch.equal(y_row, y[1:2, 2:3])
        again = ops.gate_residual_norm_modulate(residual, x, *mods, provider=provider)
        assert torch.equal(again[1], y)
