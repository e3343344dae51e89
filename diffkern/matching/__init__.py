"""WHAT A MODULE IS: the exact class of a norm -> what it computes, as data."""

from diffkern.matching.forward import apply, declines, parameter_of
from diffkern.matching.match import full_name, match
from diffkern.matching.semantics import Entry, LeftAlone, Match, NormSemantics
from diffkern.matching.tables import TABLE

__all__ = [
    "TABLE",
    "Entry",
    "LeftAlone",
    "Match",
    "NormSemantics",
    "apply",
    "declines",
    "full_name",
    "match",
    "parameter_of",
]
