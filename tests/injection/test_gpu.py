"""Injection on a GPU: before and after moving, under every offload mode, in CUDA graphs, on a second card."""

from __future__ import annotations

import copy
from typing import Any

import accelerate
import pytest
import torch
from diffusers.models.activations import GELU
from torch import nn

from diffkern import inject_optimized_kernels, restore
from diffkern.injection.rewrite_fusion import RewriteFusion
from tests.injection.models import all_fused, ltx_inputs, tiny_ltx
from tests.pipelines.tiny import build, run

pytestmark = pytest.mark.gpu


def on(device: str, **options: Any) -> dict[str, Any]:
    """Inputs of the tiny denoiser on a device."""
    inputs = ltx_inputs(**options)
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inject_first", [True, False])
def test_before_and_after_moving_to_the_gpu(inject_first: bool, dtype: torch.dtype, device: str) -> None:
    model, twin = tiny_ltx().to(dtype), tiny_ltx().to(device, dtype)
    if inject_first:
        report = inject_optimized_kernels(model)
        model.to(device)
    else:
        report = inject_optimized_kernels(model.to(device))
    # What is only remembered is computed by no kernel.
    others = ("ltx_rope", "caption", "linear_gelu")  # whose product is torch's
    providers = {site.provider for site in report.patched if site.op not in others}
    # Where it is injected on the GPU, two products compute their GELU.
    assert len(report.patched) in (23, 25) and providers <= {"compiled", "triton", "python"}
    with torch.no_grad():
        stock = twin(**on(device, dtype=dtype))[0]
        fused = model(**on(device, dtype=dtype))[0]
        assert all_fused(report)
        # Of the dtype of the stock result, and within a few roundings of it.
        torch.testing.assert_close(fused, stock, rtol=16 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps)
        report.restore()
        assert torch.equal(model(**on(device, dtype=dtype))[0], stock)


@pytest.mark.parametrize("mode", ["model", "sequential", "group-block", "group-leaf", "group-stream"])
@pytest.mark.parametrize("inject_first", [True, False])
def test_offloading(mode: str, inject_first: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # it would magnify the last digit of a float32
    target = torch.device(device)

    def offload(pipe: Any) -> None:
        if mode == "model":
            pipe.enable_model_cpu_offload(device=target)
        elif mode == "sequential":
            pipe.enable_sequential_cpu_offload(device=target)
        else:
            options: dict[str, Any] = {"offload_type": "leaf_level", "use_stream": mode == "group-stream"}
            if mode == "group-block":
                # A VAE that decodes without its forward does not meet the hook of its outer block.
                options = {"offload_type": "block_level", "num_blocks_per_group": 1, "exclude_modules": ["vae"]}
            pipe.enable_group_offload(onload_device=target, **options)

    stock_pipe, arguments = build("ltx")
    offload(stock_pipe)
    stock = run(stock_pipe, arguments)
    pipe, _ = build("ltx")
    if inject_first:
        report = inject_optimized_kernels(pipe)
        offload(pipe)
    else:
        offload(pipe)
        report = inject_optimized_kernels(pipe)
    torch.testing.assert_close(run(pipe, arguments), stock, rtol=1e-3, atol=1e-4)
    # Convolutions of the VAE whose weights come with a hook run stock.
    called = {path: count for path, count in report.calls().items() if not path.startswith("vae.")}
    called = {path: count for path, count in called.items() if count["fused"] or count["stock"]}
    assert {"transformer.rope", "transformer.transformer_blocks.0", "transformer"} <= set(called)
    reasons = {reason for count in called.values() for reason in count["stock_reasons"]}
    assert all("has a hook" in reason for reason in reasons) and (mode not in ("model", "group-block") or not reasons)
    assert restore(pipe) == len(report.patched)
    assert torch.equal(run(pipe, arguments), stock)


def test_a_captured_model_replays_with_fresh_inputs(device: str) -> None:
    model = tiny_ltx().to(device)
    report = inject_optimized_kernels(model)
    inputs = on(device)
    static = inputs["hidden_states"]
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(**inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = model(**inputs)[0]
        for seed in (5, 6):
            fresh = on(device, seed=seed)["hidden_states"]
            static.copy_(fresh)
            graph.replay()
            expected = model(**{**inputs, "hidden_states": fresh})[0]
            assert torch.equal(result, expected)
    assert all_fused(report)


def test_an_unproven_site_runs_stock_while_a_graph_is_captured(device: str) -> None:
    model = tiny_ltx().to(device)
    report = inject_optimized_kernels(model)
    for patch in report.patched:
        patch._state.proven.clear()
        if isinstance(patch._state.fusion, RewriteFusion):
            for site in patch._state.fusion.rewritten.sites:
                site.ways.clear()
    inputs = on(device)
    with torch.no_grad():
        restore_point = torch.cuda.CUDAGraph()
        with torch.cuda.graph(restore_point):
            model(**inputs)
    remembered = {site.path for site in report.patched if site.provider == "python"}  # which a graph may do, too
    counts = [count for path, count in report.calls().items() if path not in remembered]
    assert not any(count["fused"] for count in counts)
    assert all("graph" in reason for count in counts for reason in count["stock_reasons"])
    assert sum(count["stock"] for count in counts) > len(model.transformer_blocks)


def test_a_gelu_is_computed_with_the_product_before_it(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(GELU(64, 128, approximate="tanh")).to(device, torch.bfloat16)
    x = torch.randn(3, 40, 64, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        stock, exact = model(x), copy.deepcopy(model).double()(x.double())
        report = inject_optimized_kernels(model)
        fused = model(x)
    assert [(site.path, site.op) for site in report.patched] == [("0", "linear_gelu")] and all_fused(report)
    assert (fused.double() - exact).norm() <= 1.05 * (stock.double() - exact).norm()


def test_compiled_with_inductor_gives_the_same(device: str) -> None:
    model = tiny_ltx().to(device)
    with torch.no_grad():
        stock = model(**on(device))[0]
        inject_optimized_kernels(model)
        model.compile_repeated_blocks(fullgraph=True)
        torch.testing.assert_close(model(**on(device))[0], stock, rtol=1e-3, atol=1e-4)


def test_a_model_over_two_cards() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    model = tiny_ltx()
    stock = tiny_ltx().to("cuda:0")
    device_map = {name: 0 for name, _ in model.named_children() if name != "transformer_blocks"}
    device_map |= {"transformer_blocks.0": 0, "transformer_blocks.1": 1, "scale_shift_table": 0}
    report = inject_optimized_kernels(model)
    model = accelerate.dispatch_model(model, device_map=device_map)
    with torch.no_grad():
        torch.testing.assert_close(
            model(**on("cuda:0"))[0], stock(**on("cuda:0"))[0].to(model.device), rtol=1e-3, atol=1e-4
        )
    calls = report.calls()
    # What the last norm is given comes from the other card, by a hook on the norm.
    reasons = calls.pop("")["stock_reasons"]
    assert reasons == {"norm_out has a hook, or is another module than it was": 1}
    assert calls["norm_out"]["fused"] == 1 and calls["transformer_blocks.1"]["fused"] > 0
    assert torch.cuda.current_device() == 0
