"""Streams that are halves of one tensor already: what concatenates them copies nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoSingleTransformerBlock
from torch import Tensor, nn

from diffkern import inject_optimized_kernels
from diffkern.rewrite.rewriter import Rewriter, Rewritten
from diffkern.rewrite.rooms import HalvesSite, _whole
from tests.rewrite.test_rooms import launches

HALVES = "concatenation of halves"


def installed(block: nn.Module) -> Rewritten:
    found = Rewriter().rewrite(block)
    assert isinstance(found, Rewritten)
    block.forward = found.function.__get__(block)  # type: ignore[method-assign]
    return found


def flux_block() -> nn.Module:
    torch.manual_seed(0)
    return FluxSingleTransformerBlock(32, 2, 16).eval()


def streams(batch: int = 2) -> tuple[Tensor, Tensor]:
    """A text of 3 tokens and an image of 5, as a block hands them on."""
    both = torch.randn(batch, 8, 32)
    return both[:, :3], both[:, 3:]


def given(text: Tensor, image: Tensor) -> dict[str, Any]:
    return {"hidden_states": image, "encoder_hidden_states": text, "temb": torch.ones(len(text), 32)}


def concatenations(block: nn.Module, text: Tensor, image: Tensor) -> int:
    return launches(block, given(text, image)).count("aten::cat")


@pytest.mark.parametrize("batch", [1, 2])
def test_a_single_stream_block_of_flux_copies_no_stream_that_the_block_before_handed_on(batch: int) -> None:
    stock, block = flux_block(), flux_block()
    installed(block)
    text, image = streams(batch)
    with torch.no_grad():
        block(**given(text, image))
        for one, other in zip(block(**given(text, image)), stock(**given(text, image)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert concatenations(block, text.clone(), image.clone()) == 1  # that of features has room for both
    assert concatenations(block, text, image) == 0
    assert concatenations(stock, text, image) == 2


def test_streams_that_lie_apart_are_counted_as_written_with_the_reason_and_strict_lets_them() -> None:
    block = flux_block()
    report = inject_optimized_kernels(block, strict=True)
    text, image = streams()
    with torch.no_grad():
        block(**given(text.clone(), image.clone()))
        apart = report.calls()[""]
        block(**given(text, image))
        halves = report.calls()[""]
    block(**given(text, image))
    assert (apart["fused"] + 1, apart["stock"]) == (halves["fused"] - apart["fused"], 1) and halves["stock"] == 1
    (first, _), (second, again) = report.calls()[""]["stock_reasons"].items()
    assert first.startswith(HALVES) and first.endswith("its result is not in memory yet")
    assert second.startswith(HALVES) and "a backward" in second and again == 1


def test_no_concatenation_of_tokens_is_left_in_a_single_stream_block_of_hunyuan_video() -> None:
    torch.manual_seed(0)
    block = HunyuanVideoSingleTransformerBlock(2, 16, mlp_ratio=2.0).eval()
    found = installed(block)
    assert [site.plan.rule.name for site in found.sites].count(HALVES) == 2
    image, text = streams()[::-1]
    both = torch.cat([image, text], 1)
    image, text = both[:, :5], both[:, 5:]
    with torch.no_grad():
        block(**given(text, image))
        names = launches(block, given(text, image))
    assert names.count("aten::cat") <= 3  # of the attention, which this rewrites not, and of features


def test_two_parts_are_one_tensor_where_they_lie_so() -> None:
    text, image = streams()
    whole = _whole(text, image, 1)
    assert whole is not None and whole.data_ptr() == text.data_ptr() and whole.is_contiguous()
    assert torch.equal(whole, torch.cat([text, image], 1))
    assert torch.equal(_whole(text, image, -2), whole)  # type: ignore[arg-type]


def test_anything_else_is_copied() -> None:
    text, image = streams()
    other = torch.randn(2, 8, 32)
    wide = torch.randn(2, 8, 64)
    flat = torch.randn(8, 32)
    for a, b, dim in (
        (image, text, 1),
        (text, other[:, 3:], 1),
        (text[:1], image, 1),
        (text, image[:, 1:], 1),
        (text[:, :2], image, 1),
        (text, image.transpose(1, 2), 1),
        (text, image[..., :16], 1),
        (wide[:, :3, :32], wide[:, 3:, :32], 1),  # lies with gaps
        (text, image.to(torch.float64), 1),
        (text, image.view(torch.int32), 1),
        (flat[:3], flat[3:], 0),
        (text, None, 1),
        (text, nn.Parameter(image), 1),
    ):
        assert _whole(a, b, dim) is None


def test_a_result_that_a_backward_reads_is_a_tensor_of_its_own() -> None:
    block, stock = flux_block(), flux_block()
    installed(block)
    found = []
    for one in (block, stock):
        torch.manual_seed(1)
        text, image = streams()
        both = torch.cat([text, image], 1).requires_grad_()
        y = one(**given(both[:, :3], both[:, 3:]))
        (y[0].sum() + (y[1] ** 2).sum()).backward()
        found.append(both.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


class _Block(nn.Module):
    """A block of two streams; what it does to them is the body of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.kept: list[Tensor] = []


class WritesIt(_Block):
    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor) -> Tensor:
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        x += temb[:, None]
        return self.norm(x) * (1 + temb[:, None]) + temb[:, None]


class WritesIntoAViewOfIt(_Block):
    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor) -> Tensor:
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        rows = x.flatten(0, 1)
        rows.mul_(2)
        return self.norm(x) * (1 + temb[:, None]) + temb[:, None]


class WritesAHalf(_Block):
    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor) -> Tensor:
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        hidden_states[:, 0] = 3
        return self.norm(x) * (1 + temb[:, None]) + temb[:, None]


class ReturnsIt(_Block):
    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor) -> Any:
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        return self.norm(x) * (1 + temb[:, None]) + temb[:, None], x[:, 1:]


class KeepsIt(_Block):
    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor) -> Tensor:
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        self.kept.append(x)
        return self.norm(x) * (1 + temb[:, None]) + temb[:, None]


class StoresIt(_Block):
    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor) -> Tensor:
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        self.last = x
        return self.norm(x) * (1 + temb[:, None]) + temb[:, None]


class OnlyReads(_Block):
    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor) -> Tensor:
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        return self.norm(x) * (1 + temb[:, None]) + temb[:, None]


@pytest.mark.parametrize("cls", [WritesIt, WritesIntoAViewOfIt, WritesAHalf, ReturnsIt, KeepsIt, StoresIt])
def test_what_is_written_returned_or_kept_is_a_tensor_of_its_own(cls: type[_Block]) -> None:
    stock, block = cls().eval(), cls().eval()
    found = installed(block)
    assert not any(isinstance(site, HalvesSite) for site in found.sites)
    text, image = streams()
    before = text.clone(), image.clone()
    with torch.no_grad():
        ours = block(**given(text, image))
        after = text.clone(), image.clone()
        text.copy_(before[0]), image.copy_(before[1])
        torch.testing.assert_close(ours, stock(**given(text, image)), rtol=1e-5, atol=1e-5)
    assert torch.equal(after[0], text) and torch.equal(after[1], image)


def test_what_is_only_read_may_have_the_memory_of_its_halves() -> None:
    block = OnlyReads().eval()
    found = installed(block)
    assert [site.plan.rule.name for site in found.sites].count(HALVES) == 1
    text, image = streams()
    with torch.no_grad():
        block(**given(text, image))
    assert concatenations(block, text, image) == 0


def test_a_function_whose_only_find_is_a_concatenation_stays_as_it_is() -> None:
    class Alone(nn.Module):
        def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
            x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
            return x.sum()

    assert isinstance(Rewriter().rewrite(Alone()), str)


@pytest.mark.parametrize("layer", ["norm", "norm.norm", "attn"])
def test_a_hook_that_may_write_into_the_whole_gets_a_tensor_of_its_own(layer: str) -> None:
    block = flux_block()
    installed(block)
    text, image = streams()
    before = text.clone(), image.clone()

    def doubles(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor):
                x.mul_(2)

    block.get_submodule(layer).register_forward_pre_hook(doubles, with_kwargs=True)
    with torch.no_grad():
        for _ in range(2):
            block(**given(text, image))
    assert torch.equal(text, before[0]) and torch.equal(image, before[1])
