"""Steps replayed from CUDA graphs: the same bits, and never a stale one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from torch import Tensor, nn

from diffkern import inject_optimized_kernels, plan, restore
from diffkern.blocks import fp8
from diffkern.graph import MAX_GRAPHS, ModuleSnapshot
from diffkern.graph.capture import CapturedStep
from diffkern.graph.steps import FIRST_CALL
from diffkern.injection import fp8_fusion, graph_fusion, inject, planning
from diffkern.injection.patching import patches, run_below
from diffkern.ops import activation_fp8
from tests.injection.models import ltx_inputs, replay_dependencies, run, tiny_ltx


def unsafe(model: nn.Module) -> str | None:
    return graph_fusion.unsafe(model, ModuleSnapshot(model, patches(model)))


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
    assert report.calls()["(cuda_graph)"]["stock_reasons"] == {"its inputs are not all on one GPU": 1}
    assert report.restore() == len(report.patched) and model.__dict__ == before
    assert not any(site.op == "cuda_graph" for site in plan(model).patched)


def test_a_graph_goes_over_the_fused_forward_and_either_can_be_taken_back_alone() -> None:
    model = tiny_ltx()
    before, stock = dict(model.__dict__), run(model)
    fused = inject_optimized_kernels(model)
    expected = run(model)
    graph = inject_optimized_kernels(model, cuda_graph=True)
    assert [state.fusion.op for state in patches(model)] == ["cuda_graph", "norm_modulate"]
    assert torch.equal(run(model), expected) and fused.calls()[""]["fused"] == 2
    again = inject_optimized_kernels(model, cuda_graph=True)
    assert not again.patched
    twin = copy.deepcopy(model)
    assert fused.restore() == len(fused.patched)
    assert [state.fusion.op for state in patches(model)] == ["cuda_graph"] and torch.equal(run(model), stock)
    assert torch.equal(run(twin), expected) and restore(twin) == len(fused.patched) + 1
    assert graph.restore() == 1 and model.__dict__ == before

    both = inject_optimized_kernels(model, cuda_graph=True)
    assert torch.equal(run(model), expected)
    assert {path: both.calls()[path]["fused"] for path in ("", "(cuda_graph)")} == {"": 1, "(cuda_graph)": 0}
    over = inject_optimized_kernels(model)
    assert not over.patched and both.restore() == len(both.patched)
    assert model.__dict__ == before and torch.equal(run(model), stock)


def test_a_graph_alone_is_taken_away_from_over_the_fused_forward() -> None:
    model = tiny_ltx()
    fused = inject_optimized_kernels(model)
    expected = run(model)
    graph = inject_optimized_kernels(model, cuda_graph=True)
    assert graph.restore() == 1 and torch.equal(run(model), expected) and fused.calls()[""]["fused"] == 2
    assert fused.restore() == len(fused.patched)


def test_a_failure_between_two_patches_of_a_module_leaves_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_ltx()
    first = inject_optimized_kernels(model)
    before = dict(model.__dict__)
    monkeypatch.setattr(inject, "install", lambda routes: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        inject_optimized_kernels(model, cuda_graph=True)
    assert model.__dict__ == before and first.restore() == len(first.patched)


def test_under_a_foreign_wrapper_either_patch_is_taken_back_alone() -> None:
    for first in (True, False):
        model = tiny_ltx()
        stock = run(model)
        reports = [inject_optimized_kernels(model), inject_optimized_kernels(model, cuda_graph=True)]
        inner = model.forward
        model.forward = lambda *args, inner=inner, **kwargs: inner(*args, **kwargs)
        reports.pop(0 if first else 1).restore()
        assert [state.fusion.op for state in patches(model)] == ["cuda_graph" if first else "norm_modulate"]
        assert torch.equal(run(model), stock) == first
        reports.pop().restore()
        assert torch.equal(run(model), stock) and not list(patches(model))


def test_a_snapshot_sees_classes_whose_forward_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_ltx()
    seen = [replay_dependencies(model)]
    for cls, name in ((type(model), "forward"), (LTXVideoAttnProcessor, "__call__"), (nn.Linear, "forward")):
        stock = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda *args, stock=stock, **kwargs: stock(*args, **kwargs))
        seen.append(replay_dependencies(model))
    assert all(one != other for i, one in enumerate(seen) for other in seen[:i])


def test_hooks_inside_are_refused_at_once() -> None:
    model = tiny_ltx()
    model.transformer_blocks[1].register_forward_hook(lambda *call: None)
    report = inject_optimized_kernels(model, cuda_graph=True)
    reasons = [site.reason for site in report.skipped if site.op == "cuda_graph"]
    assert reasons == ["a hook sits on transformer_blocks.1, and a replay would not call it"]


def test_what_makes_a_replay_unsafe() -> None:
    model = tiny_ltx()
    assert "not on the GPU" in (unsafe(model) or "")
    handle = nn.modules.module.register_module_forward_hook(lambda *call: None)
    assert unsafe(model) == "global hooks watch the calls of all modules"
    handle.remove()
    model.train()
    assert unsafe(model) == "it is in training mode"


def replace_forward(module: nn.Module) -> None:
    module.forward = lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "hook",
    [
        lambda module: module.register_forward_hook(lambda *call: None),
        lambda module: module.register_forward_pre_hook(lambda *call: None),
        lambda module: module.register_full_backward_hook(lambda *call: None),
        lambda module: module.register_full_backward_pre_hook(lambda *call: None),
        replace_forward,
    ],
)
@pytest.mark.parametrize("path", ["transformer_blocks.1", "transformer_blocks.0.attn1.to_out.0", "rope"])
def test_a_hook_makes_a_replay_unsafe_wherever_it_sits_but_on_the_model_itself(
    hook: Callable[[nn.Module], object], path: str
) -> None:
    model = tiny_ltx()
    inject_optimized_kernels(model)
    hook(model)
    assert "not on the GPU" in (unsafe(model) or "")
    hook(model.get_submodule(path))
    assert unsafe(model) == f"a hook sits on {path}, and a replay would not call it"


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_tensor_that_is_on_no_gpu_is_named(where: str) -> None:
    model = nn.Sequential(nn.Identity(), nn.BatchNorm1d(2, affine=False)).to(where).eval()
    assert (unsafe(model) or "").startswith("1.running_mean is not on the GPU")
    assert (unsafe(tiny_ltx().to(where)) or "").startswith("scale_shift_table is not on the GPU")
    assert unsafe(nn.Sequential(nn.Identity()).eval()) is None


def test_one_walk_finds_each_module_and_each_tensor() -> None:
    model = tiny_ltx(layers=3)
    model.transformer_blocks[2].attn2 = model.transformer_blocks[1].attn2  # shared
    model.norm_out.register_buffer("offset", torch.zeros(1))
    model.norm_out.register_module("nothing", None)
    model.norm_out.register_parameter("none", None)
    found = ModuleSnapshot(model)
    modules = [reference() for reference in found.modules]
    assert set(modules) == set(model.modules()) and len(modules) == len(set(modules))
    expected = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert {id(reference()) for reference, _ in found.tensors} == expected


def test_weights_written_in_place_leave_the_snapshot_as_it_is() -> None:
    model = tiny_ltx()
    inject_optimized_kernels(model)
    now = replay_dependencies(model)
    with torch.no_grad():
        model.proj_in.weight.mul_(2)  # read again at every replay
    run(model)
    assert replay_dependencies(model) == now


def copy_data(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


CHANGES: dict[str, Callable[[Any], object]] = {
    "training mode inside": lambda model: model.transformer_blocks[1].ff.net[1].train(),
    "child added": lambda model: model.transformer_blocks[0].add_module("extra", nn.Identity()),
    "child removed": lambda model: model.transformer_blocks.__delitem__(1),
    "child replaced": lambda model: model.transformer_blocks[0].ff.net.__setitem__(1, nn.Dropout(0.0)),
    "children swapped": lambda model: model.transformer_blocks.__init__(list(model.transformer_blocks)[::-1]),
    "child shared": lambda model: model.transformer_blocks[1].add_module("attn1", model.transformer_blocks[0].attn1),
    "child that is there twice": lambda model: model.transformer_blocks.append(model.transformer_blocks[0]),
    "child moved": lambda model: model.norm_out.add_module("inner", model.__dict__["_modules"].pop("proj_out")),
    "parameter added": lambda model: model.norm_out.register_parameter("extra", nn.Parameter(torch.ones(1))),
    "parameter removed": lambda model: model.proj_out.register_parameter("bias", None),
    "parameter replaced": lambda model: setattr(model.proj_out, "weight", copy.deepcopy(model.proj_out.weight)),
    "parameter moved": lambda model: copy_data(model.transformer_blocks[1].attn2.norm_k.weight),
    "buffer added": lambda model: model.norm_out.register_buffer("extra", torch.ones(1)),
    "buffer replaced": lambda model: setattr(model.norm_out, "offset", torch.zeros(1)),
    "buffer moved": lambda model: copy_data(model.norm_out.offset),
    "processor": lambda model: model.transformer_blocks[1].attn1.set_processor(LTXVideoAttnProcessor()),
    "attention backend": lambda model: setattr(
        model.transformer_blocks[0].attn1.processor, "_attention_backend", "flash"
    ),
    "patch taken off": lambda model: restore(model.transformer_blocks[0].attn1.norm_q),
    "patch renewed": lambda model: (restore(model.norm_out), inject_optimized_kernels(model.norm_out)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_snapshot_sees(change: str) -> None:
    model = tiny_ltx()
    model.norm_out.register_buffer("offset", torch.zeros(1))
    inject_optimized_kernels(model)
    now = replay_dependencies(model)
    assert replay_dependencies(model) == now
    CHANGES[change](model)
    assert replay_dependencies(model) != now


def test_the_snapshot_sees_a_module_at_the_address_of_one_that_is_gone() -> None:
    model = tiny_ltx(layers=1)
    net = model.transformer_blocks[0].ff.net
    now, address = replay_dependencies(model), id(net[1])
    net[1] = nn.Identity()
    others = [nn.Dropout(0.0) for _ in range(1000)]
    net[1] = next((other for other in others if id(other) == address), others[0])
    assert replay_dependencies(model) != now


def test_the_snapshot_sees_adapters_and_what_they_are_set_to() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_ltx()
    facts = [replay_dependencies(model)]
    for name in ("one", "two"):
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights="gaussian"), name)
        facts.append(replay_dependencies(model))
    model.set_adapters("one", 1.0)
    facts.append(replay_dependencies(model))
    model.set_adapters("one", 0.25)
    facts.append(replay_dependencies(model))
    model.disable_adapters()
    facts.append(replay_dependencies(model))
    assert replay_dependencies(model) == facts[-1]
    assert all(facts[i] != facts[j] for i in range(len(facts)) for j in range(i))


def test_the_snapshot_sees_copies_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "fp8_unavailable_reason", lambda device: None)
    monkeypatch.setattr(fp8_fusion, "LEAST_FEATURES", 16)
    model = nn.Module.to(tiny_ltx(layers=1), torch.bfloat16)
    inject_optimized_kernels(model, numerics="fp8")
    block = model.transformer_blocks[0]
    facts = [replay_dependencies(model)]
    x = fp8.RowwiseFp8(*activation_fp8(torch.randn(4, 32).bfloat16()))
    for layer in (block.attn1.to_q, block.attn1.to_k):
        fp8.weight_of(layer, torch.device("cpu")).run(layer, x)
        facts.append(replay_dependencies(model))
    with torch.no_grad():
        block.attn1.to_q.weight.mul_(2)
    facts.append(replay_dependencies(model))
    assert replay_dependencies(model) == facts[-1]
    assert all(facts[i] != facts[j] for i in range(len(facts)) for j in range(i))


def test_the_snapshot_sees_a_block_that_was_restored_and_injected_otherwise() -> None:
    model = tiny_ltx(layers=1)
    inject_optimized_kernels(model)
    fused = replay_dependencies(model)
    restore(model.transformer_blocks[0])
    stock = replay_dependencies(model)
    restore(model)
    inject_optimized_kernels(model, numerics="exact")
    exact = replay_dependencies(model)
    assert fused != stock != exact != fused


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_replays_give_the_bits_of_the_calls(numerics: str) -> None:
    model = tiny_ltx(layers=3).to("cuda", torch.bfloat16)
    inputs = [arguments_on("cuda", seed=seed, dtype=torch.bfloat16) for seed in range(5)]
    inject_optimized_kernels(model, numerics=numerics)
    expected = [step(model, arguments) for arguments in inputs]
    report = inject_optimized_kernels(model, numerics=numerics, cuda_graph=True)
    results = [step(model, arguments) for arguments in inputs]
    assert (report.calls()[""]["fused"], report.calls()[""]["stock_reasons"]) == (4, {FIRST_CALL: 1})
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)
    report.restore()
    assert torch.equal(step(model, inputs[0]), expected[0])


@pytest.mark.gpu
def test_each_shape_has_a_graph_of_its_own_and_the_oldest_go() -> None:
    model = tiny_ltx().to("cuda")
    inject_optimized_kernels(model)
    kinds = [arguments_on("cuda", frames=frames, batch=batch) for frames in (2, 3, 4) for batch in (1, 2)]
    assert len(kinds) > MAX_GRAPHS
    expected = [step(model, kind) for kind in kinds]
    report = inject_optimized_kernels(model, cuda_graph=True)
    for _ in range(3):
        for kind, other in zip(kinds, expected, strict=True):
            for _ in range(3):
                torch.testing.assert_close(step(model, kind), other, rtol=0, atol=0)
    assert all("its kind" in reason for reason in report.calls()[""]["stock_reasons"])


@pytest.mark.gpu
def test_weights_written_in_place_and_adapters_have_their_effect() -> None:
    peft = pytest.importorskip("peft")
    model, arguments = tiny_ltx().to("cuda"), arguments_on("cuda")
    report = inject_optimized_kernels(model, cuda_graph=True)

    def settled() -> Tensor:
        results = [step(model, arguments) for _ in range(4)]
        with torch.no_grad():
            eager: Tensor = run_below(model, (), arguments)[0]
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


def test_a_replay_needs_all_the_memory_that_it_reads() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False))
    found = ModuleSnapshot(model)
    assert found.is_there()
    data = model[1].weight.data
    model[1].weight.data = torch.zeros(3, 4)
    assert not found.is_there()
    model[1].weight.data = data
    assert found.is_there()
    model[1].weight = None
    assert not found.is_there()


@pytest.mark.gpu
def test_a_replay_that_was_started_for_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, arguments = tiny_ltx().to("cuda"), arguments_on("cuda")
    started = []
    replay = CapturedStep.replay
    monkeypatch.setattr(CapturedStep, "replay", lambda self, tensors: (started.append(1), replay(self, tensors))[1])
    report = inject_optimized_kernels(model, cuda_graph=True)
    for _ in range(4):
        before = step(model, arguments)
    assert len(started) == 3
    layer = model.transformer_blocks[0].ff.net[2]
    old = layer.weight  # whose memory stays
    layer.weight = nn.Parameter(old.detach() * 2, requires_grad=False)
    with torch.no_grad():
        expected = run_below(model, (), arguments)[0]
    assert torch.equal(step(model, arguments), expected) and len(started) == 4
    assert not torch.equal(expected, before)
    model.train()
    step(model, arguments)
    assert report.calls()["(cuda_graph)"]["stock_reasons"]["it is in training mode"] == 1
    model.eval()
    del old
    layer.weight = nn.Parameter(layer.weight.detach() / 2, requires_grad=False)
    for _ in range(4):
        torch.testing.assert_close(step(model, arguments), before, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [False, True])
def test_each_thread_gets_its_own_result(streams: bool) -> None:
    model = tiny_ltx().to("cuda")
    inject_optimized_kernels(model, cuda_graph=True)
    inputs = [arguments_on("cuda", seed=seed) for seed in range(4)]
    for _ in range(3):
        expected = [step(model, arguments) for arguments in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(index: int) -> None:
        stream = torch.cuda.Stream() if streams else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            for _ in range(60):
                result = step(model, inputs[index])
                stream.synchronize()
                if not torch.equal(result, expected[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["transformer_blocks.1.ff.net.2.weight", "norm_out.offset"])
def test_a_tensor_that_is_not_with_the_rest_is_named(path: str) -> None:
    model = tiny_ltx()
    model.norm_out.register_buffer("offset", torch.zeros(1))
    model.to("cuda")
    assert unsafe(model) is None
    owner, _, name = path.rpartition(".")
    tensor = getattr(model.get_submodule(owner), name)
    tensor.data = tensor.data.cpu()
    assert unsafe(model) == (f"{path} is not on the GPU with the rest: offloaded weights come and go between replays")


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
    reasons = set(report.calls()["(cuda_graph)"]["stock_reasons"])
    assert len(reasons) == 3 and torch.equal(step(model, arguments), stock)


def test_a_snapshot_sees_names_and_strides() -> None:
    model = tiny_ltx()
    seen = [replay_dependencies(model)]
    children = model.transformer_blocks[0].attn1._modules
    children["to_q"], children["to_k"] = children["to_k"], children["to_q"]
    seen.append(replay_dependencies(model))
    renamed = {
        ("to_k" if name == "to_q" else "to_q" if name == "to_k" else name): child for name, child in children.items()
    }
    children.clear()
    children.update(renamed)
    seen.append(replay_dependencies(model))
    weight = model.transformer_blocks[0].attn1.to_q.weight
    weight.data = weight.data.t()
    seen.append(replay_dependencies(model))
    assert all(one != other for i, one in enumerate(seen) for other in seen[:i])


def test_a_scripted_child_is_no_part_of_a_graph() -> None:
    model = tiny_ltx()
    model.proj_out = torch.jit.trace(model.proj_out, torch.zeros(1, 2, 32))
    report = inject_optimized_kernels(model)
    assert report.patched and "whose state cannot be looked at" in (unsafe(model) or "")


def test_a_weight_that_became_a_plain_attribute_is_read_as_one() -> None:
    model = tiny_ltx()
    stock = run(model)
    inject_optimized_kernels(model)
    for path in ("attn1.to_q", "attn2.to_k", "attn1.norm_q", "ff.net.2"):
        layer = model.transformer_blocks[0].get_submodule(path)
        weight = layer.weight.detach()
        del layer.weight
        layer.weight = weight
    for _ in range(3):
        torch.testing.assert_close(run(model), stock, rtol=1e-4, atol=1e-5)
