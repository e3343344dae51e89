"""Linear layers of ComfyUI's models whose products are computed in fp8 (e4m3).

A weight that is stored in e4m3 is used as it is: ComfyUI hands it on as it would to its own product, from wherever it
is. Any other weight gets a copy in fp8 at its first use, adapters included, which lives in the patch of its layer until
the sampling ends: between samplings, and when hooks change weights, ComfyUI writes weights in place.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.fp8 import MULTIPLE, StoredWeight, quantize_rowwise
from diffkern.blocks.pieces import unfit
from diffkern.comfyui.rewrites import Patch, describe, in_training
from diffkern.hub import KernelConfig
from diffkern.injection.fp8_fusion import LEAST_ROWS, OP, UNLESS_INCLUDED, Fp8Layers, is_linear, kind_of
from diffkern.injection.report import InjectionReport, Site
from diffkern.matching import full_name
from diffkern.providers import select
from diffkern.providers.cublaslt import layers
from diffkern.providers.dispatch_modes import modes_active, transforms_active
from diffkern.providers.eager.fp8 import E4M3, fp8_unavailable_reason
from diffkern.verify.contract import FP8_ALLOWANCE, RATIO, ROWS, SLACK
from diffkern.verify.counts import CallCounts
from diffkern.verify.measures import Measurement, error_beside, relative_error
from diffkern.verify.samples import random_input

#: The layers that are known: torch's, and those of ``comfy.ops`` that compute ``input @ weight.T + bias``.
_CLASSES = frozenset({
    "torch.nn.modules.linear.Linear",
    "comfy.ops.disable_weight_init.Linear",
    "comfy.ops.manual_cast.Linear",
    "comfy.ops.fp8_ops.Linear",
    "comfy.ops.mixed_precision_ops.<locals>.MixedPrecisionOps.Linear",
})  # fmt: skip
#: Layouts of comfy-kitchen's tensors in e4m3 with one scale.
_LAYOUTS = frozenset({"TensorCoreFP8Layout", "TensorCoreFP8E4M3Layout"})
_HALF = (torch.bfloat16, torch.float16)
#: How paths begin for the rules about layers of denoisers.
_DENOISER = "transformer."


class _Copy(NamedTuple):
    source: weakref.ref[Tensor]
    stored: StoredWeight
    bias: Tensor | None


@dataclass
class Kind:
    """Layers of one path but for its indices, size and storage, which share a proof."""

    measurements: list[Measurement] = field(default_factory=list)
    failed: str = ""


class Fp8Linear(Patch):
    """One linear layer in fp8: what stands in the place of its forward, and all that it keeps.

    The provider quantises inputs. ``kind`` is what it shares with layers of its kind.
    """

    def __init__(self, module: nn.Module, kind: Kind, provider: str | None, counts: CallCounts | None = None) -> None:
        self.module, self.kind, self.counts = module, kind, counts or CallCounts()
        self.measurements, self.stock, self._rewritten = kind.measurements, {"forward": type(module).forward}, {}
        self._provider = provider
        self._copy: _Copy | None = None

    @override
    def on(self, module: nn.Module) -> Fp8Linear:
        return Fp8Linear(module, self.kind, self._provider, self.counts)

    @override
    def drop(self) -> None:
        self._copy = None

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Multiplies in fp8; calls the layer's own forward, and counts why, where that cannot be."""
        x = args[0] if len(args) == 1 and not kwargs else None
        reason = self._declines(x)
        if reason is None:
            assert isinstance(x, Tensor)
            try:
                y = self.compute(x)
            except torch.OutOfMemoryError:
                self.drop()
                reason = "there is no memory for a copy of its weight"
            else:
                self.counts.add_fused()
                return y
        if not torch.compiler.is_compiling():
            self.counts.add_stock(reason)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _declines(self, x: Any) -> str | None:
        module: Any = self.module
        if type(module).forward is not self.stock["forward"]:
            return f"its class has another forward since it was optimized: {describe(type(module).forward)}"
        if in_training():
            return "ComfyUI is training"
        if torch.compiler.is_compiling():
            return "a graph of torch.compile holds the product as it is written"
        if (reason := unfit(x)) is not None:
            return reason
        if x.dtype not in _HALF:
            return "its input is float32; float16 and bfloat16 are quantised"
        if x.ndim == 0 or x.numel() < LEAST_ROWS * x.shape[-1] or x.shape[-1] != module.in_features:
            return f"its input has fewer than {LEAST_ROWS} rows, where nothing is gained, or is none of its own"
        if torch.is_grad_enabled() and x.requires_grad:
            return "gradients are wanted, and rounding to fp8 has none"
        if modes_active() or transforms_active():
            return "a mode or a transform of torch watches its operations"
        if getattr(module, "weight_function", ()) or getattr(module, "bias_function", ()):
            return "an adapter computes its weight at every call"
        if getattr(module, "pre_quant_scale", None) is not None:
            return "its input is scaled first, as the checkpoint says"
        return self.kind.failed or None

    def compute(self, x: Tensor) -> Tensor:
        """The layer for an input in half precision, whatever its rows."""
        if (ops := sys.modules.get("comfy.ops")) is not None:
            ops.run_every_op()  # which lets users interrupt
        rows = quantize_rowwise(x, self._provider)
        weight: Any = self.module.weight
        if is_stored(weight):
            with _weight_and_bias(self.module, x) as (weight, bias):
                return _product(rows, stored_weight(weight), bias, x.dtype)
        copy = self._copy
        if copy is None or copy.source() is not weight or copy.stored.values.device != x.device:
            self._copy = None  # the memory of the old one
            with _weight_and_bias(self.module, x) as (dense, bias):
                stored = StoredWeight(*quantize_rowwise(dense.to(x.dtype), self._provider))
                copy = _Copy(weakref.ref(weight), stored, None if bias is None else bias.detach().clone())
            self._copy = copy
        return _product(rows, copy.stored, copy.bias, x.dtype)

    def prove(self, device: torch.device, dtype: torch.dtype) -> None:
        """Measures the error of the layer beside its stock forward, with its own weight, on random rows."""
        module: Any = self.module
        x = random_input(torch.Size((ROWS, module.in_features)), device, dtype)
        with torch.no_grad():
            ours, stock = self.compute(x), type(module).forward(module, x.clone())
            self.drop()
            with _weight_and_bias(module, x) as (weight, bias):
                values, scales = (
                    stored_weight(weight) if is_stored(weight) else (weight, torch.ones_like(weight[:, :1]))
                )
                exact = values.double() * scales.double()
                reference = x.double() @ exact.t() + (0 if bias is None else bias.double())
        fused, before = error_beside(ours, stock, reference), relative_error(stock, reference)
        passed = fused <= RATIO * before + FP8_ALLOWANCE + SLACK
        self.kind.failed = "" if passed else f"its error in fp8 is {fused:.1e}, that of stock {before:.1e}"
        provider = select("activation_fp8", device, (dtype,), self._provider).provider
        self.kind.measurements.append(Measurement.of(x, provider, fused, before, False, self.kind.failed))


def _product(rows: Any, stored: StoredWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    # The tensor cores make bfloat16 of such products.
    made = torch.bfloat16 if rows.values.is_cuda else dtype
    return layers.linear_rows(rows.values, rows.scales, stored.values, stored.scales, bias, made).to(dtype)


def is_stored(weight: Any) -> bool:
    """Whether a weight is in e4m3, with one scale or none: what checkpoints in fp8 hold."""
    if type(weight) in (nn.Parameter, Tensor):
        return weight.dtype is E4M3
    if getattr(weight, "_layout_cls", None) not in _LAYOUTS:
        return False
    values, parameters = weight._qdata, weight._params
    plain = values.dtype is E4M3 and values.ndim == 2 and values.is_contiguous()
    return plain and parameters.scale.numel() == 1 and not getattr(parameters, "transposed", False)


def stored_weight(weight: Any) -> StoredWeight:
    """The bytes of a weight that :func:`is_stored`, and its scale for each row, ``[N, 1]``."""
    values = getattr(weight, "_qdata", weight)
    scale = weight._params.scale if values is not weight else torch.ones((), device=values.device)
    return StoredWeight(values.detach(), scale.float().reshape(1, 1).expand(values.shape[0], 1).contiguous())


def _weight_and_bias(module: Any, x: Tensor) -> AbstractContextManager[Any]:
    """What a layer computes with for ``x``: a weight in e4m3 as it is stored, any other in the dtype of ``x``."""
    if not hasattr(module, "comfy_cast_weights"):
        return nullcontext((module.weight, module.bias))
    import comfy.ops

    cast: Any = comfy.ops.CastBiasWeightContext
    if not is_stored(module.weight):
        return cast(module, x, offloadable=True)  # type: ignore[no-any-return]
    return cast(  # type: ignore[no-any-return]  # as ComfyUI's own products of quantised tensors have it
        module, None, dtype=module.weight.dtype, device=x.device, bias_dtype=x.dtype, offloadable=True,
        compute_dtype=x.dtype, want_requant=True,
    )  # fmt: skip


def plan(
    denoiser: nn.Module,
    modules: Iterator[tuple[str, nn.Module]],
    provider: str | None,
    report: InjectionReport,
    dtype: torch.dtype,
    device: torch.device,
    conflict: Callable[[str, nn.Module], str | None],
) -> dict[str, Fp8Linear]:
    """Returns the patches of the large linear layers of a denoiser, proven, by path.

    The paths of its modules begin at the model. A forced ``"eager"`` multiplies the numbers behind the bytes on any
    device. The report notes layers that stay, memory and error; ``conflict`` says why nothing may stand at a path.
    """
    reason = fp8_unavailable_reason(device) if provider != "eager" else None
    if reason is None and dtype not in _HALF:
        reason = f"the model computes in {dtype}, and float16 and bfloat16 are quantised"
    if reason is not None:
        report.caveat = f"no layer is in fp8 ({reason}): all compute as mode fast"
        return {}
    rules, kinds = Fp8Layers({_DENOISER.rstrip("."): denoiser}, KernelConfig()), dict[tuple[object, ...], Kind]()
    patches: dict[str, Fp8Linear] = {}
    for path, module in modules:
        if not is_linear(module):
            continue
        left = rules.reason_of_place(_DENOISER + path.partition(".")[2], module)
        site = Site(path, full_name(type(module)), how="table", op=OP)
        site.reason = (left or "").removesuffix(UNLESS_INCLUDED)  # the node has no such option
        if left is None:
            site.reason = _unknown(module) or conflict(path, module) or ""
        if left == "" or site.reason:
            report.skipped += [site] * bool(site.reason)
            continue
        weight: Any = module.weight
        kind = kinds.setdefault((kind_of(path), tuple(weight.shape), type(weight), weight.dtype), Kind())
        patch = Fp8Linear(module, kind, provider)
        if not kind.measurements:
            patch.prove(device, dtype)
        site.measurements = kind.measurements
        if kind.failed:
            site.reason = kind.failed
            report._rejected.append(site)
            continue
        site._state = patch.counts
        patches[path] = patch
        report._accepted.append(site)
    _say(patches, report)
    return patches


def _unknown(module: Any) -> str | None:
    weight = module.weight if full_name(type(module)) in _CLASSES else None
    if weight is None:
        return f"a {type(module).__name__} is left to the library that it is of"
    dense = type(weight) in (nn.Parameter, Tensor) and weight.dtype in (*_HALF, torch.float32)
    if not dense and not is_stored(weight):
        name = getattr(weight, "_layout_cls", str(weight.dtype).removeprefix("torch."))
        return f"its weight is stored as {name}, which ComfyUI computes with"
    if any(side % MULTIPLE for side in weight.shape):
        return (
            f"tensor cores take sides that are multiples of {MULTIPLE}, and it has {' x '.join(map(str, weight.shape))}"
        )
    return None


def _say(patches: dict[str, Fp8Linear], report: InjectionReport) -> None:
    if not patches:
        report.caveat = "no layer is in fp8 (none is large enough, or known): all compute as mode fast"
        return
    weights: list[Any] = [patch.module.weight for patch in patches.values()]
    copied = [weight for weight in weights if not is_stored(weight)]
    memory = sum(weight.numel() + 4 * weight.shape[0] for weight in copied) / 2**30
    worst = max((p.fused, p.stock) for patch in patches.values() for p in patch.kind.measurements)
    stored = f"{len(weights) - len(copied)} are stored in e4m3 and used as they are"
    copies = f"{len(copied)} get copies, which take {memory:.2g} GiB more on the GPU while it samples"
    report.notes.append(f"fp8: of {len(weights)} linear layers {stored}, {copies}")
    report.notes.append(f"fp8: the result of a layer is off by {worst[0]:.1%} at most, stock by {worst[1]:.2%}")
