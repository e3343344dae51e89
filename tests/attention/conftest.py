"""A kernel as the Hub lays it out, in a directory, and calls of attention to try things on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diffkern.attention import AttentionCall

_SOURCE = '''
import torch.nn.functional as F


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Right, with the parameters and the layout of flash attention; a pair, as some versions return it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout_p, scale=softmax_scale, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.transpose(1, 2), None


def wrong(q, k, v, softmax_scale=None):
    """One percent off in the scale."""
    return flash_attn_func(q, k, v, softmax_scale=1.01 * (softmax_scale or q.shape[-1] ** -0.5))[0]


def bare(q, k, v):
    """Takes nothing but the tensors."""
    return flash_attn_func(q, k, v)[0]


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """With the parameters of PyTorch, and so its layout."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def forward(module, query, key, value, attention_mask):
    """With the parameters of an attention of transformers."""
'''


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a kernel for the CPU; its functions are named after a colon."""
    root = tmp_path_factory.mktemp("kernel")
    build = root / "build" / "torch-cpu"
    build.mkdir(parents=True)
    metadata = {"name": "tiny-attention", "id": "_tiny_attention_cpu", "version": 1, "license": "Apache-2.0"}
    metadata |= {"python-depends": [], "backend": {"type": "cpu"}}
    (build / "metadata.json").write_text(json.dumps(metadata), encoding="utf-8")
    (build / "__init__.py").write_text(_SOURCE, encoding="utf-8")
    return str(Path(root))


@pytest.fixture
def make_call() -> Callable[..., AttentionCall]:
    """Makes random calls: ``mask`` is "none", "bool" or "additive"; ``gradients`` makes the tensors leaves."""

    def make(
        batch: int = 2,
        queries: int = 9,
        keys: int = 12,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 8,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        mask: str = "none",
        gradients: bool = False,
        causal: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> AttentionCall:
        generator = torch.Generator().manual_seed(0)
        sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
        tensors = [torch.randn(batch, *size, head_dim, generator=generator).to(device, dtype) for size in sizes]
        for x in tensors:
            x.requires_grad_(gradients)
        visible = torch.rand(batch, 1, queries, keys, generator=generator) > 0.3
        visible[..., 0] = True
        masks = {
            "none": None,
            "bool": visible.to(device),
            "additive": torch.zeros(visible.shape).masked_fill(~visible, -torch.inf).to(device, dtype),
        }
        return AttentionCall(*tensors, masks[mask], dropout, causal, scale)

    return make
