"""What the node pack finds on this machine and in this ComfyUI, in words."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from diffkern.bench.environment import version_of
from diffkern.doctor import examine


def report() -> str:
    """Returns versions, the providers of kernels and why each is off, and comfy-kitchen's backends."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    checkup = examine()
    kitchen = version_of("comfy-kitchen") or "not installed"
    versions = {"ComfyUI": _comfyui_version(), **checkup.versions, "comfy-kitchen": kitchen}
    yield ", ".join(f"{name} {version}" for name, version in versions.items())
    yield from checkup.settings
    yield "\nKernels:"
    for row in checkup.rows:
        yield f"  {row.device}, {row.provider}: {f'serves {len(row.ops)} ops' if row.ops else 'serves nothing'}"
        if row.reason:
            yield f"    why not, and what to do: {row.reason}"
    yield "\nBackends of comfy-kitchen:"
    yield from _kitchen()
    reason = pipelines_unavailable_reason()
    yield f"\nNodes for diffusers pipelines: {'there' if reason is None else reason}"


def _kitchen() -> Iterator[str]:
    try:
        import comfy_kitchen
    except ImportError as error:
        yield f"  none: {error}"
        return
    for name, state in sorted(comfy_kitchen.list_backends().items()):
        if state["available"] and not state["disabled"]:
            yield f"  {name}: {len(state['capabilities'])} functions"
        else:
            yield f"  {name}: off, {state['unavailable_reason'] or 'disabled by ComfyUI'}"


def _comfyui_version() -> str:
    try:
        from comfyui_version import __version__
    except ImportError:
        return "of unknown version"
    return str(__version__)


def pipelines_unavailable_reason() -> str | None:
    """Says why there are no nodes for diffusers pipelines, or None if there are."""
    missing = [name for name in ("diffusers", "transformers", "accelerate") if find_spec(name) is None]
    if not missing:
        return None
    return f"{', '.join(missing)} not installed in ComfyUI's Python: pip install {' '.join(missing)} there"
