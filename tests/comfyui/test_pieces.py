"""The small parts of the node pack: casts, norms, rotary tables, stand-ins. No ComfyUI needed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern.cache import in_call
from diffkern.cache.in_call import one_model_call
from diffkern.cache.rotary import rotary_tables, unfit_matrices
from diffkern.comfyui.kitchen_backend import Samples
from diffkern.comfyui.norms import NORMS, norm_kind, readable, weight_and_bias
from diffkern.comfyui.rewrites import in_training, plain_arithmetic, shell
from diffkern.ops import rope
from diffkern.rewrite.facts import norm_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("norm", [nn.RMSNorm(8), nn.RMSNorm(8, elementwise_affine=False), nn.LayerNorm(8)])
def test_a_norm_that_knows_no_casting_has_plain_weights(norm: Any) -> None:
    weight, bias = weight_and_bias(norm, torch.randn(2, 8))

    assert weight is norm.weight and bias is getattr(norm, "bias", None)
    assert norm_kind(norm) == ("layer" if isinstance(norm, nn.LayerNorm) else "rms")


def test_norms_of_torch_are_read_as_before_once_the_node_pack_is_imported() -> None:
    """Models of other libraries in this process have the sites that they have without it."""
    for norm in (nn.LayerNorm(8), nn.RMSNorm(8)):
        found = norm_of(norm)
        assert found is not None and found[1].reader is None


def test_a_norm_of_another_class_is_no_norm_that_is_known() -> None:
    class Scaled(nn.RMSNorm):
        pass

    assert norm_kind(Scaled(8)) is None and norm_kind(nn.Identity()) is None and norm_kind(None) is None
    assert norm_kind(nn.LayerNorm((2, 8))) is None
    assert set(NORMS.values()) == {"rms", "layer"}


class Unpacking(nn.LayerNorm):
    """As loaders of GGUF files have it: what its weights are is its own matter."""

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_comfy_cast_weights(x)

    def forward_comfy_cast_weights(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight * 2
        return torch.nn.functional.layer_norm(x, self.normalized_shape, weight, self.bias, self.eps)


def test_a_subclass_of_a_known_norm_is_known_where_it_has_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = Unpacking(8, elementwise_affine=False)
    assert norm_kind(norm) == "layer" and norm_kind(Unpacking(8)) is None
    norm.register_forward_hook(lambda *_: None)
    assert norm_kind(norm) is None

    class Other(Unpacking):
        def forward_comfy_cast_weights(self, x: Tensor) -> Tensor:
            return super().forward_comfy_cast_weights(x) * 1.5

    assert norm_kind(Other(8, elementwise_affine=False)) is None
    for forward in (lambda self, x: x, lambda self, x: self.unpacked):
        monkeypatch.setattr(Unpacking, "forward_comfy_cast_weights", forward)
        assert norm_kind(Unpacking(8, elementwise_affine=False)) is None


def test_a_norm_that_is_watched_or_replaced_is_called_as_a_module() -> None:
    watched, replaced = nn.RMSNorm(8), nn.RMSNorm(8)
    watched.register_forward_hook(lambda *_: None)
    replaced.forward = lambda x: x

    assert norm_kind(watched) is None and norm_kind(replaced) is None


def test_weights_elsewhere_or_in_storage_formats_are_not_read() -> None:
    norm = nn.RMSNorm(8)
    norm.weight = nn.Parameter(torch.ones(8).to(torch.float8_e4m3fn), requires_grad=False)
    assert readable(norm, torch.randn(2, 8)) is None
    norm.weight = nn.Parameter(torch.ones(8, device="meta"), requires_grad=False)
    assert readable(norm, torch.randn(2, 8)) is None


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_tables_compute_the_product_with_any_matrix(pairing: str) -> None:
    generator = torch.Generator().manual_seed(1)
    matrices = torch.randn(1, 5, 3, 4, 2, 2, generator=generator)  # no rotations
    x = torch.randn(2, 5, 3, 8, generator=generator)
    pairs = x.unflatten(-1, (4, 2)) if pairing == "interleaved" else x.unflatten(-1, (2, 4)).transpose(-1, -2)
    expected = (matrices.double() @ pairs.double().unsqueeze(-1)).squeeze(-1)
    expected = expected.flatten(-2) if pairing == "interleaved" else expected.transpose(-1, -2).flatten(-2)

    cos, sin = rotary_tables(matrices, pairing)
    torch.testing.assert_close(rope(x, cos, sin, pairing=pairing).double(), expected, rtol=1e-6, atol=1e-6)


def test_tables_are_computed_once_for_a_tensor_and_die_with_it() -> None:
    matrices = Samples(CPU, torch.float32).rotations(1, 5, 1, 4)
    with one_model_call():
        kept = in_call._kept_in_call.get()
        first = rotary_tables(matrices, "interleaved")
        assert rotary_tables(matrices, "interleaved") is first
        assert rotary_tables(matrices.clone(), "interleaved") is not first
        assert rotary_tables(matrices, "half") is not first
        del matrices, first
        gc.collect()
        assert kept == {}


def test_tables_follow_what_is_written_into_the_matrices() -> None:
    matrices = Samples(CPU, torch.float32).rotations(1, 5, 1, 4)
    with one_model_call():
        before = rotary_tables(matrices, "half")[0].clone()
        matrices[:, 1:].mul_(2.0)
        after = rotary_tables(matrices, "half")[0]
        assert torch.equal(after[:, 1:], 2 * before[:, 1:]) and torch.equal(after[:, :1], before[:, :1])
        assert rotary_tables(matrices, "half")[0] is after
    matrices.data.mul_(2.0)  # PyTorch does not count this
    with one_model_call():
        assert torch.equal(rotary_tables(matrices, "half")[0], 2 * after)


def test_tables_of_inference_tensors_are_remembered_during_one_call_of_the_model() -> None:
    with torch.inference_mode():
        matrices = Samples(CPU, torch.float32).rotations(1, 5, 1, 4)
        assert rotary_tables(matrices, "half") is not rotary_tables(matrices, "half")
        with one_model_call():
            first = rotary_tables(matrices, "half")
            assert rotary_tables(matrices, "half") is first
        matrices.mul_(2.0)  # inference tensors do not count this
        with one_model_call():
            assert torch.equal(rotary_tables(matrices, "half")[0], 2 * first[0])


@pytest.mark.parametrize(
    ("matrices", "reason"),
    [
        (None, "plain tensor"),
        (torch.zeros(1, 5, 3, 4, 2), "2x2 matrix"),
        (torch.zeros(1, 6, 3, 4, 2, 2), "those of its tokens"),
        (torch.zeros(1, 5, 3, 4, 2, 2, dtype=torch.float64), "dtype"),
        (torch.zeros(1, 5, 3, 4, 2, 2, device="meta"), "device"),
        (torch.zeros(1, 5, 1, 4, 2, 2), None),
    ],
)
def test_matrices_that_do_not_fit_are_refused_with_a_reason(matrices: Any, reason: str | None) -> None:
    found = unfit_matrices(matrices, CPU, 2, 5, 3)

    assert found is None if reason is None else reason in found


def test_a_copy_to_try_things_on_has_random_weights_and_nothing_that_was_put_on_the_module() -> None:
    norm = nn.LayerNorm(8)
    norm.register_forward_hook(lambda *_: None)
    norm.weight_function, norm.forward = [abs], lambda *_: None
    copy = shell(norm, CPU, torch.bfloat16)

    assert type(copy) is nn.LayerNorm and not {"forward", "weight_function"} & vars(copy).keys()
    assert copy.weight.dtype == torch.bfloat16 and not torch.equal(copy.weight, torch.ones(8).bfloat16())
    assert not copy._forward_hooks and copy(torch.randn(2, 8).bfloat16()).isfinite().all()


def test_without_comfyui_nothing_is_training() -> None:
    assert in_training() is False
    with plain_arithmetic():
        pass


def test_random_samples_do_not_touch_the_generators_of_the_user() -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    x: Tensor = Samples(CPU, torch.float32)(3)

    assert torch.equal(torch.randn(4), expected)
    assert torch.equal(x, Samples(CPU, torch.float32)(3))
