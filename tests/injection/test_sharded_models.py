"""Models whose weights are sharded over ranks compute with kernels what they compute without."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from diffkern import inject_optimized_kernels
from diffkern.bench.measure import relative_error
from tests.injection.models import ltx_inputs, randomise, tiny_ltx
from tests.ranks import NEEDS_RANKS, on_ranks

pytestmark = NEEDS_RANKS


def call(model: nn.Module, inputs: dict[str, object]) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**inputs)[0]
    return result


def halve(model: nn.Module) -> None:
    """Writes into every weight, whole or sharded, as a checkpoint or an optimiser does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@pytest.mark.parametrize("inject_first", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_fsdp2_before_or_after_the_injection(inject_first: bool, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def work() -> None:
        dist.init_process_group("gloo")
        model, twin, inputs = tiny_ltx(), tiny_ltx(), ltx_inputs()
        report = inject_optimized_kernels(model) if inject_first else None
        for part in (*model.transformer_blocks, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
        report = report or inject_optimized_kernels(model)
        for _ in range(2):
            assert relative_error(call(model, inputs), call(twin, inputs)) < 2e-6
        halve(model)
        halve(twin)
        assert relative_error(call(model, inputs), call(twin, inputs)) < 2e-6
        assert report.restore() > 0
        assert torch.equal(call(model, inputs), call(twin, inputs))
        blocks = [counts for path, counts in report.calls().items() if path.startswith("transformer_blocks")]
        assert sum(counts["fused"] for counts in blocks) >= (6 if inject_first else 12)
        dist.destroy_process_group()

    on_ranks(work, 2, tmp_path)


def test_tensor_parallelism_of_diffusers(tmp_path: Path) -> None:
    hooks = pytest.importorskip("diffusers.hooks.tensor_parallel")
    from torch.distributed.device_mesh import init_device_mesh

    def flux() -> FluxTransformer2DModel:
        sizes = {"attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 64}
        sizes |= {"pooled_projection_dim": 64, "axes_dims_rope": (8, 12, 12), "in_channels": 8}
        model = FluxTransformer2DModel(num_layers=1, num_single_layers=1, **sizes)
        return randomise(model).eval().requires_grad_(False)  # type: ignore[return-value]

    def work() -> None:
        dist.init_process_group("gloo")
        generator = torch.Generator().manual_seed(3)
        shapes = {"hidden_states": (1, 6, 8), "encoder_hidden_states": (1, 4, 64), "pooled_projections": (1, 64)}
        inputs = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        inputs["timestep"] = torch.tensor([0.5])
        inputs |= {"img_ids": torch.arange(18.0).view(6, 3), "txt_ids": torch.zeros(4, 3), "return_dict": False}
        model, twin = flux(), flux()
        hooks._SUPPORTED_TP_DEVICES += ("cpu",)  # in this process, which is forked: gloo does what it needs
        mesh = init_device_mesh("cpu", (2,))
        for each in (model, twin):
            hooks.apply_tensor_parallel(each, SimpleNamespace(_mesh=mesh), each._tp_plan)
        report = inject_optimized_kernels(model)
        for _ in range(2):
            assert relative_error(call(model, inputs), call(twin, inputs)) < 2e-6
        assert relative_error(call(twin, inputs), call(flux(), inputs)) < 2e-6
        assert sum(counts["fused"] for counts in report.calls().values()) > 0
        assert report.restore() > 0
        assert torch.equal(call(model, inputs), call(twin, inputs))
        dist.destroy_process_group()

    on_ranks(work, 2, tmp_path)
