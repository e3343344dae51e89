"""Norms that a submodule modulates, behind a residual of the block: both are one op, and the submodule's layers run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock
from diffusers.models.transformers.transformer_cosmos import CosmosTransformerBlock
from torch import Tensor, nn

from diffkern import inject_optimized_kernels, restore
from diffkern.rewrite.rewriter import Rewriter, Rewritten

RULE = "residual, norm, modulation"


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cosmos() -> tuple[nn.Module, dict[str, Any]]:
    given = {"hidden_states": drawn(2, 6, 32), "encoder_hidden_states": drawn(2, 3, 32), "temb": drawn(2, 96)}
    return CosmosTransformerBlock(2, 16, 32, adaln_lora_dim=4), {**given, "embedded_timestep": drawn(2, 32)}


def of_tokens() -> tuple[nn.Module, dict[str, Any]]:
    """Each token has a time of its own."""
    module, given = cosmos()
    return module, {**given, "temb": drawn(2, 6, 96), "embedded_timestep": drawn(2, 6, 32)}


def cogvideox() -> tuple[nn.Module, dict[str, Any]]:
    given = {"hidden_states": drawn(2, 6, 32), "encoder_hidden_states": drawn(2, 3, 32), "temb": drawn(2, 16)}
    return CogVideoXBlock(32, 2, 16, 16), given


MODELS = {"cosmos": cosmos, "cosmos, of tokens": of_tokens, "cogvideox": cogvideox}


def block(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    module, given = MODELS[kind]()
    return module.eval().requires_grad_(False), given


def run(module: nn.Module, given: dict[str, Any]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        found = module(**given)
    return found if isinstance(found, tuple) else (found,)


def installed(module: nn.Module, numerics: str = "fast") -> list[Any]:
    found = Rewriter(numerics).rewrite(module)
    assert isinstance(found, Rewritten)
    module.forward = found.function.__get__(module)  # type: ignore[method-assign]
    return [site for site in found.sites if site.plan.rule.name == RULE]


@pytest.mark.parametrize("kind", MODELS)
def test_a_residual_and_the_norm_that_a_submodule_modulates_are_one_op(kind: str) -> None:
    (stock, given), (module, _) = block(kind), block(kind)
    sites = installed(module)
    assert len(sites) == 2
    for _ in range(2):
        torch.testing.assert_close(run(module, given), run(stock, given), rtol=1e-5, atol=1e-5)
    assert [site.fused_calls for site in sites] == [2, 2]


@pytest.mark.parametrize("kind", MODELS)
def test_exact_numerics_give_the_bits_of_stock(kind: str) -> None:
    (stock, given), (module, _) = block(kind), block(kind)
    inject_optimized_kernels(module, numerics="exact")
    for _ in range(2):
        assert all(map(torch.equal, run(module, given), run(stock, given)))
    restore(module)
    assert all(map(torch.equal, run(module, given), run(stock, given)))


@pytest.mark.parametrize("kind", MODELS)
def test_a_hook_on_the_submodule_or_another_one_in_its_place_is_seen(kind: str) -> None:
    (stock, given), (module, _) = block(kind), block(kind)
    sites = installed(module)
    run(module, given)
    seen: list[nn.Module] = []
    hook = module.norm2.register_forward_hook(lambda norm, *_: seen.append(norm))  # type: ignore[operator, union-attr]
    torch.testing.assert_close(run(module, given), run(stock, given), rtol=1e-5, atol=1e-5)
    assert seen == [module.norm2]
    hook.remove()

    class Louder(type(stock.norm2)):  # type: ignore[misc]
        def forward(self, *args: Any) -> Any:
            x, *others = super().forward(*args)
            return 2 * x, *others

    for one in (stock, module):
        one.norm2.__class__ = Louder
    torch.testing.assert_close(run(module, given), run(stock, given), rtol=1e-5, atol=1e-5)
    assert [site.fused_calls for site in sites] == [1, 1]


def test_a_submodule_that_has_a_hook_before_the_injection_stays_a_call_and_the_others_are_one_op_each() -> None:
    (stock, given), (module, _) = block("cosmos"), block("cosmos")
    for one in (stock, module):
        one.norm2.register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))  # type: ignore[operator, union-attr]
    sites = installed(module)
    for _ in range(2):
        torch.testing.assert_close(run(module, given), run(stock, given), rtol=1e-5, atol=1e-5)
    assert [site.fused_calls for site in sites] == [2]


def louder(norm: nn.Module, *args: Any) -> Any:
    """A call of a norm that computes more than its forward does."""
    x, *others = nn.Module.__call__(norm, *args)
    return (2 * x, *others)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("first", [True, False])
def test_a_class_whose_calls_do_more_than_its_forward_is_called(
    kind: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stock, given), (module, _) = block(kind), block(kind)
    cls = type(module.norm2)
    if first:
        monkeypatch.setattr(cls, "__call__", louder)
    installed(module)
    run(module, given)
    monkeypatch.setattr(cls, "__call__", louder)
    torch.testing.assert_close(run(module, given), run(stock, given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [True, False])
def test_a_replaced_forward_of_the_class_is_called(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (stock, given), (module, _) = block("cosmos"), block("cosmos")
    cls = type(module.norm2)
    forward = cls.forward

    def replaced(norm: nn.Module, *args: Any) -> Any:
        x, gate = forward(norm, *args)
        return 2 * x, gate

    if first:
        monkeypatch.setattr(cls, "forward", replaced)
    installed(module)
    run(module, given)
    monkeypatch.setattr(cls, "forward", replaced)
    torch.testing.assert_close(run(module, given), run(stock, given), rtol=1e-5, atol=1e-5)


def test_blocks_may_share_a_submodule() -> None:
    (stock, given), (module, _) = block("cosmos"), block("cosmos")
    for one in (stock, module):
        one.norm3 = one.norm2
    inject_optimized_kernels(module)
    torch.testing.assert_close(run(module, given), run(stock, given), rtol=1e-5, atol=1e-5)
    one = drawn(96, 4)
    for norm in (stock.norm2, module.norm2):
        norm.linear_2.weight.copy_(one)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(run(module, given), run(stock, given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_reach_the_layers_of_the_submodule(kind: str) -> None:
    gradients = []
    for is_stock in (True, False):
        module, given = block(kind)
        if not is_stock:
            installed(module)
        module.norm2.requires_grad_(True)
        found = module(**given)
        sum(part.square().sum() for part in (found if isinstance(found, tuple) else (found,))).backward()  # type: ignore[union-attr]
        gradients.append([parameter.grad for parameter in module.norm2.parameters()])  # type: ignore[union-attr]
    assert len(gradients[0]) >= 2 and all(one is not None for one in gradients[0])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_a_layer_of_the_submodule_that_is_another_one_computes() -> None:
    """As an adapter on the layer of a modulation is."""

    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    (stock, given), (module, _) = block("cosmos"), block("cosmos")
    installed(module)
    run(module, given)
    for one in (stock, module):
        layer = Adapted(4, 96, bias=False)
        layer.load_state_dict(one.norm2.linear_2.state_dict())  # type: ignore[union-attr, operator]
        one.norm2.linear_2 = layer  # type: ignore[union-attr]
    torch.testing.assert_close(run(module, given), run(stock, given), rtol=1e-5, atol=1e-5)


def test_a_submodule_without_a_residual_in_front_stays_a_call() -> None:
    module, given = block("cosmos")
    text = Rewriter().rewrite(module).source()  # type: ignore[union-attr]
    assert "self.norm1(hidden_states, embedded_timestep, temb)" in text and "self.norm2(" not in text
    calls: list[nn.Module] = []
    installed(module)
    module.norm1.register_forward_hook(lambda norm, *_: calls.append(norm))  # type: ignore[operator, union-attr]
    run(module, given)
    assert calls == [module.norm1]


class Modulates(nn.Module):
    """Binds a parameter again to what a generator makes, whose variable has the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32, elementwise_affine=False)
        self.linear = nn.Linear(32, 64)

    def forward(self, x: Tensor, emb: Any) -> Tensor:
        parts = self.linear(emb).chunk(2, dim=-1)
        emb = tuple(emb.unsqueeze(1) for emb in parts)
        shift, scale = emb
        return self.norm(x) * (1 + scale) + shift


class Holds(nn.Module):
    """A residual in front of one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Modulates()

    def forward(self, x: Tensor, y: Tensor, emb: Tensor) -> Tensor:
        x = x + y
        z = self.norm(x, emb)
        return x + z


def test_a_generator_binds_its_variable_in_its_own_scope() -> None:
    torch.manual_seed(0)
    stock, module = Holds(), Holds()
    module.load_state_dict(stock.state_dict())
    (site,) = installed(module)
    given = {"x": drawn(2, 6, 32), "y": drawn(2, 6, 32, seed=2), "emb": drawn(2, 32, seed=3)}
    torch.testing.assert_close(run(module, given), run(stock, given), rtol=1e-5, atol=1e-5)
    assert site.fused_calls == 1


class Layers(nn.Module):
    """A norm and its activation in a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def test_layers_of_a_sequence_are_no_modulation() -> None:
    found = Rewriter().rewrite(Layers())
    assert isinstance(found, Rewritten)
    assert [site.plan.rule.name for site in found.sites] == ["norm, SiLU"]


class Rebinds(nn.Module):
    """A helper that binds its parameter again: in a branch, and behind other reads of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32, elementwise_affine=False)

    def scaled(self, x: Tensor, scale: Tensor, factor: float | None = None) -> Tensor:
        if factor is not None:
            x = x * factor
        return self.norm(x) * (1 + scale)

    def added(self, x: Tensor, scale: Tensor) -> Tensor:
        before = x * 2
        x = self.norm(x) * (1 + scale)
        x = x + before
        return x

    def forward(self, x: Tensor, y: Tensor, scale: Tensor, factor: float | None = None) -> Tensor:
        x = x + y
        z = self.scaled(x, scale, factor)
        x = self.added(x, scale)
        return x + z


@pytest.mark.parametrize("factor", [None, 3.0])
def test_a_parameter_that_is_bound_again_is_what_the_helper_says(factor: float | None) -> None:
    stock, module = Rebinds(), Rebinds()
    installed(module)
    given = {"x": drawn(2, 6, 32), "y": drawn(2, 6, 32, seed=2), "scale": drawn(2, 1, 32, seed=3), "factor": factor}
    torch.testing.assert_close(run(module, given), run(stock, given), rtol=1e-5, atol=1e-5)
