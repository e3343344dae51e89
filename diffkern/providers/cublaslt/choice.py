"""Which algorithm computes a kind of product: torch's, until another one was measured to be faster."""

from __future__ import annotations

import logging
import statistics
import threading
import warnings
from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor, nn

from diffkern.providers.cublaslt.library import CublasLtError, Library, Proposal, find
from diffkern.providers.cublaslt.product import ALIGNMENT, Kind, Product, Scales
from diffkern.providers.dispatch_modes import modes_active, transforms_active
from diffkern.providers.eager.fp8 import LONGEST_SHORT_SUM

_log = logging.getLogger(__name__)

#: Products of fewer multiplications take so little time that a measurement would not pay.
LEAST_MULTIPLICATIONS = 1 << 33
#: One row in so many is compared: a prime, so that all rows of all tiles have their turn.
_SAMPLED = 17
#: Rounds of a measurement, and how many algorithms stay after the second one.
_ROUNDS, _FINALISTS = 7, 3
#: Clocks of the GPU, about 0.2 ms.
_HEAD_START = 400_000
#: Stands for torch's own product among the algorithms, which are numbered.
_TORCH = -1
#: Plans that are kept, beyond which all are dropped.
_MOST_PLANS = 1024

#: Computes a product as torch does: takes what :func:`multiply` takes first.
ByTorch = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Scales | None], Tensor]

#: The dtypes that are served, and for each what a user may allow torch, on which its algorithms depend.
_ALLOWED = {
    torch.float16: (
        torch._C._get_cublas_allow_fp16_accumulation,
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    ),
    torch.bfloat16: (torch._C._get_cublas_allow_bf16_reduced_precision_reduction,),
    torch.float8_e4m3fn: (),
}
_CLASSES = (Tensor, nn.Parameter)


class GemmPlan:
    """How products of one signature are computed.

    Attributes:
        kind: What cublasLt needs to know of them; None if they are none of its.
        measured: Whether it is decided who computes them.
        product: The kind, ready to run; None if torch computes them.
        proposal: The algorithm.
        shape: Of the result.
    """

    __slots__ = ("kind", "measured", "product", "proposal", "shape")

    def __init__(self, kind: Kind | None, shape: tuple[int, ...]) -> None:
        self.kind, self.shape = kind, shape
        self.measured = kind is None or kind.rows * kind.columns * kind.depth < LEAST_MULTIPLICATIONS
        self.product: Product | None = None
        self.proposal: Proposal | None = None


#: By everything but the addresses of operands. Ways of one kind are measured one by one: there are few.
_plans: dict[Hashable, GemmPlan] = {}
_lock = threading.Lock()


def serves(device_type: str, dtype: torch.dtype) -> bool:
    """Whether algorithms are measured for such operands."""
    return device_type == "cuda" and dtype in _ALLOWED and isinstance(find(), Library)


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, scales: Scales | None, gelu: bool,
    by_torch: ByTorch,
) -> Tensor:  # fmt: skip
    r"""Computes :math:`x W^\top + b`, maybe followed by a tanh GELU, to the bits that torch gives.

    At the second product of a kind algorithms are measured: a denoiser repeats its shapes, and what is computed once is
    not worth it. No gradient is recorded.

    Args:
        x: Rows ``[..., K]``.
        weight: ``[N, K]``.
        bias: ``[N]``, or None.
        out: Where the result shall be, for ``x`` as ``[M, K]``: ``[M, N]`` with any stride from row to row. None for a
            new tensor.
        scales: Of operands in e4m3, the factors of their rows, ``[..., 1]`` and ``[N, 1]`` in float32: then the bias
            and the result are in bfloat16.
        gelu: Whether the GELU follows.
        by_torch: Computes it as torch does.

    Returns:
        The result, ``[..., N]``; ``out`` if it was given.
    """
    if not x.is_cuda or transforms_active() or modes_active():
        return by_torch(x, weight, bias, out, scales)
    signature = (
        x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.stride(), weight.dtype, weight.device,
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device),
        None if out is None else (out.shape, out.stride()), gelu,
        None if scales is None else tuple([(one.shape, one.stride(), one.dtype, one.device) for one in scales]),
        *[allowed() for allowed in _ALLOWED.get(x.dtype, ())],
    )  # fmt: skip
    plan = _plans.get(signature)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[signature] = GemmPlan(_kind(x, weight, bias, out, scales, gelu), (*x.shape[:-1], *weight.shape[:1]))
        return by_torch(x, weight, bias, out, scales)
    if not plan.measured and not torch.cuda.is_current_stream_capturing():
        _decide(plan, by_torch)
    product, proposal = plan.product, plan.proposal
    if product is None or proposal is None or not _are_plain(x, weight, bias, out, *(scales or ())):
        return by_torch(x, weight, bias, out, scales)
    assert plan.kind is not None
    result = x.new_empty(plan.shape, dtype=plan.kind.out_dtype) if out is None else out
    try:
        if torch._C._cuda_getDevice() == x.device.index:
            product.run(proposal, x, weight, bias, result, scales)
        else:
            with torch.cuda.device(x.device):
                product.run(proposal, x, weight, bias, result, scales)
    except CublasLtError as error:
        plan.product = None
        warnings.warn(f"diffkern: torch computes such products from now on: {error}", stacklevel=2)
        return by_torch(x, weight, bias, out, scales)
    return result


def _are_plain(*operands: Tensor | None) -> bool:
    """Whether the memory of operands holds their values, at addresses that cublasLt takes."""
    addresses = 0
    for operand in operands:
        if operand is not None:
            if type(operand) not in _CLASSES or operand.is_neg():
                return False
            addresses |= operand.data_ptr()
    return addresses % ALIGNMENT == 0


def _kind(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, scales: Scales | None, gelu: bool
) -> Kind | None:
    """What cublasLt needs to know of such operands, but for their addresses; None if it cannot compute them."""
    dtype, device, multiple = x.dtype, x.device, ALIGNMENT // x.element_size()
    if dtype not in _ALLOWED or weight.ndim != 2 or x.ndim < 1 or not weight.is_contiguous():
        return None
    (columns, depth), row_stride = weight.shape, x.shape[-1]
    if x.shape[-1] != depth or x.numel() == 0 or depth % multiple or columns % multiple or columns == 0:
        return None
    if not x.is_contiguous():
        if x.ndim != 2 or x.stride(1) != 1 or x.stride(0) < depth or x.stride(0) % multiple:
            return None
        row_stride = x.stride(0)
    if bias is not None and (bias.shape != (columns,) or not bias.is_contiguous()):
        return None
    rows, out_stride = x.numel() // depth, columns
    if (dtype is torch.float8_e4m3fn) != (scales is not None):
        return None
    if scales is not None:
        if gelu or not x.is_contiguous() or not (out is None or out.is_contiguous()):  # which torch writes, too
            return None
        for scale, count in zip(scales, (rows, columns), strict=True):
            if scale.dtype != torch.float32 or scale.device != device or scale.numel() != count:
                return None
            if not scale.is_contiguous():
                return None
    if out is not None:
        if out.shape != (rows, columns) or out.stride(1) != 1 or out.stride(0) % multiple:
            return None
        out_stride = out.stride(0)
    if weight.dtype != dtype or weight.device != device:
        return None
    short = scales is not None and depth <= LONGEST_SHORT_SUM
    kind = Kind(device.index, dtype, rows, columns, depth, row_stride, out_stride, bias is not None, gelu, short)
    if any(one is not None and (one.dtype != kind.out_dtype or one.device != device) for one in (bias, out)):
        return None
    return kind


def _decide(plan: GemmPlan, by_torch: ByTorch) -> None:
    kind = plan.kind
    assert kind is not None
    with _lock, torch.cuda.device(kind.device), torch.no_grad():
        if not plan.measured:
            plan.measured = True
            try:
                _measure(kind, plan, by_torch)
            except torch.OutOfMemoryError:
                _log.info("%s: torch's, since there is no memory to measure others", kind)


def _measure(kind: Kind, plan: GemmPlan, by_torch: ByTorch) -> None:
    """Decides who computes a kind of product.

    With operands of its own: with zeros, say, as in a warm-up, every algorithm gives the same.
    """
    lib = find()
    if not isinstance(lib, Library):
        return
    try:
        product = Product(kind, lib)
    except CublasLtError as error:
        _log.info("%s: torch's, since %s", kind, error)
        return
    x, weight, bias, out, scales = _operands(kind)
    runs: dict[int, Callable[[], object]] = {_TORCH: partial(by_torch, x, weight, bias, out, scales)}
    y = by_torch(x, weight, bias, out, scales)
    wanted = _bits(y).clone()
    for index, proposal in enumerate(product.proposals):
        run = partial(product.run, proposal, x, weight, bias, y, scales)
        try:
            run()
        except CublasLtError as error:
            _log.info("%s: algorithm %d left out, since %s", kind, index, error)
            continue
        if torch.equal(_bits(y), wanted):
            runs[index] = run
    times = _times(runs)
    best = min(times, key=times.__getitem__)
    if best != _TORCH:
        plan.proposal, plan.product = product.proposals[best], product
    _log.info(
        "%s: torch's algorithm takes %.1f us, the best of the library's %d of the same bits %.1f us",
        kind, times[_TORCH], len(runs) - 1, times[best],
    )  # fmt: skip


def _operands(kind: Kind) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Scales | None]:
    """Random operands of a kind, from a generator of their own, so that the user's noise stays the same."""
    device, eight_bits = torch.device("cuda", kind.device), kind.dtype is torch.float8_e4m3fn
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, row_stride: int | None = None, scale: float = 1.0) -> Tensor:
        whole = torch.empty(*shape[:-1], row_stride or shape[-1], dtype=kind.out_dtype, device=device)
        return whole.normal_(0.0, scale, generator=generator)[..., : shape[-1]]

    x = random(kind.rows, kind.depth, row_stride=kind.row_stride)
    weight = random(kind.columns, kind.depth, scale=1.0 if eight_bits else kind.depth**-0.5)
    out = None if kind.out_stride == kind.columns else random(kind.rows, kind.columns, row_stride=kind.out_stride)
    bias = random(kind.columns) if kind.bias else None
    if not eight_bits:
        return x, weight, bias, out, None
    scales = random(kind.rows, 1).float().exp(), random(kind.columns, 1).float().exp() * kind.depth**-0.5
    return x.to(kind.dtype), weight.to(kind.dtype), bias, out, scales


def _bits(y: Tensor) -> Tensor:
    """Some rows of a result, as integers."""
    return y[::_SAMPLED].view(torch.int16)


def _times(runs: dict[int, Callable[[], object]]) -> dict[int, float]:
    """Microseconds of each, in turn, so that a clock that changes favours none; the slow ones drop out early."""
    samples: dict[int, list[float]] = {name: [] for name in runs}
    left = list(runs)
    for number in range(_ROUNDS):
        for name in left:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_HEAD_START)  # for the host to get ahead: launches are not what is measured
            begin.record()
            runs[name]()
            runs[name]()
            end.record()
            end.synchronize()
            samples[name].append(500.0 * begin.elapsed_time(end))
        if number == 1:
            fastest = sorted(left, key=lambda name: min(samples[name]))[:_FINALISTS]
            left = [name for name in left if name in fastest or name == _TORCH]
    return {name: statistics.median(samples[name]) for name in left}
