"""Small kernels in the Hub's layout, with the public interfaces of known ones, computed in PyTorch."""

from __future__ import annotations

import itertools
import json
import textwrap
from pathlib import Path

from torch import Tensor, nn

from tests.hub.server import Files

_numbers = itertools.count(1)


def kernel(
    init: str,
    layers: str = "",
    *,
    name: str = "tiny",
    variants: tuple[str, ...] = ("torch-cpu",),
    backend: str = "cpu",
    version: int = 1,
    identity: str = "",
    **metadata: object,
) -> Files:
    """The files of a kernel repository with one Python package for all variants.

    Args:
        init: Source of its ``__init__.py``; it imports ``layers`` by itself if there are any.
        layers: Source of its ``layers.py``, or "".
        name: Name in the metadata.
        variants: The builds.
        backend: What the metadata calls their backend.
        version: Version in the metadata.
        identity: The ``id``; "" makes one up that no other kernel of this process has.
        metadata: Further keys of the metadata, ``_`` for ``-``.
    """
    identity = identity or f"_{name.replace('-', '_')}_{backend}_{next(_numbers):07x}"
    data = {
        "name": name,
        "id": identity,
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        **{key.replace("_", "-"): value for key, value in metadata.items()},
    }
    files: Files = {"README.md": b"# A kernel\n"}
    for variant in variants:
        root = f"build/{variant}"
        start = "from . import layers\n" if layers else ""
        files[f"{root}/__init__.py"] = (start + textwrap.dedent(init)).encode()
        files[f"{root}/metadata.json"] = json.dumps(data, indent=2).encode()
        if layers:
            files[f"{root}/layers.py"] = textwrap.dedent(layers).encode()
    return files


def write(root: Path, files: Files) -> str:
    """Writes the files of a kernel below a folder; returns its path."""
    for name, data in files.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return str(root)


class Gated(nn.Module):
    """A gated feed-forward as language models have it, which diffkern knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(16, 32, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


#: As kernels-community/rmsnorm: rounds once.
RMSNORM = """
    import torch

    def apply_rms_norm(input, weight, eps):
        wide = input.float()
        return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(input.dtype)
"""

#: As the layers of kernels-community/mlx-rmsnorm: rounds before the weight.
MLX_RMSNORM = """
    import torch

    class RMSNorm(torch.nn.Module):
        def forward(self, x):
            wide = x.float()
            normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)
            return (self.weight.view(-1) * normed).to(x.dtype)
"""

#: As the layers of kernels-community/layer-norm: without a bias.
LAYER_NORM = """
    import torch

    class LayerNorm(torch.nn.Module):
        def forward(self, hidden_states):
            assert hidden_states.is_contiguous()
            wide = hidden_states.float()
            wide = wide - wide.mean(-1, keepdim=True)
            y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight.float()
            return y.to(hidden_states.dtype)
"""

#: As the layers of kernels-community/activation.
ACTIVATION = """
    import torch
    import torch.nn.functional as F

    class Silu(torch.nn.Module):
        def forward(self, x): return F.silu(x)
    class Gelu(torch.nn.Module):
        def forward(self, x): return F.gelu(x)
    class GeluTanh(torch.nn.Module):
        def forward(self, x): return F.gelu(x, approximate="tanh")
    class QuickGELU(torch.nn.Module):
        def forward(self, x): return (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)
    class SiluAndMul(torch.nn.Module):
        def forward(self, x):
            assert x.is_contiguous()
            return F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
    class MulAndSilu(torch.nn.Module):
        def forward(self, x): return x.chunk(2, -1)[0] * F.silu(x.chunk(2, -1)[1])
    class GeluAndMul(torch.nn.Module):
        def forward(self, x): return F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
    class GeluTanhAndMul(torch.nn.Module):
        def forward(self, x): return F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1]
"""

#: As kernels-community/rotary.
ROTARY = """
    import torch

    def apply_rotary(x1, x2, cos, sin, out1, out2, conj):
        assert x1.dtype == cos.dtype
        a, b, c, s = x1.float(), x2.float(), cos.float(), sin.float()
        s = -s if conj else s
        first, second = a * c - b * s, a * s + b * c
        out1.copy_(first)
        out2.copy_(second)

    def apply_rotary_transformers(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        half = q.shape[-1] // 2
        outs = []
        for x in (q, k):
            out = torch.empty_like(x)
            apply_rotary(x[..., :half], x[..., half:], cos[..., :half], sin[..., :half], out[..., :half],
                         out[..., half:], False)
            outs.append(out)
        return tuple(outs)
"""

#: As the layers of kernels-community/liger-kernels.
LIGER_LAYERS = """
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    class LigerRMSNorm(nn.Module):
        weight: nn.Parameter
        variance_epsilon: float

        def forward(self, hidden_states):
            wide = hidden_states.float()
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return (self.weight * normed.to(hidden_states.dtype)).to(hidden_states.dtype)

    class LigerSwiGLUMLP(nn.Module):
        can_torch_compile = True

        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class Wrong(nn.Module):
        def forward(self, x):
            return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))

    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()

        def forward(self, x):
            return x
"""
