"""Bytes and operations of a step, against counts by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffkern.bench.estimate import CARDS, Estimate, estimate
from tests.package.test_cli import invoke

ROWS, WIDTH = 32, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        heads = self.linear(self.norm(x)).view(1, ROWS, 2, WIDTH // 2).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads)
        return x + gate * attended.transpose(1, 2).reshape(1, ROWS, WIDTH)


def test_glue_is_counted_in_bytes_and_the_rest_in_operations() -> None:
    attention = F.scaled_dot_product_attention
    with torch.device("meta"):
        found = estimate(Block(), {"x": torch.empty(1, ROWS, WIDTH), "gate": torch.empty(1, ROWS, WIDTH)})
    tensor = 4 * ROWS * WIDTH
    # The norm and the copy of reshape read and write one; the product with the gate and the sum read two and write one.
    assert found.glue_bytes == (2 + 2 + 3 + 3) * tensor
    assert found.operations == 2 * ROWS * WIDTH * WIDTH + 4 * 2 * ROWS * ROWS * (WIDTH // 2)
    assert F.scaled_dot_product_attention is attention


def test_the_sentence_divides_by_what_the_card_does() -> None:
    card = CARDS["H100"]
    said = Estimate(int(0.65 * card.bandwidth / 100), int(0.6 * card.operations / 50)).sentence("H100")
    assert "about 10.0 ms beside 20.0 ms" in said and "gains less than 1.50x" in said and "not measured" in said


def test_inspect_says_what_can_be_gained_on_a_card() -> None:
    result = invoke("inspect", "sana", "--card", "H200", "--json")
    assert result.exit_code == 0, result.output
    gain = result.stdout.split("so fusing gains less than ")[1].split("x;")[0]
    assert 1.2 < float(gain) < 2.5


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["flux", "wan", "ltx", "sd3", "qwen"])
def test_the_steps_of_large_models_can_be_estimated(name: str) -> None:
    assert "so fusing gains less than" in " ".join(invoke("inspect", name, "--card", "A100").stdout.split())
