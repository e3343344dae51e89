"""The way of a call to its kernel: remembered, left again where it does not fit, and the same in compiled graphs."""

from __future__ import annotations

import ast
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from diffkern import ops
from diffkern.ops import registration
from diffkern.providers import NoProviderError, get_provider, registry, select, use_provider
from diffkern.providers.signatures import SIGNATURES, arguments, schema

Result = Tensor | tuple[Tensor, ...]

CSRC = Path(__file__).parents[2] / "csrc"
D = 32
_GENERATOR = torch.Generator().manual_seed(3)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_GENERATOR)


X, Y, SCALE, SHIFT, WEIGHT = _random(2, 6, D), _random(2, 6, D), _random(2, 1, D), _random(2, 1, D), _random(D)
IMAGE, VIDEO = _random(2, D, 3, 4), _random(2, D, 3, 2, 4)
HEADS, COS, SIN = _random(2, 6, 2, D // 2), _random(6, 1, D // 2), _random(6, 1, D // 2)
AXES = [_random(2, 3), _random(3, 5)]

# what is called: on the tensors of the first argument, which are moved to the device
CALLS: dict[str, Callable[..., Result]] = {
    "rms_norm": lambda t: ops.rms_norm(t(X), t(WEIGHT)),
    "rms_norm with options": lambda t: ops.rms_norm(t(X), t(WEIGHT), eps=1e-3, weight_offset=1.0),
    "rms_norm without a weight": lambda t: ops.rms_norm(t(X)),
    "rms_norm over channels": lambda t: ops.rms_norm(t(IMAGE), t(WEIGHT), dim=1),
    "layer_norm": lambda t: ops.layer_norm(t(X), t(WEIGHT), t(WEIGHT)),
    "layer_norm with a bias alone": lambda t: ops.layer_norm(t(X), None, t(WEIGHT), 1e-6),
    "norm_modulate": lambda t: ops.norm_modulate(t(X), t(SCALE), t(SHIFT)),
    "norm_modulate with a weight": lambda t: ops.norm_modulate(t(X), t(SCALE), t(SHIFT), t(WEIGHT), norm="layer"),
    "gate_residual": lambda t: ops.gate_residual(t(X), t(Y), t(SCALE)),
    "gate_residual of tanh": lambda t: ops.gate_residual(t(X), t(Y), t(SCALE), gate_activation="tanh"),
    "gate_residual_norm_modulate": lambda t: ops.gate_residual_norm_modulate(t(X), t(Y), t(SCALE), t(SCALE), t(SHIFT)),
    "gate_residual_norm_modulate without a gate": lambda t: ops.gate_residual_norm_modulate(
        t(X), t(Y), None, t(SCALE), t(SHIFT), rounding="each"
    ),
    "gelu": lambda t: ops.gelu(t(X), "tanh"),
    "glu": lambda t: ops.geglu(t(X)),
    "group_norm_silu": lambda t: ops.group_norm_silu(t(IMAGE), 4, t(WEIGHT), t(WEIGHT)),
    "channel_glu": lambda t: ops.channel_glu(t(IMAGE), t(WEIGHT)),
    "channel_rms_norm_silu": lambda t: ops.channel_rms_norm_silu(
        t(IMAGE), t(WEIGHT), scale=t(SCALE[:, 0, :, None, None])
    ),
    "add_norm_silu_pad": lambda t: ops.add_norm_silu_pad(t(VIDEO), t(WEIGHT), pad=(1, 0)),
    "linear_attention": lambda t: ops.linear_attention(t(HEADS), t(HEADS), t(HEADS)),
    "linear_gelu": lambda t: ops.linear_gelu(t(X), t(_WIDE), t(_WIDE[:, 0].contiguous())),
    "rope": lambda t: ops.rope(t(HEADS), t(COS), t(SIN)),
    "rope of some tokens": lambda t: ops.rope(t(HEADS), t(COS[:4]), t(SIN[:4]), tokens=(1, 4), seq_dim=-3),
    "rope_3d": lambda t: ops.rope_3d(t(HEADS), *_axes(t), grid=(2, 3)),
    "qk_norm_rope": lambda t: ops.qk_norm_rope(t(HEADS), t(HEADS), None, None, t(COS), t(SIN)),
    "qk_norm_rope across heads": lambda t: ops.qk_norm_rope(
        t(X), t(Y), t(WEIGHT), t(WEIGHT), *_axes(t), 1e-5, grid=(2, 3), across_heads=2
    ),
    "qk_norm_rope without tables": lambda t: ops.qk_norm_rope(t(X), t(Y), t(WEIGHT), None, across_heads=2),
}
_WIDE = _random(8, D)


def _axes(to: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    cos = [to(table) for table in AXES]
    return cos, [table.clone() for table in cos]


def _all(result: Result) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    registry.reset()
    torch.compiler.reset()
    yield
    registry.reset()


@pytest.mark.parametrize("call", CALLS)
def test_the_remembered_way_gives_what_the_long_one_gave(call: str, device: str) -> None:
    first = _all(CALLS[call](lambda t: t.to(device)))
    for _ in range(2):
        for ours, before in zip(_all(CALLS[call](lambda t: t.to(device))), first, strict=True):
            assert torch.equal(ours, before)
            assert ours.stride() == before.stride()
    with use_provider("eager"):
        for ours, reference in zip(first, _all(CALLS[call](lambda t: t.to(device))), strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("call", CALLS)
def test_compiled_kernels_are_called_directly_and_functions_after_the_checks(
    call: str, provider: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with use_provider(provider):
        try:
            CALLS[call](lambda t: t.to(device))
        except NoProviderError as error:
            pytest.skip(str(error))
        ((op, *_),) = registry._kernels
        directly = isinstance(select(str(op), torch.device(device), (torch.float32,)).kernel, OpOverload)
        remembers = directly or "[]" not in SIGNATURES[str(op)]
        assert len(registry.dispatch_cache) == remembers
        seen: list[str] = []
        for step in ("dispatch_slow", "_are_of"):
            monkeypatch.setattr(registration.Op, step, lambda self, *args, step=step: seen.append(step) or True)
        CALLS[call](lambda t: t.to(device))
    assert seen == ([] if directly else ["_are_of"] if remembers else ["dispatch_slow"])


@pytest.mark.parametrize("op", SIGNATURES)
def test_the_plain_form_of_a_compiled_op_has_its_defaults(op: str) -> None:
    kernel = select(op, torch.device("cpu"), (torch.float32,)).kernel
    if not isinstance(kernel, OpOverload):
        pytest.skip(f"{op} is not served by a compiled kernel here")
    arguments = schema(op).arguments
    plain = registration._shortest(kernel, 0)
    for form in (kernel, plain):
        for argument, expected in zip(form._schema.arguments, arguments, strict=False):
            assert (argument.name, str(argument.real_type)) == (expected.name, str(expected.real_type))
            assert argument.has_default_value() == expected.has_default_value()
            assert argument.default_value == expected.default_value
    if plain is not kernel:
        operands = [*(X, Y, SCALE, SCALE, SHIFT)[: len(plain._schema.arguments)]]
        if op in ("rms_norm", "layer_norm"):
            operands[1:] = [WEIGHT, WEIGHT]
        full = _all(kernel(*operands, *(argument.default_value for argument in arguments[len(operands) :])))
        for short, long in zip(_all(plain(*operands)), full, strict=True):
            assert torch.equal(short, long)


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_every_provider_takes_the_arguments_of_the_signature(name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    found = get_provider(name)
    for op in found.support:
        parameters = list(inspect.signature(found.kernel(op, torch.device("cpu"))).parameters)
        assert parameters == [argument.name for argument in schema(op).arguments], op


# --- where the remembered way does not fit --------------------------------------------------------------


def test_errors_are_those_of_the_public_function_also_on_the_remembered_way(device: str) -> None:
    x, weight, scale = X.to(device), WEIGHT.to(device), SCALE.to(device)
    ops.rms_norm(x, weight)
    with pytest.raises(ValueError, match="weight has shape \\(7,\\), but 32 elements"):
        ops.rms_norm(x, weight[:7])
    with pytest.raises(ValueError, match="the weight is on meta"):
        ops.rms_norm(x, weight.to("meta"))
    with pytest.raises(ValueError, match="at least one dimension"):
        ops.rms_norm(x[0, 0, 0], weight)
    ops.gate_residual(x, x, scale)
    with pytest.raises(ValueError, match="at least one dimension, got a scalar"):
        ops.gate_residual(x[0, 0, 0], x, scale)
    with pytest.raises(RuntimeError, match="must match the size"):
        ops.gate_residual(x, x, scale[..., :5])
    image = IMAGE.to(device)
    ops.group_norm_silu(image, 4)
    with pytest.raises(ValueError, match="do not fall into 5 groups"):
        ops.group_norm_silu(image, 5)
    with pytest.raises(ValueError, match="has one element, and no variance"):
        ops.group_norm_silu(image[:1, :, :1, :1], D)


def test_both_a_grid_and_coordinates_are_refused_also_on_the_remembered_way(device: str) -> None:
    x, (cos, sin) = HEADS.to(device), _axes(lambda t: t.to(device))
    coords = torch.tensor([[0, 0]] * 6, device=device)
    ops.rope_3d(x, cos, sin, grid=(2, 3))
    ops.rope_3d(x, cos, sin, coords=coords)
    with pytest.raises(ValueError, match="either the grid or the coordinates"):
        ops.rope_3d(x, cos, sin, coords=coords, grid=(2, 3))


def test_a_dtype_that_the_remembered_kernel_has_not_goes_elsewhere(device: str) -> None:
    x, scale, shift = X.to(device), SCALE.to(device), SHIFT.to(device)
    ops.norm_modulate(x, scale, shift)
    ways = dict(registry.dispatch_cache)
    y = ops.norm_modulate(x, scale.double(), shift)
    assert y.dtype == torch.float64
    if any(count for _, count, *_ in ways.values()):
        assert registry.dispatch_cache == ways
    with use_provider("eager"):
        assert torch.equal(y, ops.norm_modulate(x, scale.double(), shift))
    half = ops.norm_modulate(x, scale.bfloat16(), shift.bfloat16())
    assert half.dtype == torch.float32


def test_a_parameter_of_several_dimensions_is_flattened_also_on_the_remembered_way(device: str) -> None:
    x, weight = IMAGE.to(device), torch.ones(3, 4, device=device)
    flat = ops.layer_norm(x.flatten(-2), weight.flatten())
    assert torch.equal(ops.layer_norm(x, weight), flat.view(x.shape))


def test_a_way_is_that_of_the_operands_that_are_given(device: str) -> None:
    x, scale, shift, weight = (t.to(device) for t in (X, SCALE, SHIFT, WEIGHT))
    axes, (cos, sin) = _axes(lambda t: t.to(device)), (COS.to(device), SIN.to(device))
    q = HEADS.to(device)
    calls: list[Callable[[], Result]] = [
        *(lambda given=given: ops.norm_modulate(x, *given) for given in _some_of(scale, shift, weight, weight)),
        *(lambda given=given: ops.gate_residual_norm_modulate(x, x, *given) for given in _some_of(scale, scale, shift)),
        *(lambda given=given: ops.rms_norm(x, *given) for given in _some_of(weight, weight)),
        lambda: ops.qk_norm_rope(q, q, None, None, *axes, grid=(2, 3)),
        lambda: ops.qk_norm_rope(q, q, None, None, cos, sin),
    ]
    with use_provider("eager"):
        expected = [_all(call()) for call in calls]
    for _ in range(3):
        for call, reference in zip(calls, expected, strict=True):
            for ours, theirs in zip(_all(call()), reference, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _some_of(*tensors: Tensor) -> list[list[Tensor | None]]:
    """Every choice of the tensors, None in place of the others."""
    return [list(chosen) for chosen in itertools.product(*((tensor, None) for tensor in tensors))]


def test_a_subclass_among_the_operands_is_handed_the_call_also_on_the_remembered_way(device: str) -> None:
    x, scale, shift = X.to(device), SCALE.to(device), SHIFT.to(device)
    expected = ops.norm_modulate(x, scale, shift)
    for _ in range(2):
        y = ops.norm_modulate(x, scale.as_subclass(_Theirs), shift)
        assert type(y) is _Theirs and torch.equal(y.as_subclass(Tensor), expected)
    assert type(ops.norm_modulate(x, scale, shift)) is Tensor


class _Theirs(Tensor):
    """A tensor of somebody else's."""


def test_a_remembered_function_is_checked_and_is_for_dtypes(provider: str, device: str) -> None:
    x, weight, scale = X.to(device), WEIGHT.to(device), SCALE.to(device)
    with use_provider(provider):
        ops.norm_modulate(x, scale, None, weight)
        with pytest.raises(ValueError, match="weight has shape \\(7,\\), but 32 elements"):
            ops.norm_modulate(x, scale, None, weight[:7])
        lazy = torch.complex(torch.zeros_like(scale), scale).conj().imag
        torch.testing.assert_close(ops.norm_modulate(x, lazy, None, weight), ops.norm_modulate(x, -scale, None, weight))
        if provider == "eager":
            assert ops.norm_modulate(x, scale.double(), None, weight).dtype == torch.float64
        else:
            with pytest.raises(NoProviderError, match="float64"):
                ops.norm_modulate(x, scale.double(), None, weight)
        leaf = weight.clone().requires_grad_()
        ops.norm_modulate(x, scale, None, leaf).sum().backward()
        assert leaf.grad is not None


def test_what_is_no_tensor_is_refused_also_on_the_remembered_way(device: str) -> None:
    x, scale = X.to(device), SCALE.to(device)
    ops.norm_modulate(x, scale)
    for wrong in (0.5, 1, [0.5] * D, "scale"):
        with pytest.raises(AttributeError, match="has no attribute"):
            ops.norm_modulate(x, wrong)  # type: ignore[arg-type]


def test_an_option_without_a_hash_takes_the_long_way(device: str) -> None:
    x, cos, sin = (t.to(device) for t in (HEADS, COS[:4], SIN[:4]))
    tokens: Any = [1, 4]
    expected = ops.rope(x, cos, sin, tokens=(1, 4))
    for _ in range(2):
        assert torch.equal(ops.rope(x, cos, sin, tokens=tokens), expected)


def test_the_provider_of_the_moment_computes(device: str) -> None:
    x, weight = X.to(device), WEIGHT.to(device)
    ops.rms_norm(x, weight)
    for _ in range(2):
        with use_provider("eager"):
            eager = ops.rms_norm(x, weight)
        assert torch.equal(eager, torch.nn.functional.rms_norm(x, (D,), weight, 1e-6))
        with pytest.raises(NoProviderError), use_provider("hub"):
            ops.rms_norm(x, weight)
        with pytest.raises(ValueError, match="unknown provider"):
            ops.rms_norm(x, weight, provider="nobody")


def test_gradients_and_transforms_are_noticed_on_the_remembered_way(device: str) -> None:
    x, weight = X.to(device), WEIGHT.to(device)
    with torch.no_grad():
        ops.rms_norm(x, weight)
    assert ops.rms_norm(x, weight).requires_grad is False
    leaf = x.clone().requires_grad_()
    ops.rms_norm(leaf, weight).square().sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    (pulled,) = torch.func.vjp(lambda t: ops.rms_norm(t, weight), x)[1](2 * ops.rms_norm(x, weight))
    torch.testing.assert_close(pulled, leaf.grad)
    _, tangent = torch.func.jvp(lambda t: ops.rms_norm(t, weight), (x,), (torch.ones_like(x),))
    with forward_ad.dual_level():
        dual = ops.rms_norm(forward_ad.make_dual(x, torch.ones_like(x)), weight)
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, tangent)
    mapped = torch.func.vmap(lambda t: ops.rms_norm(t, weight))(x)
    torch.testing.assert_close(mapped, ops.rms_norm(x, weight))


def test_lazy_signs_are_resolved(device: str) -> None:
    x, scale, shift = X.to(device), SCALE.to(device), SHIFT.to(device)
    lazy = torch.complex(torch.zeros_like(scale), scale).conj().imag
    assert lazy.is_neg()
    expected = ops.norm_modulate(x, -scale, shift)
    for provider in (None, "eager"):
        for _ in range(2):
            torch.testing.assert_close(ops.norm_modulate(x, lazy, shift, provider=provider), expected)


def test_fake_tensors_are_traced_and_not_run(device: str) -> None:
    tensors = [t.to(device) for t in (X, SCALE, SHIFT)]
    real = ops.norm_modulate(*tensors)
    with FakeTensorMode() as mode:
        fake = ops.norm_modulate(*map(mode.from_tensor, tensors))
    assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)


def test_ways_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_MOST_ENTRIES", 3)
    for start in range(8):
        ops.rms_norm(X, WEIGHT, eps=1e-6 * (start + 1))
        assert len(registry.dispatch_cache) <= 3


def test_threads_share_the_ways(device: str) -> None:
    x, weight = X.to(device), WEIGHT.to(device)
    expected = ops.rms_norm(x, weight)
    wrong: list[Any] = []

    def work(provider: str | None) -> None:
        for _ in range(200):
            with use_provider(provider):
                y = ops.rms_norm(x, weight)
            if not torch.allclose(y, expected, atol=1e-5):
                wrong.append(provider)

    threads = [threading.Thread(target=work, args=(name,)) for name in (None, "eager", None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- compiled graphs -------------------------------------------------------------------------------------


def _held(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def _compiled(function: Callable[..., Any], graphs: list[torch.fx.GraphModule], **options: Any) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return torch.compile(function, backend=backend, fullgraph=True, **options)


@pytest.mark.parametrize("call", CALLS)
def test_a_graph_holds_the_op_of_whoever_computes_it(call: str, provider: str, device: str) -> None:
    graphs: list[torch.fx.GraphModule] = []
    with use_provider(provider):
        try:
            expected = _all(CALLS[call](lambda t: t.to(device)))
        except NoProviderError as error:
            pytest.skip(str(error))
        (op,) = {op for op, *_ in registry._kernels}
        with torch.no_grad():
            result = _all(_compiled(lambda: CALLS[call](lambda t: t.to(device)), graphs)())
    for ours, eager in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-6)
    (graph,) = graphs
    kernel = select(op, torch.device(device), (torch.float32,), provider).kernel
    if op == "linear_gelu":
        assert not any("diffkern" in target for target in _held(graph))
    elif isinstance(kernel, OpOverload):
        assert any(target.startswith(f"{kernel.namespace}.{op}") for target in _held(graph))
    else:
        assert f"diffkern.{op}_by_{provider}.default" in _held(graph)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_strided_views_reach_a_compiled_kernel_as_they_are(backend: str, device: str) -> None:
    def step(qkv: Tensor, table: Tensor, temb: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        q, k, _ = qkv.chunk(3, dim=-1)
        q, k = ops.qk_norm_rope(q, k, weight, weight, across_heads=2)
        shift, scale, gate = (table + temb).unbind(2)
        x, y = ops.gate_residual_norm_modulate(q, k, gate, scale, shift)
        return ops.norm_modulate(x * 2, scale, shift), y

    inputs = [_random(2, 6, 3 * D), _random(3, D), _random(2, 1, 3, D), WEIGHT]
    inputs = [tensor.to(device) for tensor in inputs]
    with torch.no_grad():
        compiled = torch.compile(step, backend=backend, fullgraph=True)
        if backend == "aot_eager":
            result = compiled(*inputs)
        else:
            result, (code, *_) = run_and_get_code(compiled, *inputs)
            if isinstance(select("qk_norm_rope", torch.device(device), (torch.float32,)).kernel, OpOverload):
                call = next(line for line in code.splitlines() if "qk_norm_rope.default(" in line)
                # The chunks are views of the argument, at their offsets.
                assert call.count(f"reinterpret_tensor(arg0_1, (2, 6, {D}), ({18 * D}, {3 * D}, 1)") == 2
            assert "clone" not in code
    for ours, eager in zip(result, step(*inputs), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


def test_one_graph_for_all_instances_and_no_break(device: str) -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(D, device=device))

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return ops.gate_residual(x, ops.norm_modulate(x, scale, None, self.weight), scale)

    blocks = [Norm() for _ in range(5)]
    counters.clear()
    x, scale = X.to(device), SCALE.to(device)
    for block in blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for block in blocks * 2:
            torch.testing.assert_close(block(x, scale), block.forward(x, scale))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_graph_for_training_has_gradients(device: str) -> None:
    graphs: list[torch.fx.GraphModule] = []
    x, weight = X.to(device), WEIGHT.to(device)
    leaf = x.clone().requires_grad_()
    compiled = _compiled(lambda t: ops.rms_norm(t, weight), graphs)
    compiled(leaf).square().sum().backward()
    assert _held(graphs[0]) == ["diffkern.rms_norm.default"]
    plain = x.clone().requires_grad_()
    ops.rms_norm(plain, weight).square().sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad)
    # Where gradients are on and nobody wants one, the graph is the other one.
    compiled(x)
    assert _held(graphs[1]) != _held(graphs[0])


def test_the_grid_of_a_graph_may_be_dynamic(device: str) -> None:
    cos = [torch.rand(8, 4, device=device) for _ in range(2)]
    sin = [torch.rand(8, 4, device=device) for _ in range(2)]

    def step(x: Tensor) -> Tensor:
        return ops.rope_3d(x.flatten(1, 2), cos, sin, grid=(x.shape[1], x.shape[2]))

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for height in (3, 4, 5):
            x = torch.rand(1, height, 6, 2, 16, device=device)
            torch.testing.assert_close(compiled(x), step(x))


def test_a_graph_does_not_write_into_its_inputs(device: str) -> None:
    tensors = [t.to(device).clone() for t in (X, Y, SCALE, SHIFT)]
    before = [t.clone() for t in tensors]
    with torch.no_grad():
        torch.compile(ops.gate_residual_norm_modulate, fullgraph=True)(*tensors[:3], *tensors[2:])
    for tensor, expected in zip(tensors, before, strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("op", SIGNATURES)
def test_the_ops_of_a_build_pass_opcheck(op: str, device: str) -> None:
    from tests.ops.kernel_calls import CALLS as KERNEL_CALLS

    kernel = select(op, torch.device(device), (torch.float32,)).kernel
    if not isinstance(kernel, OpOverload):
        pytest.skip(f"{op} is not served by a compiled kernel here")

    def check(*args: Any) -> Any:
        torch.library.opcheck(kernel, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))
        return kernel(*args)

    KERNEL_CALLS[op](check, 2, device)


def test_what_a_call_rotates_by_decides_its_way() -> None:
    """Lists do not say whether they are empty; the same options mean other things with and without tables."""
    q = torch.randn(1, 4, 4, 8)
    cos, sin, axes = torch.randn(1, 8), torch.randn(1, 8), [torch.randn(2, 2), torch.randn(2, 2)]
    full = torch.randn(4, 8)
    calls = [
        lambda: ops.qk_norm_rope(q, q, tokens=(1, 2), seq_dim=2)[0],
        lambda: ops.qk_norm_rope(q, q, None, None, cos, sin, tokens=(1, 2), seq_dim=2)[0],
        lambda: ops.qk_norm_rope(q, q, None, None, full, full, seq_dim=2)[0],
        lambda: ops.qk_norm_rope(q, q, None, None, axes, axes, grid=(2, 2), seq_dim=2)[0],
    ]
    cold = []
    for call in calls:
        registry.reset()
        cold.append(call())
    for first in calls:
        registry.reset()
        first()
        assert all(torch.equal(call(), expected) for call, expected in zip(calls, cold, strict=True))


def test_axes_that_do_not_fit_are_refused_also_after_some_that_did() -> None:
    x, good, bad = torch.randn(2, 4, 2, 8), [torch.randn(4, 1)] * 2, [torch.randn(4, 2)] * 2
    ops.rope_3d(x, good, good, grid=(2, 2), rotary_dim=4)
    for op in (lambda: ops.rope_3d(x, bad, bad, grid=(2, 2), rotary_dim=4),
               lambda: ops.qk_norm_rope(x, x, None, None, bad, bad, grid=(2, 2), rotary_dim=4)):  # fmt: skip
        with pytest.raises(ValueError, match="2 are rotated, or 4 in all heads"):
            op()


@pytest.mark.parametrize("who", ["eager", "compiled"])
def test_a_mode_sees_the_calls_of_functions_too(who: str) -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)
    for _ in range(2):
        ops.rms_norm(x, weight, provider=who)
    graph = make_fx(lambda x: ops.rms_norm(x, weight, provider=who))(x)
    assert any("rms_norm" in str(node.target) for node in graph.graph.nodes)
    y = torch.randn(4, 64)
    torch.testing.assert_close(graph(y), ops.rms_norm(y, weight, provider=who))


# --- errors that are not the arguments' ------------------------------------------------------------------


def test_a_fault_of_a_remembered_kernel_is_raised_once_and_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    ops.rms_norm(X, WEIGHT)
    ((key, (kernel, *rest)),) = registry.dispatch_cache.items()
    if not rest[0]:
        pytest.skip("rms_norm is not served by a compiled kernel here")
    fault, runs = RuntimeError("CUDA error: unspecified launch failure"), []

    def failing(*operands: Tensor) -> Tensor:
        runs.append(kernel(*operands))
        raise fault

    entry = (failing, *rest)
    registry.dispatch_cache[key] = entry
    with pytest.raises(RuntimeError) as caught:
        ops.rms_norm(X, WEIGHT)
    assert caught.value is fault and len(runs) == 1
    assert registry.dispatch_cache[key] is entry
    with pytest.raises(ValueError, match="weight has shape"):  # what the public function has to say comes first
        ops.rms_norm(X, WEIGHT[:7])


@pytest.mark.parametrize("op", [ops.rms_norm, ops.silu, ops.norm_modulate])
def test_a_result_that_does_not_fit_into_memory_is_an_error_in_the_words_of_torch(op: Callable[..., Any]) -> None:
    small, large = torch.ones(4, 64), torch.ones(1).expand(2**44, 64)
    with pytest.raises(RuntimeError) as stock:
        torch.empty_like(large, memory_format=torch.contiguous_format)
    for _ in range(2):  # as a first call, and from the cache
        with pytest.raises(RuntimeError, match="you tried to allocate") as ours:
            op(large)
        assert str(ours.value).splitlines()[0] == str(stock.value).splitlines()[0]
        op(small)


@pytest.mark.gpu
def test_out_of_memory_on_a_gpu_is_the_exception_that_torch_raises() -> None:
    small, large = torch.ones(4, 64, device="cuda"), torch.ones(1, device="cuda").expand(2**40, 64)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            ops.rms_norm(large)
        ops.rms_norm(small)


def test_tables_in_float64_are_computed_alike_after_other_calls() -> None:
    q, cos, sin = HEADS, COS.double(), SIN.double()
    for provider in (None, "compiled"):
        outcomes = []
        for warm in (False, True):
            registry.reset()
            try:
                if warm:
                    ops.qk_norm_rope(q, q, None, None, COS, SIN, provider=provider)
                outcomes.append(ops.qk_norm_rope(q, q, None, None, cos, SIN, provider=provider)[0])
                assert torch.equal(ops.qk_norm_rope(q, q, None, None, cos, sin, provider=provider)[0], outcomes[-1])
            except NoProviderError as error:
                outcomes.append(torch.tensor([len(str(error))]))
        assert torch.equal(*outcomes)


def test_a_cached_kernel_is_given_operands_of_one_device() -> None:
    """Whatever the kernel itself looks at: one of another device's memory would bring the process down."""
    x, weight = X, WEIGHT
    ops.rms_norm(x, weight)
    ((key, (kernel, *rest)),) = registry.dispatch_cache.items()
    if not rest[0]:
        pytest.skip("rms_norm is not served by a compiled kernel here")
    given: list[set[str]] = []

    def watched(*operands: Tensor) -> Tensor:
        given.append({str(operand.device) for operand in operands})
        return kernel(*operands)

    registry.dispatch_cache[key] = (watched, *rest)
    with pytest.raises(ValueError, match="the weight is on meta, and x on cpu"):
        ops.rms_norm(x, weight.to("meta"))
    ops.rms_norm(x, weight)
    assert given == [{"cpu"}]


def test_each_compiled_op_says_to_a_tracer_what_it_returns_for_all_its_arguments() -> None:
    """Read from the sources: ops for one kind of GPU are built for that alone."""
    fakes: dict[str, ast.arguments] = {}
    for path in (CSRC / "torch-ext" / "diffkern").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "fake":
                    assert isinstance(node, ast.FunctionDef)
                    fakes[ast.literal_eval(decorator.args[0])] = node.args
    bindings = "".join(path.read_text() for path in CSRC.glob("*/*_binding.cpp"))
    compiled = {name for name in SIGNATURES if f"DIFFKERN_OP({name})" in bindings or f" {name}(" in bindings}
    assert fakes.keys() == compiled
    for name, taken in fakes.items():
        names = [argument for argument, _ in arguments(schema(name))]
        assert taken.vararg is not None or [one.arg for one in taken.args] == names, name
