r"""Attention on e4m3 by cuDNN: ``sdpa_fp8`` of the package nvidia-cudnn-frontend, for heads of 128 channels.

:math:`\operatorname{softmax}(c\,s_q s_k\,q_8 k_8^\top)\,v_8\,s_v + m_v`, where queries, keys and values are in e4m3
(:func:`diffkern.providers.eager.attention_fp8.quantize`), weights too, with sums in float32, and the output again, as
Hopper has it. Inference only, no mask, no dropout. Kernels of Triton quantise and take the output back; a plan of cuDNN
is built at the first call of a shape, and kept.

On other devices than NVIDIA's GPUs the op computes the same numbers in plain PyTorch: right, and slow.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from diffkern.attention.call import AttentionCall
from diffkern.ops.registration import define
from diffkern.providers.eager import attention_fp8 as eager
from diffkern.providers.eager.fp8 import E4M3

#: Plans that are kept besides those in CUDA graphs.
PLANS = 64
#: Operands of the graph by number; those from :data:`_SCALARS` on are one number each, in the order of ``scalars``.
_QUERY, _KEY, _VALUE, _OUTPUT, _WEIGHT_PEAK, _OUTPUT_PEAK, _SCALARS = range(1, 8)


def attend(call: AttentionCall) -> Tensor:
    """Computes a call without mask, causal mask and dropout, ``[B, S, H, D]`` in its dtype."""
    scale = call.query.shape[3] ** -0.5 if call.scale is None else call.scale
    y: Tensor = _op(call.query, call.key, call.value, scale)
    return y


def attend_unrotated(x: eager.Unrotated, value: Tensor, scale: float | None) -> Tensor:
    """Computes what :func:`attend` does from before the norm and rotation of queries and keys; inference only."""
    quantized = _kernels(value).quantize_unrotated(x, value)
    return _attended(quantized, value.shape[3] ** -0.5 if scale is None else scale, value.dtype)


def _compute(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return _attended(_kernels(value).quantize(query, key, value), scale, query.dtype)


def _attended(x: eager.Quantized, scale: float, dtype: torch.dtype) -> Tensor:
    kernels = _kernels(x.value)
    y = (eager.attend if kernels is eager else _attend)(x, scale)
    result: Tensor = kernels.dequantize(y, x, dtype)
    return result


def _kernels(x: Tensor) -> Any:
    on_gpu = x.device.type == "cuda" and torch.version.hip is None
    return import_module("diffkern.providers.triton.attention_fp8") if on_gpu else eager


def _fake(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


_op = define("attention_fp8", "(Tensor query, Tensor key, Tensor value, float scale) -> Tensor", _compute, _fake)


@dataclass
class _Plan:
    graph: Any
    workspace: int
    captured: bool = False  # in a CUDA graph, which runs its code for as long as it likes


#: One handle of cuDNN for each device, and plans by device and shape: cuDNN wants no two threads in one handle.
_handles: dict[torch.device, Any] = {}
_plans: OrderedDict[tuple[Any, ...], _Plan] = OrderedDict()
_lock = threading.Lock()


def _attend(x: eager.Quantized, scale: float) -> Tensor:
    """:func:`diffkern.providers.eager.attention_fp8.attend` by cuDNN, on the current stream."""
    cudnn, device = import_module("cudnn"), x.query.device
    y = torch.empty(x.query.shape, dtype=torch.uint8, device=device)
    with _lock, torch.cuda.device(device):
        handle = _handles.get(device)
        if handle is None:
            handle = _handles[device] = cudnn.create_handle()
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        plan = _plan(cudnn, handle, device, x.query.shape, x.key.shape, scale)
        plan.captured |= torch.cuda.is_current_stream_capturing()
        workspace = torch.empty(max(plan.workspace, 1), dtype=torch.uint8, device=device)
        # Tensors, since of an address the package finds out in Python what is there, which takes 20 us for each.
        bytes_ = (t.view(torch.uint8) for t in (x.query, x.key, x.value, y))
        numbers = (*torch.empty(2, device=device, dtype=torch.float32).unbind(), *x.scalars.unbind())
        plan.graph.execute(dict(enumerate((*bytes_, *numbers), _QUERY)), workspace, handle=handle)
    return y.view(E4M3)


def _plan(cudnn: Any, handle: Any, device: torch.device, query: torch.Size, key: torch.Size, scale: float) -> _Plan:
    known = (device, query, key, scale)
    plan = _plans.get(known)
    if plan is None:
        plan = _plans[known] = _build(cudnn, handle, query, key, scale)
        free = [key for key, kept in _plans.items() if not kept.captured]
        if len(free) > PLANS:
            del _plans[free[0]]
    else:
        _plans.move_to_end(known)
    return plan


def _build(cudnn: Any, handle: Any, query: torch.Size, key: torch.Size, scale: float) -> _Plan:
    """Builds the graph; raises cuDNN's own error where it has no kernel for the shape."""
    f32, e4m3 = cudnn.data_type.FLOAT, cudnn.data_type.FP8_E4M3
    graph = cudnn.pygraph(io_data_type=e4m3, intermediate_data_type=f32, compute_data_type=f32, handle=handle)

    def tensor(uid: int, shape: torch.Size) -> Any:
        (batch, length, heads, channels), strides = shape, _heads_second(shape)
        return graph.tensor(dim=(batch, heads, length, channels), stride=strides, data_type=e4m3, uid=uid)

    def number(uid: int) -> Any:
        return graph.tensor(dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=f32, uid=uid)

    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    output, _, *peaks = graph.sdpa_fp8(
        q=tensor(_QUERY, query),
        k=tensor(_KEY, key),
        v=tensor(_VALUE, key),
        **{name: number(_SCALARS + i) for i, name in enumerate(names)},
        attn_scale=scale,
        generate_stats=False,
        use_causal_mask=False,
    )
    batch, length, heads, channels = query
    output.set_uid(_OUTPUT).set_output(True).set_dim((batch, heads, length, channels))
    output.set_stride(_heads_second(query)).set_data_type(e4m3)
    # The peaks are not read, but without them cuDNN's own engines do not serve on Hopper.
    for uid, peak in zip((_WEIGHT_PEAK, _OUTPUT_PEAK), peaks, strict=True):
        peak.set_uid(uid).set_output(True).set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1)).set_data_type(f32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return _Plan(graph, graph.get_workspace_size())


def _heads_second(shape: torch.Size) -> tuple[int, int, int, int]:
    """Strides of a dense ``[B, S, H, D]`` in the order ``[B, H, S, D]``."""
    _, length, heads, channels = shape
    return (length * heads * channels, channels, heads * channels, 1)
