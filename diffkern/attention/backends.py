"""The implementations of attention that can be named: what each needs and can do, as data.

The names are those of diffusers. Those of PyTorch's own kernels are called directly; the others through diffusers,
which adapts the packages behind them, so the packages' quirks are known in one place. diffusers silently drops
what a backend does not take (a mask raises, but dropout, a scale or ``is_causal`` are lost): the table below says
what may be handed to each.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffkern.attention.call import AttentionCall, Compute, MaskKind, Signature
from diffkern.hub.policy import switched_off
from diffkern.providers.eager.attention_fp8 import Unrotated
from diffkern.providers.foreign import summary

_HALF = frozenset({torch.float16, torch.bfloat16})
_ANY = _HALF | {torch.float32}
_NO_MASK: frozenset[MaskKind] = frozenset({"none"})
_MASKS: frozenset[MaskKind] = frozenset({"none", "bool", "additive"})


class UnavailableError(RuntimeError):
    """A backend cannot be loaded. The message says why and what to do."""


@dataclass(frozen=True)
class Backend:
    """One implementation of attention."""

    name: str  # as diffusers names it, or a Hub kernel ``"org/repo@revision:function"``
    load: Callable[[], Compute]  # returns the function, loading what it needs; raises :class:`UnavailableError`
    device_types: frozenset[str] | None = None  # devices it runs on; None for any
    dtypes: frozenset[torch.dtype] = _ANY  # dtypes it takes
    masks: frozenset[MaskKind] = _MASKS  # kinds of masks it applies
    causal: bool = True  # whether it can mask causally
    dropout: bool = True  # whether it can drop weights
    grouped: bool = True  # Whether it takes fewer key heads than query heads. For others the key heads are repeated.
    scale: bool = True  # whether it takes a scale
    gradients: bool = True  # whether it has a backward
    head_dims: frozenset[int] | None = None  # sizes of a head it takes, if only some
    max_head_dim: int | None = None  # the largest size of a head it takes
    capability: tuple[int, int] | None = None  # least CUDA compute capability; ROCm devices are not asked
    lossy: str = ""  # how it is less accurate on purpose, or ""
    max_error: float = math.inf  # the relative error against float64 up to which one that is lossy serves
    timed: bool = False  # whether it serves only calls that it computes faster than the stock attention, by measurement
    package: str = ""  # the Python package that it needs besides torch, or ""
    extra: str = ""  # the extra of diffkern that installs that package, or ""
    candidate: bool = False  # Whether ``"auto"`` tries it, if it is installed. Nothing that is downloaded is.
    #: Computes queries and keys from before their norm and rotation, values and a scale; None if it cannot.
    unrotated: Callable[[Unrotated, Tensor, float | None], Tensor] | None = None

    @property
    def downloads(self) -> bool:
        """Whether loading it may ask the Hub."""
        return "hub" in self.name or "/" in self.name

    def missing(self) -> str | None:
        """Says which package it needs that is not there, or None."""
        if not self.package or importlib.util.find_spec(self.package) is not None:
            return None
        install = f": pip install 'diffkern[{self.extra}]'" if self.extra else ""
        return f"needs the package {self.package}, which is not installed{install}"

    def refusal(self, call: Signature) -> str | None:
        """Says why it cannot serve calls of this kind, or None as far as this table knows."""
        if self.device_types is not None and call.device.type not in self.device_types:
            return f"runs on {' and '.join(sorted(self.device_types))} only"
        if call.dtype not in self.dtypes:
            return f"takes {_names(self.dtypes)} only, not {_names({call.dtype})}"
        if call.mask not in self.masks:
            return "applies no mask" if self.masks == _NO_MASK else f"applies no {call.mask} mask"
        if call.causal and not self.causal:
            return "has no causal mask"
        if call.dropout and not self.dropout:
            return "has no dropout"
        if call.scaled and not self.scale:
            return "takes no scale"
        if call.gradients and not self.gradients:
            return "has no backward"
        if self.head_dims is not None and (other := {call.head_dim, call.value_dim} - self.head_dims):
            return f"takes heads of {', '.join(map(str, sorted(self.head_dims)))} only, not {min(other)}"
        if self.max_head_dim is not None and max(call.head_dim, call.value_dim) > self.max_head_dim:
            return f"takes heads of up to {self.max_head_dim} only, not {max(call.head_dim, call.value_dim)}"
        if self.capability is not None and call.device.type == "cuda" and torch.version.hip is None:
            have = torch.cuda.get_device_capability(call.device)
            if have < self.capability:
                return f"needs compute capability {_version(self.capability)}, this card has {_version(have)}"
        return None

    def compute(self, call: AttentionCall) -> Tensor:
        """Computes the attention, ``[B, S, H, E]``.

        Raises:
            UnavailableError: as :attr:`load`.
        """
        return self.load()(call if self.grouped else call.repeated())


def backend_of(name: str) -> Backend:
    """Returns the backend of a name of diffusers.

    Raises:
        ValueError: there is none; the message names the nearest, or all.
    """
    if name not in BACKENDS:
        close = difflib.get_close_matches(name.lower(), [*BACKENDS, "auto"], n=1) if isinstance(name, str) else []
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(BACKENDS)},"
        raise ValueError(
            f"unknown attention backend {name!r}: {hint} or 'auto' to measure, or a kernel of the Hub such as "
            "'org/repo@revision:function'"
        )
    return BACKENDS[name]


# --- PyTorch's own -------------------------------------------------------------------------------------


def _torch(kernel: SDPBackend | None) -> Callable[[], Compute]:
    """Scaled dot product attention of PyTorch: one of its kernels, or the one it chooses."""

    def compute(call: AttentionCall) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            y = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=call.mask,
                dropout_p=call.dropout,
                is_causal=call.causal,
                scale=call.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return y.transpose(1, 2)

    return lambda: compute


# --- through diffusers ---------------------------------------------------------------------------------


def _once(load: Callable[[], Compute]) -> Callable[[], Compute]:
    """A loader that loads at its first call: what ``torch.compile`` traces later is the function alone."""
    loaded: list[Compute] = []

    def load_once() -> Compute:
        if not loaded:
            loaded.append(load())
        return loaded[0]

    return load_once


def _diffusers(name: str) -> Callable[[], Compute]:
    """A backend as diffusers has registered it."""
    return _once(lambda: _load_from_diffusers(name))


def _load_from_diffusers(name: str) -> Compute:
    off = switched_off() if BACKENDS[name].downloads else None
    if off is not None:
        raise UnavailableError(off)
    try:
        from diffusers.models import attention_dispatch as dispatch
    except ImportError as error:
        raise UnavailableError(f"needs diffusers, which adapts it: pip install diffusers ({error})") from None
    try:
        member = dispatch.AttentionBackendName(name)
        function = dispatch._AttentionBackendRegistry._backends[member]
        names = dispatch._AttentionBackendRegistry._supported_arg_names[member]
    except (AttributeError, KeyError, ValueError):
        raise UnavailableError("is not among the backends of the installed diffusers: update it") from None
    try:
        dispatch._check_attention_backend_requirements(member)
        if BACKENDS[name].downloads:
            dispatch._maybe_download_kernel_for_backend(member)
    except Exception as error:  # the Hub's errors are of many classes, and every one of them is a reason
        raise UnavailableError(str(error)) from error

    def compute(call: AttentionCall) -> Tensor:
        arguments: dict[str, Any] = {
            "attn_mask": call.mask,
            "dropout_p": call.dropout,
            "is_causal": call.causal,
            "scale": call.scale,
            "enable_gqa": call.query.shape[2] != call.key.shape[2],
        }
        known = {key: value for key, value in arguments.items() if key in names}
        y: Tensor = function(query=call.query, key=call.key, value=call.value, **known)
        return y

    return compute


def _unrotated_cudnn_fp8(x: Unrotated, value: Tensor, scale: float | None) -> Tensor:
    from diffkern.attention.cudnn_fp8 import attend_unrotated

    return attend_unrotated(x, value, scale)


def _load_cudnn_fp8() -> Compute:
    try:
        importlib.import_module("cudnn")
        importlib.import_module("triton")
    except Exception as error:  # without libcudnn, for example
        raise UnavailableError(
            f"needs nvidia-cudnn-frontend and triton, whose import raised {summary(error)}: "
            "pip install 'diffkern[cudnn]'"
        ) from error
    from diffkern.attention.cudnn_fp8 import attend

    return attend


def _through_diffusers(properties: Mapping[str, Any], name: str, **differences: Any) -> Backend:
    """A backend that has the properties of its family, but for some."""
    return Backend(name, _diffusers(name), **{**properties, **differences})


_CUDA = frozenset({"cuda"})
_FLASH = {"device_types": _CUDA, "dtypes": _HALF, "masks": _NO_MASK, "max_head_dim": 256, "capability": (8, 0)}
_SAGE = {
    **_FLASH,
    "dropout": False,
    "gradients": False,
    "max_head_dim": 128,
    "lossy": "quantises queries and keys to 8 bits",
    "package": "sageattention",
}
_flash, _sage = partial(_through_diffusers, _FLASH), partial(_through_diffusers, _SAGE)

#: Every backend by its name. The variants for packed sequences take no mask here: given one, they keep the first
#: keys of each sample, as many as it shows, whichever those are.
BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("native", _torch(None)),
        Backend("_native_cudnn", _torch(SDPBackend.CUDNN_ATTENTION), _CUDA, _HALF, capability=(8, 0), candidate=True),
        Backend("_native_efficient", _torch(SDPBackend.EFFICIENT_ATTENTION), _CUDA, grouped=False, candidate=True),
        Backend("_native_flash", _torch(SDPBackend.FLASH_ATTENTION), max_head_dim=256, candidate=True),
        Backend("_native_math", _torch(SDPBackend.MATH)),
        # Its causal mask is lost unless there is another mask, and of a mask it wants all four dimensions.
        Backend("flex", _diffusers("flex"), masks=_NO_MASK, causal=False, dropout=False),
        Backend("_native_npu", _diffusers("_native_npu"), frozenset({"npu"}), _HALF, causal=False, grouped=False),
        Backend(
            "_native_xla",
            _diffusers("_native_xla"),
            frozenset({"xla"}),
            masks=_NO_MASK,
            dropout=False,
            grouped=False,
            scale=False,
        ),
        Backend(
            "xformers", _diffusers("xformers"), _CUDA, masks=_NO_MASK, grouped=False, package="xformers", candidate=True
        ),
        Backend(
            "cudnn_fp8",
            _once(_load_cudnn_fp8),
            _CUDA,
            _HALF,
            masks=_NO_MASK,
            causal=False,
            dropout=False,
            gradients=False,
            head_dims=frozenset({128}),
            capability=(9, 0),
            lossy="computes in e4m3: queries, keys, values, weights and output",
            max_error=0.1,
            timed=True,
            unrotated=_unrotated_cudnn_fp8,
            package="cudnn",
            extra="cudnn",
        ),
        _flash("flash", package="flash_attn", candidate=True),
        _flash("flash_hub", package="kernels"),
        _flash("flash_varlen", package="flash_attn"),
        _flash("flash_varlen_hub", package="kernels"),
        _flash("_flash_3", package="flash_attn_interface", dropout=False, capability=(9, 0), candidate=True),
        _flash("_flash_3_hub", package="kernels", dropout=False, capability=(9, 0)),
        _flash("_flash_varlen_3", package="flash_attn_interface", dropout=False, capability=(9, 0)),
        _flash("_flash_3_varlen_hub", package="kernels", dropout=False, capability=(9, 0)),
        _flash("flash_4_hub", package="kernels", dropout=False, capability=(9, 0)),
        _flash("aiter_fa2_hub", package="kernels", dtypes=frozenset({torch.bfloat16})),
        _sage("sage"),
        _sage("sage_hub", package="kernels"),
        _sage("sage_varlen"),
        _sage("sage_blackwell_hub", package="kernels", head_dims=frozenset({64, 128}), scale=False, capability=(12, 0)),
        _sage("_sage_qk_int8_pv_fp16_cuda"),
        _sage("_sage_qk_int8_pv_fp16_triton"),
        _sage("_sage_qk_int8_pv_fp8_cuda", capability=(8, 9)),
        _sage("_sage_qk_int8_pv_fp8_cuda_sm90", capability=(9, 0)),
    )
}


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _names(dtypes: frozenset[torch.dtype] | set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
