"""The proof of a site compares its op with the source in float64, whatever the source is."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.rewrite.modules import block, leaves, rewritten

NAMES = "x, scale, shift"


def test_a_site_whose_op_computes_something_else_runs_the_expression() -> None:
    module = block(NAMES, "return self.norm(x) * (1 + scale) + shift")
    found = rewritten(module)
    (site,) = found.sites
    site.plan = replace(site.plan, options={"scale_offset": 2.0})  # as if the match had read 2 + scale
    assert torch.equal(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))
    assert list(site.reasons.values()) == ["in float64 its op does not compute what the source says"]


def test_an_activation_that_the_source_does_not_name_is_found_by_the_proof() -> None:
    from diffusers.models.activations import GELU

    module = GELU(32, 32, approximate="tanh").eval().requires_grad_(False)
    found, x = rewritten(module), leaves("x")["x"]
    torch.testing.assert_close(found.function(module, x), module(x))
    (way,) = found.sites[0].ways.values()
    assert way is not None and way.options == {"approximate": "tanh"}


def test_the_reference_lifts_the_casts_inside_of_a_norm() -> None:
    from diffusers.models.normalization import RMSNorm

    from diffkern.rewrite.reference import CastsLifted, float64_twin

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(32, eps=1e-6)

    x = leaves("x")["x"].double()
    with CastsLifted():
        y = float64_twin(Holder(), [("norm",)]).norm(x)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (y - expected).norm() <= 1e-14 * expected.norm()
