"""Keeps the tiny pipelines offline and quiet."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import diffusers
import pytest
import transformers


@pytest.fixture(autouse=True, scope="package")
def quiet_libraries() -> None:
    """Progress bars and advice of the libraries would bury a failure."""
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
