"""What of a pipeline is touched: plain, modular and partly loaded pipelines, by default and by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from diffusers import AutoencoderKL, DiTPipeline, FluxTransformer2DModel
from diffusers.modular_pipelines import FluxAutoBlocks
from torch import nn

from diffkern import KernelConfig, inject_optimized_kernels, plan, restore
from diffkern.injection.rewrite_fusion import RewriteFusion
from tests.pipelines.tiny import build, models

#: What each pipeline has besides safety checkers and the like: everything is touched by default.
EXPECTED = {
    "ltx": {"transformer", "vae", "text_encoder"},
    "flux": {"transformer", "vae", "text_encoder", "text_encoder_2"},
    "sdxl": {"unet", "vae", "text_encoder", "text_encoder_2"},
    "dit": {"transformer", "vae"},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_default_components(name: str) -> None:
    pipe, _ = build(name)
    assert set(models(pipe)) == EXPECTED[name]
    report = plan(pipe)
    assert {site.path.partition(".")[0] for site in (*report.patched, *report.skipped)} == EXPECTED[name]
    assert not report.notes


def test_components_by_name_and_the_note_about_the_rest() -> None:
    pipe, _ = build("ltx")
    report = inject_optimized_kernels(pipe, components=["transformer"])
    assert {site.path.partition(".")[0] for site in report.patched} == {"transformer"}
    assert any("'vae': not asked for" in note for note in report.notes)
    assert restore(pipe) == len(report.patched)
    with pytest.raises(ValueError, match="did you mean 'transformer'"):
        inject_optimized_kernels(pipe, components=["transfomer"])


@pytest.mark.parametrize("cuda_graph", ["auto", False])
def test_the_host_counts_in_components_that_become_no_graph(cuda_graph: str | bool) -> None:
    pipe, _ = build("flux")
    report = inject_optimized_kernels(pipe, config=KernelConfig(measure=True), cuda_graph=cuda_graph)
    counts: dict[str, set[bool | None]] = {}
    for site in report._accepted:
        fusion = getattr(site._state, "fusion", None)
        replayed = fusion.rewriters.replayed if isinstance(fusion, RewriteFusion) else getattr(fusion, "replayed", None)
        if replayed is not None:
            counts.setdefault(site.path.partition(".")[0], set()).add(replayed)
    graph = cuda_graph == "auto"
    assert counts == {"transformer": {graph}, "text_encoder": {False}, "text_encoder_2": {False}, "vae": {False}}


def test_an_empty_list_of_components_is_refused() -> None:
    pipe, _ = build("dit")
    for call in (inject_optimized_kernels, plan):
        with pytest.raises(ValueError, match=r"components=\[\] names nothing to work on: name some of trans"):
            call(pipe, components=[])
    with pytest.raises(ValueError, match="leave components out"):
        inject_optimized_kernels(pipe.transformer, components=[])
    pipe.components.clear()
    assert restore(pipe) == 0


def test_a_modular_pipeline_that_is_partly_loaded() -> None:
    pipe = FluxAutoBlocks().init_pipeline()
    pipe.update_components(
        transformer=FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
        )
    )  # fmt: skip
    report = inject_optimized_kernels(pipe)
    assert len(report.patched) == 22 and all(site.path.startswith("transformer.") for site in report.patched)
    assert restore(pipe) == 22


def test_a_module_shared_by_two_components_is_patched_once() -> None:
    pipe, _ = build("sdxl")
    pipe.text_encoder_2 = pipe.text_encoder
    pipe.register_modules(text_encoder_2=pipe.text_encoder)
    report = inject_optimized_kernels(pipe, components=["text_encoder", "text_encoder_2"])
    paths = [site.path for site in report.patched]
    assert paths and all(path.startswith("text_encoder.") for path in paths)
    assert restore(pipe) == len(paths)


def test_pipelines_that_share_a_text_encoder() -> None:
    first, _ = build("ltx")
    second, _ = build("ltx", seed=1)
    second.register_modules(text_encoder=first.text_encoder)
    report = inject_optimized_kernels(first, components=["transformer"])
    assert not any("_diffkern" in vars(module) for module in second.transformer.modules())
    again = inject_optimized_kernels(second)
    assert report.restore() == len(report.patched)
    assert restore(second) == len(again.patched)
    assert not any(
        "_diffkern" in vars(m) for pipe in (first, second) for part in models(pipe).values() for m in part.modules()
    )


def test_a_pipeline_without_the_default_names_needs_them() -> None:
    class Odd(DiTPipeline):
        @property
        def components(self) -> dict[str, object]:
            return {"safety_checker": nn.Sequential(nn.LayerNorm(8)), "vae": AutoencoderKL(norm_num_groups=1)}

    report = plan(Odd.__new__(Odd))
    assert report.notes == [
        "component 'safety_checker': not touched by default: pass components=['safety_checker', ...]"
    ]
    assert report.patched and all(site.path.startswith("vae.") for site in (*report.patched, *report.skipped))


def test_a_model_of_transformers() -> None:
    from transformers import LlamaConfig, LlamaModel

    model = LlamaModel(
        LlamaConfig(hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, vocab_size=50)
    ).eval()
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        stock = model(tokens).last_hidden_state
        report = inject_optimized_kernels(model)
        assert Counter(site.op for site in report.patched) == {
            "rms_norm": 5,
            "gate_residual_norm_modulate": 2,
            "glu": 2,
            "rope": 2,
        }
        torch.testing.assert_close(model(tokens).last_hidden_state, stock, rtol=1e-4, atol=1e-4)
        report.restore()
        assert torch.equal(model(tokens).last_hidden_state, stock)


def test_a_plan_on_meta_looks_at_tensors_in_proportion_to_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    parameters = nn.Module.parameters

    def counted(self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in parameters(self, recurse):
            seen.append(parameter.shape)
            yield parameter

    def count(layers: int) -> int:
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8)) for _ in range(layers)])
        seen.clear()
        assert len(plan(model).patched) == 2 * layers
        return len(seen)

    monkeypatch.setattr(nn.Module, "parameters", counted)
    few, many = count(4), count(16)
    assert many <= 4.5 * few, "16 times as many would be those of the whole model for each of its modules"
