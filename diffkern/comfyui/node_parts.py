"""What the nodes share: their category, and inputs that mean the same in several of them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from comfy_api.latest import io, ui
from typing_extensions import override

from diffkern.comfyui.optimize import NUMERICS
from diffkern.providers import ORDER
from diffkern.providers.hub import NAME as HUB

CATEGORY = "diffkern"

_MODES = {
    "fast": "fast: at most 1.05 times the error of stock.",
    "exact": "exact: only what gives the very same bits.",
    "fp8": "fp8: as fast, and large linear layers in 8 bits, which is lossy: the report says what error and memory it "
    "means.",
}

#: The largest that the seed widget of ComfyUI gives.
MAX_SEED = 0xFFFFFFFFFFFFFFFF

#: Hands the input on as it is.
OFF = "off"


class RunsEveryTime(io.ComfyNode):
    """A node whose result is of the moment, and not remembered for the same inputs."""

    @classmethod
    @override
    def fingerprint_inputs(cls, **kwargs: Any) -> float:
        return time.time()


def mode_input(what: str, numerics: Iterable[str] = NUMERICS) -> io.Input:
    """Returns the choice of numerics for an input called ``what``."""
    means = [_MODES[mode] for mode in numerics]
    return io.Combo.Input(
        "mode",
        options=[*numerics, OFF],
        default="fast",
        tooltip=f"{' '.join(means)} off: hands the {what} on as it is.",
    )


def backend_input() -> io.Input:
    """Returns the choice of who computes."""
    return io.Combo.Input(
        "backend",
        options=["auto", *(name for name in ORDER if name != HUB)],
        default="auto",
        advanced=True,
        tooltip="Who computes. auto: the first of these that can. eager is plain PyTorch, to compare with.",
    )


def unsupported_input() -> io.Input:
    """Returns the choice of what to do about what stays as it was."""
    return io.Combo.Input(
        "on_unsupported",
        options=["warn", "error"],
        default="warn",
        advanced=True,
        tooltip="What to do if something stays as it was: say so in the report, or stop.",
    )


def seed_input(tooltip: str) -> io.Input:
    """Returns a seed."""
    return io.Int.Input("seed", default=0, min=0, max=MAX_SEED, tooltip=tooltip)


def with_text(text: str, *outputs: Any) -> io.NodeOutput:
    """Returns the outputs of a node and a text, which is shown as well."""
    return io.NodeOutput(*outputs, text, ui=ui.PreviewText(text))
