"""A specialised call of a site runs for the leaves and norms that it was recorded with, and for no others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern import KernelConfig, inject_optimized_kernels, ops, use_provider
from diffkern.matching import NormSemantics
from diffkern.providers import registry, select
from diffkern.rewrite import FusedSite, Rewriter, Rewritten, specialize
from diffkern.rewrite import site as site_module
from scripts.check_models.denoisers import DENOISERS
from scripts.check_models.model import Draw
from tests.rewrite.modules import SIZE, block, leaves, rewritten

NAMES = "x, scale, shift, gate, y"
BODY = "n = self.norm2(x) * (1 + scale) + shift\nreturn n + gate * y"

pytestmark = pytest.mark.skipif(
    select("norm_modulate", torch.device("cpu"), (torch.float32,)).provider != "compiled", reason="no kernels are built"
)


class Watched:
    """Counts the calls that specialised functions computed, and those that they left to others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran = self.left = 0
        call, quick = FusedSite._specialized_call, specialize._Writer.quick

        def counted(site: FusedSite, module: nn.Module, leaves: tuple[Any, ...]) -> Any:
            result = call(site, module, leaves)
            self.left += result is specialize.OTHER
            self.ran += result is not specialize.OTHER
            return result

        def counted_quick(writer: Any, site: FusedSite, otherwise: Callable[..., Any]) -> Callable[..., Any]:
            def others(*given: Any) -> Any:
                self.ran -= 1
                return otherwise(*given)

            function = quick(writer, site, others)

            def counted(*given: Any) -> Any:
                self.ran += 1
                return function(*given)

            return counted

        monkeypatch.setattr(FusedSite, "_specialized_call", counted)
        monkeypatch.setattr(specialize._Writer, "quick", counted_quick)


def _ready(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, dict[str, Tensor], Watched]:
    module, given, watched = block(NAMES, BODY), leaves(NAMES), Watched(monkeypatch)
    found = rewritten(module)
    with torch.no_grad():
        first = found.function(module, **given)
        found.function(module, **given)
        assert watched.ran == 0 and all(len(site.specialized) == 1 for site in found.sites)
        assert torch.equal(found.function(module, **given), first) and watched.ran == 2
    watched.ran = watched.left = 0
    return module, found, given, watched


def _eps(module: Any, given: dict[str, Tensor]) -> None:
    module.norm2.eps = 1.0


def _weight(module: Any, given: dict[str, Tensor]) -> None:
    module.norm2.weight = nn.Parameter(torch.full((SIZE,), 7.0))


def _weight_as_an_attribute(module: Any, given: dict[str, Tensor]) -> None:
    del module.norm2.weight
    module.norm2.weight = torch.full((SIZE,), 7.0)


def _weight_over_the_parameter(module: Any, given: dict[str, Tensor]) -> None:
    module.norm2.__dict__["weight"] = torch.full((SIZE,), 7.0)


def _no_bias(module: Any, given: dict[str, Tensor]) -> None:
    module.norm2.bias = None


def _weights_of_another_dtype(module: Any, given: dict[str, Tensor]) -> None:
    module.norm2.to(torch.float64)
    for name in ("x", "scale", "shift"):
        given[name] = given[name].double()


def _half(module: Any, given: dict[str, Tensor]) -> None:
    module.to(torch.bfloat16)
    given.update({name: leaf.to(torch.bfloat16) for name, leaf in given.items()})


def _strided(module: Any, given: dict[str, Tensor]) -> None:
    given["scale"] = torch.randn(2, SIZE, 3)[..., :1].transpose(1, 2)


def _of_each_token(module: Any, given: dict[str, Tensor]) -> None:
    given["shift"] = torch.randn(2, 40, SIZE)


def _one_tensor_twice(module: Any, given: dict[str, Tensor]) -> None:
    given["shift"] = given["scale"]


def _in_a_larger_one(module: Any, given: dict[str, Tensor]) -> None:
    given["scale"], given["shift"], given["gate"] = torch.randn(2, 3, SIZE).chunk(3, dim=1)


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (_weight, 0),
        (_one_tensor_twice, 0),
        (_eps, 1),
        (_no_bias, 1),
        (_weight_as_an_attribute, 1),
        (_weight_over_the_parameter, 1),
        (_weights_of_another_dtype, 2),
        (_half, 2),
        (_strided, 1),
        (_of_each_token, 1),
        (_in_a_larger_one, 2),
    ],
)
def test_what_a_specialised_call_was_not_recorded_with_is_computed_without_it(
    monkeypatch: pytest.MonkeyPatch, change: Callable[..., None], left: int
) -> None:
    module, found, given, watched = _ready(monkeypatch)
    change(module, given)
    with torch.no_grad():
        results = [found.function(module, **given) for _ in range(3)]
        stock = module(**given)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if stock.dtype is torch.bfloat16 else {}
    for result in results:
        torch.testing.assert_close(result, stock, **tolerance)
    assert watched.left >= left and watched.left + watched.ran <= 6
    assert watched.ran >= 2 or change is _weights_of_another_dtype


def test_a_call_with_gradients_under_a_transform_or_by_another_provider_is_not_specialised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, found, given, watched = _ready(monkeypatch)
    given["y"].requires_grad_()
    found.function(module, **given).sum().backward()
    assert given["y"].grad is not None and watched.ran == watched.left == 0
    given["y"].requires_grad_(False)
    with torch.no_grad():
        stock = module(**given)
        batched = torch.func.vmap(lambda x: found.function(module, **{**given, "x": x}))(given["x"][None])
        torch.testing.assert_close(batched[0], stock)
        with use_provider("eager"):
            torch.testing.assert_close(found.function(module, **given), stock)
        assert watched.ran == 0
        registry.reset()
        torch.testing.assert_close(found.function(module, **given), stock)
        assert watched.ran == 0, "another provider may serve by now"


def test_a_tensor_that_two_leaves_shared_is_two_tensors_later(monkeypatch: pytest.MonkeyPatch) -> None:
    module, given, watched = block(NAMES, BODY), leaves(NAMES), Watched(monkeypatch)
    found = rewritten(module)
    twice = {**given, "shift": given["scale"]}
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(found.function(module, **twice), module(**twice))
        assert (watched.ran, watched.left) == (2, 2), "the third calls"
        torch.testing.assert_close(found.function(module, **given), module(**given))
    assert watched.left == 3, "the modulation, once more"


def test_a_wrong_call_has_the_error_of_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    module, found, given, _ = _ready(monkeypatch)
    module.norm2.weight = nn.Parameter(torch.ones(SIZE + 1))
    with torch.no_grad():
        with pytest.raises(RuntimeError) as stock:
            module(**given)
        with pytest.raises(RuntimeError) as raised:
            found.function(module, **given)
    assert str(raised.value) == str(stock.value)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["wan", "chroma", "sd3", "qwenimage", "hunyuan_dit", "mochi", "zimage", "flux"])
def test_models_have_the_same_bits_from_the_third_call_on(
    monkeypatch: pytest.MonkeyPatch, name: str, context: Callable[[], Any]
) -> None:
    torch.manual_seed(0)
    model = DENOISERS[name].build()
    given = [
        DENOISERS[name].inputs(Draw(torch.Generator().manual_seed(seed), torch.device("cpu"), torch.float32), size)
        for seed, size in ((1, 8), (2, 8), (3, 12))
    ]
    inject_optimized_kernels(model, config=KernelConfig(measure=False))
    with context():
        expected = []
        with monkeypatch.context() as patched:
            patched.setattr("diffkern.rewrite.site._MOST_RECORDINGS", 0)
            expected = [model(**one)[0] for one in given]
        watched = Watched(monkeypatch)
        for _ in range(4):
            for one, result in zip(given, expected, strict=True):
                assert all(map(torch.equal, model(**one)[0], result))
    assert watched.ran > 0


def _specialised(compute: Callable[[Tensor], Tensor], x: Tensor) -> Callable[..., Any]:
    """The function of a call that has one leaf."""
    kernel: Any = select("norm_modulate", x.device, (torch.float32,)).kernel
    with specialize.Recorder() as recorder:
        result = compute(x)
    writer = specialize._Writer(x, kernel.namespace)
    writer.leaf("x0", x)
    for call in recorder.calls:
        writer.call(*call)
    return writer.function(1, result)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_what_a_view_had_to_copy_is_copied_again(context: Callable[[], Any]) -> None:
    x, other = (torch.randn(4, SIZE, generator=torch.Generator().manual_seed(seed)).t() for seed in (0, 1))

    def compute(x: Tensor) -> Tensor:
        return ops.norm_modulate(x.reshape(2, -1)).t()

    with context():
        function = _specialised(compute, x)
        assert torch.equal(function(None, x), compute(x)) and torch.equal(function(None, other), compute(other))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_what_lies_in_the_memory_of_a_leaf_is_read_where_the_leaf_is_now(context: Callable[[], Any]) -> None:
    tables = torch.randn(12, SIZE, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))

    def compute(table: Tensor) -> Tensor:
        return ops.norm_modulate(torch.view_as_real(table).unbind(-1)[1])

    with context():
        function = _specialised(compute, tables[:4])
        for start in (0, 5):
            part = tables[start : start + 4]
            assert torch.equal(function(None, part), compute(part))


def test_a_view_of_a_parameter_has_no_function() -> None:
    x, norm = torch.randn(4, SIZE), nn.LayerNorm(SIZE).requires_grad_(False)
    with torch.no_grad(), specialize.Recorder() as recorder:
        ops.norm_modulate(x, norm.weight.view(1, SIZE))
    writer = specialize._Writer(x, "")
    writer.leaf("x0", x)
    semantics = NormSemantics(op="layer_norm", weight="weight", bias="bias", eps="eps")
    writer.norm("n0", nn.ModuleDict({"norm": norm}), ("norm",), semantics)
    func, args, kwargs, result = recorder.calls[0]
    writer.call(func, args, kwargs, result)
    assert func.is_view
    with pytest.raises(specialize._Unknown):  # since another one may have other strides
        writer._written(result)


def test_a_nested_tensor_behind_others_runs_as_it_is_written() -> None:
    module = block("x", "return x + self.norm2(x)")
    found = rewritten(module)
    nested = torch.nested.nested_tensor([torch.randn(3, SIZE), torch.randn(5, SIZE)])
    with torch.no_grad():
        for _ in range(3):
            found.function(module, torch.randn(2, 40, SIZE))
        pairs = zip(found.function(module, nested).unbind(), module(nested).unbind(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_operands_of_other_layouts_that_come_by_turns_have_a_function_each(monkeypatch: pytest.MonkeyPatch) -> None:
    module, found, given, watched = _ready(monkeypatch)
    other = dict(given)
    _strided(module, other)
    with torch.no_grad():
        expected = [found.function(module, **each) for each in (given, other)]
        recorded = sum(site._recordings for site in found.sites)
        watched.ran = watched.left = 0
        for _ in range(3):
            results = [found.function(module, **each) for each in (given, other)]
            assert all(torch.equal(result, first) for result, first in zip(results, expected, strict=True))
    assert watched.left == 0 and watched.ran == 3 * 2 * len(found.sites)
    assert sum(site._recordings for site in found.sites) == recorded


def test_what_gained_nothing_may_gain_at_another_size() -> None:
    module, given = block(NAMES, BODY), leaves(NAMES)
    found = rewritten(module)
    for site in found.sites:
        site.on_new_size = lambda site, module, leaves: "no gain" if leaves[site.sized].shape[1] == 40 else ""
    shorter = {name: leaf[:, :8].contiguous() if leaf.shape[1] == 40 else leaf for name, leaf in given.items()}
    with torch.no_grad():
        for _ in range(3):
            found.function(module, **given)
        assert all((site.idle_calls, site.fused_calls) == (3, 0) for site in found.sites)
        found.function(module, **shorter)
        found.function(module, **given)
    assert all((site.idle_calls, site.fused_calls) == (4, 1) for site in found.sites)


def test_a_site_that_is_off_for_good_leaves_the_guard_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    module, found, given, _watched = _ready(monkeypatch)
    off = found.sites[0]
    found.guard.disabled = {off.plan.index}
    monkeypatch.setattr(type(found.guard), "__call__", None)  # which forwards ask where something changed
    before = off.original_calls
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(found.function(module, **given), module(**given))
    assert off.original_calls == before + 3 and found.sites[1].fused_calls == 6


def test_a_site_that_meets_many_kinds_asks_for_none_of_them_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    module, found, given, _watched = _ready(monkeypatch)
    kinds = [
        {name: leaf[:, :tokens].contiguous() if leaf.shape[1] == 40 else leaf for name, leaf in given.items()}
        for tokens in range(1, 20)
    ]
    with torch.no_grad():
        for kind in kinds[:3] * 3:
            found.function(module, **kind)
        assert all(site.front is not site for site in found.sites)
        for kind in kinds * 3:
            torch.testing.assert_close(found.function(module, **kind), module(**kind))
    assert all(site.front is site for site in found.sites)


def test_threads_that_make_the_second_call_of_a_kind_at_once_find_nothing_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU()).eval()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = module

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.norm(x))

    block, both = Block().eval(), threading.Barrier(2)
    found = Rewriter().rewrite(block)
    assert isinstance(found, Rewritten)
    written = site_module.specialized

    def together(*given: Any) -> Any:
        function = written(*given)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(5)
        return function

    monkeypatch.setattr(site_module, "specialized", together)
    x, errors = torch.randn(1, 16, 8, 8), list[Exception]()

    def call() -> None:
        try:
            with torch.no_grad():
                found.function(block, x)
        except Exception as error:
            errors.append(error)

    call()
    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
