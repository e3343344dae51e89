"""WHERE FUSED OPS STAND IN A MODEL: found in the source of its forwards, which are recompiled with sites in them.

``Rewriter(numerics).rewrite(module)`` returns a :class:`Rewritten` forward, or the reason why there is none. A site
calls its op if that is proven and no hook watches what it replaces, and the expression of the source otherwise.
"""

from diffkern.rewrite.ahead import prove_ahead, serves_in_graphs
from diffkern.rewrite.rewriter import Rewriter, Rewritten
from diffkern.rewrite.rules import RULES
from diffkern.rewrite.site import AllowedInStrict, FusedSite, Trained, Way
from diffkern.rewrite.verify import DISAGREES, SiteVerifier

#: Names under which configurations and reports know what is fused inside of forwards.
OPS = tuple(dict.fromkeys(rule.op for rule in RULES))

__all__ = [
    "DISAGREES",
    "OPS",
    "RULES",
    "AllowedInStrict",
    "FusedSite",
    "Rewriter",
    "Rewritten",
    "SiteVerifier",
    "Trained",
    "Way",
    "prove_ahead",
    "serves_in_graphs",
]
