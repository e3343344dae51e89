"""Modes of dispatch and transforms, which see the calls of ops, and nothing of a kernel that reads memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

_Function = TypeVar("_Function", bound=Callable[..., Any])


def transforms_active() -> bool:
    """Whether a transform of ``torch.func``, or forward-mode differentiation, sees this call."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def modes_active() -> bool:
    """Whether a mode of dispatch (fake tensors, tracing, counters of operations) sees the calls of ops."""
    return torch._C._len_torch_dispatch_stack() > 0


def proxies_trace() -> bool:
    """Whether ``make_fx`` records the calls of ops: their results have no values to ask for."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def functions_intercepted() -> bool:
    """Whether a ``TorchFunctionMode`` may compute something else; one that only sets the default device does not."""
    count = torch._C._len_torch_function_stack()
    return count > 0 and any([type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in range(count)])


def constant_in_graphs(function: _Function) -> _Function:
    """Has ``torch.compile`` run a function while it traces, and take the result for a constant.

    So does ``torch.compiler.assume_constant_result``, which imports all of torch._dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def is_exporting() -> bool:
    """Whether ``torch.export`` traces this call.

    Of ``torch.compiler.is_exporting`` the Dynamo of torch 2.11 believes that it is always true.
    """
    return torch.compiler.is_exporting()
