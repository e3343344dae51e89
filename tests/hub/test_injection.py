"""Kernels of the Hub in a model: named by op, class, layer and path; by device and mode; with a way back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern import InjectionError, KernelConfig, StrictModeError, inject_optimized_kernels, plan
from diffkern.hub import Mode
from diffkern.providers import compiled, registry
from tests.hub import kernels
from tests.hub.kernels import Gated, kernel, write
from tests.hub.server import Fault, LoopbackHub


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.RMSNorm(16, eps=1e-6), nn.RMSNorm(16, eps=1e-6)
        self.norm, self.mlp = nn.LayerNorm(16), Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(self.second(self.first(x) + x)))


@pytest.fixture
def model() -> Model:
    return Model().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def published(hub: LoopbackHub) -> LoopbackHub:
    hub.repository("org/norms").commit(kernel(kernels.RMSNORM), "v1", "v1.2.0")
    hub.repository("org/layers").commit(kernel("", kernels.LIGER_LAYERS), "v1")
    return hub


def providers(report: Any) -> dict[str, str]:
    return {site.path: site.provider for site in report.patched}


@pytest.mark.parametrize(
    ("key", "served"),
    [("rms_norm", ["first", "second"]), ("RMSNorm", ["first", "second"]), ("first", ["first"]), ("*cond", ["second"])],
)
@pytest.mark.parametrize("text", ["org/norms", "org/norms@v1.2.0", "org/norms@>=1.0,<2.0:apply_rms_norm"])
def test_a_kernel_serves_by_op_class_and_path(
    published: LoopbackHub, model: Model, x: Tensor, key: str, served: list[str], text: str
) -> None:
    expected = model(x)
    report = inject_optimized_kernels(model, config={key: text})
    assert [path for path, provider in providers(report).items() if provider == text] == served
    assert any(f"kernel {text} at " in note and "torch-cpu" in note for note in report.notes)
    torch.testing.assert_close(model(x), expected)
    assert all(report.calls()[path]["fused"] == 1 for path in served)
    assert report.restore() == len(report.patched)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_a_layer_replaces_the_forward_of_a_class_that_diffkern_does_not_know(
    published: LoopbackHub, model: Model, x: Tensor
) -> None:
    expected = model(x)
    stock = model.mlp.forward.__func__
    report = inject_optimized_kernels(model, config={"Gated": "org/layers:LigerSwiGLUMLP"})
    (site,) = (site for site in report.patched if site.path == "mlp")
    assert (site.op, site.provider, site.how) == ("LigerSwiGLUMLP", "org/layers:LigerSwiGLUMLP", "config")
    assert site.measurements[0].passed
    torch.testing.assert_close(model(x), expected)
    assert report.calls()["mlp"]["fused"] == 1
    report.restore()
    assert model.mlp.forward.__func__ is stock


def test_a_layer_that_computes_something_else_is_refused_with_the_measured_error(
    published: LoopbackHub, model: Model
) -> None:
    report = inject_optimized_kernels(model, config={"mlp": "org/layers:Wrong"})
    (site,) = (site for site in report.patched if site.path == "mlp")
    assert site.provider in ("compiled", "triton", "eager"), "the op of its gated unit serves in its place"
    assert "error " in site.reason and "against stock's" in site.reason


def test_a_kernel_that_raises_is_a_reason_for_the_next_provider(hub: LoopbackHub, model: Model, x: Tensor) -> None:
    """On the sizes of this model, which no sample of an adapter has: at injection, and in another dtype later."""
    raising = kernels.RMSNORM.replace(
        "wide = input.float()",
        """if input.shape[-1] == 16 and input.dtype in DTYPES: raise ValueError("misaligned address\\nframes")
        wide = input.float()""",
    )
    layers = kernels.LIGER_LAYERS.replace("return self.down_proj(F.silu", "raise ValueError(); self.down_proj(F.silu")
    for name, dtypes in (("org/all", "(torch.float32, torch.bfloat16)"), ("org/half", "(torch.bfloat16,)")):
        hub.repository(name).commit(kernel(raising.replace("DTYPES", dtypes), layers), "v1")
    config = {"first": "org/all", "second": "org/half", "Gated": "org/all:LigerSwiGLUMLP"}
    with torch.no_grad():
        report = inject_optimized_kernels(model, config=config)
        sites = {site.path: site for site in report.patched + report.failed}
        assert "org/all: float32 on cpu: failed: ValueError: misaligned address" in sites["first"].reason
        assert "failed: ValueError" in sites["mlp"].reason
        assert sites["first"].provider != "org/all" and sites["second"].provider == "org/half"
        model(x)
        model.bfloat16()
        with pytest.warns(UserWarning, match="failed: ValueError: misaligned address; the next provider serves"):
            model(x.bfloat16())
    assert report.calls()["second"]["fused"] == 2 and not report.calls()["second"]["stock"]


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ("Stateful", "Stateful has a constructor"),
        ("Nothing", "it has no such layer; its layers: .*LigerRMSNorm, LigerSwiGLUMLP"),
    ],
)
def test_a_layer_that_cannot_stand_in_says_why(published: LoopbackHub, model: Model, layer: str, said: str) -> None:
    import re

    report = plan(model, config={"Gated": f"org/layers:{layer}"})
    assert not report.failed
    (site,) = (site for site in report.patched if site.path == "mlp")
    assert re.search(said, site.reason)


def test_a_norm_that_an_op_cannot_reach_is_served_by_the_layer_itself(hub: LoopbackHub, x: Tensor) -> None:
    layers = """
        import torch
        from torch import nn

        class Norm(nn.Module):
            def forward(self, x):
                return torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight, self.eps) * self.extra
    """
    hub.repository("org/norm").commit(kernel("", layers), "v1")
    model = nn.Sequential(nn.RMSNorm(16, eps=1e-6))
    model[0].extra = 1.0
    report = inject_optimized_kernels(model, config={"rms_norm": "org/norm:Norm"}, strict=True)
    assert [(site.op, site.provider) for site in report.patched] == [("Norm", "org/norm:Norm")]
    assert "has no attribute 'extra'" in report.patched[0].reason
    torch.testing.assert_close(model(x), nn.functional.rms_norm(x, (16,), model[0].weight, 1e-6))


def test_a_block_does_not_compute_around_a_kernel_that_is_named_for_a_part_of_it(published: LoopbackHub) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.LTXVideoTransformer3DModel(
        num_layers=1, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, caption_channels=16,
        in_channels=4, out_channels=4,
    ).eval()  # fmt: skip
    report = plan(model, config={"*.norm1": "org/norms", "*.norm2": "eager"})
    reasons = {site.path: site.reason for site in report.skipped}
    assert reasons["transformer_blocks.0"] == "norm1 is inside, and config names a kernel for it"
    report = plan(model, config={"*.norm2": None})
    reasons = {site.path: site.reason for site in report.skipped}
    assert reasons["transformer_blocks.0"] == "norm2 is inside, and config leaves it alone"


def test_a_module_that_the_kernel_has_no_room_for_is_not_said_to_be_served_by_it(
    published: LoopbackHub, x: Tensor
) -> None:
    model = nn.Sequential(nn.RMSNorm(16, elementwise_affine=False), nn.RMSNorm(16))
    report = inject_optimized_kernels(model, config={"rms_norm": "org/norms"})
    weightless, weighted = report.patched
    assert weighted.provider == "org/norms"
    assert weightless.provider != "org/norms" and "it needs a weight" in weightless.reason
    with pytest.raises(InjectionError, match="it needs a weight"):
        fresh = nn.RMSNorm(16, elementwise_affine=False)
        inject_optimized_kernels(fresh, config={"rms_norm": "org/norms"}, strict=True)


def test_a_local_path(hub: LoopbackHub, model: Model, x: Tensor, tmp_path: Any) -> None:
    text = f"{write(tmp_path / 'kernel', kernel(kernels.RMSNORM))}:apply_rms_norm"
    report = inject_optimized_kernels(model, config={"rms_norm": text})
    assert providers(report)["first"] == text
    assert hub.requests == []


def test_copies_and_pickles_do_not_take_the_kernel_along(published: LoopbackHub, model: Model, x: Tensor) -> None:
    import pickle

    inject_optimized_kernels(model, config={"Gated": "org/layers:LigerSwiGLUMLP", "rms_norm": "org/norms"})
    twin = copy.deepcopy(model)
    twin.mlp.down_proj.weight.data.zero_()
    assert twin(x).abs().max() == 0 and model(x).abs().max() > 0
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), model(x))


# --- devices and modes ---------------------------------------------------------------------------------------


def test_a_device_that_is_not_here_costs_nothing(published: LoopbackHub, model: Model) -> None:
    config = {"rms_norm": {"metal": "org/norms", "xpu": "org/norms@v1.2.0", "cpu": "eager"}}
    report = inject_optimized_kernels(model, config=config)
    assert providers(report)["first"] == "eager"
    assert published.requests == []


def test_a_module_left_alone_on_this_device_is_patched_for_the_others(
    published: LoopbackHub, model: Model, x: Tensor
) -> None:
    report = inject_optimized_kernels(model, config={"rms_norm": {"cpu": "", "metal": "org/norms"}})
    model(x)
    assert report.calls()["first"]["stock_reasons"] == {"left alone by config on cpu in inference": 1}


def test_the_kernel_changes_with_the_mode_and_is_proven_for_each(
    published: LoopbackHub, model: Model, x: Tensor
) -> None:
    config = {"rms_norm": {Mode.INFERENCE: "org/norms", Mode.TRAINING: "eager"}}
    report = inject_optimized_kernels(model, config=config)
    model(x)
    assert providers(report)["first"] == "org/norms"
    (site,) = (site for site in report.patched if site.path == "first")
    before = len(site.measurements)
    model.train()
    model(x).sum().backward()
    assert model.first.weight.grad is not None
    assert [(m.provider, m.gradients) for m in site.measurements[before:]] == [("eager", False), ("eager", True)]
    model.eval()
    model(x)
    assert report.calls()["first"] == {"fused": 3, "stock": 0, "stock_reasons": {}, "stock_pieces": {}}


def test_a_kernel_for_training_that_is_not_there_costs_inference_nothing(
    published: LoopbackHub, model: Model, x: Tensor
) -> None:
    """What cannot be had at ``train()`` the next provider serves, as at injection; ``strict`` raises there alone."""
    config = {"rms_norm": {"inference": "org/norms", "training": "org/gone"}}
    report = inject_optimized_kernels(model, config=config)
    model.train()
    with pytest.warns(UserWarning, match="org/gone.* the next provider serves on cpu in training"):
        model(x)
    model.eval()
    model(x)
    (site,) = (site for site in report.patched if site.path == "first")
    assert "org/gone" in site.reason and not report.failed
    kernels_of = {(proof.provider, proof.passed) for proof in site.measurements if "/" in proof.provider}
    assert kernels_of == {("org/norms", True), ("org/gone", False)}
    assert report.calls()["first"] == {"fused": 2, "stock": 0, "stock_reasons": {}, "stock_pieces": {}}
    report.restore()
    inject_optimized_kernels(model, config=config, strict=True)
    model.train()
    with pytest.raises(StrictModeError, match="org/gone"), pytest.warns(UserWarning):
        model(x)
    model.eval()
    model(x)


def test_a_provider_that_fails_in_training_is_kept_from_training_alone() -> None:
    norm, x = nn.RMSNorm(16).eval(), torch.randn(3, 16)
    report = inject_optimized_kernels(norm, config={"rms_norm": {"inference": "eager", "training": "triton"}})
    norm.train()
    with pytest.warns(UserWarning, match="triton: .* it runs stock on cpu in training"):
        norm(x)
    norm.eval()
    norm(x)
    norm.train()
    norm(x)
    (reason,) = report.calls()[""]["stock_reasons"]
    assert (report.calls()[""]["fused"], report.calls()[""]["stock"]) == (1, 2) and "triton" in reason
    assert not report.failed and "triton" in report.patched[0].reason


def test_a_gated_unit_of_two_layers_is_not_said_to_be_served_by_a_kernel_for_halves(hub: LoopbackHub) -> None:
    """Values and gates of Llama come from two layers, those of Phi 3 from one."""
    build = pytest.importorskip("tests.transformers.models", exc_type=ImportError).build
    hub.repository("org/act").commit(kernel("", kernels.ACTIVATION), "v1")
    for name, packed in (("phi3", True), ("llama", False)):
        report = inject_optimized_kernels(build(name), config={"glu": "org/act"})
        sites = [site for site in report.patched if site.op == "glu"]
        assert sites and {site.provider == "org/act" for site in sites} == {packed}
        assert {"halves of one packed tensor" in site.reason for site in sites} == {not packed}


def test_an_explicit_mode_wins_over_the_training_flag(published: LoopbackHub, model: Model) -> None:
    rules = {"rms_norm": {Mode.INFERENCE: "org/norms", Mode.TRAINING: "eager"}}
    report = plan(model.eval(), config=KernelConfig(rules, mode=Mode.TRAINING))
    assert providers(report)["first"] == "eager"


def test_a_layer_without_a_backward_gives_way_where_gradients_are_wanted(hub: LoopbackHub, x: Tensor) -> None:
    layers = kernels.LIGER_LAYERS.replace("can_torch_compile = True", "has_backward = False")
    hub.repository("org/layers").commit(kernel("", layers), "v1")
    model = Model().eval()
    twin = copy.deepcopy(model)
    report = inject_optimized_kernels(model, config={"Gated": "org/layers:LigerSwiGLUMLP"})
    with torch.no_grad():
        model(x)
    for one in (model, twin):
        one(x).sum().backward()
    assert report.calls()["mlp"]["stock_reasons"] == {"LigerSwiGLUMLP has no backward": 1}
    torch.testing.assert_close(model.mlp.down_proj.weight.grad, twin.mlp.down_proj.weight.grad)


@pytest.mark.parametrize("compiles", [True, False])
def test_hashed_module_names_under_compile(hub: LoopbackHub, x: Tensor, compiles: bool) -> None:
    layers = kernels.LIGER_LAYERS.replace("can_torch_compile = True", f"can_torch_compile = {compiles}")
    layers = layers.replace("F.silu(self.gate_proj(x))", "torch.ops.aten.silu.default(self.gate_proj(x))")
    hub.repository("org/layers").commit(kernel("", layers), "v1")
    hub.repository("org/norms").commit(kernel(kernels.RMSNORM), "v1")
    model = Model().eval()
    expected = model(x)
    report = inject_optimized_kernels(model, config={"Gated": "org/layers:LigerSwiGLUMLP", "rms_norm": "org/norms"})
    assert {"org/layers:LigerSwiGLUMLP", "org/norms"} <= {site.provider for site in report.patched}
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    with torch.no_grad():
        compiled_model = torch.compile(model, fullgraph=True, backend=keep)
        torch.testing.assert_close(compiled_model(x), expected)
        torch.testing.assert_close(compiled_model(x[:1]), expected[:1])  # another shape
    assert all("rms_norm_by_org_norms" in graph for graph in graphs)
    assert all(("aten.silu" in graph) == compiles for graph in graphs)  # else the stock forward is in the graph
    torch._dynamo.reset()


# --- when it goes wrong --------------------------------------------------------------------------------------


def test_a_kernel_that_is_not_there_gives_a_reason_and_the_next_provider(
    hub: LoopbackHub, model: Model, x: Tensor
) -> None:
    hub.organisations["org"] = True
    with pytest.warns(UserWarning, match=r"org/nothing at .* answered 404"):
        report = inject_optimized_kernels(model, config={"rms_norm": "org/nothing"})
    (site,) = (site for site in report.patched if site.path == "first")
    assert site.provider != "org/nothing" and "org/nothing: org/nothing at http://127" in site.reason
    model(x)
    with pytest.raises(InjectionError, match=r"strict injection refused.*org/nothing at http://127"):
        inject_optimized_kernels(Model(), config={"rms_norm": "org/nothing"}, strict=True)


@pytest.mark.parametrize("fault", [401, 404, 500, "no variant", "no function", "untrusted", "wrong"])
def test_whatever_is_wrong_the_model_runs_and_the_report_says_it(
    hub: LoopbackHub, model: Model, x: Tensor, fault: Any
) -> None:
    said = {
        "no variant": "torch-metal: backend", "no function": "no rms_norm that diffkern knows",
        "untrusted": "trust_remote_code", "wrong": "error",
    }.get(fault, str(fault))  # fmt: skip
    variants = ("torch-metal",) if fault == "no variant" else ("torch-cpu",)
    source = {"no function": "VALUE = 1\n", "wrong": kernels.RMSNORM.replace("+ eps", "+ 0.1")}.get(
        fault, kernels.RMSNORM
    )
    hub.repository("org/norms", trusted=fault != "untrusted").commit(kernel(source, variants=variants), "v1")
    if isinstance(fault, int):
        hub.faults.append(Fault("/refs", fault))
    expected = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = inject_optimized_kernels(model, config={"rms_norm": "org/norms"})
    (site,) = (site for site in report.patched if site.path == "first")
    assert site.provider in ("compiled", "eager") and said in site.reason
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(InjectionError, match="strict"):
        inject_optimized_kernels(Model(), config={"rms_norm": "org/norms"}, strict=True)


def test_offline_with_an_empty_cache_warns_once_and_asks_nobody(
    published: LoopbackHub, offline: Callable[[], None], model: Model, x: Tensor
) -> None:
    offline()
    expected = model(x)
    with pytest.warns(UserWarning) as caught:
        report = inject_optimized_kernels(model, config={"rms_norm": "org/norms"})
    assert [str(w.message) for w in caught if "diffkern" in str(w.message) and "org/norms" in str(w.message)] == [
        str(caught[0].message)
    ]
    assert published.requests == []
    torch.testing.assert_close(model(x), expected)
    assert "offline" in report.patched[0].reason


def test_offline_with_a_filled_cache_it_serves(
    published: LoopbackHub, offline: Callable[[], None], model: Model
) -> None:
    inject_optimized_kernels(model, config={"rms_norm": "org/norms"}).restore()
    asked = len(published.requests)
    offline()
    report = inject_optimized_kernels(model, config={"rms_norm": "org/norms"})
    assert providers(report)["first"] == "org/norms"
    assert len(published.requests) == asked


def test_a_new_injection_tries_again(hub: LoopbackHub, model: Model) -> None:
    hub.organisations["org"] = True
    with pytest.warns(UserWarning, match="404"):
        inject_optimized_kernels(model, config={"rms_norm": "org/norms"}).restore()
    hub.repository("org/norms").commit(kernel(kernels.RMSNORM), "v1")
    report = inject_optimized_kernels(model, config={"rms_norm": "org/norms"})
    assert providers(report)["first"] == "org/norms"


def test_trust_and_lock_of_the_configuration_are_used(hub: LoopbackHub, model: Model, tmp_path: Any) -> None:
    hub.repository("stranger/norms", trusted=False).commit(kernel(kernels.RMSNORM), "v1")
    config = KernelConfig({"rms_norm": "stranger/norms"}, trust_remote_code=["stranger/norms"])
    report = inject_optimized_kernels(model, config=config)
    assert providers(report)["first"] == "stranger/norms"
    report.restore()
    with pytest.warns(UserWarning, match="trust_remote_code"):
        inject_optimized_kernels(model, config={"rms_norm": "stranger/norms"}).restore()
    with pytest.warns(UserWarning, match=r"missing\.lock is not there"):
        inject_optimized_kernels(model, config=KernelConfig(config.rules, lock=str(tmp_path / "missing.lock")))


# --- hub="auto" ----------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A platform without compiled kernels; Triton does not serve the CPU anyway."""
    monkeypatch.setattr(compiled.PROVIDER, "unavailable_reason", lambda device: "not on this platform", raising=False)
    registry.reset()
    yield
    registry.reset()


def test_auto_serves_where_nothing_else_does(hub: LoopbackHub, nothing_else: Any, model: Model, x: Tensor) -> None:
    hub.repository("kernels-community/rmsnorm").commit(kernel(kernels.RMSNORM), "v1")
    expected = model(x)
    report = inject_optimized_kernels(model, config=KernelConfig(hub="auto"))
    served = providers(report)
    assert served == {"first": "kernels-community/rmsnorm@v1", "second": "kernels-community/rmsnorm@v1"}
    assert any("kernels-community/rmsnorm@v1 at " in note for note in report.notes)
    torch.testing.assert_close(model(x), expected)


def test_auto_asks_for_nothing_where_another_provider_serves(hub: LoopbackHub, model: Model) -> None:
    if compiled.PROVIDER.unavailable_reason(torch.device("cpu")) is not None:
        pytest.skip("no compiled kernels on this machine")
    inject_optimized_kernels(model, config=KernelConfig(hub="auto"))
    assert hub.requests == []


def test_nothing_is_downloaded_unless_the_user_says_so(hub: LoopbackHub, nothing_else: Any, model: Model) -> None:
    hub.repository("kernels-community/rmsnorm").commit(kernel(kernels.RMSNORM), "v1")
    for config in (None, {"rms_norm": "auto"}, {"*": "eager"}, KernelConfig(hub="off")):
        inject_optimized_kernels(model, config=config).restore()
    assert hub.requests == []


def test_what_auto_takes_is_measured_too(hub: LoopbackHub, nothing_else: Any, model: Model, x: Tensor) -> None:
    wrong = kernels.RMSNORM.replace("+ eps", "+ 0.1")
    hub.repository("kernels-community/rmsnorm").commit(kernel(wrong), "v1")
    expected = model(x)
    report = inject_optimized_kernels(model, config=KernelConfig(hub="auto"))
    (site,) = (site for site in report.skipped if site.path == "first")
    assert "error" in site.reason
    torch.testing.assert_close(model(x), expected)


def test_the_environment_switches_auto_off(
    hub: LoopbackHub, nothing_else: Any, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFKERN_HUB", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = inject_optimized_kernels(model, config=KernelConfig({"norm": "org/x"}, hub="auto"))
        auto = inject_optimized_kernels(model, config=KernelConfig(hub="auto"))
    for report in (named, auto):
        assert providers(report) == {}
        assert any("switched off by DIFFKERN_HUB=0" in site.reason for site in report.skipped)
    assert hub.requests == []


# --- whatever the kernels package is ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replacement", "said"),
    [
        ("sys.modules['kernels'] = None", "install 'kernels>=0.17'"),
        (
            "import kernels; kernels.get_local_kernel = lambda path: 1 / 0",
            "unexpected keyword argument",
        ),
        ("import kernels; kernels.LayerRepository.__init__ = lambda *a, **k: 1 / 0", None),
    ],
    ids=["absent", "another signature", "a repository class that raises"],
)
def test_the_kernels_package_fails_at_first_use_and_is_told_of_once(
    hub: LoopbackHub, process: Any, tmp_path: Any, replacement: str, said: str | None
) -> None:
    from tests.hub.conftest import result

    write(tmp_path / "kernel", kernel(kernels.RMSNORM))
    code = f"""
import sys, warnings, torch
{replacement}
import diffkern
model = torch.nn.Sequential(*(torch.nn.RMSNorm(64, eps=1e-6) for _ in range(3)))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    report = diffkern.inject_optimized_kernels(model, config={{"rms_norm": "./kernel"}})
said = [str(w.message) for w in caught if "diffkern" in str(w.message)]
x = torch.randn(3, 64)
torch.testing.assert_close(model[0](x), torch.nn.functional.rms_norm(x, (64,), eps=1e-6))
print(len(said), len(report.patched), report.patched[0].provider, report.patched[0].reason)
"""
    out = result(process(code))
    if said is None:
        assert out.startswith("0 3 ./kernel")
    else:
        assert out.startswith("1 3 ") and said in out and "./kernel" not in out.split()[2]
