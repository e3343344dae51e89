"""A class that no table knows is tried out: right when it is a norm, refused with a reason when not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffkern.matching import TABLE, NormSemantics, apply, declines, match
from diffkern.matching.probe import probe
from tests.matching.zoo import SIZE, Specimen, specimens


class OwnRMSNorm(nn.Module):
    """Multiplies in float32, eps a constant in the code."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, features: Tensor) -> Tensor:
        wide = features.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale).type_as(features)


class LlamaRMSNorm(nn.Module):
    """Of the name of a known class, which computes something else."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(size))
        self.small_eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.small_eps) * (1 + self.gamma.float())).to(
            x.dtype
        )


class Scaled(nn.Module):
    """Nothing in the name: a scale vector and an eps."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = 1e-5

    def forward(self, x: Tensor, **unused: object) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


class QuietLayerNorm(nn.LayerNorm):
    """A subclass that changes nothing."""


class LengthNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class UnbiasedLayerNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + self.eps) * self.weight


class CountingNorm(OwnRMSNorm):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class SettingNorm(OwnRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        self.eps = 1e-5
        return super().forward(x)


class RunningNorm(OwnRMSNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("running_mean", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - self.running_mean


class InPlaceNorm(OwnRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x.copy_(super().forward(x))


class AugmentingNorm(OwnRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        x *= self.scale
        return super().forward(x)


class RenormingNorm(OwnRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(max=0.5)
        return super().forward(x)


class NoisyNorm(OwnRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * torch.randn_like(x)


class DropoutNorm(OwnRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class NarrowNorm(OwnRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(5, 5))


class PairNorm(OwnRMSNorm):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x, x


class GatedNorm(OwnRMSNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * gate


class PaddedNorm(OwnRMSNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.table = nn.Parameter(torch.ones(3, size))


class LooseNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (8,), self.weight, 1e-6)


class CoarseNorm(nn.Module):
    """A norm in float32, whose roundings in half precision are far larger than others'."""

    eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * scale.pow(1 / 64).pow(64)


def reason(module: nn.Module) -> str:
    """Why a look-alike is left alone."""
    matched = match(module)
    assert matched is not None and matched.semantics is None
    assert matched.reason is not None
    return matched.reason


def _found(module: nn.Module) -> NormSemantics:
    matched = match(module)
    assert matched is not None and matched.semantics is not None, matched
    assert matched.how == "probe" and matched.reason is None
    return matched.semantics


def _normalised(semantics: NormSemantics, module: nn.Module) -> NormSemantics:
    """Leaves out what cannot be seen in one instance: where a fixed number comes from, unused names."""
    dim = getattr(module, semantics.dim) if isinstance(semantics.dim, str) else semantics.dim
    if isinstance(dim, bool):
        dim = 1 if dim else -1
    has_weight = semantics.weight is not None and getattr(module, semantics.weight, None) is not None
    eps_is_none = isinstance(semantics.eps, str) and getattr(module, semantics.eps) is None
    return replace(
        semantics,
        dim=semantics.dim if isinstance(dim, tuple) else dim,
        optional_eps=semantics.optional_eps and eps_is_none,
        weight=semantics.weight if has_weight else None,
        bias=semantics.bias if has_weight and isinstance(getattr(module, str(semantics.bias), None), Tensor) else None,
        rounding=semantics.rounding if has_weight else "once",
        output=semantics.output if has_weight else "input",
        weight_offset=semantics.weight_offset if has_weight else 0.0,
        mixed_dtypes=semantics.mixed_dtypes or not has_weight,
        root=None,  # no norm that reads one is probed
    )


#: One class of each entry of the tables, in all its variants. Without force_fp32 StableAudio3RMSNorm is another.
DISTINCT = {(TABLE[s.name], s.args, str(s.kwargs), s.shape): s for s in specimens() if "force_fp32" not in s.kwargs}


@pytest.mark.parametrize("specimen", list(DISTINCT.values()), ids=str)
def test_the_probe_finds_by_itself_what_the_table_says(specimen: Specimen) -> None:
    module = specimen.build()
    known = TABLE[specimen.name]
    found = probe(module).semantics
    assert isinstance(known, NormSemantics)
    assert found is not None, probe(module).reason
    assert _normalised(found, module) == _normalised(known, module)


def test_a_class_without_attributes_for_eps_is_found() -> None:
    expected = NormSemantics("rms_norm", "features", weight="scale", eps=1e-5)
    assert _found(OwnRMSNorm(SIZE)) == expected


def test_a_class_of_a_known_name_is_judged_by_what_it_computes() -> None:
    module = LlamaRMSNorm(SIZE)
    module.gamma.data.normal_()
    semantics = _found(module)
    assert semantics == NormSemantics("rms_norm", "x", weight="gamma", eps="small_eps", weight_offset=1.0)
    x = torch.randn(70, SIZE).bfloat16()
    assert declines(semantics, module, x) is None
    torch.testing.assert_close(apply(semantics, module, x), module(x), rtol=8e-3, atol=1e-6)


def test_a_class_of_another_name_is_found_by_its_parameters() -> None:
    semantics = _found(Scaled(SIZE))
    assert (semantics.op, semantics.argument, semantics.bias, semantics.eps) == (
        "layer_norm",
        "x",
        "bias",
        "eps",
    )
    assert not semantics.mixed_dtypes


def test_a_subclass_is_tried_and_never_taken_for_its_base() -> None:
    assert _found(QuietLayerNorm(SIZE)).dim == "normalized_shape"

    class HalvedLayerNorm(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) / 2

    assert "it computes no norm that is known" in reason(HalvedLayerNorm(SIZE))


def test_the_nearest_candidate_is_named_with_its_error() -> None:
    text = reason(UnbiasedLayerNorm(SIZE))
    assert text.startswith("it computes no norm that is known; the nearest is layer_norm over -1")
    # Bessel's correction is a factor of sqrt(95 / 96), 5.2e-3 off; next to the root mean square, up to 4.2e-3.
    assert 2e-3 < float(text.rpartition("off by ")[2]) < 5.2e-3
    assert "it computes no norm" in reason(LengthNorm())


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (CountingNorm(8), "not in the tables, and not probed: its forward writes self.calls"),
        (SettingNorm(8), "not in the tables, and not probed: its forward writes self.eps"),
        (RenormingNorm(8), "not in the tables, and not probed: its forward calls clamp_, which a probe cannot judge"),
        (RunningNorm(8), "not in the tables, and not probed: its forward reads self.running_mean"),
        (InPlaceNorm(8), "not in the tables, and not probed: its forward calls copy_, which a probe cannot judge"),
        (AugmentingNorm(8), "its forward changes its input"),
        (NoisyNorm(8), "not in the tables, and not probed: its forward calls randn_like, which a probe cannot judge"),
        (DropoutNorm(8), "not in the tables, and not probed: its forward calls dropout, which a probe cannot judge"),
        (NarrowNorm(8), "its forward raises RuntimeError for float32 (6, 8): "),
        (PairNorm(8), "its forward returns a tuple, not a tensor"),
        (GatedNorm(8), "its forward takes (x, gate), not one tensor"),
        (PaddedNorm(8), "no candidate has its parameters (scale, table)"),
        (LooseNorm(), "not in the tables, and not probed: its forward reads self.weight"),
        (CoarseNorm(), "it computes a known norm in float32, but rounds otherwise in half precision"),
        (OwnRMSNorm(8).to("meta"), "its scale has no data (meta device), so it cannot be tried"),
        (OwnRMSNorm(8).to(torch.float8_e4m3fn), "its scale is a Parameter of torch.float8_e4m3fn"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_what_cannot_be_tried_or_is_no_norm_is_left_alone(module: nn.Module, expected: str) -> None:
    assert reason(module).startswith(expected)


def test_hooks_are_no_part_of_what_is_tried() -> None:
    module, calls = OwnRMSNorm(8), []
    module.register_forward_hook(lambda *_: calls.append(1))
    assert _found(module).op == "rms_norm" and not calls


def test_neither_the_module_nor_the_random_state_changes() -> None:
    module = OwnRMSNorm(7).requires_grad_(False)
    module.anything = [1, 2]
    parameter, values = module.scale, module.scale.clone()
    before = {key: repr(value) for key, value in vars(module).items()}
    state = torch.random.get_rng_state()
    match(module)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {key: repr(value) for key, value in vars(module).items()} == before
    assert module.scale is parameter and torch.equal(parameter, values)
    assert parameter.grad is None and not parameter.requires_grad and module.training


def test_equal_instances_share_one_answer_and_others_do_not() -> None:
    assert match(OwnRMSNorm(12)) is match(OwnRMSNorm(12))
    one, other = LlamaRMSNorm(12), LlamaRMSNorm(12)
    other.small_eps = None
    assert match(one) is not match(other)
    other.small_eps = 1e-6
    assert match(one) is match(other)
    other._mode = "private"
    assert match(one) is not match(other)


def test_modules_that_are_no_norms_are_not_tried() -> None:
    class Normaliser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LayerNorm(8)

    for module in (nn.Linear(4, 4), nn.Conv2d(3, 3, 1), nn.GELU(), nn.Embedding(3, 4), Normaliser()):
        assert match(module) is None


def test_a_parametrized_norm_is_left_alone() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    module = nn.LayerNorm(8)
    nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
    matched = match(module)
    assert matched is not None and matched.semantics is None
    assert matched.reason == "a LayerNorm with modules inside, for example a parametrization"


def test_a_known_class_whose_forward_was_replaced_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.normalization import RMSNorm

    def faster(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return hidden_states

    monkeypatch.setattr(RMSNorm, "forward", faster)
    matched = match(RMSNorm(8, 1e-6))
    assert matched is not None and matched.semantics is None
    assert "the forward of its class was replaced by" in str(matched.reason) and "faster" in str(matched.reason)


def test_a_scripted_norm_is_no_module_to_patch() -> None:
    assert match(torch.jit.script(nn.LayerNorm(8))) is None


def test_a_norm_sharded_by_fsdp_is_left_alone() -> None:
    if not torch.distributed.is_available() or torch.distributed.is_initialized():
        pytest.skip("needs a process group of its own")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        module = nn.LayerNorm(8)
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        matched = match(module)
    finally:
        torch.distributed.destroy_process_group()
    assert matched is not None and matched.semantics is None
    assert matched.reason == "sharded by FSDP, which gathers its parameters around its own forward"
