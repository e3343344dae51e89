"""Tests of the node pack: most need no ComfyUI; the others run a checkout that ``COMFYUI_ROOT`` names."""

from __future__ import annotations

import pytest

from tests.comfyui import native

if native.ROOT:
    # Before any test imports diffusers, which imports torchvision if it is there, as ComfyUI needs it.
    native.declare_torchvision()


@pytest.fixture(scope="session")
def comfyui() -> None:
    """ComfyUI in this process, on the CPU."""
    if not native.ROOT:
        pytest.skip("COMFYUI_ROOT names no checkout of ComfyUI")
    native.start()
