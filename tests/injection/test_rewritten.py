"""A user's own module whose forward holds expressions that one op computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from diffkern import inject_optimized_kernels
from scripts.check_models.denoisers import DENOISERS
from scripts.check_models.rewritten import batch_of_two, run


class Block(nn.Module):
    """A block as a user may write it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64, elementwise_affine=False)
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        y = self.norm(x) * (1 + scale) + shift
        return x + gate * self.layer(y)


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(2, 8, 64, generator=generator), *torch.randn(3, 2, 1, 64, generator=generator))


def test_a_users_own_forward_is_rewritten_and_restored() -> None:
    model = nn.ModuleDict({"block": Block()}).requires_grad_(False)
    inputs = _inputs()
    stock = model["block"](*inputs)
    report = inject_optimized_kernels(model, config={"*": "eager"})
    (site,) = [site for site in report.patched if site.how == "source"]
    assert site.path == "block"
    torch.testing.assert_close(model["block"](*inputs), stock, rtol=1e-5, atol=1e-5)
    assert report.calls()["block"]["fused"] == 2
    assert report.restore() > 0
    assert torch.equal(model["block"](*inputs), stock)


def test_the_text_of_a_rewritten_forward_is_shown_by_its_path() -> None:
    model = nn.ModuleDict({"block": Block()}).requires_grad_(False)
    report = inject_optimized_kernels(model, config={"*": "eager"})
    text = report.source("block")
    assert "def forward(self, x" in text and "self.layer(" in text and "1 + scale" not in text
    with pytest.raises(ValueError, match="no forward was rewritten at 'norm'; there are 'block'"):
        report.source("norm")


def test_a_hook_on_the_norm_turns_its_site_off_and_leaves_the_other_on() -> None:
    model = nn.ModuleDict({"block": Block()}).requires_grad_(False)
    inputs = _inputs()
    stock = model["block"](*inputs)
    report = inject_optimized_kernels(model, config={"*": "eager"})
    seen: list[Tensor] = []
    model["block"].norm.register_forward_hook(lambda module, args, output: seen.append(output))
    torch.testing.assert_close(model["block"](*inputs), stock, rtol=1e-5, atol=1e-5)
    assert len(seen) == 1
    calls = report.calls()["block"]
    assert (calls["fused"], calls["stock"]) == (1, 1)


def test_a_model_whose_first_weights_stay_in_float32_is_proven_in_the_dtype_of_most() -> None:
    model = DENOISERS["anyflow"].in_dtype(torch.device("cpu"), torch.bfloat16).requires_grad_(False)
    for block in (model, *model.blocks):  # as from_pretrained keeps them
        block.scale_shift_table.data = block.scale_shift_table.data.float()
    assert next(model.parameters()).dtype is torch.float32
    report = inject_optimized_kernels(model)
    run(model, batch_of_two(DENOISERS["anyflow"], torch.bfloat16))
    assert report.calls()["blocks.0.attn1"]["fused"] == 1
