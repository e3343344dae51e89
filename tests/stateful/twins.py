"""A model that is injected, an untouched twin that takes every other step with it, and what must hold between them."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from diffkern import InjectionReport, inject_optimized_kernels, restore
from diffkern.bench.measure import relative_error
from tests.pipelines.test_pipelines import ERROR_RATIO, ERROR_SLACK
from tests.stateful.models import Inputs, Subject

#: How much further from stock than its own rounding errors a run may be before the float64 reference is asked.
SUSPICIOUS = 2.0

#: How far from stock ``numerics="fp8"`` may take a model of this size.
FP8_ERROR = 0.15


@dataclass
class Live:
    """An injection that was not restored, and the counts of its report when they were last looked at."""

    report: InjectionReport
    prefix: str
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)
    restored: list[str] = field(default_factory=list)

    def is_restored(self, path: str) -> bool:
        """Whether the site at ``path`` was restored with a part of the model."""
        return any(not part or f"{path}.".startswith(f"{part}.") for part in self.restored)

    def called(self) -> dict[str, tuple[int, int]]:
        """Fused and stock calls by path in the model since the last question."""
        before, self.counts = self.counts, self.report.calls()
        return {
            self._path(path): tuple(
                now[kind] - before.get(path, now | {"fused": 0, "stock": 0})[kind] for kind in _KINDS
            )
            for path, now in self.counts.items()
        }  # type: ignore[return-value]

    def paths(self) -> dict[str, Any]:
        """The sites by their path in the model, as the report's counts name them: a second one by its op, too."""
        found: dict[str, Any] = {}
        for site in self.report.patched:
            path = self._path(site.path)
            found[f"{path} ({site.op})".strip() if path in found else path] = site
        return found

    def _path(self, path: str) -> str:
        return ".".join(filter(None, (self.prefix, path)))


_KINDS = ("fused", "stock")


def _module(path: str) -> str:
    """The path of the module, without the op of a second site there."""
    return path.partition("(")[0].strip()


def _absorbs(other: str, how: str, path: str, op: str) -> bool:
    """Whether what ran fused at ``other`` may have done the work of the site at ``path``, which then is not called.

    A block that is fused as a whole and a step that is replayed call nothing inside of them; a rewritten forward calls
    all but the norms that its sites compute.
    """
    if path == other:
        return how == "option" and op != "cuda_graph"
    inside = not other or path.startswith(f"{other}.")
    return inside and (how in ("recipe", "option") or (how == "source" and op in ("rms_norm", "layer_norm")))


class Twins:
    """Two models with the same weights and the same history, but for the injections.

    Attributes:
        patched: The model that is injected and restored.
        stock: Its twin.
        tiers: The contracts of the injections that are not restored.
        live: Those of them whose reports count the calls of ``patched``.
        loose: Why counts may be lower than the calls of the twin's modules ("" if they may not).
        outcomes: How often a comparison was made, and of what kind.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.patched = subject.model()
        self.stock = copy.deepcopy(self.patched)
        self.tiers: list[str] = []
        self.live: list[Live] = []
        self.loose = ""
        self.outcomes: Counter[str] = Counter()
        self._remembered: set[str] | None = None

    # --- steps -----------------------------------------------------------------------------------------

    def both(self, step: Callable[[nn.Module], Any]) -> bool:
        """Takes a step with both models; it works with both, or raises the same class of error with both."""
        errors = []
        for model in (self.stock, self.patched):
            try:
                step(model)
                errors.append(None)
            except Exception as error:
                errors.append(error)
        _assert_same_error(*errors)
        return errors[0] is None

    def replace(self, step: Callable[[nn.Module], nn.Module]) -> None:
        """Replaces both models by what ``step`` makes of them, if it works."""
        made: list[nn.Module] = []
        if self.both(lambda model: made.append(step(model))):
            self.stock, self.patched = made
            self.live.clear()  # their reports speak of the models that were

    def inject(self, path: str, numerics: str, **options: Any) -> InjectionReport | None:
        """Injects the part of the model at ``path``; None if it is patched with another contract and says so."""
        try:
            report = inject_optimized_kernels(self.patched.get_submodule(path), numerics=numerics, **options)
        except ValueError as error:
            assert "already patched with numerics" in str(error)
            assert set(self.tiers) - {numerics}
            return None
        if report.patched:
            self.tiers.append(numerics)
            self.live.append(Live(report, path))
        return report

    def restore(self) -> None:
        """Restores everything; nothing of diffkern is left on any module."""
        restore(self.patched)
        self.tiers.clear()
        self.live.clear()
        left = [name for name, module in self.patched.named_modules() if "_diffkern" in vars(module)]
        assert not left, f"restore left a patch on {left[:3]}"

    def restore_report(self, index: int) -> None:
        """Restores what one injection patched."""
        live = self.live.pop(index % len(self.live))
        live.report.restore()
        self.tiers.remove(live.report.numerics)
        assert live.report.restore() == 0

    def restore_part(self, path: str) -> None:
        """Restores one submodule."""
        restore(self.patched.get_submodule(path))
        for live in self.live:
            live.restored.append(path)

    # --- what must hold --------------------------------------------------------------------------------

    @property
    def contract(self) -> str:
        """What the patched model promises: ``"exact"`` if nothing looser is left on it, or in a cache of diffusers."""
        return "exact" if {*self.tiers, *(self._remembered or ())} <= {"exact"} else "fast"

    def remember(self, remembers: bool) -> None:
        """Notes that a cache keeps results from step to step from now on, or no more."""
        self._remembered = set() if remembers else None

    def compare(self, run: Callable[[nn.Module, Inputs], Any], inputs: Inputs, *, counted: bool = True) -> None:
        """Runs both models on the same inputs and compares results, errors, inputs and counts."""
        results, errors, given = [], [], [inputs, copy.deepcopy(inputs)]
        for live in self.live:
            live.called()
        with _calls_of_modules(self.stock) as calls:
            _try(lambda: run(self.stock, given[1]), results, errors)
        _try(lambda: run(self.patched, given[0]), results, errors)
        _assert_same_error(*errors)
        assert all(map(_same_bits, tensors(given[0]), tensors(given[1]))), "an argument was written to"
        if errors[0] is not None:
            self.outcomes[f"both raise {type(errors[0]).__name__}"] += 1
            return
        self._compare_results(run, inputs, *map(tensors, results))
        if counted:
            self._check_counts(calls)

    def _compare_results(self, run: Any, inputs: Inputs, stock: list[Tensor], patched: list[Tensor]) -> None:
        if self._remembered is not None:
            self._remembered.update(self.tiers)
        kinds = [[(y.dtype, y.shape) for y in ys] for ys in (stock, patched)]
        assert kinds[0] == kinds[1], f"stock returns {kinds[0]}, the patched model {kinds[1]}"
        self.outcomes[self.contract if self.tiers else "restored"] += 1
        if all(map(_same_bits, stock, patched)):
            return
        difference = relative_error(flat(patched), flat(stock))
        promise = "exact" if self.tiers else "nothing is patched"
        assert self.contract != "exact", f"not equal to the bit ({promise}): {difference:.2e} from stock"
        noise = _rounding(stock)
        if difference <= (FP8_ERROR if "fp8" in self.tiers else SUSPICIOUS * noise):
            return
        try:
            reference = self._in_float64(run, inputs)
        except Exception:  # an adapter or a hook that stays in its dtype: two roundings are this close
            assert difference <= 10 * noise, f"{difference:.2e} from stock"
            return
        error, stock_error = (relative_error(flat(ys), reference) for ys in (patched, stock))
        assert error <= 2 * ERROR_RATIO * stock_error + 10 * ERROR_SLACK, (
            f"error {error:.2e}, stock's {stock_error:.2e}; {difference:.2e} apart"
        )

    def _in_float64(self, run: Any, inputs: Inputs) -> Tensor:
        """What the twin computes in float64."""
        reference = copy.deepcopy(self.stock).double()
        return flat(tensors(run(reference, cast(copy.deepcopy(inputs), torch.float64))))

    def _check_counts(self, calls: Counter[str]) -> None:
        counts = [(live, live.called()) for live in self.live]
        fused = [
            (_module(path), site.how)
            for live, called in counts
            for path, site in live.paths().items()
            if called.get(path, (0, 0))[0]
        ]
        for live, called in counts:
            for path, site in live.paths().items():
                absorbed = any(_absorbs(other, how, _module(path), site.op) for other, how in fused)
                fused_calls, stock_calls = called.get(path, (0, 0))
                total, expected = (
                    fused_calls + stock_calls,
                    0 if live.is_restored(_module(path)) or site.restored else calls[_module(path)],
                )
                if absorbed or self.loose or site.revoked:
                    fits = site.how == "source" or total <= expected
                elif site.how == "source":  # each call of a forward counts for every site that it reaches
                    fits = total >= expected if expected else total == 0
                else:
                    fits = total == expected
                assert fits, (
                    f"{path or 'the model'} ({site.op}): {fused_calls} fused + {stock_calls} stock of {expected} calls"
                )


@contextlib.contextmanager
def _calls_of_modules(model: nn.Module) -> Iterator[Counter[str]]:
    """Counts the calls of all modules of a model, by path."""
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=True)}
    calls: Counter[str] = Counter()

    def count(module: nn.Module, _: Any) -> None:
        if id(module) in names:
            calls[names[id(module)]] += 1

    handle = register_module_forward_pre_hook(count)
    try:
        yield calls
    finally:
        handle.remove()


def _try(run: Callable[[], Any], results: list[Any], errors: list[Exception | None]) -> None:
    try:
        results.append(run())
        errors.append(None)
    except Exception as error:
        results.append(None)
        errors.append(error)


def _assert_same_error(stock: Exception | None, patched: Exception | None) -> None:
    if type(stock) is not type(patched):
        message = f"stock: {stock!r}; the patched model: {patched!r}"
        raise AssertionError(message) from (patched or stock)


def tensors(value: Any) -> list[Tensor]:
    """All tensors of a nested value, in order."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def flat(values: list[Tensor]) -> Tensor:
    """All values of some tensors, in float64."""
    return torch.cat([value.detach().flatten().double() for value in values])


def cast(inputs: Inputs, dtype: torch.dtype, device: str | torch.device | None = None) -> Inputs:
    """Casts the floating-point tensors among the arguments, and moves all of them."""
    if isinstance(inputs, dict):
        return {name: cast(value, dtype, device) for name, value in inputs.items()}
    if not isinstance(inputs, Tensor):
        return inputs
    return inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def _rounding(values: list[Tensor]) -> float:
    """About the rounding errors of a model that returns these dtypes."""
    return max({torch.bfloat16: 4e-3, torch.float16: 5e-4}.get(value.dtype, 2e-6) for value in values)
