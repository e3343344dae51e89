"""A call of a denoiser, in which its blocks share masks and tables, with graphs or without."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from diffkern import inject_optimized_kernels, restore
from diffkern.cache import in_call
from diffkern.injection.graph_fusion import GraphFusion
from diffkern.injection.patching import patches
from diffkern.injection.twin_fusion import ModelCall
from scripts.check_models.denoisers import DENOISERS
from scripts.check_models.rewritten import batch_of_two, run


class Seen(nn.Module):
    """Notes the call of the model that it is in, and hands on."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.calls = block, []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(in_call.current_call())
        return self.block(*args, **kwargs)


def seen_in(model: Any, blocks: str) -> Seen:
    """Puts a block of the model into a module that notes."""
    layers = model.get_submodule(blocks)
    layers[0] = Seen(layers[0])
    return layers[0]  # type: ignore[no-any-return]


def calls_of(model: Any, name: str, seen: Seen, times: int = 2) -> list[Tensor]:
    given = batch_of_two(DENOISERS[name], torch.float32)
    found = [run(model, given) for _ in range(times)]
    assert len(seen.calls) == times and in_call.current_call() is None
    return found


def test_a_model_that_is_patched_itself_or_not_says_what_a_call_of_it_is() -> None:
    for name, blocks, own in (
        ("hunyuan_video", "transformer_blocks", True),
        ("wan", "blocks", False),
        ("flux", "transformer_blocks", True),
    ):
        model = DENOISERS[name].build().requires_grad_(False)
        seen = seen_in(model, blocks)
        stock = calls_of(model, name, seen)[0]
        assert seen.calls == [None, None]
        seen.calls.clear()
        report = inject_optimized_kernels(model, cuda_graph=False)
        assert own == (type(next(patches(model)).fusion) is ModelCall)
        for result in calls_of(model, name, seen):
            torch.testing.assert_close(result, stock, rtol=1e-4, atol=1e-5)
        first, second = seen.calls
        assert first is not None and second is not None and first is not second
        assert not [site for site in report.patched if site.op == "model_call"]
        seen.calls.clear()
        restore(model)
        assert torch.equal(calls_of(model, name, seen)[0], stock) and seen.calls == [None, None]
        assert "forward" not in model.__dict__


def test_a_graph_over_such_a_model_and_gradients_see_one_call_too() -> None:
    model = DENOISERS["flux"].build().requires_grad_(False)
    seen = seen_in(model, "transformer_blocks")
    given = batch_of_two(DENOISERS["flux"], torch.float32)
    stock = run(model, given)
    inject_optimized_kernels(model, cuda_graph=False)
    inject_optimized_kernels(model, cuda_graph=True)
    assert [type(state.fusion) for state in patches(model)] == [GraphFusion, ModelCall]
    seen.calls.clear()
    torch.testing.assert_close(calls_of(model, "flux", seen, 1)[0], stock, rtol=1e-4, atol=1e-5)
    given["hidden_states"].requires_grad_()
    model(**given)[0].square().sum().backward()
    assert given["hidden_states"].grad.norm() > 0 and None not in seen.calls


def test_a_copy_of_a_model_that_is_patched_itself_says_what_a_call_of_it_is() -> None:
    model = DENOISERS["wan"].build().requires_grad_(False)
    seen_in(model, "blocks")
    inject_optimized_kernels(model, cuda_graph=False)
    copied = copy.deepcopy(model)
    calls_of(copied, "wan", copied.get_submodule("blocks")[0])
    assert None not in copied.get_submodule("blocks")[0].calls


def test_a_compiled_model_is_traced_without_it() -> None:
    model = DENOISERS["flux"].build().requires_grad_(False)
    given = batch_of_two(DENOISERS["flux"], torch.float32)
    stock = run(model, given)
    inject_optimized_kernels(model, cuda_graph=False)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)(**given)[0]
    torch.testing.assert_close(compiled.flatten().double(), stock, rtol=1e-4, atol=1e-5)
