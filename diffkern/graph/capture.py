"""Capturing a step as a CUDA graph, and replaying it; a capture that fails leaves the device as it was.

A capture is lost for good once something in it waits for the GPU (``.item()``, a copy from the CPU): CUDA invalidates
it, and ``capture_end`` raises before it has told the allocator and the random generator that the capture is over. So
everything is told here, one by one. Left alone, memory that other streams used would never be given back, and the next
random number would raise "Offset increment outside graph capture encountered unexpectedly".
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

#: Plain values that a graph has written into it.
CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)

#: PyTorch captures one graph at a time in a process.
_one_at_a_time = threading.Lock()
_streams: dict[torch.device, torch.cuda.Stream] = {}
#: Graphs whose capture was lost: allocators may go on asking them whether they are capturing.
_lost: list[torch.cuda.CUDAGraph] = []


class CaptureError(Exception):
    """A step cannot be captured; the message says why. Nothing was computed, and the device can be used."""


@dataclass(frozen=True)
class CapturedStep:
    """A captured step.

    Attributes:
        graph: The graph.
        inputs: The tensors it reads, in the order of the flattened arguments.
        outputs: What it writes, flattened.
        spec: How the outputs were nested.
        kept: What else it reads, kept alive.
        lock: Held by a thread while it gives the GPU one replay.
        free: The end of the last replay.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Any]
    spec: TreeSpec
    kept: list[Any] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    free: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Has the GPU compute the step; other threads and streams wait for the inputs and outputs to be free again."""
        with self.lock, torch.cuda.device(self.inputs[0].device):
            self.free.wait()
            for static, tensor in zip(self.inputs, tensors, strict=True):
                static.copy_(tensor)
            self.graph.replay()
            # Copies: the next replay writes where this one did.
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.outputs]
            self.free.record()
        return tree_unflatten(leaves, self.spec)


def capture(run: Callable[[list[Any]], Any], leaves: Sequence[Any]) -> CapturedStep:
    """Captures one step on copies of its inputs.

    Args:
        run: Runs the step on flattened arguments.
        leaves: The arguments, flattened: tensors on one GPU, and constants.

    Raises:
        CaptureError: the step cannot be captured.
    """
    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    inputs = [leaf for leaf in copies if isinstance(leaf, Tensor)]
    versions = [tensor._version for tensor in inputs if not tensor.is_inference()]
    on_cpu = torch.get_rng_state()
    with _one_at_a_time:
        graph, result = _capture(lambda: run(copies), inputs[0].device)
    reason = None
    if versions != [tensor._version for tensor in inputs if not tensor.is_inference()]:
        reason = "its forward writes into its inputs"
    elif not torch.equal(on_cpu, torch.get_rng_state()):
        torch.set_rng_state(on_cpu)
        reason = "its forward draws random numbers on the CPU"
    outputs, spec = tree_flatten(result)
    strange = next((leaf for leaf in outputs if type(leaf) is not Tensor and not isinstance(leaf, CONSTANTS)), None)
    if strange is not None:
        reason = f"its result holds a {type(strange).__name__}, which is neither a plain tensor nor a plain value"
    elif any(isinstance(leaf, Tensor) and leaf.device != inputs[0].device for leaf in outputs):
        reason = "its result is not all on the GPU of its inputs"
    if reason is not None:
        raise CaptureError(reason)
    return CapturedStep(graph, inputs, outputs, spec)


def _capture(run: Callable[[], Any], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Captures ``run`` on a stream of its own.

    Raises:
        CaptureError: that failed. Streams, allocators and random generators are as they were before.
    """
    on_gpu, on_cpu = torch.cuda.get_rng_state(device), torch.get_rng_state()
    with torch.cuda.device(device):
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        begun = False
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # the pool of a graph cannot use what is cached
            with torch.cuda.stream(_stream(device)):
                # Other threads may go on computing.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                begun = True
                result = run()
                graph.capture_end()
            return graph, result
        except BaseException as error:
            reason = describe(error)
            if not isinstance(error, Exception):
                clean_up(graph, pool, device, begun)
                raise
        # Here the exception is gone, and with it the tensors of the frames it came through.
        clean_up(graph, pool, device, begun)
        torch.set_rng_state(on_cpu)
        if not torch.equal(on_gpu, torch.cuda.get_rng_state(device)):
            torch.cuda.set_rng_state(on_gpu, device)
    raise CaptureError(reason)


def clean_up(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device, begun: bool) -> None:
    """Ends a capture that failed, wherever it did."""
    ended = False
    if begun:
        # Ends it, if it is valid still: an error of Python's in the middle of it.
        with contextlib.suppress(RuntimeError), torch.cuda.stream(_stream(device)):
            graph.capture_end()
            ended = True
    if not ended:
        for end in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with contextlib.suppress(RuntimeError, AttributeError):
                getattr(torch._C, end)(device.index, pool)
        _lost.append(graph)
    with contextlib.suppress(RuntimeError):
        graph.reset()
    # In some versions of torch the generator only leaves its capturing mode at the end of a capture that succeeds.
    spare = torch.cuda.CUDAGraph()
    try:
        value = torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(_stream(device)):
            spare.capture_begin(capture_error_mode="thread_local")
            value.add_(1)
            spare.capture_end()
        spare.reset()
    except RuntimeError as error:
        _lost.append(spare)
        warnings.warn(f"diffkern: after a failed capture the GPU captures no more: {describe(error)}", stacklevel=2)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def describe(error: BaseException) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
