"""Masks that every layer makes from one argument: made once in a call of the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from torch import Tensor, nn

from diffkern.cache import in_call
from diffkern.rewrite import Rewriter, Rewritten
from tests.rewrite.test_processors import TorchOps

TEXT, IMAGE, WIDTH = 5, 12, 32
RULE = "mask, once a step"


class Written:
    """Lets every token see the first one, in the mask itself."""

    def __call__(self, attn: Any, hidden_states: Tensor, mask: Tensor) -> Tensor:
        size = hidden_states.shape[1]
        rows = mask.view(1, 1, size).repeat(1, size, 1)
        pairs = rows & rows.transpose(1, 2)
        pairs[:, :, 0] = True
        return F.scaled_dot_product_attention(hidden_states, hidden_states, attn.to_v(hidden_states), attn_mask=pairs)


class Small(nn.Module):
    """Values and a processor."""

    def __init__(self) -> None:
        super().__init__()
        self.to_v, self.processor = nn.Linear(8, 8), Written()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.processor(self, x, mask)
        return result


def attention() -> tuple[nn.Module, Rewritten, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Attention(
        query_dim=WIDTH, heads=2, dim_head=16, out_dim=WIDTH, bias=True, added_kv_proj_dim=WIDTH,
        context_pre_only=False, qk_norm="rms_norm", processor=HunyuanVideo15AttnProcessor2_0(),
    )  # fmt: skip
    module.requires_grad_(False)
    found = Rewriter().rewrite(module)
    assert isinstance(found, Rewritten)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    image, text = torch.randn(2, IMAGE, WIDTH), torch.randn(2, TEXT, WIDTH)
    return module, found, {"hidden_states": image, "encoder_hidden_states": text, "attention_mask": mask}


def masks_made(module: nn.Module, given: dict[str, Tensor], calls: int) -> int:
    """How many masks so many layers make, all of them the same module."""
    with TorchOps() as seen:
        for _ in range(calls):
            module(**given)
    return seen.names.count("aten::__and__") + seen.names.count("aten::bitwise_and")


def test_layers_share_a_mask_in_one_call_of_the_model_and_make_it_anew_in_the_next() -> None:
    module, found, given = attention()
    stock = [part.nan_to_num() for part in module(**given)]
    module.forward = found.function.__get__(module)
    module(**given)  # proofs run stock, too
    assert masks_made(module, given, 3) == 3  # nothing says that they are one call of a model
    for _ in range(2):
        with in_call.one_model_call():
            assert masks_made(module, given, 3) == 1
            results = [part.nan_to_num() for part in module(**given)]
            torch.testing.assert_close(results, stock, rtol=1e-4, atol=1e-5)
    assert sum(site.fused_calls for site in found.sites if site.plan.rule.name == RULE) == 12


def test_a_mask_that_is_written_between_two_layers_is_made_again() -> None:
    module, found, given = attention()
    module.forward = found.function.__get__(module)
    with in_call.one_model_call():
        before = module(**given)[0]
        given["attention_mask"][0, :] = True
        after = module(**given)[0]
    found.guard.force_original()
    torch.testing.assert_close(after, module(**given)[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(after[0], before[0], rtol=1e-3)


def test_a_mask_that_the_layer_writes_into_is_its_own() -> None:
    module = Small()
    assert Rewriter().rewrite(module) == "it is written into, and would be shared"
