"""What the user may say: configurations and components, and what a mistake is answered with."""

from __future__ import annotations

import typing

import pytest
from torch import nn

from diffkern import KernelConfig, plan
from diffkern.blocks import OPS as BLOCK_OPS
from diffkern.hub.config import MODULE_OPS
from diffkern.injection.components import select_components
from diffkern.injection.fp8_fusion import OPS as FP8_OPS
from diffkern.matching import NormSemantics
from diffkern.providers import OPS
from diffkern.rewrite.rules import RULES


def test_the_ops_of_a_configuration_are_those_that_modules_are_matched_to() -> None:
    # Group norms have an op where a SiLU follows, in the source of the module that calls both.
    assert set(MODULE_OPS) == set(typing.get_args(typing.get_type_hints(NormSemantics)["op"])) - {"group_norm"}
    assert set(MODULE_OPS) <= set(OPS)


@pytest.mark.parametrize("config", ["eager", ["eager"], 5])
def test_a_configuration_that_is_no_mapping_is_answered_with_one(config: object) -> None:
    with pytest.raises(ValueError, match=r"pass a dict .* \{'rms_norm': 'eager'\}"):
        KernelConfig(config)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pass a dict .* KernelConfig\.from_file reads a file"):
        plan(nn.LayerNorm(8), config=config)


@pytest.mark.parametrize("key", [nn.LayerNorm, None, 3])
def test_keys_are_strings(key: object) -> None:
    with pytest.raises(ValueError, match="keys are strings"):
        KernelConfig({key: "eager"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "op", sorted(set(OPS) - set(MODULE_OPS) - set(BLOCK_OPS) - set(FP8_OPS) - {rule.op for rule in RULES})
)
def test_an_op_that_no_module_has_is_no_key(op: str) -> None:
    with pytest.raises(ValueError, match=rf"'{op}'.*layer_norm and rms_norm"):
        plan(nn.LayerNorm(8), config={op: "eager"})


def test_the_star_speaks_of_every_module() -> None:
    report = plan(nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8)), config={"*": "eager"})
    assert [site.provider for site in report.patched] == ["eager", "eager"]


@pytest.mark.parametrize("names", [5, [None], ["vae", 3]])
def test_components_are_names(names: object) -> None:
    with pytest.raises(TypeError, match=r"components=.*expected the names of components, such as \['transformer'"):
        select_components(nn.LayerNorm(8), names)  # type: ignore[arg-type]


def test_a_single_name_is_one_component_and_not_its_letters() -> None:
    with pytest.raises(ValueError, match=r"components=\['transformer'\] makes sense for a pipeline"):
        select_components(nn.LayerNorm(8), "transformer")
