"""What a proof of a norm over channels holds for."""

from __future__ import annotations

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm
from torch import Tensor, nn

from diffkern.rewrite import FusedSite, Rewriter, Rewritten
from diffkern.rewrite.draws import draws_of
from diffkern.verify.measures import relative_error


class Block(nn.Module):
    """A norm over channels and its activation."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.act(x)


class Loss(nn.Module):
    """A sum of two numbers, one weighted."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x.mean() + weight * (x * x).mean()


def _rewritten(module: nn.Module) -> tuple[Rewritten, FusedSite]:
    found = Rewriter(provider="eager").rewrite(module.requires_grad_(False))
    assert isinstance(found, Rewritten)
    return found, found.sites[0]


def test_a_proof_on_smaller_tensors_keeps_the_channels() -> None:
    block = Block(nn.GroupNorm(4, 144))
    found, site = _rewritten(block)
    x = torch.randn(1, 144, 260, 130)  # too large for a proof, in which all other sizes are 128
    assert relative_error(found.function(block, x), block(x)) < 1e-6
    assert site.fused_calls == 1, site.reasons


def test_a_proof_of_videos_says_nothing_of_images() -> None:
    block = Block(WanRMS_norm(4, images=False))
    nn.init.normal_(block.norm.gamma)
    found, site = _rewritten(block)
    assert torch.allclose(found.function(block, video := torch.randn(2, 4, 3, 4, 4)), block(video), atol=1e-6)
    assert site.fused_calls == 1
    image = torch.randn(4, 4, 4, 4)  # whose samples a weight of [C, 1, 1, 1] multiplies
    assert torch.equal(found.function(block, image), block(image))
    assert site.fused_calls == 1


def test_tensors_without_a_dimension_stay_as_they_are() -> None:
    loss = Loss()
    found, _ = _rewritten(loss)
    x, weight = torch.randn(5, 7), torch.tensor(0.25)
    assert torch.equal(found.function(loss, x, weight), loss(x, weight))
    assert draws_of((weight, 2), False) == draws_of((weight[None],), False), "of numbers alone, too"
