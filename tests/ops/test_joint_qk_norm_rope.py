"""joint_qk_norm_rope: the bits of qk_norm_rope of each stream, one behind the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diffkern.ops import joint_qk_norm_rope, qk_norm_rope
from tests.ops.checks import leaves_alone
from tests.ops.reference import INTERPRETED
from tests.ops.rotation import angles, random

F64 = torch.float64
TEXT, IMAGE = 3, 6
#: Triton's interpreter is slow: there, the first of several cases stands for all.
LESS = 1 if INTERPRETED else None


def streams(dim: int, device: str, dtype: torch.dtype = torch.float32, heads: int = 2) -> list[Tensor]:
    """Two of ``[2, tokens, heads, 16]``; with tokens behind heads if those are along dimension 2."""
    drawn = [random(2, tokens, heads, 16, seed=tokens + heads, device=device).to(dtype) for tokens in (TEXT, IMAGE)]
    return drawn if dim == 1 else [x.transpose(1, 2) for x in drawn]


def tables(dim: int, device: str, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Cosines of both streams, then sines."""
    shape = (TEXT + IMAGE, 1, 16) if dim == 1 else (TEXT + IMAGE, 16)
    return [list(table.split([TEXT, IMAGE])) for table in angles(*shape, device=device, dtype=dtype)]


def parameters(device: str, dtype: torch.dtype = torch.float32) -> dict[str, tuple[Tensor, ...]]:
    names = ("q_weights", "k_weights", "q_biases", "k_biases")
    drawn = [[1 + random(16, seed=10 * i + j, device=device).to(dtype) for j in (0, 1)] for i in range(4)]
    return {name: tuple(pair) for name, pair in zip(names, drawn, strict=True)}


def joined(queries: Any, keys: Any, cos: Any, sin: Any, given: dict[str, Any], dim: int, **options: Any) -> Any:
    """What the op is said to compute."""
    results = [
        qk_norm_rope(
            queries[i], keys[i], given["q_weights"][i], given["k_weights"][i], cos[i], sin[i],
            q_bias=given["q_biases"][i], k_bias=given["k_biases"][i], **options,
        )
        for i in (0, 1)
    ]  # fmt: skip
    return [torch.cat(pair, dim).contiguous() for pair in zip(*results, strict=True)]


@pytest.mark.parametrize("rotated", [(True, True), (False, True), (True, False), (False, False)][:LESS])
@pytest.mark.parametrize("dim", [1, 2][:LESS])
def test_each_stream_has_the_bits_of_qk_norm_rope(
    dim: int, rotated: tuple[bool, bool], provider: str, device: str
) -> None:
    queries, keys = (streams(dim, device, torch.bfloat16, heads) for heads in (2, 1))
    cos, sin = ([t if on else None for t, on in zip(ts, rotated, strict=True)] for ts in tables(dim, device))
    given: dict[str, Any] = parameters(device, torch.bfloat16)
    options: dict[str, Any]
    for options in ({"pairing": "half"}, {"arithmetic": "input", "norm": "layer"}, {"round_norm": True})[:LESS]:
        with leaves_alone(*queries, *keys):
            ours = joint_qk_norm_rope(
                tuple(queries), tuple(keys), cos=tuple(cos), sin=tuple(sin), dim=dim, **given, **options,
                provider=provider,
            )  # fmt: skip
        expected = joined(queries, keys, cos, sin, given, dim, **options, provider=provider)
        for one, other in zip(ours, expected, strict=True):
            assert one.is_contiguous() and torch.equal(one, other)


def test_a_stream_without_tokens_adds_nothing(provider: str, device: str) -> None:
    q, k = (streams(1, device)[1] for _ in "qk")
    both = joint_qk_norm_rope((q[:, :0], q), (k[:, :0], k), provider=provider)
    for one, other in zip(both, qk_norm_rope(q, k, provider=provider), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dim", [1, 2])
def test_gradients_are_right_in_float64(dim: int, device: str) -> None:
    leaves = [*streams(dim, device, F64), *streams(dim, device, F64, 1), *parameters(device, F64)["q_weights"]]
    leaves += [*parameters(device, F64)["k_biases"], tables(dim, device, F64)[0][1], tables(dim, device, F64)[1][1]]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]

    def call(*x: Tensor) -> tuple[Tensor, Tensor]:
        return joint_qk_norm_rope(
            x[0:2], x[2:4], x[4:6], cos=(None, x[8]), sin=(None, x[9]), dim=dim, norm="layer", k_biases=x[6:8]
        )

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_opcheck_passes(device: str) -> None:
    queries, keys = (streams(1, device, heads=heads) for heads in (2, 1))
    cos, sin = tables(1, device)
    weight = torch.ones(16, device=device, requires_grad=True)
    parameters = (weight, *[None] * 7, [cos[0]], [sin[0]], [], [], 1, 1, 1e-6, False, False, 0, None)
    operands = (queries[0].requires_grad_(), keys[0], queries[1], keys[1])
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.diffkern.joint_qk_norm_rope, (*operands, *parameters), test_utils=tests)


def test_compiled_code_holds_one_op_and_no_concatenation(device: str) -> None:
    queries, keys = (streams(1, device) for _ in "qk")
    cos, sin = tables(1, device)

    def step(*x: Tensor) -> tuple[Tensor, Tensor]:
        return joint_qk_norm_rope(x[0:2], x[2:4], cos=(cos[0], cos[1]), sin=(sin[0], sin[1]))

    explained = torch._dynamo.explain(step)(*queries, *keys)
    called = [str(node.target) for node in explained.graphs[0].graph.nodes if node.op == "call_function"]
    assert explained.graph_break_count == 0 and not any("cat" in name for name in called)
    assert sum("joint_qk_norm_rope" in name for name in called) == 1
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    assert all(map(torch.equal, compiled(*queries, *keys), step(*queries, *keys)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k: ((q[0],), k), "two streams"),
        (lambda q, k: ((q[0], q[1].half()), (k[0], k[1].half())), "must be alike"),
        (lambda q, k: ((q[0], q[1][:, :, :1]), k), "only dimension 1 may differ"),
        (lambda q, k: ((q[0], q[1].float()), k), "must be alike"),
    ],
)
def test_streams_that_do_not_fit_together_are_refused(change: Any, words: str) -> None:
    queries, keys = change(*(streams(1, "cpu", torch.bfloat16) for _ in "qk"))
    with pytest.raises(ValueError, match=words):
        joint_qk_norm_rope(queries, keys)
    with pytest.raises(ValueError, match="joined along 3"):
        joint_qk_norm_rope(*(tuple(streams(1, "cpu")) for _ in "qk"), dim=3)
