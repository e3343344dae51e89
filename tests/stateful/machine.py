"""A state machine that does to a model what users do, in any order, and to its untouched twin the same."""

from __future__ import annotations

from tests.stateful.adapters import AdapterRules
from tests.stateful.calls import CallRules
from tests.stateful.hooks import HookRules
from tests.stateful.weights import WeightRules


class ModelMachine(AdapterRules, WeightRules, HookRules, CallRules):
    """All rules; those that a model does not know do nothing, to both twins alike."""
