"""What Inductor must be told of an op before it meets it in a graph.

Before torch 2.13 it writes out, for its log and whether anybody reads that or not, all that an op it has not met before
is computed from: that doubles with each residual connection in a chain of such ops, and the norm at the end of a
denoiser is met behind all of its blocks. A model compiled as a whole would never be done.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch.torch_version import TorchVersion

from diffkern.providers.dispatch_modes import constant_in_graphs

_IS_TOLD_NOTHING = TorchVersion(torch.__version__) >= "2.13"


@constant_in_graphs
def register_fallback(namespace: str, name: str) -> None:
    """Registers an op of torch's as one that Inductor calls as it is, which it would find out by itself.

    ``torch.compile`` runs this while it traces.
    """
    if _IS_TOLD_NOTHING:
        return
    op = getattr(getattr(torch.ops, namespace), name).default
    lowering: Any = import_module("torch._inductor.lowering")
    if op not in lowering.lowerings:
        tag = import_module("torch._library.utils").get_layout_constraint_tag(op, with_default=True)
        lowering.make_fallback(op, layout_constraint=lowering.tag_to_layout_constraint(tag), warn=False)
