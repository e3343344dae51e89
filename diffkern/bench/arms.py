"""The arms of a comparison: one pipeline, stock or compiled or injected or both, and stock again after."""

from __future__ import annotations

import contextlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from diffkern import InjectionReport


@dataclass(frozen=True)
class Arm:
    """What is done to the pipeline before it runs.

    Attributes:
        numerics: Contract of the kernels that are injected, or None if none are.
        cuda_graph: Whether the steps of the denoiser are captured as CUDA graphs, whatever that gains: ours, or the
            compiler's if nothing is injected. Of what is injected and not compiled times decide otherwise, as they do
            for every user.
        compiled: Whether ``torch.compile`` compiles the denoiser.
        torchao: Whether torchao quantises the layers that diffkern computes in fp8: float8, dynamic, row by row.
        attention: Backend of attention that is injected as well, or None.
        float32: Whether weights and inputs of the denoiser are in float32: as the first arm, what all others are
            compared with.
    """

    numerics: str | None = None
    cuda_graph: bool = False
    compiled: bool = False
    torchao: bool = False
    attention: str | None = None
    float32: bool = False

    @property
    def injected(self) -> bool:
        """Whether kernels are injected."""
        return self.numerics is not None

    @property
    def name(self) -> str:
        """``"stock"`` or the numerics, and what comes on top: ``"fast + graph"``."""
        extras = [" float32"] * self.float32 + [" + graph"] * self.cuda_graph + [" + compile"] * self.compiled
        extras += [f" + {self.attention}"] * (self.attention is not None)
        return (self.numerics or ("torchao float8" if self.torchao else "stock")) + "".join(extras)


STOCK = Arm()
COMPILED = Arm(compiled=True)
EXACT = Arm("exact")
FAST = Arm("fast")
FAST_GRAPH = Arm("fast", cuda_graph=True)
FAST_COMPILED = Arm("fast", compiled=True)
FP8 = Arm("fp8")
FP8_GRAPH = Arm("fp8", cuda_graph=True)
#: The most that the compiler makes of a model: all of it as one CUDA graph, minutes of compiling later.
COMPILED_GRAPH = Arm(cuda_graph=True, compiled=True)

TORCHAO = Arm(compiled=True, torchao=True)
FP8_ATTENTION = Arm("fp8", attention="cudnn_fp8")
FP8_ATTENTION_GRAPH = Arm("fp8", cuda_graph=True, attention="cudnn_fp8")
FLOAT32 = Arm(float32=True)

#: What is compared unless arms are named: stock, the compiler's, and ours with and without it.
DEFAULT = (STOCK, COMPILED, FAST, FAST_GRAPH, FAST_COMPILED)
#: The arms of a full comparison, the baseline first.
ARMS = (STOCK, COMPILED, EXACT, FAST, FAST_GRAPH, FAST_COMPILED, FP8, FP8_GRAPH)
#: Those, and what else may be compared by name.
NAMED = {arm.name: arm for arm in (*ARMS, COMPILED_GRAPH, TORCHAO, FP8_ATTENTION, FP8_ATTENTION_GRAPH, FLOAT32)}


class ArmUnavailableError(RuntimeError):
    """An arm would not be what its name says: this machine or this version lacks something. Says what."""


@contextlib.contextmanager
def applied(arm: Arm, pipe: Any, denoiser: nn.Module) -> Iterator[InjectionReport | None]:
    """Puts a pipeline or module into the state that ``arm`` names, and back into its own afterwards.

    Kernels go in before the compiler sees ``denoiser``, the model in ``pipe`` that compiled arms compile, and come out
    after its graphs are gone. Yields the injection report, or None when the arm injects nothing.

    Raises:
        ArmUnavailableError: nothing could be injected, or no CUDA graph; the pipeline is as it was.
    """
    with contextlib.ExitStack() as stack:
        report = None
        if arm.float32:
            stack.enter_context(_in_float32(denoiser))
        if arm.numerics is not None:
            from diffkern import inject_optimized_kernels

            graph: bool | str = arm.cuda_graph or ("auto" if not arm.compiled else False)
            report = inject_optimized_kernels(pipe, numerics=arm.numerics, cuda_graph=graph, attention=arm.attention)
            stack.callback(report.restore)
            _check_that_it_took(arm, report)
        if arm.torchao:
            stack.enter_context(_quantised(denoiser))
        if arm.compiled:
            stack.enter_context(compiled(denoiser, as_graph=arm.cuda_graph and not arm.injected))
        yield report


def _check_that_it_took(arm: Arm, report: InjectionReport) -> None:
    if report.caveat:
        raise ArmUnavailableError(report.caveat)
    wanted = ["cuda_graph"] * arm.cuda_graph + ["attention"] * (arm.attention is not None)
    for op in wanted or [""]:
        if any(op in ("", site.op) for site in report.patched):
            continue
        reasons = Counter(site.reason for site in (*report.skipped, *report.failed) if op in ("", site.op))
        why = reasons.most_common(1)
        raise ArmUnavailableError(why[0][0] if why else "there is nothing in the pipeline that it applies to")


@contextlib.contextmanager
def compiled(model: nn.Module, *, as_graph: bool = False, **options: Any) -> Iterator[None]:
    """Compiles ``model`` in place with ``torch.compile`` and takes the compiled code off afterwards.

    A diffusers model that names its repeated blocks is compiled block by block, which takes seconds where the whole
    model takes minutes; any other model is compiled whole, and ``as_graph`` as one CUDA graph. Modules, names and
    weights stay as they are. ``options`` are those of :func:`torch.compile`.
    """
    before = {module: module.__dict__.get("_compiled_call_impl") for module in model.modules()}
    try:
        if as_graph:
            model.compile(mode="reduce-overhead", fullgraph=True, **options)
        elif getattr(model, "_repeated_blocks", None):
            model.compile_repeated_blocks(**options)  # type: ignore[operator]
        else:
            model.compile(**options)
        yield
    finally:
        for module, implementation in before.items():
            if implementation is None:
                module.__dict__.pop("_compiled_call_impl", None)
            else:
                module._compiled_call_impl = implementation
        torch._dynamo.reset()


@contextlib.contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Widens weights, buffers and inputs of ``model``, and puts its own tensors back afterwards."""
    half = torch.float16, torch.bfloat16
    own = [(x, x.data) for x in (*model.parameters(), *model.buffers()) if x.dtype in half]

    def widen(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype in half else x, (args, kwargs))

    hook = model.register_forward_pre_hook(widen, with_kwargs=True)
    try:
        for x, data in own:
            x.data = data.float()
        yield
    finally:
        hook.remove()
        for x, data in own:
            x.data = data


@contextlib.contextmanager
def _quantised(model: nn.Module) -> Iterator[None]:
    """Has torchao quantise layers of ``model`` in place, and puts their own weights back afterwards."""
    from diffkern.hub import KernelConfig
    from diffkern.injection.fp8_fusion import Fp8Layers

    torchao: Any = import_module("torchao.quantization")
    layers = Fp8Layers({"": model}, KernelConfig())
    chosen = {
        module: module._parameters["weight"]
        for path, module in model.named_modules()
        if layers.reason(path, module) is None
    }
    if not chosen:
        raise ArmUnavailableError("no layer of the model is large enough for fp8")
    config = torchao.Float8DynamicActivationFloat8WeightConfig(
        granularity=torchao.PerRow(),
        # It would tune each kernel by coordinate descent, for more than three minutes a model on a machine of 16 cores,
        # and set that for all that is compiled in this process from now on.
        set_inductor_config=False,
    )
    try:
        torchao.quantize_(model, config, filter_fn=lambda module, path: module in chosen)
        yield
    finally:
        for module, weight in chosen.items():
            module._parameters["weight"] = weight
            module.__dict__.pop("extra_repr", None)


def unavailable_reason(arm: Arm, device: torch.device) -> str | None:
    """Returns why ``arm`` cannot run on ``device``, as far as that is known before trying, or None."""
    if arm.cuda_graph and device.type != "cuda":
        return f"CUDA graphs need a GPU, and this runs on {device.type}"
    if arm.torchao and importlib.util.find_spec("torchao") is None:
        return "torchao is not installed: pip install torchao"
    if arm.attention is not None:
        from diffkern.attention import backend_of

        missing = backend_of(arm.attention).missing()
        if missing is not None:
            return missing
    if arm.numerics == "fp8" or arm.torchao:
        from diffkern.providers.eager.fp8 import fp8_unavailable_reason

        reason = fp8_unavailable_reason(device)
        if reason is not None:
            return reason
    return compiler_unavailable_reason(device) if arm.compiled else None


def compiler_unavailable_reason(device: torch.device) -> str | None:
    """Returns why ``torch.compile`` cannot generate code for ``device`` here, or None."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:  # each torch release raises a class of its own for this
            return f"no C++ compiler ({type(error).__name__}): install g++ or clang++"
        return None
    from torch.utils._triton import has_triton

    return None if has_triton() else f"no Triton for {device.type}: install the triton package of your torch"
