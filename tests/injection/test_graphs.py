"""Steps replayed from CUDA graphs: the same bits, and never a stale one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diffkern import inject_optimized_kernels, plan, restore
from diffkern.injection.graph_fusion import MAX_GRAPHS, fingerprint, unsafe
from tests.injection.models import ltx_inputs, run, tiny_ltx


def step(model: torch.nn.Module, arguments: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**arguments)[0]
    return result


def arguments_on(device: str, **options: Any) -> dict[str, Any]:
    inputs = ltx_inputs(**options)
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}


def test_on_the_cpu_steps_run_as_they_are_and_say_so() -> None:
    model = tiny_ltx()
    before = dict(model.__dict__)
    report = inject_optimized_kernels(model, cuda_graph=True)
    run(model)
    site = next(site for site in report.patched if site.op == "cuda_graph")
    assert (site.path, site.how) == ("", "option")
    assert report.calls()[""]["stock_reasons"] == {"its inputs are not all on one GPU": 1}
    assert report.restore() == len(report.patched) and model.__dict__ == before
    assert not any(site.op == "cuda_graph" for site in plan(model).patched)


def test_hooks_inside_are_refused_at_once() -> None:
    model = tiny_ltx()
    model.transformer_blocks[1].register_forward_hook(lambda *call: None)
    report = inject_optimized_kernels(model, cuda_graph=True)
    reasons = [site.reason for site in report.skipped if site.op == "cuda_graph"]
    assert reasons == ["a hook sits on transformer_blocks.1, and a replay would not call it"]


def test_what_makes_a_replay_unsafe() -> None:
    model = tiny_ltx()
    assert "not on the GPU" in (unsafe(model) or "")
    model.train()
    assert unsafe(model) == "it is in training mode"


def test_the_fingerprint_sees_what_a_graph_has_written_into_it() -> None:
    model = tiny_ltx()
    now = fingerprint(model)
    with torch.no_grad():
        model.proj_in.weight.mul_(2)  # read again at every replay
    assert fingerprint(model) == now
    model.transformer_blocks[0].attn1.processor._attention_backend = "flash"
    other = fingerprint(model)
    assert other != now
    model.proj_in.weight.data = model.proj_in.weight.data.clone()
    assert fingerprint(model) != other


def test_the_fingerprint_sees_a_block_that_was_restored_and_injected_otherwise() -> None:
    model = tiny_ltx(layers=1)
    inject_optimized_kernels(model)
    fused = fingerprint(model)
    restore(model.transformer_blocks[0])
    stock = fingerprint(model)
    inject_optimized_kernels(model, numerics="exact")
    assert len({fused, stock, fingerprint(model)}) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_replays_give_the_bits_of_the_calls(numerics: str) -> None:
    model = tiny_ltx(layers=3).to("cuda", torch.bfloat16)
    inputs = [arguments_on("cuda", seed=seed, dtype=torch.bfloat16) for seed in range(5)]
    inject_optimized_kernels(model, numerics=numerics)
    expected = [step(model, arguments) for arguments in inputs]
    report = inject_optimized_kernels(model, numerics=numerics, cuda_graph=True)
    results = [step(model, arguments) for arguments in inputs]
    assert report.calls()[""]["fused"] == 5
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)
    report.restore()
    assert torch.equal(step(model, inputs[0]), expected[0])


@pytest.mark.gpu
def test_each_shape_has_a_graph_of_its_own_and_the_oldest_go() -> None:
    model = tiny_ltx().to("cuda")
    inject_optimized_kernels(model)
    report = inject_optimized_kernels(model, cuda_graph=True)
    kinds = [arguments_on("cuda", frames=frames, batch=batch) for frames in (2, 3, 4) for batch in (1, 2)]
    assert len(kinds) > MAX_GRAPHS
    expected = [type(model).forward(model, **kind)[0].detach() for kind in kinds]
    for _ in range(3):
        for kind, other in zip(kinds, expected, strict=True):
            for _ in range(3):
                torch.testing.assert_close(step(model, kind), other, rtol=0, atol=0)
    assert report.calls()[""]["stock"] == 0


@pytest.mark.gpu
def test_weights_written_in_place_and_adapters_have_their_effect() -> None:
    peft = pytest.importorskip("peft")
    model, arguments = tiny_ltx().to("cuda"), arguments_on("cuda")
    report = inject_optimized_kernels(model, cuda_graph=True)

    def settled() -> Tensor:
        results = [step(model, arguments) for _ in range(4)]
        eager = type(model).forward(model, **arguments)[0].detach()
        for result in results:
            assert torch.equal(result, eager)
        return eager

    first = settled()
    with torch.no_grad():
        model.proj_out.weight.mul_(1.5)
    second = settled()
    assert not torch.equal(first, second)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights="gaussian"), "one")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator("cuda").manual_seed(0))
    third = settled()
    assert not torch.equal(second, third)
    model.set_adapters("one", 0.25)
    assert not torch.equal(settled(), third)
    model.disable_adapters()
    assert torch.equal(settled(), second)
    report.restore()


@pytest.mark.gpu
def test_a_hook_added_later_and_gradients_run_as_they_are() -> None:
    model, arguments = tiny_ltx().to("cuda"), arguments_on("cuda")
    report = inject_optimized_kernels(model, cuda_graph=True)
    for _ in range(3):
        stock = step(model, arguments)
    seen = []
    handle = model.transformer_blocks[0].register_forward_hook(lambda *call: seen.append(1))
    step(model, arguments)
    handle.remove()
    assert seen == [1]
    arguments["hidden_states"].requires_grad_()
    model(**arguments)[0].sum().backward()
    assert arguments["hidden_states"].grad is not None
    reasons = set(report.calls()[""]["stock_reasons"])
    assert len(reasons) == 2 and torch.equal(step(model, arguments), stock)
