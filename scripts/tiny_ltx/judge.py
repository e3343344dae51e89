"""Looks at a video and says what it shows, by measuring it: no model, no learning."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from tiny_ltx.scenes import BACKGROUNDS, COLOURS, DIRECTIONS

#: How far from the background, in any channel from 0 to 1, a pixel belongs to the shape.
CONTRAST = 0.25
#: Least share of the picture that a shape covers, and least share of its shorter side that it moves.
LEAST_AREA = 0.01
LEAST_WAY = 0.15


@dataclass(frozen=True)
class Sight:
    """What a video shows; None where it shows nothing clear."""

    colour: str | None
    shape: str | None
    direction: str | None
    background: str | None

    def agreement(self, other: Sight) -> tuple[bool, ...]:
        """Whether colour, shape, direction and background agree."""
        return tuple(mine == theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))


def look(video: Tensor) -> Sight:
    """Measures a video of shape [frames, 3, height, width], from 0 to 1.

    The background is the median of the border. Against it, each frame has a mask; the colour is the one
    nearest to the mean under the masks, the shape follows from the share of its bounding box that it fills (1 for
    a square, 0.79 for a circle, 0.5 for a triangle), and the direction from the way of its centre.
    """
    height, width = video.shape[-2:]
    border = torch.cat([video[..., 0, :], video[..., -1, :], video[..., :, 0], video[..., :, -1]], dim=-1)
    ground = border.transpose(0, 1).flatten(1).median(dim=1).values
    grey = float(ground.mean())
    background = min(BACKGROUNDS, key=lambda name: abs(BACKGROUNDS[name] - grey))

    masks = (video - ground[:, None, None]).abs().amax(dim=1) > CONTRAST  # [frames, height, width]
    areas = masks.flatten(1).sum(dim=1)
    if int(areas.min()) < LEAST_AREA * height * width:
        return Sight(None, None, None, background)
    mean = (video * masks[:, None]).sum(dim=(0, 2, 3)) / masks.sum()
    colour = min(COLOURS, key=lambda name: float((mean - torch.tensor(COLOURS[name]).to(mean)).norm()))

    rows, columns = masks.any(dim=2), masks.any(dim=1)
    filled = float((areas / (rows.sum(dim=1) * columns.sum(dim=1))).median())
    shape = "square" if filled > 0.89 else "circle" if filled > 0.65 else "triangle"

    weights = masks / areas[:, None, None]
    x = (weights.sum(dim=1) * torch.arange(width, device=video.device)).sum(dim=1)
    y = (weights.sum(dim=2) * torch.arange(height, device=video.device)).sum(dim=1)
    way = (float(x[-1] - x[0]), float(y[-1] - y[0]))
    ways = {name: way[0] * right + way[1] * down for name, (right, down) in DIRECTIONS.items()}
    direction = max(ways, key=lambda name: ways[name])
    moved = ways[direction] >= LEAST_WAY * min(height, width)
    return Sight(colour, shape, direction if moved else None, background)
