"""Runs random calls and says what is wrong with them: values, gradients, layout, inputs, and the dispatch cache."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffkern import ops
from diffkern.providers import NoProviderError, explain, registry
from tests.fuzz import formulas
from tests.fuzz.cases import GENERATORS, Case, Operand
from tests.fuzz.draw import HALVES, Draw
from tests.ops.layouts import storage_of
from tests.ops.reference import poisoned_allocations

#: Ops that quantise: their results are compared after being multiplied with their scales, and have no gradient.
_FP8 = tuple(op for op in GENERATORS if op.endswith("_fp8"))

#: Largest error of float32 arithmetic in units of that of another right order of operations.
_ORDERS = 16
#: Relative error of one rounding to e4m3.
_E4M3 = 2.0**-4


class Mismatch(AssertionError):
    """An op did not do what it promises."""


@dataclass(frozen=True)
class Bound:
    """The truth in float64 and the largest admissible error, of one result."""

    truth: Tensor
    error: Tensor

    def check(self, y: Tensor, what: str) -> None:
        """Raises :class:`Mismatch` if an element is out of bounds; where the truth is no number, so must ``y`` be."""
        found = y.detach().cpu().double()
        if found.shape != self.truth.shape:
            raise Mismatch(f"{what} has shape {tuple(found.shape)}, and must have {tuple(self.truth.shape)}")
        largest = torch.finfo(y.dtype).max if y.dtype.is_floating_point else 0.0
        regular = self.truth.isfinite() & (self.truth.abs() + self.error < 0.99 * largest)
        wrong = regular & ~((found - self.truth).abs() <= self.error)
        wrong |= self.truth.isnan() & found.isfinite()
        if wrong.any():
            place = tuple(int(index) for index in wrong.nonzero()[0])
            raise Mismatch(
                f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at {place}: "
                f"{found[place].item():.9g}, and must be {self.truth[place].item():.9g} "
                f"+- {self.error[place].item():.3g}"
            )


def run_case(seed: int, op: str, device: str, budget: int = 20_000) -> str:
    """Makes the call that ``seed`` says, checks it, changes one thing, and checks again.

    Returns:
        What was called, in a few words.

    Raises:
        Mismatch: with the op, the seed and what was wrong.
    """
    draw = Draw(seed, device, budget=budget)
    case = GENERATORS[op](draw)
    served = [name for name in ("compiled", "triton", "eager") if _refusal(case, name, device) is None]
    provider = draw.one_of(None, *served)
    words = f"{op}, seed {seed}, by {provider}"
    try:
        if draw.chance(0.3) and op not in _FP8:
            _check_gradients(case, draw, provider)
        first = _check(case, provider, poisoned=draw.chance(0.2))
        for _ in range(draw.one_of(1, 2)):
            _check_changed(case, draw, provider)
        again = _results(call(case, provider))
        for y, before in zip(again, first, strict=True):
            _same(y, before, "the same call again")
    except Exception as error:
        raise Mismatch(f"{words}: {type(error).__name__}: {error}\n{describe(case)}") from error
    return words


def describe(case: Case) -> str:
    """Operands and options of a call, a line each."""
    lines = [
        f"  {name}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}, strides {list(t.stride())}, "
        f"offset {t.storage_offset()}, {t.device}"
        for name, t in case.tensors().items()
    ]
    return "\n".join([*lines, *(f"  {name} = {value!r}" for name, value in case.options.items())])


def call(case: Case, provider: str | None) -> Any:
    """The result of the public function."""
    options = dict(case.options) if case.op == "expand_axes" else {**case.options, "provider": provider}
    return getattr(ops, case.op)(**case.operands, **options)


def _results(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _refusal(case: Case, provider: str, device: str) -> str | None:
    tensors = case.tensors().values()
    names = {"gelu": "activation", "silu": "activation", "quick_gelu": "activation", "geglu": "glu", "swiglu": "glu"}
    dtypes = tuple({t.dtype for t in tensors if t.dtype.is_floating_point})
    dtypes += tuple(value for value in case.options.values() if isinstance(value, torch.dtype))
    if case.op == "expand_axes":
        return None if provider == "eager" else "plain PyTorch alone"
    return explain(names.get(case.op, case.op), torch.device(device), dtypes)[provider]


def _check(case: Case, provider: str | None, *, poisoned: bool = False) -> tuple[Tensor, ...]:
    """Calls and checks: values, layout, that inputs keep their bytes, and that no result is an input."""
    tensors = case.tensors()
    before = {name: storage_of(tensor) for name, tensor in tensors.items()}
    with poisoned_allocations() if poisoned else contextlib.nullcontext():
        results = _results(call(case, provider))
    for name, tensor in tensors.items():
        if not torch.equal(storage_of(tensor), before[name]):
            raise Mismatch(f"it wrote into {name}")
        for y in results:
            if y.numel() and y.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                raise Mismatch(f"a result shares the memory of {name}")
    _check_layout(case, results)
    for index, (y, bound) in enumerate(zip(_dequantised(case, results), _bounds(case, results), strict=True)):
        bound.check(y, f"result {index}")
    return results


def _check_layout(case: Case, results: tuple[Tensor, ...]) -> None:
    x = next(iter(case.tensors().values()))
    if case.op in ("rope", "rope_3d", "qk_norm_rope", "gelu", "silu", "quick_gelu", "channel_rms_norm_silu"):
        preserved = True
    elif case.op in ("rms_norm", "layer_norm"):
        preserved = case.options["memory_format"] is torch.preserve_format
    else:
        return
    inputs = [x, case.tensors()["k"]] if case.op == "qk_norm_rope" else [x]
    for y, given in zip(results, inputs, strict=True):
        wanted = torch.empty_like(given) if preserved else torch.empty(given.shape)
        if y.numel() and any(
            own != other for own, other, size in zip(y.stride(), wanted.stride(), y.shape, strict=True) if size > 1
        ):
            raise Mismatch(f"strides {y.stride()}, and must be {wanted.stride()}")


def _dequantised(case: Case, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if case.op not in _FP8 or case.op == "linear_fp8":
        return results
    *others, values, scales = results
    return (*others, values.cpu().double() * scales.cpu().double())


def _bounds(case: Case, results: tuple[Tensor, ...]) -> list[Bound]:
    truth = _formula(case, torch.float64)
    narrow, noisy = _formula(case, torch.float32), _formula(case, torch.float64, noise=2.0**-23)
    rounded = _as_stock_rounds(case) if case.rounds_between else None
    cancelled = _cancelled(case)
    bounds = []
    for index, (exact, single) in enumerate(zip(truth, narrow, strict=True)):
        y = results[index]
        arithmetic = (_worst(single, exact) + _worst(noisy[index], exact)) * _ORDERS + 4e-7 * exact.abs()
        if y.dtype == torch.float64:
            # Cosines and sines, or a part of the operands, may be narrower than the result; never the arithmetic.
            arithmetic = 1e-9 * (1 + exact.abs() + _worst(single, exact) / 1e-7)
        error = arithmetic if cancelled is None else arithmetic + _unit(torch.float32) * cancelled[index].abs()
        if _is_centred(case) and "x" in case.tensors() and case.tensors()["x"].shape[_rows(case)] == 1:
            error = error + _unit(torch.float32) * _largest_term(case, [case.tensors()["x"]])
        if case.options.get("clamp_eps") and case.tensors()["x"].stride(_rows(case)) == 0:
            # torch.linalg.vector_norm adds in order: over equal numbers its roundings all point one way.
            error = error + _unit(torch.float32) * case.tensors()["x"].shape[_rows(case)] * exact.abs()
        if rounded is not None:
            error = error + 3 * _worst(rounded[index], exact) + 3 * _unit(rounded[index].dtype) * exact.abs()
        if y.dtype == torch.float8_e4m3fn:
            peak = exact.abs().amax(-1, keepdim=True).nan_to_num(0, 0, 0)
            error = error + _E4M3 * exact.abs() + peak * 2.0**-9 / 448 + 1e-12
        else:
            error = error + 1.01 * _unit(y.dtype) * exact.abs() + max(torch.finfo(y.dtype).smallest_normal, 1e-30)
        bounds.append(Bound(exact, error))
    return bounds


def _cancelled(case: Case) -> tuple[Tensor, ...] | None:
    """The terms whose difference torch's GELU of a negative number is; None without a GELU."""
    gelus = {
        name: formulas.MAGNITUDE
        for name, value in case.options.items()
        if name == "approximate" or (name in ("activation", "function") and str(value).startswith("gelu"))
    }
    return _formula(replace(case, options={**case.options, **gelus}), torch.float64) if gelus else None


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _worst(y: Tensor, exact: Tensor) -> float:
    """The largest error, where both are numbers."""
    error = (y.detach().cpu().double() - exact).abs()
    error = error[error.isfinite()]
    return float(error.max()) if error.numel() else 0.0


def _formula(case: Case, dtype: torch.dtype, noise: float = 0.0) -> tuple[Tensor, ...]:
    """The formula on the same values in another dtype, on the CPU; on neighbouring ones for a relative ``noise``."""
    widened = case.changed(lambda _, t: _noisy(_widened(t, dtype), noise))
    result: tuple[Tensor, ...] = getattr(formulas, case.op)(**widened.operands, **case.options)
    return result


def _widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return tensor.to(dtype) if tensor.dtype.is_floating_point else tensor


def _noisy(tensor: Tensor, noise: float, seed: int = 2) -> Tensor:
    """What the rounding of values, or of sums of them, does to a result shows how well it is conditioned."""
    if not noise or not tensor.dtype.is_floating_point:
        return tensor
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8) * 2 - 1
    return tensor * (1 + noise * signs)


def _as_stock_rounds(case: Case) -> tuple[Tensor, ...]:
    """The result of plain PyTorch in the dtypes of the call, whose roundings are the chain's."""
    on_cpu = case.changed(lambda _, t: t.detach().cpu())
    results = _results(call(on_cpu, "eager"))
    return _dequantised(case, results)


# --- gradients -------------------------------------------------------------------------------------------


def _check_gradients(case: Case, draw: Draw, provider: str | None) -> None:
    """Compares the gradients of some operands with those of the formula in float64."""
    if case.op == "expand_axes":
        return
    tensors = {name: t for name, t in case.tensors().items() if t.dtype.is_floating_point}
    wanted = {name for name in tensors if draw.chance(0.7)}
    if not wanted or any(not t.isfinite().all() for t in tensors.values()):
        return
    leaves: dict[str, Tensor] = {}

    def with_leaves(case: Case) -> Case:
        leaves.clear()

        def change(name: str, tensor: Tensor) -> Tensor:
            if name in wanted:
                tensor = leaves[name] = tensor.detach().requires_grad_()
            return tensor

        return case.changed(change)

    results = _results(call(with_leaves(case), provider))
    grads = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, y.dtype) for y in results]
    ours = _gradients(results, grads, leaves)
    halves = any(y.dtype in HALVES for y in results) or any(t.dtype in HALVES for t in tensors.values())
    # The gradient of a value that was rounded on the way is that of a neighbouring value.
    noise = max(_unit(t.dtype) for t in (*results, *tensors.values())) if halves and case.rounds_between else 2.0**-23

    def reference(dtype: torch.dtype, noise: float = 0.0, seed: int = 2) -> dict[str, Tensor | None]:
        widened = with_leaves(case.changed(lambda _, t: _noisy(_widened(t, dtype), noise, seed)))
        outputs = getattr(formulas, case.op)(**widened.operands, **case.options)
        return _gradients(outputs, [_noisy(grad.cpu().to(dtype), noise, seed + 1) for grad in grads], leaves)

    exacts, singles = reference(torch.float64), reference(torch.float32)
    # A gradient of one element may be right by chance with one neighbour: hence two.
    neighbours = [reference(torch.float64, noise, seed) for seed in (2, 4)]
    for name, ours_of in ours.items():
        exact, single = exacts[name], singles[name]
        if ours_of is None or exact is None or single is None:
            if (ours_of is None) != (exact is None):
                raise Mismatch(f"the gradient of {name} is {'missing' if ours_of is None else 'there'}")
            continue
        noisy = max(_worst(near, exact) for one in neighbours if (near := one[name]) is not None)
        if ours_of.dtype != tensors[name].dtype:
            raise Mismatch(f"the gradient of {name} is {ours_of.dtype}")
        largest = float(exact.abs().max()) if exact.numel() else 0.0
        arithmetic = _worst(single, exact) + noisy
        if case.op.endswith("qk_norm_rope"):  # torch sums the two of a table that q and k share, in its dtype
            arithmetic += _unit(ours_of.dtype) * largest
        error = 2 * _unit(ours_of.dtype) * exact.abs() + _ORDERS * arithmetic + 2e-6 * largest
        error = error + 2.0**-20 * _largest_term(case, grads)
        error = error + torch.finfo(ours_of.dtype).smallest_normal
        Bound(exact, error).check(ours_of, f"the gradient of {name}")


def _largest_term(case: Case, factors: list[Tensor]) -> float:
    """Bounds ``factor * weight / rms``, the terms of a norm and its gradient that may cancel; 0 without a norm.

    In rows of one or two elements all of them do: whatever the difference, its error is that of the terms.
    """
    if "eps" not in case.options or not all(t.numel() for t in factors):
        return 0.0
    term = max(float(factor.double().abs().max()) for factor in factors)
    for name, tensor in case.tensors().items():
        if _kind(name) in ("weight", "scale", "gate") and tensor.numel():
            term *= 1 + float(tensor.double().abs().max())
    power = math.inf
    for name, tensor in case.tensors().items():
        if _kind(name) in ("x", "q", "k") and tensor.numel():
            power = min(power, float(_powers(case, tensor.double()).amin()))
    return term / math.sqrt(max(power, float(case.options["eps"])))


def _powers(case: Case, x: Tensor) -> Tensor:
    """The mean square of what each norm divides by its root, around the mean where the norm subtracts it."""
    if "num_groups" in case.options:
        add = case.tensors().get("add")
        wide = None if add is None else add.double()
        groups, dims = formulas.in_groups(x, wide, case.options["num_groups"], case.options["frames"])
        return groups.var(dims, unbiased=False)
    return x.var(_rows(case), unbiased=False) if _is_centred(case) else x.square().mean(_rows(case))


#: Of streams that are joined.
_SINGULAR = {"queries": "q", "keys": "k", "q_weights": "weight", "k_weights": "weight"}


def _kind(name: str) -> str:
    """What an operand is: ``"q"`` for ``"queries[0]"``, ``"weight"`` for ``"weight_k"``."""
    stream = name.partition("[")[0]
    return _SINGULAR.get(stream, stream.removesuffix("_k").removesuffix("_q"))


def _rows(case: Case) -> int:
    if case.op.startswith("joint"):  # whose dim is that of the tokens
        return -1
    return 1 if case.op.startswith("channel") else int(case.options.get("dim", -1))


def _is_centred(case: Case) -> bool:
    return case.op == "layer_norm" or case.options.get("norm") == "layer"


def _gradients(outputs: tuple[Tensor, ...], grads: list[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor | None]:
    pairs = [(y, grad) for y, grad in zip(outputs, grads, strict=True) if y.requires_grad]
    if not pairs:
        return dict.fromkeys(leaves)
    found = torch.autograd.grad(
        [y for y, _ in pairs], list(leaves.values()), [grad for _, grad in pairs], allow_unused=True
    )
    return dict(zip(leaves, found, strict=True))


# --- one thing changed -----------------------------------------------------------------------------------


def _check_changed(case: Case, draw: Draw, provider: str | None) -> None:
    """Calls with one thing changed, which must be what a first call gives."""
    name, change = draw.one_of(*_CHANGES.items())
    changed = change(case, draw)
    if changed is None:
        return
    try:
        warm = _outcome(changed, provider)
        with _empty_cache():
            cold = _outcome(changed, provider)
        if isinstance(warm, str) or isinstance(cold, str):
            if not (isinstance(warm, str) and warm == cold):
                kept, first = (one if isinstance(one, str) else "a result" for one in (warm, cold))
                raise Mismatch(f"after another call: {kept}; as a first call: {first}")
            if name == "device" and "move one of them" not in str(warm):
                raise Mismatch(f"an operand on another device: {warm}")
            return
        if name == "device":
            raise Mismatch("an operand on another device is taken")
        for y, expected in zip(warm, cold, strict=True):
            _same(y, expected, "the call after another one")
    except Mismatch as error:
        raise Mismatch(f"with another {name}: {error}\n{describe(changed)}\nafter") from error


def _outcome(case: Case, provider: str | None) -> tuple[Tensor, ...] | str:
    """The results, or the error."""
    try:
        return _results(call(case, provider))
    except (ValueError, TypeError, IndexError, NoProviderError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    kept = dict(registry.dispatch_cache)
    registry.dispatch_cache.clear()
    yield
    registry.dispatch_cache.clear()
    registry.dispatch_cache.update(kept)


def _same(y: Tensor, expected: Tensor, what: str) -> None:
    if (y.shape, y.dtype, y.stride()) != (expected.shape, expected.dtype, expected.stride()):
        raise Mismatch(f"{what} gives {y.dtype}{list(y.shape)} of strides {y.stride()}")
    if y.dtype == torch.float8_e4m3fn:
        y, expected = y.view(torch.uint8), expected.view(torch.uint8)
    if y.is_meta or torch.equal(y.nan_to_num(7.0), expected.nan_to_num(7.0)):
        return
    raise Mismatch(f"{what} gives other values")


def _one_tensor(case: Case, draw: Draw, change: Callable[[Tensor], Tensor]) -> Case:
    chosen = draw.one_of(*case.tensors())
    return case.changed(lambda name, tensor: change(tensor) if name == chosen else tensor)


def _other_device(case: Case, draw: Draw) -> Case | None:
    names = list(case.tensors())
    if len(names) < 2:
        return None
    chosen = draw.one_of(*names)
    foreign = "meta" if draw.device == "cpu" else draw.one_of("meta", "cpu")
    moved = case.tensors()[chosen]
    if moved.ndim == 0:
        return None
    return case.changed(lambda name, tensor: tensor.to(foreign) if name == chosen else tensor)


def _other_dtype(case: Case, draw: Draw) -> Case:
    def change(tensor: Tensor) -> Tensor:
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            return tensor.to(draw.one_of(torch.float32, torch.float16, torch.bfloat16, torch.float64))
        return tensor

    return _one_tensor(case, draw, change)


def _other_layout(case: Case, draw: Draw) -> Case:
    def change(tensor: Tensor) -> Tensor:
        if tensor.dtype.is_floating_point and tensor.ndim:
            order = list(range(tensor.ndim))[::-1]
            return tensor.permute(order).contiguous().permute(order)
        return tensor.clone()

    return _one_tensor(case, draw, change)


def _other_size(case: Case, draw: Draw) -> Case:
    def change(tensor: Tensor) -> Tensor:
        dim = draw.one_of(*range(tensor.ndim)) if tensor.ndim else 0
        return tensor.narrow(dim, 0, tensor.shape[dim] - 1) if tensor.ndim and tensor.shape[dim] > 1 else tensor

    return _one_tensor(case, draw, change)


def _without(case: Case, draw: Draw) -> Case | None:
    parameters = inspect.signature(getattr(ops, case.op)).parameters
    optional = [name for name in case.operands if parameters[name].default is not inspect.Parameter.empty]
    names = [name for name in optional if case.operands[name] is not None]
    if not names:
        return None
    chosen = draw.one_of(*names)
    operands: dict[str, Operand] = {**case.operands, chosen: [] if isinstance(case.operands[chosen], list) else None}
    return Case(case.op, operands, case.options, case.rounds_between)


def _negative(case: Case, draw: Draw) -> Case:
    def change(tensor: Tensor) -> Tensor:
        if tensor.dtype in (torch.float32, torch.float64) and tensor.device.type != "meta":
            return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
        return tensor

    return _one_tensor(case, draw, change)


_CHANGES: dict[str, Callable[[Case, Draw], Case | None]] = {
    "device": _other_device,
    "dtype": _other_dtype,
    "layout": _other_layout,
    "size": _other_size,
    "set of operands": _without,
    "sign bit": _negative,
}
