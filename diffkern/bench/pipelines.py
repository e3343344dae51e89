"""Calls of a whole pipeline, arm against arm, interleaved in one process."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffkern.bench.arms import Arm, ArmUnavailableError, applied, unavailable_reason
from diffkern.bench.environment import dtype_argument
from diffkern.bench.measure import peak_memory, psnr, relative_error, reset_peak_memory, ssim, wall_clock
from diffkern.bench.models import NO_DOWNLOAD
from diffkern.bench.results import ArmResult, Difference
from diffkern.bench.steps import sharing_weights


def load(folder: Path, device: torch.device) -> Any:
    """Loads a saved pipeline, in bfloat16 on a GPU and in float32 on a CPU; nothing is downloaded.

    Raises:
        ValueError: it is no folder with a ``model_index.json``.
    """
    index = folder / "model_index.json"
    if not index.is_file():
        raise ValueError(f"{index}: not found: name the folder of a saved pipeline. {NO_DOWNLOAD}")
    from diffusers import DiffusionPipeline
    from diffusers.utils.logging import disable_progress_bar
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    if are_progress_bars_disabled():
        disable_progress_bar()  # which diffusers does not ask
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True, **dtype_argument(dtype)).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(
    pipe: Any, arms: Sequence[Arm], device: torch.device, call: Mapping[str, Any], repetitions: int = 3
) -> tuple[list[ArmResult], dict[str, str]]:
    """Times the call of every arm, one of each in turn.

    All arms share the weights of ``pipe``, which stays as it is. Each has module trees of its own, so that no arm waits
    for another's compiler. The first is the baseline of the differences. Arguments of ``call`` that the pipeline does
    not take are left out. Before the ``repetitions`` comes a call that is not in the median.

    Returns:
        The results, and by name the reason for each arm that did not run.
    """
    known = inspect.signature(pipe.__call__).parameters
    arguments = {name: value for name, value in call.items() if name in known and value is not None}
    left_out: dict[str, str] = {}
    running: dict[Arm, Any] = {}
    first: dict[Arm, float] = {}
    with torch.no_grad(), ExitStack() as stack:
        for arm in arms:
            try:
                if reason := unavailable_reason(arm, device):
                    raise ArmUnavailableError(reason)
                own = _sharing(pipe)
                stack.enter_context(applied(arm, own, denoiser_of(own)))
            except ArmUnavailableError as error:
                left_out[arm.name] = str(error)
                continue
            running[arm], first[arm] = own, _timed(own, arguments, device)[1]
        seconds: dict[Arm, list[float]] = {arm: [] for arm in running}
        outputs: dict[Arm, Tensor] = {}
        peaks: dict[Arm, int | None] = {}
        for _ in range(repetitions):
            for arm, own in running.items():
                reset_peak_memory(device)
                outputs[arm], taken = _timed(own, arguments, device)
                peaks[arm] = peak_memory(device)
                seconds[arm].append(taken)
        base = next(iter(running), None)
    results = []
    for arm in running:
        difference = None if arm == base or base is None else _difference(outputs[arm], outputs[base])
        results.append(ArmResult(arm, tuple(seconds[arm]), None, first[arm], peaks[arm], difference))
    return results, left_out


def denoiser_of(pipe: Any) -> nn.Module:
    """The model that a pipeline calls at every step."""
    found: nn.Module | None = getattr(pipe, "transformer", None) or getattr(pipe, "unet", None)
    if found is None:
        raise ArmUnavailableError(f"{type(pipe).__name__} has neither a transformer nor a unet")
    return found


def _sharing(pipe: Any) -> Any:
    """A pipeline of the same class and weights, with module trees of its own."""
    parts = {n: sharing_weights(part) if isinstance(part, nn.Module) else part for n, part in pipe.components.items()}
    own = type(pipe)(**parts)
    own.set_progress_bar_config(disable=True)
    return own


def _timed(pipe: Any, arguments: Mapping[str, Any], device: torch.device) -> tuple[Tensor, float]:
    """The frames or images of one call, and the seconds that it took."""
    started = wall_clock(device)
    generator = torch.Generator("cpu").manual_seed(0)
    output = pipe(**arguments, generator=generator, output_type="pt")[0]
    taken = wall_clock(device) - started
    return torch.as_tensor(output).float().cpu(), taken


def _difference(result: Tensor, stock: Tensor) -> Difference:
    return Difference(math.nan, relative_error(result, stock), psnr(result, stock), ssim(result, stock))
