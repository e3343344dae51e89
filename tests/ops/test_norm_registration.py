"""The registered torch ops: schema, fake, autograd registration, compile, export, a second copy."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import diffkern
from diffkern import ops
from diffkern.ops import layer_norm, rms_norm
from tests.ops.checks import strides_that_matter
from tests.ops.layouts import make, make_parameter

_OPCHECK_VIEWS = ("matrix", "heads_first", "transposed", "expanded")


@pytest.mark.parametrize("layout", _OPCHECK_VIEWS)
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_opcheck_passes_for_views_and_mixed_dtypes(op: str, layout: str, provider: str, device: str) -> None:
    x = make(layout, 2, 3, 8, torch.float32, device).detach().requires_grad_()
    weight = make_parameter("strided", 8, torch.float16, device)
    preserve = layout in ("transposed", "expanded")
    torch.library.opcheck(
        getattr(torch.ops.diffkern, op), (x, weight), {"preserve_strides": preserve, "provider": provider}
    )
    torch.library.opcheck(
        getattr(torch.ops.diffkern, op),
        (x.detach().bfloat16(),),
        {"out_dtype": torch.float32, "preserve_strides": not preserve, "provider": provider},
    )


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_the_fake_result_has_the_shape_dtype_and_strides_of_the_real_one(op: str, provider: str, device: str) -> None:
    function = getattr(ops, op)
    for layout in ("matrix", "heads_first", "transposed", "every_second_column", "expanded", "channel_first"):
        for memory_format in (torch.contiguous_format, torch.preserve_format):
            for dim in (-1, 0):
                x = make(layout, 2, 3, 8, torch.bfloat16, device)
                weight = torch.ones(x.shape[dim], device=device)
                options = {"memory_format": memory_format, "dim": dim, "out_dtype": torch.float16}
                real = function(x, weight, provider=provider, **options)
                with FakeTensorMode() as mode:
                    fake = function(mode.from_tensor(x), mode.from_tensor(weight), provider=provider, **options)
                assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
                assert strides_that_matter(fake) == strides_that_matter(real)


def _trace_without_options(op: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Calls a registered op with nothing but its tensors, on fake ones; returns the real result."""
    real = op(*args)
    with FakeTensorMode() as mode:
        fake = op(*map(mode.from_tensor, args))
    assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
    assert strides_that_matter(fake) == strides_that_matter(real)
    return real


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_the_registered_op_is_traced_without_its_optional_arguments(op: str, device: str) -> None:
    bare = getattr(torch.ops.diffkern, op)
    x = make("transposed", 2, 3, 8, torch.bfloat16, device)
    weight = make_parameter("plain", 8, torch.float32, device)
    assert weight is not None
    for args in ((x,), (x, weight)):
        torch.compiler.reset()
        real = _trace_without_options(bare, *args)
        compiled = torch.compile(lambda *tensors: bare(*tensors), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*args), real, rtol=0, atol=0)
        program = torch.export.export(_Bare(bare), args)
        torch.testing.assert_close(program.module()(*args), real, rtol=0, atol=0)


class _Bare(torch.nn.Module):
    """A model that is one op."""

    def __init__(self, op: Callable[..., Tensor]) -> None:
        super().__init__()
        self.op = op

    def forward(self, *args: Tensor) -> Tensor:
        return self.op(*args)


def test_a_fake_without_the_schemas_defaults_would_be_noticed() -> None:
    library = torch.library.Library("diffkern_test_fakes", "DEF")
    library.define("norm(Tensor x, Tensor? weight=None, float eps=1e-6) -> Tensor")
    library.impl("norm", lambda x, weight=None, eps=1e-6: x.clone(), "CPU")
    torch.library.register_fake("diffkern_test_fakes::norm", lambda x, weight, eps: x.clone(), lib=library)
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        _trace_without_options(torch.ops.diffkern_test_fakes.norm, torch.ones(2, 8))


# Each leaves out something else: eps, the weight, the keyword.
CALLS: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "defaults": lambda x, w, p: rms_norm(x, w, provider=p),
    "eps_by_keyword": lambda x, w, p: rms_norm(x, weight=w, eps=1e-3, provider=p),
    "eps_none": lambda x, w, p: rms_norm(x, w, eps=None, provider=p),
    "no_weight": lambda x, w, p: rms_norm(x, provider=p),
    "rounded": lambda x, w, p: rms_norm(x, w, round_dtype=torch.bfloat16, out_dtype=torch.float16, provider=p),
    "channels": lambda x, w, p: rms_norm(x.transpose(1, 2), w, dim=1, clamp_eps=True, provider=p),
    "layer_norm_defaults": lambda x, w, p: layer_norm(x, w, provider=p),
    "layer_norm_bias_only": lambda x, w, p: layer_norm(x, bias=w, eps=1e-3, provider=p),
}


@pytest.mark.parametrize("call", CALLS)
def test_compile_without_a_graph_break(call: str, provider: str, device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(CALLS[call], fullgraph=True, backend="aot_eager")
    x = make("contiguous", 2, 5, 16, torch.float32, device)
    weight = make_parameter("plain", 16, torch.float32, device)
    assert weight is not None
    expected = CALLS[call](x, weight, provider)
    y = compiled(x, weight, provider)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected, rtol=0, atol=0)

    leaf = x.clone().requires_grad_()
    compiled(leaf, weight, provider).float().square().sum().backward()
    assert leaf.grad is not None
    plain = x.clone().requires_grad_()
    CALLS[call](plain, weight, provider).float().square().sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-6, atol=1e-6)


def test_compile_with_dynamic_shapes_compiles_once(provider: str, device: str) -> None:
    torch.compiler.reset()
    weight = torch.ones(16, device=device)
    compiled = torch.compile(
        lambda x: rms_norm(x, weight, provider=provider), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 8, 33):
            x = torch.randn(2, rows, 16, device=device)
            torch.testing.assert_close(compiled(x), rms_norm(x, weight, provider=provider), rtol=0, atol=0)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_inductor_fuses_around_the_op_and_keeps_its_strides(op: str, provider: str, device: str) -> None:
    torch.compiler.reset()
    function = getattr(ops, op)

    def block(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = function(x * 2, weight, memory_format=torch.preserve_format, provider=provider)
        return y + x

    x = make("transposed", 2, 5, 16, torch.float32, device)
    weight = torch.ones(16, device=device)
    y = torch.compile(block, fullgraph=True)(x, weight)
    torch.testing.assert_close(y, block(x, weight), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_export_keeps_the_op(op: str, provider: str, device: str) -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((16,), 1.5, device=device))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = getattr(ops, op)(x, self.weight, provider=provider)
            return y

    x = torch.randn(2, 5, 16, device=device)
    program = torch.export.export(Norm(), (x,))
    targets = {str(node.target) for node in program.graph.nodes}
    assert f"diffkern.{op}.default" in targets
    torch.testing.assert_close(program.module()(x), Norm()(x), rtol=0, atol=0)


def test_a_reload_and_a_second_copy_leave_right_results(tmp_path: Path) -> None:
    package = Path(diffkern.__file__).parent
    script = textwrap.dedent(
        f"""
        import importlib, shutil, sys
        import torch
        import diffkern.ops, diffkern.ops.norm

        x, w = torch.randn(3, 16), torch.randn(16)
        expected = torch.nn.functional.rms_norm(x, (16,), w, 1e-6)

        def check(ops):
            torch.testing.assert_close(ops.rms_norm(x, w, provider="eager"), expected)
            leaf = x.clone().requires_grad_()
            ops.rms_norm(leaf, w, provider="eager").sum().backward()
            assert leaf.grad.isfinite().all() and leaf.grad.abs().sum() > 0
            norm = lambda x: ops.rms_norm(x, w, provider="eager")
            torch.testing.assert_close(torch.compile(norm, backend="eager", fullgraph=True)(x), expected)

        first = diffkern.ops
        check(first)
        importlib.reload(diffkern.ops.norm)
        check(importlib.reload(diffkern.ops))

        shutil.copytree({str(package)!r}, {str(tmp_path / "copy" / "diffkern")!r})
        for name in [name for name in sys.modules if name.split(".")[0] == "diffkern"]:
            del sys.modules[name]
        sys.path.insert(0, {str(tmp_path / "copy")!r})
        second = importlib.import_module("diffkern.ops")
        assert second.__file__.startswith({str(tmp_path)!r}), second.__file__
        check(second)
        check(first)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
