"""Which parts of the node pack can be offered here."""

from __future__ import annotations

from importlib.util import find_spec


def pipelines_unavailable_reason() -> str | None:
    """Says why there are no nodes for diffusers pipelines, or None if there are."""
    missing = [name for name in ("diffusers", "transformers", "accelerate") if find_spec(name) is None]
    if not missing:
        return None
    return f"{', '.join(missing)} not installed in ComfyUI's Python: pip install {' '.join(missing)} there"
