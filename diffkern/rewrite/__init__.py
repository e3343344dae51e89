"""WHERE FUSED OPS STAND IN A MODEL: found in the source of its forwards, which are recompiled with sites in them.

``Rewriter(numerics).rewrite(module)`` returns a :class:`Rewritten` forward, or the reason why there is none. A site
calls its op if that is proven and no hook watches what it replaces, and the expression of the source otherwise.
"""

from diffkern.rewrite.rewriter import Rewriter, Rewritten
from diffkern.rewrite.site import FusedSite
from diffkern.rewrite.verify import SiteVerifier

__all__ = ["FusedSite", "Rewriter", "Rewritten", "SiteVerifier"]
