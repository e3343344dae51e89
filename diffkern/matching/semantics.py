"""The vocabulary in which the tables say what a norm class computes, by data alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class NormSemantics:
    r"""All that is needed to compute the forward of a norm class with :mod:`diffkern.ops`.

    Attributes hold names, not values: weight, bias and eps are read from the module at every call, since
    loading, offloading, casting and fine-tuning change them.
    """

    #: The function of :mod:`diffkern.ops` that computes it; a group norm is computed with what follows it.
    op: Literal["rms_norm", "layer_norm", "group_norm"]
    argument: str = "hidden_states"  # name of the one tensor parameter of the class's forward
    #: Name of the multiplier; None for a class that has none. The attribute may be None or missing.
    weight: str | None = "weight"
    bias: str | None = None  # Name of the summand, or None. The attribute may be None, missing, or the number 0.0.
    eps: str | float = "eps"  # name of the attribute, or the constant itself
    #: Whether the attribute may be None, for the machine epsilon of the precision computed in.
    optional_eps: bool = False
    #: The dimension normalised over, or the name of the attribute that says it: an int, a tuple (so many trailing
    #: dimensions together, as ``normalized_shape``), or a bool (``channel_first``: True is dimension 1, False the last
    #: one).
    dim: int | str = -1
    #: Where the class rounds. ``"once"``: only the result. ``"weight"``: the normalised value is rounded to the dtype
    #: of the weight if that is half, and then multiplied (T5). ``"input"``: it is rounded to the dtype of the input
    #: first (Llama).
    rounding: Literal["once", "weight", "input"] = "once"
    #: Dtype of the result: that of the ``"input"``; that of the ``"weight"``, or of the input without one; or what
    #: torch's type promotion makes of both (``"promote"``).
    output: Literal["input", "weight", "promote"] = "input"
    weight_offset: float = 0.0  # added to the weight in float32; 1.0 for zero-centred weights
    clamp_eps: bool = False  # whether eps bounds the vector's length from below (``F.normalize``) and is not added
    #: Strides of the result. ``"contiguous"``: as the torch.nn norms write. ``"preserve"``: as a chain of pointwise ops
    #: gives. ``"channels_last"``: NCHW is permuted to NHWC, normalised over the last dimension, written contiguously
    #: and permuted back.
    layout: Literal["contiguous", "preserve", "channels_last"] = "preserve"
    #: Whether parameters of another dtype than the input belong to the class's contract. ``F.layer_norm`` accepts some
    #: mixes on some devices only, and raises for the rest.
    mixed_dtypes: bool = True
    #: Reads weight and bias for an input, where a library casts or moves them at every call; it returns None where
    #: kernels cannot read them. None: they are plain parameters.
    reader: Callable[[Any, Any], tuple[Any, Any] | None] | None = None
    #: Name of the attribute that holds the root of the channel count, which the class multiplies by; or None.
    root: str | None = None


@dataclass(frozen=True)
class LeftAlone:
    """A known class that stays as it is."""

    reason: str  # why, as a sentence that the report can show


@dataclass(frozen=True)
class Match:
    """What is known about one module that is, or looks like, a norm."""

    semantics: NormSemantics | None  # what it computes; None if it is left alone
    #: ``"table"`` if its exact class is known, ``"probe"`` if its forward was compared with the candidates on random
    #: input, None if neither was possible.
    how: Literal["table", "probe"] | None
    reason: str | None = None  # why it is left alone; None if it is not


Entry = NormSemantics | LeftAlone
