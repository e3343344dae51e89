"""Which classes of transformers compute what inside their forwards: read off the source, word for word.

Its models are written so that each file stands alone, and over a hundred of them hold the same few functions. A class
is known if the text of its forward is; its name does not matter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from diffkern.blocks.gated_mlp import GatedMLP
from diffkern.blocks.inner import InnerRecipe
from diffkern.blocks.rotary import ROTATE, Rotary, rotating
from diffkern.blocks.source import body, calls, normalised

#: Names under which configurations and reports know what is fused inside of forwards.
OPS = (GatedMLP.op, Rotary.op)

_SEPARATE = GatedMLP("act_fn", "gate_proj", "up_proj", "down_proj")
_PACKED = GatedMLP("activation_fn", "gate_up_proj", None, "down_proj")

_MLPS = {
    normalised(text): recipe
    for recipe, text in (
        (
            _SEPARATE,
            """
            def forward(self, x):
                down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
                return down_proj
            """,
        ),
        (
            _SEPARATE,
            """
            def forward(self, x):
                return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
            """,
        ),
        (
            _PACKED,
            """
            def forward(self, x):
                up_states = self.gate_up_proj(x)
                gate, up_states = up_states.chunk(2, dim=-1)
                up_states = up_states * self.activation_fn(gate)
                return self.down_proj(up_states)
            """,
        ),
    )
}

_ROTATE = (
    normalised(
        """
        def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
            cos = cos.unsqueeze(unsqueeze_dim)
            sin = sin.unsqueeze(unsqueeze_dim)
            q_embed = (q * cos) + (rotate_half(q) * sin)
            k_embed = (k * cos) + (rotate_half(k) * sin)
            return q_embed, k_embed
        """
    ),
    normalised(
        """
        def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
            cos = cos.unsqueeze(unsqueeze_dim)
            sin = sin.unsqueeze(unsqueeze_dim)
            rotary_dim = cos.shape[-1]
            q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
            k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
            q_embed = torch.cat([(q_rot * cos) + (rotate_half(q_rot) * sin), q_pass], dim=-1)
            k_embed = torch.cat([(k_rot * cos) + (rotate_half(k_rot) * sin), k_pass], dim=-1)
            return q_embed, k_embed
        """
    ),
    normalised(
        """
        def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
            cos = cos.unsqueeze(unsqueeze_dim)
            sin = sin.unsqueeze(unsqueeze_dim)
            rotary_dim = cos.shape[-1]
            q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
            k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
            q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
            k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
            q_embed = torch.cat([q_embed, q_pass], dim=-1)
            k_embed = torch.cat([k_embed, k_pass], dim=-1)
            return q_embed, k_embed
        """
    ),
)
_ROTATE_HALF = normalised(
    """
    def rotate_half(x):
        x1 = x[..., : x.shape[-1] // 2]
        x2 = x[..., x.shape[-1] // 2 :]
        return torch.cat((-x2, x1), dim=-1)
    """
)


def inside_of(module: str, decorated: Callable[..., Any]) -> InnerRecipe | None:
    """Returns what is fused inside the forward of a class in this module, or None."""
    if not module.startswith("transformers.models."):
        return None
    # A forward that somebody has replaced is left alone.
    forward = inspect.unwrap(decorated)
    if not isinstance(forward, FunctionType) or not forward.__module__.startswith("transformers.models."):
        return None
    recipe = _MLPS.get(body(forward) or "")
    return recipe if recipe is not None else _rotary(forward, decorated)


def _rotary(forward: FunctionType, decorated: Callable[..., Any]) -> Rotary | None:
    if ROTATE not in forward.__code__.co_names or "hidden_states" not in forward.__code__.co_varnames:
        return None
    rotate, half = forward.__globals__.get(ROTATE), forward.__globals__.get("rotate_half")
    if not isinstance(rotate, FunctionType) or not isinstance(half, FunctionType):
        return None
    if body(inspect.unwrap(rotate)) not in _ROTATE or body(half) != _ROTATE_HALF:
        return None
    if any(len(call.args) != 4 for call in calls(forward, ROTATE)):
        return None
    renamed = _renamed(decorated)
    return None if renamed is None or rotating(forward) is None else Rotary(forward, renamed)


def _renamed(function: Callable[..., Any]) -> frozenset[str] | None:
    """The arguments that decorators know by an old name; None for a decorator that does something else."""
    names = set()
    while hasattr(function, "__wrapped__"):
        if not isinstance(function, FunctionType) or "old_name" not in function.__code__.co_freevars:
            return None
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        names.add(cells["old_name"].cell_contents)
        function = function.__dict__["__wrapped__"]
    return frozenset(names)
