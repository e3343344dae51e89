"""Linear layers of attention that compute where the rows of all streams lie, so that nothing is copied behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.transformers import transformer_flux
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from diffkern.rewrite import rooms
from diffkern.rewrite.rooms import JoinSite, StreamSite
from tests.rewrite.test_heads import arguments, attention, rewritten, run
from tests.rewrite.test_processors import arguments as arguments_of_flux
from tests.rewrite.test_processors import attention as attention_of_flux
from tests.rewrite.test_processors import joint_attention, wan_attention

LINEAR = "linear of a stream"


@pytest.fixture(autouse=True)
def _pays_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "LEAST_ROWS", 4)
    rooms._made.clear()


def sample(given: dict[str, Any], batch: int) -> dict[str, Any]:
    """The first samples of a batch; tables are those of all."""
    return {name: x[:batch] if isinstance(x, Tensor) and x.ndim == 3 else x for name, x in given.items()}


def results(module: nn.Module, given: dict[str, Any]) -> list[Tensor]:
    found = run(module, given)
    return list(found) if isinstance(found, (tuple, list)) else [found]


def launches(module: nn.Module, given: dict[str, Any]) -> list[str]:
    """What one call launches. A mode that counted it would be given no memory with room."""
    with torch.no_grad(), torch.profiler.profile() as seen:
        module(**given)
    return [event.name for event in seen.events()]


def assert_close(some: list[Tensor], others: list[Tensor], tolerance: float = 1e-5) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["sd3", "qwen", "hunyuan"])
def test_values_are_computed_where_their_concatenation_would_copy_them(kind: str, batch: int) -> None:
    module, given = joint_attention(kind)
    given = sample(given, batch)
    stock = results(module, given)
    rewritten(module)
    for _ in range(3):
        assert_close(results(module, given), stock)
    assert "aten::cat" not in launches(module, given) and not rooms._made


@pytest.mark.parametrize("batch", [1, 2])
def test_values_of_a_layer_that_a_helper_calls_are_computed_where_they_are_joined(batch: int) -> None:
    module, given = attention_of_flux(torch.float32), sample(arguments_of_flux(torch.float32), batch)
    stock = results(module, given)
    found = rewritten(module)
    for _ in range(3):
        assert_close(results(module, given), stock)
    assert "aten::cat" not in launches(module, given) and not rooms._made
    (site,) = [site for site in found.sites if isinstance(site, StreamSite)]
    assert site.rows_around == (given["encoder_hidden_states"].shape[1], 0) and site.fused_calls == 4
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert_close(list(compiled(**given)), stock)


def test_projections_that_are_fused_later_are_those_of_the_module() -> None:
    module, given = attention_of_flux(torch.float32), arguments_of_flux(torch.float32)
    stock = results(module, given)
    rewritten(module)
    results(module, given)
    module.fuse_projections()
    for one in (module.to_qkv, module.to_added_qkv):
        one.weight.data.mul_(2)
    fused = results(module, given)
    assert not torch.equal(fused[0], stock[0])
    other = attention_of_flux(torch.float32)
    other.load_state_dict({name: x for name, x in module.state_dict().items() if "qkv" not in name})
    other.fuse_projections()
    for one in (other.to_qkv, other.to_added_qkv):
        one.weight.data.mul_(2)
    assert_close(fused, results(other, given))


@pytest.mark.parametrize("name", ["_get_qkv_projections", "_get_projections"])
def test_a_helper_that_is_replaced_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = attention_of_flux(torch.float32), arguments_of_flux(torch.float32)
    rewritten(module)
    for _ in range(2):
        results(module, given)
    helper = getattr(transformer_flux, name)
    monkeypatch.setattr(transformer_flux, name, lambda *args: tuple([2 * x for x in helper(*args)]))
    assert_close(results(module, given), results(attention_of_flux(torch.float32), given))


def test_a_helper_whose_results_are_not_joined_stays_a_call() -> None:
    module, _ = wan_attention()
    assert "_get_qkv_projections(" in rewritten(module).source()


def test_queries_keys_and_values_of_two_samples_take_one_copy_of_the_text_each() -> None:
    module, given = attention(), arguments()
    stock = run(module, given)
    found = rewritten(module)
    for _ in range(2):
        assert_close(run(module, given), stock, 2e-2)
    names = launches(module, given)
    assert "aten::cat" not in names
    joining = [site for site in found.sites if isinstance(site, StreamSite) and site.plan.options["joins"]]
    rooms_of = {site.plan.modules["linear"]: site.rows_around for site in joining}
    text = given["encoder_hidden_states"].shape[1]
    assert rooms_of == {(f"to_{x}",): (0, text) for x in "qkv"} | {(f"add_{x}_proj",): None for x in "qkv"}


def test_a_text_of_another_length_gets_other_room() -> None:
    module, given = joint_attention("sd3")
    texts = [given["encoder_hidden_states"], torch.randn(2, 9, 32), torch.randn(2, 2, 32)]
    calls = [{**given, "encoder_hidden_states": text} for text in texts]
    stock = [results(module, call) for call in calls]
    rewritten(module)
    for number in (0, 0, 1, 1, 0, 2, 1, 1, 2, 2, 0):
        assert_close(results(module, calls[number]), stock[number])


def test_a_text_that_is_longer_than_the_image_is_copied_as_in_stock() -> None:
    module, given = joint_attention("sd3")
    given = {**given, "encoder_hidden_states": torch.randn(2, 40, 32)}
    stock = results(module, given)
    rewritten(module)
    for _ in range(3):
        assert_close(results(module, given), stock)


def test_whichever_stream_is_the_longest_now_has_room_for_the_others() -> None:
    module, given = joint_attention("sd3")
    longer = {**given, "encoder_hidden_states": torch.randn(2, 40, 32)}
    stock = [results(module, call) for call in (given, longer)]
    rewritten(module)
    for number in (0, 0, 1, 1, 1, 1, 0, 0, 0, 0):
        assert_close(results(module, (given, longer)[number]), stock[number])
        seen = launches(module, (given, longer)[number])
    assert "aten::cat" not in seen


def test_a_hook_on_a_layer_sees_its_calls_and_changes_its_result() -> None:
    module, given = joint_attention("sd3")
    rewritten(module)
    for _ in range(2):
        results(module, given)
    seen: list[Tensor] = []

    def hook(_: nn.Module, __: Any, y: Tensor) -> Tensor:
        seen.append(y)
        return 2 * y

    stock, _ = joint_attention("sd3")
    for one in (module, stock):
        one.to_v.register_forward_hook(hook)  # type: ignore[union-attr, operator]
    assert_close(results(module, given), results(stock, given))
    assert len(seen) == 2


class KeepsValues(JointAttnProcessor2_0):
    """Keeps what its layer of values computed, as caches do."""

    kept: Any = None

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, **_: Any) -> Any:
        value = attn.to_v(hidden_states)
        self.kept = value
        text = attn.add_v_proj(encoder_hidden_states)
        joined = torch.cat([value, text], dim=1)
        return joined * 2


def test_a_result_that_something_else_keeps_shares_its_memory_with_nobody() -> None:
    module, given = attention(), arguments()
    module.set_processor(KeepsValues())
    stock = run(module, given)
    found = rewritten(module)
    joining = [site.plan.modules["linear"] for site in found.sites if site.plan.rule.name == LINEAR]
    assert joining == [("add_v_proj",)]
    for _ in range(3):
        assert all(map(torch.equal, run(module, given), stock))


def test_memory_of_others_is_never_written() -> None:
    """It may look like that of a result with room: what tells them apart is the storage itself."""
    module, _ = joint_attention("sd3")
    found = rewritten(module)
    site = next(site for site in found.sites if isinstance(site, StreamSite))
    site.rows_around = (0, 5)
    made = torch.zeros(2, 17, 32)[:, :12]
    rooms._remember(site, made, (0, 5))
    del made
    for _ in range(100):  # one of these lies at the same address
        others = torch.zeros(2, 17, 32)
        assert rooms._join([others[:, :12], torch.ones(2, 5, 32)], 1) is None
        assert not others.any()
        del others


def test_results_that_were_never_concatenated_are_freed() -> None:
    module, given = joint_attention("sd3")
    found = rewritten(module)
    for _ in range(2):
        results(module, given)
    made: list[StorageWeakRef] = []
    remember = rooms._remember

    def watched(site: StreamSite, y: Tensor, room: tuple[int, int]) -> None:
        made.append(StorageWeakRef(y.untyped_storage()))
        remember(site, y, room)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "_remember", watched)
        patch.setattr(rooms, "_join", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(module, given)
    assert made and all(one.expired() for one in made)
    assert isinstance(found.sites[0].fused_calls, int)


def test_a_result_that_waits_for_its_concatenation_is_not_forgotten_for_those_that_are_gone() -> None:
    module, _ = joint_attention("sd3")
    site = next(site for site in rewritten(module).sites if isinstance(site, StreamSite))
    memory = torch.zeros(1, 17, 8)
    rooms._remember(site, memory[:, :12], (0, 5))
    for _ in range(3 * rooms._MOST_MADE):
        rooms._remember(site, torch.zeros(1, 12, 8), (0, 0))
    assert len(rooms._made) <= rooms._MOST_MADE
    whole = rooms._join([memory[:, :12], torch.ones(1, 5, 8)], 1)
    assert whole is not None and whole.data_ptr() == memory.data_ptr() and (memory[:, 12:] == 1).all()
    kept = [torch.zeros(1, 12, 8) for _ in range(3 * rooms._MOST_MADE)]
    for one in kept:
        rooms._remember(site, one, (0, 0))
    assert len(rooms._made) <= rooms._MOST_MADE


@pytest.mark.parametrize("other", ["dtype", "shape", "a view with its rows apart", "layout"])
def test_streams_that_do_not_fit_together_are_left_to_torch(other: str) -> None:
    module, _ = joint_attention("sd3")
    site = next(site for site in rewritten(module).sites if isinstance(site, StreamSite))
    memory = torch.zeros(1, 17, 8)
    y, text = memory[:, :12], torch.ones(1, 5, 8)
    rooms._remember(site, y, (0, 5))
    if other == "dtype":
        text = text.double()
    elif other == "shape":
        text = text[..., :4]
    elif other == "layout":
        y = y.flatten(1)[:, None]
    else:
        y = y[:, ::2]
    assert rooms._join([y, text], 1) is None and not memory[:, 12:].any()


def test_gradients_and_compiled_calls_take_the_layer_as_it_is_written() -> None:
    module, given = joint_attention("sd3")
    rewritten(module)
    for _ in range(2):
        results(module, given)
    stock, _ = joint_attention("sd3")
    both = []
    for one in (module, stock):
        x = given["hidden_states"].clone().requires_grad_()
        one(**{**given, "hidden_states": x})[0].sum().backward()
        both.append(x.grad)
    assert_close([both[0]], [both[1]], 1e-4)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert_close(list(compiled(**given)), results(stock, given))


class Tenfold(Tensor):
    """A weight of which a linear layer computes ten times as much, as one of a quantiser has a product of its own."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.as_subclass(Tensor) if isinstance(arg, cls) else arg for arg in args]
        y = function(*plain, **(kwargs or {}))
        return 10 * y if function is nn.functional.linear else y


def test_a_tensor_that_hides_a_parameter_of_a_layer_is_what_is_computed_with() -> None:
    (module, given), (stock, _) = joint_attention("sd3"), joint_attention("sd3")
    rewritten(module)
    results(module, given)
    for one in (module, stock):
        one.to_v.__dict__["weight"] = one.to_v._parameters["weight"].detach().as_subclass(Tenfold)  # type: ignore[union-attr]
    for _ in range(2):
        assert_close(results(module, given), results(stock, given))


def test_before_a_backward_streams_are_concatenated_as_they_are_written_and_that_is_said() -> None:
    module, given = joint_attention("sd3")
    (site,) = [site for site in rewritten(module).sites if isinstance(site, JoinSite)]
    reasons: list[str] = []
    site.observer = lambda _, reason: reasons.append(reason)
    results(module, given)
    fused = site.fused_calls
    module(**{**given, "hidden_states": given["hidden_states"].clone().requires_grad_()})[0].sum().backward()
    assert site.fused_calls == fused > 0 and reasons[-1].startswith(f"{site}: gradients are wanted")


@pytest.mark.gpu
def test_on_a_gpu_a_batch_takes_no_product_without_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    module, given = attention("cuda", 4, 64), arguments("cuda", 256, 1024)
    stock = run(module, given)
    rewritten(module)
    for _ in range(3):
        assert_close(run(module, given), stock, 2e-2)
    names = launches(module, given)
    assert "aten::cat" not in names and "aten::bmm" not in names


def test_a_layer_of_few_rows_of_several_samples_adds_its_bias_in_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "LEAST_ROWS", 512)
    module, given = attention(), arguments()
    stock = run(module, given)
    rewritten(module)
    for _ in range(2):
        assert_close(results(module, given), [*stock], 2e-2)
    assert "aten::bmm" not in launches(module, given)


def test_what_a_call_that_raised_left_behind_is_asked_about_by_no_transform() -> None:
    module, given = joint_attention("sd3")
    rewritten(module)
    for _ in range(2):
        results(module, given)
    with pytest.raises(RuntimeError), torch.no_grad():  # between a stream and its concatenation
        module(**{**given, "encoder_hidden_states": torch.randn(2, 5, 7)})
    image, text = given["hidden_states"], given["encoder_hidden_states"]
    with torch.no_grad():
        each = torch.func.vmap(lambda x, y: module(x[None], y[None])[0][0])(image, text)
        torch.testing.assert_close(each, module(image, text)[0], rtol=1e-5, atol=1e-5)
