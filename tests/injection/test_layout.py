"""Channels last inside of convolutional models: what decides about it, and that nothing but the layout changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern import InjectionReport, KernelConfig, inject_optimized_kernels
from diffkern.blocks import layout
from diffkern.injection import layout_fusion
from diffkern.rewrite import verify
from diffkern.verify import gain
from diffkern.verify.measures import relative_error
from scripts.check_models.convolutional import AUTOENCODERS, UNETS
from scripts.check_models.rewritten import batch_of_two, run

MODELS = AUTOENCODERS | UNETS
#: Sites of a provider that was asked for are not timed: what is timed here is the layout. Most tests do without sites.
WITH_SITES, CONFIG = KernelConfig({"*": "eager"}, measure=True), KernelConfig({"*": None}, measure=True)


@pytest.fixture(autouse=True)
def calls_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is."""
    monkeypatch.setattr(layout_fusion, "_LONGEST", float("inf"))


@pytest.fixture
def gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels last is faster here, whatever this machine's clock says."""
    monkeypatch.setattr(layout_fusion, "reason_without_gain", lambda *costs: "")


def _inject(model: nn.Module, config: KernelConfig = CONFIG, **options: Any) -> InjectionReport:
    return inject_optimized_kernels(model, config=config, cuda_graph=False, **options)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{id(parent)} {name}": child.weight  # type: ignore[dict-item]
        for parent, name, child in layout.convolutions(model)
        if max(child.kernel_size) > 1 and min(child.weight.shape[:2]) > 1  # type: ignore[arg-type, union-attr, index]
    }


def _are_last(model: nn.Module) -> set[bool]:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return {w.is_contiguous(memory_format=formats[w.ndim]) for w in _weights(model).values()}


#: Shapes of latents.
LATENTS = {"kl": (2, 4, 8, 8), "hunyuan_video": (1, 4, 2, 4, 4), "wan": (1, 4, 2, 8, 8)}


def _call(model: Any, name: str) -> Tensor:
    """A decode or a step."""
    if name not in LATENTS:
        return run(model, batch_of_two(MODELS[name], torch.float32))
    latents = torch.randn(LATENTS[name], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        result: Tensor = model.decode(latents.to(next(model.parameters()).device), return_dict=False)[0]
    return result


def _inside(model: Any, name: str) -> nn.Module:
    part: nn.Module = model.decoder if name in LATENTS else model
    return part


@pytest.mark.usefixtures("gains")
@pytest.mark.parametrize(
    "name",
    [
        "unet2d_condition",
        "hunyuan_video",
        *[pytest.param(name, marks=pytest.mark.exhaustive) for name in ("kl", "wan")],
    ],
)
def test_a_model_that_gains_computes_in_channels_last_and_is_restored_bit_for_bit(name: str) -> None:
    model = MODELS[name].build()
    before = {key: (value.clone(), value.stride()) for key, value in model.state_dict().items()}
    parameters = list(model.parameters())
    stock = _call(model, name)
    report = _inject(model, WITH_SITES)
    results = []
    for _ in range(2):
        result = _call(model, name)
        results.append(result)
        assert relative_error(result, stock) < 1e-5 and result.stride() == stock.stride()
        assert _are_last(_inside(model, name)) == {True}
        # What is saved has the strides that it had; the next call converts again.
        for key, value in model.state_dict().items():
            kept, strides = before[key]
            assert torch.equal(value, kept) and value.stride() == strides
    assert torch.equal(*results), "what is decided holds for the call in which it is decided"
    assert any("computes in channels last" in note for note in report.notes)
    _call(model, name)
    assert _are_last(_inside(model, name)) == {True}
    report.restore()
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(_call(model, name), stock)
    assert all(value.stride() == before[key][1] for key, value in model.state_dict().items())


class _Cached(nn.Module):
    """Four convolutions, and a list in which a call finds what the one before it made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Conv2d(4, 4, 3, padding=1) for _ in range(4)])

    def forward(self, x: Tensor, cache: list[Tensor | None]) -> Tensor:
        x, before = self.layers(x), cache[0]
        cache[0] = x
        return x if before is None else x + before


@pytest.mark.usefixtures("gains")
def test_the_call_that_decides_leaves_in_a_cache_what_calls_in_the_new_layout_leave() -> None:
    model = _Cached().requires_grad_(False).eval()
    x, caches = torch.randn(2, 4, 8, 8), [[None], [None]]
    report = inject_optimized_kernels(model, config=KernelConfig(measure=True), cuda_graph=False)
    first, second = [], []
    first.append(model(x, caches[0]))
    assert caches[0][0].is_contiguous(memory_format=torch.channels_last), "the very call that decides"
    first.append(model(x, caches[0]))
    second += [model(x, caches[1]), model(x, caches[1])]
    assert any("computes in channels last" in note for note in report.notes)
    for (left,), expected in zip(caches, (first, second), strict=True):
        assert left is not None and left.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(expected[1], second[1])


@pytest.mark.usefixtures("gains")
def test_weights_that_were_made_in_inference_mode_keep_their_layout_and_serve_after_a_restore() -> None:
    with torch.inference_mode():
        model = MODELS["kl"].build()
        stock = _call(model, "kl")
        for _ in range(2):
            report = _inject(model)
            assert torch.equal(_call(model, "kl"), stock)
            assert any("was made in inference mode" in note for note in report.notes)
            report.restore()


def test_a_model_whose_second_call_takes_too_long_keeps_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_fusion, "_LONGEST", -1.0)
    model = MODELS["kl"].build()
    report = _inject(model)
    stock = _call(model, "kl")
    assert not any("layout" in note for note in report.notes), "the first call may have proven and compiled"
    assert torch.equal(_call(model, "kl"), stock)
    assert any("too long to be timed in both layouts" in note for note in report.notes)


def test_a_model_without_a_gain_keeps_its_layout_and_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_fusion, "reason_without_gain", lambda *costs: "no gain")
    model = MODELS["kl"].build()
    strides = {name: weight.stride() for name, weight in _weights(model).items()}
    report = _inject(model)
    _call(model, "kl")
    assert {name: weight.stride() for name, weight in _weights(model).items()} == strides
    assert "decoder keeps its layout: no gain" in report.notes
    assert not any(site.op == "channels_last" for site in report.patched)


def test_the_clock_of_a_cpu_decides_once_for_all_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIFFKERN_CHOICES", str(tmp_path))
    model = MODELS["kl"].build()
    report = _inject(model)
    _call(model, "kl")
    (said,) = [note for note in report.notes if note.startswith("decoder ")]
    assert said.count(" us") == 2
    assert ("computes" in said) == (_are_last(_inside(model, "kl")) == {True})

    def must_not_time(*given: Any) -> Any:
        raise AssertionError("timed again")

    monkeypatch.setattr(gain, "costs", must_not_time)
    again = MODELS["kl"].build()
    other = _inject(again)
    _call(again, "kl")
    assert [note for note in other.notes if note.startswith("decoder ")] == [said]


#: What a step of Stable Diffusion 1.5 takes on an H200 in channels last and as it is, on a host that takes longer.
SLOW_HOST = gain.Cost(34000.0, 9000.0), gain.Cost(32000.0, 12000.0)


@pytest.mark.parametrize("cuda_graph", [True, "auto", False])
@pytest.mark.parametrize("name", ["unet2d_condition", "kl"])
def test_the_device_decides_about_the_layout_of_what_becomes_a_graph(
    name: str, cuda_graph: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An autoencoder never does, and waits for its host; so does a step without graphs."""
    monkeypatch.setattr(gain, "costs", lambda *given: list(SLOW_HOST))
    model = MODELS[name].build()
    report = inject_optimized_kernels(model, config=CONFIG, cuda_graph=cuda_graph)
    _call(model, name)
    gains = name not in LATENTS and cuda_graph is not False
    assert (_are_last(_inside(model, name)) == {True}) == gains
    (said,) = [note for note in report.notes if "layout" in note or "channels last" in note]
    assert ("no gain" in said) != gains and "9000.0 us (host 34000.0 us)" in said


def test_a_host_that_takes_as_long_in_both_layouts_leaves_it_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for ours, stock, gains in (9000.0, 12000.0, True), (12000.0, 9000.0, False):
        costs = [gain.Cost(32300.0, ours), gain.Cost(32000.0, stock)]
        monkeypatch.setattr(gain, "costs", lambda *given, costs=costs: costs)
        model = MODELS["unet2d_condition"].build()
        _inject(model)
        _call(model, "unet2d_condition")
        assert (_are_last(model) == {True}) == gains


def test_weights_are_laid_out_before_turns_that_are_timed_and_not_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[bool] = []

    def costs(computations: Any, device: torch.device) -> list[gain.Cost]:
        for compute, last in zip(computations, (True, False), strict=True):
            compute.prepare()
            before = [weight.data_ptr() for weight in model.parameters()]
            assert (_are_last(model) == {True}) == last
            compute()
            moved.append(before != [weight.data_ptr() for weight in model.parameters()])
        return list(SLOW_HOST)

    monkeypatch.setattr(gain, "costs", costs)
    model = MODELS["unet2d_condition"].build()
    _inject(model)
    _call(model, "unet2d_condition")
    assert moved == [False, False]


def test_a_wider_model_of_a_class_is_timed_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIFFKERN_CHOICES", str(tmp_path))
    asked: list[int] = []
    monkeypatch.setattr(gain, "costs", lambda *given: asked.append(1) or list(SLOW_HOST))

    class Layers(nn.Sequential):
        def __init__(self, width: int) -> None:
            super().__init__(*[nn.Conv2d(4, width, 3), *[nn.Conv2d(width, width, 3) for _ in range(3)]])

    for width, times in (8, 1), (8, 1), (32, 2):
        model = Layers(width).requires_grad_(False).eval()
        _inject(model, KernelConfig(measure=True))
        model(torch.randn(1, 4, 16, 16))
        assert len(asked) == times


def test_a_site_is_timed_in_each_layout_and_gains_where_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def costs(computations: Any, device: torch.device, *key: Any) -> list[gain.Cost]:
        timed.append(key[-1])
        stock = 2.0 if "strided" in key[-1] else 1.0
        return [gain.Cost(1.0, 1.0), gain.Cost(stock, stock)]

    monkeypatch.setattr(verify, "kept_costs", costs)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.GroupNorm(4, 16), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.norm(x))

    block, x = Block().requires_grad_(False), torch.randn(2, 16, 8, 8)
    report = _inject(block, KernelConfig(measure=True))
    with torch.no_grad():
        for _ in range(3):
            block(x)
        assert report.calls()[""]["fused"] == 0
        last = x.to(memory_format=torch.channels_last)
        for _ in range(3):
            assert torch.allclose(block(last), Block.forward(block, x), atol=1e-5)
    assert report.calls()[""]["fused"] == 3
    sizes = [size for size in timed if size.startswith("2^")]
    assert sizes == ["2^11 numbers", "2^11 numbers, strided"]


@pytest.mark.usefixtures("gains")
@pytest.mark.parametrize("name", ["unet2d_condition", pytest.param("kl", marks=pytest.mark.exhaustive)])
def test_exact_numerics_keep_the_bits_of_stock_whatever_is_faster(name: str) -> None:
    model = MODELS[name].build()
    stock = _call(model, name)
    report = _inject(model, numerics="exact")
    for _ in range(2):
        assert torch.equal(_call(model, name), stock)
    last = any("computes in channels last" in note for note in report.notes)
    assert last or any("other bits" in note for note in report.notes)


def _hook(model: Any) -> None:
    model.conv_in.register_forward_hook(lambda module, args, output: output)


def _hook_around(model: Any) -> None:
    model.mid_block.register_forward_pre_hook(lambda module, args: None)


def _offload(model: Any) -> None:
    model.mid_block._hf_hook = object()


def _adapter(model: Any) -> None:
    wrapper = nn.Sequential()
    wrapper.base_layer = model.conv_in
    model.conv_in = wrapper


def _shared(model: Any) -> None:
    resnets = model.mid_block.resnets
    resnets[0].conv2.weight = resnets[0].conv1.weight


def _integers(model: Any) -> None:
    model.conv_in.weight = nn.Parameter(model.conv_in.weight.to(torch.int8), requires_grad=False)


def _own_layout(model: Any) -> None:
    model.conv_in.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("change", [_hook, _hook_around, _offload, _adapter, _shared, _integers, _own_layout])
def test_weights_that_others_look_at_keep_their_layout(change: Callable[[Any], None]) -> None:
    model: Any = MODELS["kl"].build()
    assert layout.unfit(model.decoder) is None
    change(model.decoder)
    assert layout.unfit(model.decoder) is not None


@pytest.mark.usefixtures("gains")
@pytest.mark.parametrize("change", [_hook, _hook_around, _offload])
def test_hooks_and_adapters_that_come_later_give_the_layout_back(change: Callable[[Any], None]) -> None:
    model: Any = MODELS["kl"].build()
    strides = {name: weight.stride() for name, weight in _weights(model.decoder).items()}
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    _inject(model)
    with torch.no_grad():
        model.decode(latents)
        assert _are_last(model.decoder) == {True}
        change(model.decoder)
        model.decode(latents)
    assert {name: weight.stride() for name, weight in _weights(model.decoder).items()} == strides


@pytest.mark.usefixtures("gains")
def test_gradients_are_computed_in_the_layout_of_the_user() -> None:
    model: Any = MODELS["unet2d_condition"].build()
    twin: Any = MODELS["unet2d_condition"].build()
    arguments = batch_of_two(MODELS["unet2d_condition"], torch.float32)
    _inject(model)
    run(model, arguments)
    assert _are_last(model) == {True}
    for one in (model, twin):
        one.requires_grad_()
        one(**arguments, return_dict=False)[0].square().sum().backward()
    assert _are_last(model) != {True}
    for own, stock in zip(model.parameters(), twin.parameters(), strict=True):
        if stock.grad is not None:
            assert own.grad.stride() == stock.grad.stride()
            assert relative_error(own.grad, stock.grad) < 1e-4


@pytest.mark.usefixtures("gains")
@pytest.mark.parametrize("transposed", [False, True])
def test_results_are_laid_out_as_those_of_stock(transposed: bool) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)])

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.layers(x)
            return (y.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if transposed else y), y

    model = Layers().requires_grad_(False).eval()
    x = torch.randn(2, 8, 6, 10)
    stock = model(x)
    inject_optimized_kernels(model, config=KernelConfig(measure=True))
    for _ in range(2):
        for one, other in zip(model(x), stock, strict=True):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert _are_last(model) == {True}


@pytest.mark.usefixtures("gains")
def test_a_model_that_asks_for_contiguous_tensors_keeps_its_layout() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            y = self.layers(x)
            return y.view(x.shape[0], -1)

    model = Flat().requires_grad_(False).eval()
    x = torch.randn(2, 8, 8, 8)
    stock = model(x)
    report = inject_optimized_kernels(model, config=KernelConfig(measure=True))
    for _ in range(2):
        assert torch.equal(model(x), stock)
    assert any("does not run in channels last" in note for note in report.notes)


def test_without_measurements_no_layout_is_asked_for() -> None:
    model, arguments = MODELS["kl"].build(), batch_of_two(MODELS["kl"], torch.float32)
    report = inject_optimized_kernels(model, config=KernelConfig({"*": "eager"}, measure=False))
    run(model, arguments)
    assert not any("layout" in note or "channels last" in note for note in report.notes)


@pytest.mark.gpu
@pytest.mark.usefixtures("gains")
def test_on_a_gpu_norms_keep_channels_last_between_convolutions() -> None:
    model: Any = MODELS["kl"].build().to("cuda")
    stock = _call(model, "kl")
    report = _inject(model, WITH_SITES)
    assert relative_error(_call(model, "kl"), stock) < 1e-3
    assert _are_last(model.decoder) == {True}
    seen: list[bool] = []
    last, own = model.decoder.conv_out, nn.Conv2d._conv_forward
    last._conv_forward = lambda x, *rest: seen.append(x.is_contiguous()) or own(last, x, *rest)
    _call(model, "kl")
    assert seen and not any(seen)
    report.restore()


@pytest.mark.usefixtures("gains")
def test_nothing_is_laid_out_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["unet2d_condition"].build()
    stock = _call(model, "unet2d_condition")
    _inject(model)
    _call(model, "unet2d_condition")
    monkeypatch.setattr(layout_fusion, "_is_captured", lambda x: True)
    before = [weight.data_ptr() for weight in model.parameters()]
    assert _are_last(model) == {True}
    assert relative_error(_call(model, "unet2d_condition"), stock) < 1e-5
    assert [weight.data_ptr() for weight in model.parameters()] == before and _are_last(model) == {True}
    model.state_dict()
    assert relative_error(_call(model, "unet2d_condition"), stock) < 1e-5
    assert _are_last(model) == {False}


@pytest.mark.gpu
@pytest.mark.usefixtures("gains")
def test_a_step_in_channels_last_is_replayed_from_a_graph() -> None:
    model = MODELS["unet2d_condition"].build().to("cuda")
    arguments = {
        name: value.to("cuda") for name, value in batch_of_two(MODELS["unet2d_condition"], torch.float32).items()
    }
    stock = run(model, arguments)
    report = inject_optimized_kernels(model, config=WITH_SITES, cuda_graph=True)
    addresses = set()
    for _ in range(6):
        assert relative_error(run(model, arguments), stock) < 1e-3
        addresses.add(tuple(weight.data_ptr() for weight in model.parameters()))
    assert _are_last(model) == {True} and len(addresses) == 1
    assert any(site.op == "cuda_graph" and not site.waiting for site in report.patched)
