"""The rules: which shape of expressions is computed by which op.

They are tried in this order, the largest shape first, and a node belongs to one match. A rule says what to look for and
names the function of :mod:`diffkern.ops`; the names of operands, modules and options are those of its arguments.
To add one, add it here, with a test and a line in ``docs/models.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diffkern.rewrite.facts import CHANNELS, GROUPS
from diffkern.rewrite.halves import HalfOfChannels
from diffkern.rewrite.identity import DividedByOne, DividedSite, ImageOfTokens, ImageSite, RepeatedSite
from diffkern.rewrite.kept import OfText, OnceSite, TextSite
from diffkern.rewrite.linear_attention import LinearAttention
from diffkern.rewrite.masked import MaskedAttention, MaskedAttentionSite, PairMask
from diffkern.rewrite.match import (
    Activated,
    AddedInPlace,
    Either,
    Kept,
    Leaf,
    Linear,
    Norm,
    OnePlus,
    PerChannel,
    Product,
    Rotation,
    Shape,
    Sum,
)
from diffkern.rewrite.padding import Padded, RepeatedFrames, Undropped
from diffkern.rewrite.patches import PatchEmbedding, PatchesSite
from diffkern.rewrite.pixels import Pixels, PixelsSite, PutBefore, PutBeforeSite, RepeatedChannels, RepeatedChannelsSite
from diffkern.rewrite.query_key import (
    JOINED_FIRST,
    JOINED_LAST,
    JOINED_THEN,
    NORMED,
    QUERY_ROTATED,
    ROTATED,
    ROTATED_ALONE,
    ROTATED_IN_PART,
    QueryKey,
    RotatedTogether,
)
from diffkern.rewrite.rooms import HalvesSite, JoinSite, StreamSite
from diffkern.rewrite.site import FusedSite
from diffkern.rewrite.streams import Joined, LinearOfStream, Repeated, SideBySide

_GATES = frozenset({"tanh", "sigmoid"})
_GLU = frozenset({"silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid"})


@dataclass(frozen=True)
class Rule:
    """A shape and what computes it.

    Attributes:
        name: How reports and the table of coverage call it.
        op: The function of :mod:`diffkern.ops`.
        shape: What to look for.
        keeps: Whether the op returns the new residual, too, before the result.
        options: Arguments of the op that the shape implies, unless the match found others.
        is_left_to_compiler: Whether a graph of ``torch.compile`` holds the expression as it is written, unless a
            provider is named: Inductor fuses it as well, and with what stands around it.
        site: What its sites are, unless their results are modulated, read by fp8 layers, or by attention alone.
    """

    name: str
    op: str
    shape: Shape
    keeps: bool = False
    options: Mapping[str, object] = field(default_factory=dict)
    is_left_to_compiler: bool = False
    site: type[FusedSite] = FusedSite


def _modulated(base: Shape, factor: Shape) -> Shape:
    """``base * factor + shift``, or without the shift."""
    product = Product(base, factor)
    return Either((Sum(product, Leaf("shift")), product))


_GATE = Either((Activated("gate", _GATES), Leaf("gate")))
_SCALE = OnePlus("scale")
_FACTOR = Either((_SCALE, Leaf("scale")))
_GATED = Sum(Leaf("residual"), Product(_GATE, Leaf("x")))
_RESIDUAL = Either((_GATED, Sum(Leaf("residual"), Leaf("x"))))
#: ``residual + gate * norm(x)`` is a modulated norm whose scale is the whole factor, and whose shift is the residual.
_POST_NORM = Sum(Leaf("shift"), Either((Product(Norm(Leaf("x")), Leaf("scale")), Norm(Leaf("x")))))
_WHOLE = {"scale_offset": 0.0}


_SILU = frozenset({"silu"})
#: A convolution, whose bias is added with what follows.
_CONVOLVED = Linear(Leaf("x"), "convolution")
_CONVOLVED_SUM = Sum(Leaf("residual"), _CONVOLVED)


def _embedded(x: Shape) -> Shape:
    """``silu(norm(x + embedding[:, :, None, None]))``, as residual blocks add the embedding of the time step."""
    return Activated("norm", _SILU, Norm(Sum(x, PerChannel("add")), over=GROUPS))


def _activated(over: str) -> Shape:
    """``silu`` of a norm, modulated or not."""
    norm = Norm(Leaf("x"), over=over)
    return Activated("norm", _SILU, Either((_modulated(norm, _SCALE), norm)))


#: ``a * silu(b)`` of the two halves of what a convolution gives.
_CONVOLVED_GLU = Product(
    Activated("gate", _GLU, HalfOfChannels(1, _CONVOLVED)),
    HalfOfChannels(0, _CONVOLVED),
)

#: ``silu`` of a norm over channels, of what a convolution gives or of anything else.
_NORMED_FOR_FRAMES = Undropped(Activated("norm", _SILU, Norm(Either((_CONVOLVED, Leaf("x"))), over=CHANNELS)))

RULES = (
    Rule("linear attention", "linear_attention", LinearAttention(), is_left_to_compiler=True),
    Rule("query and key norm, rotation", "qk_norm_rope", RotatedTogether()),
    Rule("query and key norm, two streams", "qk_norm_rope", QueryKey(JOINED_FIRST)),
    Rule("query and key norm, two streams", "qk_norm_rope", QueryKey(JOINED_THEN)),
    Rule("query and key norm, two streams", "qk_norm_rope", QueryKey(JOINED_LAST)),
    Rule("query and key norm, rotation", "qk_norm_rope", QueryKey(ROTATED)),
    Rule("query and key norm, rotation", "qk_norm_rope", QueryKey(QUERY_ROTATED)),
    Rule("query and key norm", "qk_norm_rope", QueryKey(NORMED)),
    Rule("rotation of query and key", "qk_norm_rope", QueryKey(ROTATED_IN_PART)),
    Rule("rotation of query and key", "qk_norm_rope", QueryKey(ROTATED_ALONE)),
    Rule("rotation of query and key", "qk_norm_rope", RotatedTogether(alone=True)),
    Rule("linear of a stream", "qk_norm_rope", LinearOfStream(), site=StreamSite),
    Rule("concatenation of streams", "qk_norm_rope", Joined(), site=JoinSite),
    Rule("concatenation of halves", "qk_norm_rope", SideBySide(), site=HalvesSite),
    Rule("repetition, once", "qk_norm_rope", Repeated(), site=RepeatedSite),
    Rule("mask, once a step", "qk_norm_rope", PairMask(), site=OnceSite),
    Rule("attention, of the keys that count", "qk_norm_rope", MaskedAttention(), site=MaskedAttentionSite),
    Rule("convolution, embedding, norm, SiLU", "group_norm_silu", _embedded(_CONVOLVED)),
    Rule("convolution, norm, SiLU", "group_norm_silu", Activated("norm", _SILU, Norm(_CONVOLVED, over=GROUPS))),
    Rule("patch embedding", "add_norm_silu_pad", PatchEmbedding(), site=PatchesSite),
    Rule("image of tokens", "add_norm_silu_pad", ImageOfTokens(), site=ImageSite),
    Rule(
        "convolution, residual",
        "add_norm_silu_pad",
        Either((DividedByOne(_CONVOLVED_SUM), _CONVOLVED_SUM)),
        is_left_to_compiler=True,
    ),
    Rule("pixels, residual", "add_norm_silu_pad", Sum(Pixels(), Leaf("residual")), site=PixelsSite),
    Rule("pixels", "add_norm_silu_pad", Pixels(), site=PixelsSite),
    Rule("concatenation with nothing", "add_norm_silu_pad", PutBefore(), site=PutBeforeSite),
    Rule("division by one", "qk_norm_rope", DividedByOne(), site=DividedSite),
    Rule("norm, SiLU, padding of frames", "add_norm_silu_pad", RepeatedFrames(_NORMED_FOR_FRAMES)),
    Rule("padding", "add_norm_silu_pad", Padded()),
    Rule("padding of frames", "add_norm_silu_pad", RepeatedFrames()),
    Rule("repetition of channels", "add_norm_silu_pad", RepeatedChannels(), site=RepeatedChannelsSite),
    Rule("embedding, norm, SiLU", "group_norm_silu", _embedded(Leaf("x"))),
    Rule("key or value of a text, once a text", "qk_norm_rope", OfText(), site=TextSite),
    Rule("norm, SiLU", "group_norm_silu", _activated(GROUPS)),
    Rule("norm, SiLU", "channel_rms_norm_silu", _activated(CHANNELS)),
    Rule(
        "residual, norm, modulation",
        "gate_residual_norm_modulate",
        _modulated(Norm(Kept(_RESIDUAL)), _FACTOR),
        keeps=True,
        options=_WHOLE,
    ),
    Rule("residual, norm", "gate_residual_norm_modulate", Norm(Kept(_RESIDUAL)), keeps=True),
    Rule("norm, modulation", "norm_modulate", _modulated(Norm(Leaf("x")), _SCALE)),
    Rule("group norm, modulation", "group_norm_silu", _modulated(Norm(Leaf("x"), over=GROUPS), _SCALE)),
    Rule("post-norm, residual", "norm_modulate", _POST_NORM, options=_WHOLE),
    Rule("norm, scale", "norm_modulate", Product(Norm(Leaf("x")), Leaf("scale")), options=_WHOLE),
    Rule("modulation", "norm_modulate", _modulated(Leaf("x"), _SCALE), options={"norm": None}),
    Rule("gated residual", "gate_residual", _GATED, is_left_to_compiler=True),
    Rule("gated residual, in place", "gate_residual", AddedInPlace(Product(Leaf("gate"), Leaf("x")))),
    Rule("convolution, gated linear unit", "channel_glu", _CONVOLVED_GLU, is_left_to_compiler=True),
    Rule("gated linear unit", "glu", Product(Activated("gate", _GLU), Leaf("value"))),
    Rule(
        "convolution, SiLU",
        "add_norm_silu_pad",
        Activated("convolution", _SILU, _CONVOLVED),
        is_left_to_compiler=True,
    ),
    Rule("rotation", "rope", Rotation()),
    Rule("group norm", "group_norm_silu", Norm(Leaf("x"), over=GROUPS)),
    Rule("concatenation of halves", "qk_norm_rope", SideBySide(of_sites=True), site=HalvesSite),
    Rule("linear, GELU", "linear_gelu", Activated("linear", frozenset({"gelu_tanh"}), Linear(Leaf("x")))),
)
