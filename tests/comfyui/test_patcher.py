"""Object patches on clones of a model: with a double of ComfyUI's model patcher, and with the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern.comfyui import kitchen_backend
from diffkern.comfyui.optimize import optimize, selects, without_diffkern
from diffkern.comfyui.patcher import APPLY_MODEL, patches_of
from diffkern.injection import InjectionError
from tests.comfyui import double, toy

CPU = torch.device("cpu")


class Host:
    """A model patcher, and how it is loaded: the double's way, or ComfyUI's."""

    def __init__(self, patcher: Any) -> None:
        self.patcher = patcher

    @staticmethod
    def run(patcher: Any, seed: int = 0, **options: Any) -> Tensor:
        """Loads a clone as a sampler does, runs it, and takes its patches off as the next load does."""
        patcher.patch_model()
        try:
            with torch.no_grad():
                result: Tensor = patcher.model.diffusion_model(*toy.inputs(seed), **options)
                return result
        finally:
            patcher.unpatch_model()

    @staticmethod
    def deep_clone(patcher: Any) -> Any:
        if isinstance(patcher, double.ModelPatcher):
            return patcher.deep_clone()
        pristine = double.Model(toy.Denoiser())
        pristine.load_state_dict(patcher.model.state_dict())
        return patcher.clone(model_override=(pristine, ({}, {}, {}, set())))


@pytest.fixture(params=["double", "comfyui"])
def host(request: pytest.FixtureRequest) -> Host:
    torch.manual_seed(0)
    model = double.Model(toy.Denoiser())
    if request.param == "double":
        return Host(double.ModelPatcher(model, CPU, CPU))
    request.getfixturevalue("comfyui")
    from comfy.model_patcher import ModelPatcher

    return Host(ModelPatcher(model, CPU, CPU))


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 1e-6 * b.norm())


def test_a_patch_belongs_to_the_clone_and_leaves_nothing_on_the_model(host: Host) -> None:
    before = host.run(host.patcher)
    keys, attributes = list(host.patcher.model.state_dict()), [vars(m).keys() - {"forward"} for m in _modules(host)]
    optimized, report = optimize(host.patcher)

    after = host.run(optimized)
    assert len(report.patched) == 3 and report.patched[0].how == "source"
    assert close(after, before)
    assert torch.equal(host.run(host.patcher), before)
    assert not patches_of(host.patcher)
    assert list(host.patcher.model.state_dict()) == keys
    assert [vars(m).keys() - {"forward"} for m in _modules(host)] == attributes
    assert all(
        patch.counts.fused_calls == 2 and not patch.counts.stock_calls for patch in patches_of(optimized).values()
    )


def test_two_branches_from_one_loader_do_not_see_each_other(host: Host) -> None:
    plain, optimized = host.patcher.clone(), optimize(host.patcher)[0]
    expected = host.run(plain, 1)

    first = host.run(optimized, 1)
    assert torch.equal(host.run(plain, 1), expected)
    assert torch.equal(host.run(optimized, 1), first)
    assert torch.equal(host.run(without_diffkern(optimized), 1), expected)


def test_an_error_while_sampling_leaves_nothing_behind(host: Host) -> None:
    before = host.run(host.patcher)
    optimized, _ = optimize(host.patcher)
    with pytest.raises(TypeError):
        host.run(optimized, nonsense=1)

    assert torch.equal(host.run(host.patcher), before)


def test_a_clone_with_a_model_of_its_own_runs_on_its_own_weights(host: Host) -> None:
    optimized, _ = optimize(host.patcher)
    deep = host.deep_clone(optimized)
    with torch.no_grad():
        deep.model.diffusion_model.blocks[0].linear.weight.mul_(-1.0)
    expected = host.run(without_diffkern(deep))

    assert deep.model is not optimized.model
    assert {patch.module for patch in patches_of(deep).values()} <= set(deep.model.modules())
    assert close(host.run(deep), expected)
    assert not close(host.run(optimized), expected)


def test_exact_mode_gives_the_very_same_bits(host: Host) -> None:
    optimized, report = optimize(host.patcher, numerics="exact")

    assert all(m.bit_identical for site in report.patched for m in site.measurements)
    assert torch.equal(host.run(optimized), host.run(host.patcher))


def test_a_module_that_another_node_gives_another_class_runs_the_forward_of_that(host: Host) -> None:
    class Halved(toy.Block):
        def forward(self, x: Tensor, modulation: Tensor, transformer_options: Any = None) -> Tensor:
            return toy.Block.forward(self, x, modulation, transformer_options or {}) * 0.5

    optimized, report = optimize(host.patcher)
    plain = host.run(host.patcher)
    host.patcher.model.diffusion_model.blocks[1].__class__ = Halved
    changed = host.run(host.patcher)
    assert not close(changed, plain) and close(host.run(optimized), changed)
    (reason,) = report.calls()["diffusion_model.blocks.1"]["stock_reasons"]
    assert reason.startswith("its class has another forward since it was optimized: tests.comfyui.test_patcher")


def test_a_second_optimizer_finds_the_first_and_changes_nothing(host: Host) -> None:
    first, _ = optimize(host.patcher)
    second, report = optimize(first, numerics="exact")

    assert [site.reason for site in report.skipped] == ["already optimized by diffkern"] * 3
    assert torch.equal(host.run(second), host.run(first))
    with pytest.raises(InjectionError, match="already optimized"):
        optimize(first, strict=True)


@pytest.mark.parametrize("kitchen", ["on", "off"])
def test_a_second_optimizer_leaves_the_kitchen_of_the_first(host: Host, kitchen: str) -> None:
    pytest.importorskip("comfy_kitchen")
    first, _ = optimize(host.patcher, numerics="exact", kitchen="on")
    second, report = optimize(first, kitchen=kitchen)
    wrappers = [
        each.get_wrappers(APPLY_MODEL, kitchen_backend.KEY) for each in (first, second, without_diffkern(second))
    ]

    assert len(wrappers[0]) == 1 and wrappers[1] == wrappers[0] and not wrappers[2]
    assert "comfy-kitchen is left as the Optimize Model before this one has set it" in report.notes
    assert not without_diffkern(second).wrappers.get(APPLY_MODEL)


def test_patches_of_other_nodes_are_left_and_named(host: Host) -> None:
    theirs = host.patcher.clone()
    block = theirs.model.diffusion_model.blocks[1]
    theirs.add_object_patch("diffusion_model.blocks.1.forward", lambda x, *_, **__: x)
    theirs.add_object_patch("diffusion_model.blocks.2", nn.Identity())
    assert block is theirs.model.diffusion_model.blocks[1]
    optimized, report = optimize(theirs)

    assert [site.path for site in report.patched] == ["diffusion_model.blocks.0"]
    reasons = {site.path[-1]: site.reason for site in report.skipped}
    assert reasons["1"].startswith("another node patches its forward: tests.comfyui.test_patcher")
    assert reasons["2"].startswith("another node replaces diffusion_model.blocks.2")
    assert optimized.object_patches["diffusion_model.blocks.1.forward"] is theirs.object_patches[
        "diffusion_model.blocks.1.forward"
    ]  # fmt: skip


def test_the_original_is_seen_under_the_patch_of_a_clone_that_is_loaded(host: Host) -> None:
    first, _ = optimize(host.patcher)
    first.patch_model()
    _, report = optimize(host.patcher.clone())
    first.unpatch_model()

    assert len(report.patched) == 3


def test_modules_that_another_clone_puts_in_while_it_is_loaded_are_not_taken_for_those_of_this_one(host: Host) -> None:
    other = host.patcher.clone()
    other.add_object_patch("diffusion_model.blocks.1", toy.Block())
    other.add_object_patch("diffusion_model.blocks.2", nn.Identity())
    expected = host.run(host.patcher)
    other.patch_model()
    optimized, report = optimize(host.patcher)
    other.unpatch_model()

    assert len(report.patched) == 3 and close(host.run(optimized), expected)
    assert {patch.module for patch in patches_of(optimized).values()} <= set(_modules(host))


def test_a_forward_that_was_replaced_on_the_class_object_is_left(host: Host) -> None:
    block = host.patcher.model.diffusion_model.blocks[0]
    block.forward = lambda x, *_, **__: x
    _, report = optimize(host.patcher)

    assert [site.reason.partition(":")[0] for site in report.skipped] == ["its forward was replaced"]


def test_the_result_of_a_block_is_its_argument_which_holds_it(host: Host) -> None:
    """What the caller keeps would hold the old value otherwise, and memory the residual twice."""
    optimized, _ = optimize(host.patcher)
    patch = patches_of(optimized)["diffusion_model.blocks.1"]
    x, modulation = toy.inputs()
    kept = [x.clone(), x.clone()]
    with torch.no_grad():
        stock, fused = type(patch.module).forward(patch.module, kept[0], modulation), patch.forward(kept[1], modulation)

    assert stock is kept[0] and fused is kept[1] and patch.counts.fused_calls == 2
    assert close(fused, stock) and not close(fused, x)


def test_a_model_without_known_modules_is_handed_on_with_a_reason(host: Host) -> None:
    plain = type(host.patcher)(double.Model(nn.Linear(2, 2)), CPU, CPU)
    optimized, report = optimize(plain)

    assert "Linear has no module that diffkern knows" in report.notes[0]
    assert optimized is not plain and not optimized.object_patches
    with pytest.raises(InjectionError, match="no module that diffkern knows"):
        optimize(plain, strict=True)


def _checkpoint(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    return function(*arguments)


class Unknown(nn.Module):
    """A block which norms in one method what it adds in another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(toy.SIZE, elementwise_affine=False)
        self.linear = nn.Linear(toy.SIZE, toy.SIZE)

    def row(self, top: int, height: int, number: int) -> int:
        return top + height * number

    def before(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y: Tensor = self.norm(x) * (1 + scale) + shift
        return y

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        shift, scale, gate = modulation.chunk(3, dim=-1)
        y = self.linear(_checkpoint(self.before, x, scale, shift))
        return x + y * gate


@pytest.fixture
def unknown(host: Host) -> Any:
    """A model patcher with two such blocks."""
    model = toy.Denoiser(0)
    model.blocks.extend([Unknown(), Unknown()])
    return type(host.patcher)(double.Model(model), CPU, CPU)


def test_a_block_is_fused_in_every_method_that_rules_know(unknown: Any) -> None:
    before = Host.run(unknown)
    optimized, report = optimize(unknown)

    assert [site.how for site in report.patched] == ["source", "source"] and report.patched[0].measurements
    assert close(Host.run(optimized), before) and torch.equal(Host.run(unknown), before)
    assert [count["fused"] for count in report.calls().values()] == [2, 2]
    assert {key.rpartition(".")[2] for key in optimized.object_patches} == {"forward", "before"}
    assert not any(count["stock"] for count in report.calls().values())
    assert torch.equal(Host.run(without_diffkern(optimized)), before) and not patches_of(without_diffkern(optimized))


class Pair(nn.Module):
    """As ``QKNorm`` of Flux."""

    def __init__(self) -> None:
        super().__init__()
        self.query_norm, self.key_norm = nn.RMSNorm(toy.SIZE, eps=1e-6), nn.RMSNorm(toy.SIZE, eps=1e-6)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q), self.key_norm(k)


class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms, self.linear = Pair(), nn.Linear(toy.SIZE, toy.SIZE)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        q, k = self.norms(self.linear(x), x)
        return q * k


def test_a_submodule_of_norms_is_part_of_its_block(host: Host) -> None:
    model = toy.Denoiser(0)
    model.blocks.append(Paired())
    patcher = type(host.patcher)(double.Model(model), CPU, CPU)
    before = Host.run(patcher)
    optimized, report = optimize(patcher)

    assert [site.path for site in report.patched] == ["diffusion_model.blocks.0"]
    assert close(Host.run(optimized), before)
    assert [(count["fused"], count["stock"]) for count in report.calls().values()] == [(1, 0)]
    again, second = optimize(optimized)
    assert not second.patched, "what a block of the first optimizer computes is no module of the second"
    assert close(Host.run(again), before)
    assert [(count["fused"], count["stock"]) for count in report.calls().values()] == [(2, 0)]


def test_such_a_block_in_a_model_of_its_own_runs_on_its_own_weights(unknown: Any) -> None:
    if not isinstance(unknown, double.ModelPatcher):
        pytest.skip("the double says how a model is cloned deeply")
    optimized, _ = optimize(unknown)
    deep = optimized.deep_clone()
    with torch.no_grad():
        deep.model.diffusion_model.blocks[0].linear.weight.mul_(-1.0)

    assert {patch.module for patch in patches_of(deep).values()} <= set(deep.model.modules())
    assert close(Host.run(deep), Host.run(without_diffkern(deep))) and not close(Host.run(deep), Host.run(optimized))
    assert all(patch.counts.fused_calls for patch in patches_of(deep).values())


def test_such_a_block_is_left_where_another_node_patches_a_method_or_its_class(
    unknown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = unknown.clone()
    theirs.add_object_patch("diffusion_model.blocks.1.before", lambda x, scale, shift: x)
    optimized, report = optimize(theirs)
    assert [site.path for site in report.patched] == ["diffusion_model.blocks.0"]
    assert report.skipped[0].reason.startswith("another node patches its before: tests.comfyui.test_patcher")

    monkeypatch.setattr(Unknown, "before", lambda self, x, scale, shift: x * scale)
    assert torch.equal(Host.run(optimized), Host.run(theirs))
    reasons = report.calls()["diffusion_model.blocks.0"]["stock_reasons"]
    assert any(reason.startswith("its class has another before since it was optimized") for reason in reasons)


def test_such_a_block_runs_native_while_comfyui_trains(unknown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffkern.comfyui import rewrites

    optimized, report = optimize(unknown)
    monkeypatch.setattr(rewrites, "in_training", lambda: True)
    assert torch.equal(Host.run(optimized), Host.run(unknown))
    assert {reason for site in report.patched for reason in site.stock_calls} == {"ComfyUI is training"}


def test_families_switch_what_rules_fuse_as_well(unknown: Any) -> None:
    assert not optimize(unknown, families=["qk_norm_rope"])[1].patched


def test_exact_mode_gives_the_very_same_bits_by_rules(unknown: Any) -> None:
    assert torch.equal(Host.run(optimize(unknown, numerics="exact")[0]), Host.run(unknown))


def test_a_dtype_that_no_kernel_serves_is_named(host: Host) -> None:
    wide = host.patcher.clone()
    wide.add_object_patch("manual_cast_dtype", torch.float64)
    _, report = optimize(wide)

    assert not report.patched and "float64" in report.notes[0]


def test_families_and_blocks_choose_what_is_patched(host: Host) -> None:
    assert not optimize(host.patcher, families=["qk_norm_rope"])[1].patched
    assert optimize(host.patcher, families=[])[1].notes[0] == "every family is switched off"
    _, report = optimize(host.patcher, blocks="0, 2-5")
    assert [site.path for site in report.patched] == ["diffusion_model.blocks.0", "diffusion_model.blocks.2"]
    with pytest.raises(ValueError, match="fits none of the 3 modules"):
        optimize(host.patcher, blocks="7")
    for options in ({"numerics": "fp4"}, {"families": ["norms"]}, {"kitchen": "maybe"}):
        with pytest.raises(ValueError, match="choose"):
            optimize(host.patcher, **options)


@pytest.mark.parametrize(
    ("blocks", "path", "selected"),
    [
        ("", "diffusion_model.double_blocks.3", True),
        ("3", "diffusion_model.double_blocks.3", True),
        ("0-2,4 - 6", "diffusion_model.double_blocks.3", False),
        ("0-3", "diffusion_model.transformer_blocks.2.attn1", True),
        ("double_blocks.*", "diffusion_model.double_blocks.3", True),
        ("single_blocks.*", "diffusion_model.double_blocks.3", False),
        ("1", "diffusion_model.norm", False),
    ],
)
def test_blocks_are_numbers_ranges_and_patterns(blocks: str, path: str, selected: bool) -> None:
    assert selects(blocks, path) is selected


def test_a_part_that_is_none_of_these_is_an_error() -> None:
    with pytest.raises(ValueError, match="'3-'"):
        selects("1, 3-", "diffusion_model.blocks.1")


def test_no_more_graphs_than_the_unpatched_model_has(host: Host) -> None:
    """The traced forward keeps nothing that differs from block to block."""
    from torch._dynamo.testing import CompileCounter

    def graphs(patcher: Any) -> int:
        counter = CompileCounter()
        torch._dynamo.reset()
        patcher.patch_model()
        try:
            with torch.no_grad():
                for block in patcher.model.diffusion_model.blocks:
                    compiled = torch.compile(block, backend=counter, fullgraph=True)
                    x, modulation = toy.inputs()
                    compiled(x.clone(), modulation)
                    compiled(x.clone(), modulation)
        finally:
            patcher.unpatch_model()
        return int(counter.frame_count)

    assert graphs(optimize(host.patcher)[0]) <= graphs(host.patcher)
    torch._dynamo.reset()


def _modules(host: Host) -> list[nn.Module]:
    return list(host.patcher.model.diffusion_model.modules())
