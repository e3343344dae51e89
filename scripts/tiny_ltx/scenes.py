"""Videos of one plain shape that moves over a plain background, and the captions that describe them.

Everything is drawn where the tensors are, a batch at a time, from signed distances: edges are smooth, positions
are continuous, and no video occurs twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Red, green and blue of each colour, from 0 to 1.
COLOURS = {
    "red": (0.88, 0.08, 0.12),
    "orange": (1.00, 0.55, 0.05),
    "yellow": (0.98, 0.90, 0.15),
    "green": (0.10, 0.70, 0.22),
    "blue": (0.12, 0.28, 0.92),
    "purple": (0.60, 0.16, 0.74),
}
SHAPES = ("square", "circle", "triangle")
#: Steps to the right and down of each direction.
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
#: Grey level of each background.
BACKGROUNDS = {"black": 0.05, "white": 0.95}

#: Half the size of a shape, and the way that it goes in one clip, as shares of the shorter side.
RADII = (0.15, 0.21)
TRAVELS = (0.36, 0.50)


@dataclass(frozen=True)
class Scenes:
    """What ``n`` videos show.

    Attributes:
        colour, shape, direction, background: Numbers of the entries in the tables above, [n].
        radius: Half the size of the shape, in shares of the shorter side, [n].
        travel: The way from the first to the last frame, in shares of the shorter side, [n].
        place: Where in the free room the way lies, across and down, from 0 to 1, [n, 2].
    """

    colour: Tensor
    shape: Tensor
    direction: Tensor
    background: Tensor
    radius: Tensor
    travel: Tensor
    place: Tensor

    def __len__(self) -> int:
        return len(self.colour)


def random_scenes(n: int, generator: torch.Generator) -> Scenes:
    """Draws ``n`` scenes by lot, on the generator's device."""
    device = generator.device

    def pick(table_size: int) -> Tensor:
        return torch.randint(table_size, (n,), generator=generator, device=device)

    def between(bounds: tuple[float, float]) -> Tensor:
        return bounds[0] + (bounds[1] - bounds[0]) * torch.rand(n, generator=generator, device=device)

    return Scenes(
        colour=pick(len(COLOURS)),
        shape=pick(len(SHAPES)),
        direction=pick(len(DIRECTIONS)),
        background=pick(len(BACKGROUNDS)),
        radius=between(RADII),
        travel=between(TRAVELS),
        place=torch.rand(n, 2, generator=generator, device=device),
    )


def draw(scenes: Scenes, num_frames: int, height: int, width: int) -> Tensor:
    """Draws the videos: [n, 3, num_frames, height, width], from -1 to 1. The shape never leaves the picture."""
    device = scenes.colour.device
    unit = min(height, width)
    size = torch.tensor([width, height], device=device, dtype=torch.float32)
    radius = scenes.radius[:, None] * unit
    heading = torch.tensor(list(DIRECTIONS.values()), device=device, dtype=torch.float32)[scenes.direction]
    way = heading * scenes.travel[:, None] * unit
    room = size - 2 * radius - way.abs()
    middle = radius + way.abs() / 2 + scenes.place * room
    time = torch.linspace(-0.5, 0.5, num_frames, device=device)
    centre = middle[:, None] + way[:, None] * time[:, None]  # [n, frames, 2]

    x = torch.arange(width, device=device) + 0.5 - centre[..., 0, None]
    y = torch.arange(height, device=device) + 0.5 - centre[..., 1, None]
    distance = _distance(x[..., None, :], y[..., :, None], radius[..., None, None], scenes.shape)
    cover = (0.5 - distance).clamp(0, 1)[:, None]  # [n, 1, frames, height, width]

    colours = torch.tensor(list(COLOURS.values()), device=device)[scenes.colour][:, :, None, None, None]
    greys = torch.tensor(list(BACKGROUNDS.values()), device=device)[scenes.background][:, None, None, None, None]
    return torch.lerp(greys, colours, cover) * 2 - 1


def _distance(x: Tensor, y: Tensor, radius: Tensor, shape: Tensor) -> Tensor:
    """Signed distance in pixels from the edge of each shape, negative inside; the triangle points up."""
    square = torch.maximum(x.abs(), y.abs()) - radius * 0.9
    circle = torch.hypot(x, y) - radius
    base = y - radius * 0.9
    flank = (2 * x.abs() - y - radius * 0.9) / 5**0.5
    triangle = torch.maximum(base, flank)
    which = shape[:, None, None, None]
    return torch.where(which == 0, square, torch.where(which == 1, circle, triangle))


def caption(
    colour: str | None = None, shape: str | None = None, direction: str | None = None, background: str | None = None
) -> str:
    """Describes a scene, as far as it is told: ``a red square moving right on a black background``."""
    if (colour, shape, direction, background) == (None, None, None, None):
        return ""
    thing = f"{colour} {shape or 'shape'}" if colour else shape or "shape"
    text = f"an {thing}" if thing[0] in "aeiou" else f"a {thing}"
    if direction:
        text += f" moving {direction}"
    if background:
        text += f" on a {background} background"
    return text


#: All words of all captions.
WORDS = ("a", "an", "shape", "moving", "on", "background", *COLOURS, *SHAPES, *DIRECTIONS, *BACKGROUNDS)
