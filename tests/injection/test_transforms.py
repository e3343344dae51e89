"""Patched modules under torch.func, forward-mode differentiation, replicas and threads."""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from diffkern import InjectionError, inject_optimized_kernels, restore


def pair() -> tuple[nn.Module, nn.Module]:
    """A stock and a patched module with the same weights."""
    torch.manual_seed(0)
    stock = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-6))
    for parameter in stock.parameters():
        nn.init.normal_(parameter)
    patched = copy.deepcopy(stock)
    inject_optimized_kernels(patched)
    return stock, patched


X, TANGENT = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).unbind(0)


def test_forward_mode_gives_the_stock_tangents() -> None:
    stock, patched = pair()
    expected = torch.func.jvp(stock, (X,), (TANGENT,))
    actual = torch.func.jvp(patched, (X,), (TANGENT,))
    torch.testing.assert_close(actual, expected)
    assert actual[1].abs().max() > 0.1
    with forward_ad.dual_level():
        tangents = [forward_ad.unpack_dual(m(forward_ad.make_dual(X, TANGENT))).tangent for m in (stock, patched)]
    torch.testing.assert_close(tangents[1], tangents[0])


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_jacobians_and_hessians(transform: object) -> None:
    stock, patched = pair()
    values = [transform(lambda x, m=m: m(x).square().sum(-1))(X[:2]) for m in (stock, patched)]  # type: ignore[operator]
    torch.testing.assert_close(values[1], values[0], rtol=1e-3, atol=1e-3)


def test_vmap_also_in_a_dtype_that_is_not_proven_yet() -> None:
    stock, patched = pair()
    x = X.expand(3, 4, 8)
    torch.testing.assert_close(torch.func.vmap(patched)(x), stock(x))
    for module in patched.modules():
        if hasattr(module, "_diffkern"):
            module._diffkern.proven.clear()
    assert torch.equal(torch.func.vmap(patched)(x), torch.func.vmap(stock)(x))


def test_a_forward_that_somebody_kept_runs_stock_after_restore() -> None:
    stock, patched = pair()
    kept = patched[0].forward
    patched[0].forward = lambda x: kept(x)
    restore(patched)
    assert torch.equal(patched(X), stock(X))


def test_a_wrapper_around_forward_is_left_alone_and_works() -> None:
    layer = nn.LayerNorm(8)
    stock = layer.forward

    @functools.wraps(stock)
    def doubled(x: Tensor) -> Tensor:
        return 2 * stock(x)

    layer.forward = doubled  # type: ignore[method-assign]
    report = inject_optimized_kernels(layer)
    assert not report.patched and "its forward was replaced by" in report.skipped[0].reason
    assert torch.equal(layer(X), 2 * stock(X))
    with pytest.raises(InjectionError, match="its forward was replaced by"):
        inject_optimized_kernels(layer, strict=True)


def test_restoring_while_other_threads_call() -> None:
    stock, patched = pair()
    expected, errors, stop = stock(X), [], threading.Event()

    def call() -> None:
        while not stop.is_set():
            try:
                torch.testing.assert_close(patched(X), expected)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        restore(patched)
        inject_optimized_kernels(patched)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors


def test_modules_under_data_parallel_are_refused() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.DataParallel(nn.Sequential(nn.RMSNorm(8))))
    report = inject_optimized_kernels(model)
    assert [site.path for site in report.patched] == ["0"]
    assert "DataParallel" in report.skipped[0].reason


def test_a_default_device_does_not_disturb_the_injection() -> None:
    layer = nn.LayerNorm(8)
    with torch.device("meta"):
        report = inject_optimized_kernels(layer)
    assert len(report.patched) == 1
    torch.testing.assert_close(layer(X), nn.functional.layer_norm(X, (8,)))


def test_a_model_that_is_cast_after_the_injection_compiles_to_the_ops() -> None:
    layer = nn.Sequential(nn.LayerNorm(8))
    inject_optimized_kernels(layer, config={"layer_norm": "eager"})  # the compiler has others to itself
    layer.bfloat16()
    targets: set[str] = set()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        targets.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(layer, backend=backend, fullgraph=True)(X.bfloat16())
    assert any("diffkern" in target for target in targets)


def test_a_copied_or_pickled_report_is_a_record() -> None:
    import pickle

    layer = nn.LayerNorm(8)
    report = inject_optimized_kernels(layer)
    for record in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert [site.path for site in record.patched] == [""]
        assert record.restore() == 0
    assert report.restore() == 1


def test_a_parameter_replaced_after_a_fused_call_is_used() -> None:
    layer = nn.LayerNorm(8)
    report = inject_optimized_kernels(layer)
    layer(X)
    layer.weight = nn.Parameter(torch.full((8,), 3.0))
    torch.testing.assert_close(layer(X), nn.functional.layer_norm(X, (8,), layer.weight, layer.bias))
    assert report.calls()[""]["fused"] == 2


def test_an_optimizer_from_before_and_tied_weights() -> None:
    one, two = nn.LayerNorm(8), nn.LayerNorm(8)
    two.weight = one.weight
    model = nn.Sequential(one, two)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inject_optimized_kernels(model)
    before = one.weight.detach().clone()
    model(X).square().mean().backward()
    optimizer.step()
    assert one.weight is two.weight and not torch.equal(one.weight, before)
    expected = nn.functional.layer_norm(
        nn.functional.layer_norm(X, (8,), one.weight, one.bias), (8,), two.weight, two.bias
    )
    torch.testing.assert_close(model(X), expected)
