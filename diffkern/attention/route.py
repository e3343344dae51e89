"""Where the attention calls of a model go: to a backend that was proven on such a call, or where they went before."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from diffkern.attention import accuracy
from diffkern.attention.accuracy import runner, seconds
from diffkern.attention.backends import Backend
from diffkern.attention.call import AttentionCall, Compute
from diffkern.providers.dispatch_modes import is_exporting, transforms_active
from diffkern.providers.eager.attention_fp8 import Unrotated
from diffkern.providers.foreign import identical, is_of_user, preserved, summary
from diffkern.verify import choices
from diffkern.verify.contract import ENOUGH, RATIO, SLACK
from diffkern.verify.counts import CallCounts
from diffkern.verify.isolation import call_twice
from diffkern.verify.measures import Measurement

#: Keys from which on a call is of another kind.
MANY_KEYS = 1024
#: What ``"auto"`` must gain to leave the stock attention, and the share of its time that is left then.
GAIN = 0.97


@dataclass(eq=False)
class Route(CallCounts):
    """Sends attention calls to one of some backends, and counts them.

    A backend is tried on the first real call of a kind, on copies of its tensors, and on a short one with a query of
    NaN. There it must be as accurate as the stock attention (backends that are lossy on purpose are measured, not
    judged on more than the error that they state), with ``exact`` equal to it bit for bit, and do nothing besides.
    If there is a choice, or one that is worth its loss only where it gains, the fastest one serves, by measurement,
    for sequences of about that length. A backend that raises later is given up, and the stock attention serves.
    Inside a graph that is being compiled or captured nothing can be tried: there the choice of an earlier call of
    that kind serves, and without one the stock attention.
    """

    backends: Sequence[Backend]  # those to choose from
    auto: bool = False  # whether they are measured, and must gain something
    exact: bool = False  # whether bits must stay
    verify: bool = True  # whether backends are tried at all; without it the first one that its table allows serves
    #: Whether a call that the stock attention must serve raises. The choice of ``auto`` is no such call.
    strict: bool = False
    error: type[Exception] = RuntimeError  # class of that exception
    owner: str = "a model"  # what warnings call the model
    measurements: list[Measurement] = field(default_factory=list)  # the proofs so far
    #: Gets what was measured to be the fastest so far, as a sentence.
    on_choice: Callable[[str], None] = lambda sentence: None
    undo: Callable[[], int] = int  # takes the route out of the model; returns how many places had it
    _trials: dict[Hashable, Measurement] = field(default_factory=dict)
    _fastest: dict[str, dict[str, str]] = field(default_factory=dict)
    _choices: dict[tuple[Hashable, ...], tuple[Backend | None, str]] = field(default_factory=dict)
    _unrotated: dict[Hashable, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __call__(self, call: AttentionCall, stock: Compute) -> Tensor:
        """Computes a call; ``stock`` is how it was computed before. Programs that are exported hold that."""
        if is_exporting() or torch._C._get_tracing_state() is not None:
            return stock(call)
        if torch.compiler.is_compiling():
            backend = None if call.unfit() else self._choices.get(_kind(call), (None, ""))[0]
            return stock(call) if backend is None else backend.compute(call)
        reason = call.unfit()
        if reason is not None:
            return self.decline(reason, call, stock)
        backend, reason = self._choose(call, stock)
        if backend is None:
            return self.decline(reason, call, stock)
        try:
            y = backend.compute(call)
        except Exception as error:
            if is_of_user(error):
                raise
            failure = error
        else:
            self.add_fused()
            return y
        result = stock(call)  # raises as well where the call is wrong, and not the backend
        reason = self._give_up(backend, call, failure)
        if self.strict:
            raise self.error(f"attention cannot run on {reason}") from failure
        self.add_stock(reason)
        return result

    def attend_unrotated(self, x: Unrotated, value: Tensor, scale: float | None) -> Tensor | None:
        """Computes a call from before the norm and rotation of queries and keys, or returns None.

        The backend that serves calls of its kind does so, if it can. The first call of a kind is compared with float64:
        it must keep the error that the backend states.
        """
        if any([y.dtype is not value.dtype or y.device != value.device for y in (*x.queries, *x.keys)]):
            return None
        if x.shapes[1] != value.shape:
            return None
        like = [value.new_empty(1).expand(shape) for shape in x.shapes]
        call = AttentionCall(like[0], like[1], value, scale=scale)
        backend = None if call.unfit() else self._choices.get(self._key(call), (None, ""))[0]
        if backend is None or backend.unrotated is None or self.exact:
            return None
        key = len(x.queries), _trial(backend, call)
        if self.verify and key not in self._unrotated:
            if transforms_active() or (value.is_cuda and torch.cuda.is_current_stream_capturing()):
                return None
            self._unrotated[key] = self._keeps_error(backend, x, value, scale)
        if not self._unrotated.get(key, True):
            return None
        try:
            y = backend.unrotated(x, value, scale)
        except Exception as error:
            if is_of_user(error):
                raise
            self._unrotated[key] = False
            _warn_of_rotation(backend, summary(error))
            return None
        self.add_fused()
        return y

    def _keeps_error(self, backend: Backend, x: Unrotated, value: Tensor, scale: float | None) -> bool:
        assert backend.unrotated is not None
        query, key = (side.to(value.dtype) for side in x.rotated())
        call = AttentionCall(query, key, value, scale=scale)
        try:
            y = backend.unrotated(x, value, scale)
            error = accuracy.errors(call, (lambda call: y,))[0]
        except Exception as raised:  # as above
            if is_of_user(raised):
                raise
            _warn_of_rotation(backend, summary(raised))
            return False
        if error > backend.max_error:
            _warn_of_rotation(backend, f"an error of {error:.2g}, beyond {backend.max_error:.2g}")
        return error <= backend.max_error

    def decline(self, reason: str, call: AttentionCall, stock: Compute) -> Tensor:
        """Computes a call as it was before, and counts the reason; an empty one if that is simply the fastest."""
        if not torch.compiler.is_compiling():
            if self.strict and reason:
                names = " or ".join(backend.name for backend in self.backends)
                raise self.error(f"attention cannot run on {names}: {reason}")
            self.add_stock(reason or _STOCK_IS_BEST)
        return stock(call)

    # --- choosing --------------------------------------------------------------------------------------

    def _choose(self, call: AttentionCall, stock: Compute) -> tuple[Backend | None, str]:
        """The backend of a call, or None and why; an empty reason if the stock attention is simply the fastest."""
        kind, key = _kind(call), self._key(call)
        timed = key != kind
        if key not in self._choices:
            if call.query.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None, "not tried yet, and not to be tried while a CUDA graph is captured: run one call before"
            if transforms_active():
                return None, "not tried yet, and not to be tried under a transform: run one call before"
            with preserved(call.query.device):
                choice = self._measure(call, stock) if timed else self._first(call, stock)
            # Graphs of the compiler do not know how long sequences are, and take the last choice of the kind.
            self._choices[key] = self._choices[kind] = choice
            if timed:
                self._tell_fastest(call, "the stock attention" if choice[0] is None else choice[0].name)
        return self._choices[key]

    def _key(self, call: AttentionCall) -> tuple[Hashable, ...]:
        """What a call has its choice by: its kind, and its lengths where times decide."""
        timed = self.auto or any(backend.timed for backend in self.backends)
        return (*_kind(call), _size(call)) if timed else _kind(call)

    def _first(self, call: AttentionCall, stock: Compute) -> tuple[Backend | None, str]:
        reasons = []
        for backend in self.backends:
            refusal = self._refusal(backend, call, stock)
            if refusal is None:
                return backend, ""
            reasons.append(f"{backend.name} {refusal}")
        return None, "; ".join(reasons)

    def _measure(self, call: AttentionCall, stock: Compute) -> tuple[Backend | None, str]:
        refusals = {backend.name: self._refusal(backend, call, stock) for backend in self.backends}
        fit = [backend for backend in self.backends if refusals[backend.name] is None]
        if not fit:
            return None, "" if self.auto else "; ".join(f"{name} {refusal}" for name, refusal in refusals.items())
        device, by_name = call.query.device, {backend.name: backend for backend in fit}
        key = "attention", call.signature(), _size(call), *by_name
        known = choices.recall(device, *key)
        if known is not None and known in ("", *by_name):
            return by_name.get(known), ""
        best, least = None, GAIN * seconds(stock, call)
        for backend in fit:
            needed = seconds(backend.compute, call)
            if needed < least:
                best, least = backend, needed
        choices.remember(device, "" if best is None else best.name, *key)
        return best, ""

    def _give_up(self, backend: Backend, call: AttentionCall, error: Exception) -> str:
        """Keeps a backend that raised from calls of this kind; returns the reason."""
        proof = Measurement.of(call.query, backend.name, math.nan, math.nan, False, f"failed: {summary(error)}")
        self._note(backend, call, proof, aloud=True)
        for key in [key for key in self._choices if key[0] == call.signature()]:
            del self._choices[key]
        return f"{backend.name} {proof.reason}"

    def _note(self, backend: Backend, call: AttentionCall, proof: Measurement, aloud: bool) -> None:
        """Keeps a proof; with a warning if it failed and the user had asked for that backend."""
        self._trials[_trial(backend, call)] = proof
        self.measurements.append(proof)
        if proof.reason and aloud:
            what = f"attention of {self.owner} with {call.signature().describe()}"
            warnings.warn(f"diffkern: {backend.name} {proof.reason}; {what} runs as before", stacklevel=2)

    def _tell_fastest(self, call: AttentionCall, name: str) -> None:
        """Says what was measured to be best so far, and the first lengths of which it was."""
        lengths = f"{call.query.shape[1]} x {call.key.shape[1]}"
        self._fastest.setdefault(call.signature().describe(), {}).setdefault(name, lengths)
        said = [
            f"{kind}: {', '.join(f'{name} ({lengths})' for name, lengths in names.items())}"
            for kind, names in self._fastest.items()
        ]
        self.on_choice(f"fastest by measurement (queries x keys) for {'; '.join(said)}")

    def _refusal(self, backend: Backend, call: AttentionCall, stock: Compute) -> str | None:
        """Why a backend cannot serve calls of this kind, or None."""
        refusal = backend.refusal(call.signature())
        key = _trial(backend, call)
        if refusal is not None or (not self.verify and key not in self._trials):
            return refusal
        if key not in self._trials:
            self._note(backend, call, self._try(backend, call, stock), aloud=not self.auto)
        return self._trials[key].reason or None

    def _try(self, backend: Backend, call: AttentionCall, stock: Compute) -> Measurement:
        plain = accuracy.without_dropout(call)
        with torch.no_grad():
            # First, and outside of what is caught: what is wrong with a call, the stock attention has to say.
            expected = stock(plain)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                return self._compare(backend, call, plain, stock, expected)
            except BaseException as failure:  # whatever a foreign kernel raises is the reason not to use it
                if is_of_user(failure):
                    raise
                because = [str(warning.message).split("(Triggered")[0].strip() for warning in said]
                reason = " ".join([f"failed: {failure}", *because])
                return Measurement.of(call.query, backend.name, math.nan, math.nan, False, reason)

    def _compare(
        self, backend: Backend, call: AttentionCall, plain: AttentionCall, stock: Compute, expected: Tensor
    ) -> Measurement:
        """Tries a backend twice on the call, on a short one, and on what else its signature asks for."""
        signature = call.signature()

        def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return backend.compute(replace(plain, query=query, key=key, value=value, mask=mask))

        with torch.no_grad():
            results = call_twice(run, plain.query, plain.key, plain.value, plain.mask)
            rows = accuracy.spread(plain)
            exact = accuracy.reference(plain, rows)
            stock_error = accuracy.distance(expected[:, rows], exact)
            errors = [accuracy.distance(y[:, rows], exact) for y in results if y.shape == expected.shape]
        error = max(errors, key=lambda error: math.inf if math.isnan(error) else error, default=math.nan)
        same = all(identical(y, expected) for y in results) if self.exact else error == stock_error
        other = next((y for y in results if (y.dtype, y.shape) != (expected.dtype, expected.shape)), None)
        if other is not None:
            refusal = f"returns {other.dtype} {tuple(other.shape)} in place of {expected.dtype} {tuple(expected.shape)}"
        else:
            refusal = self._verdict(backend, call, error, stock_error, same)
        refusal = refusal or self._refuse_short(backend, call, stock)
        if not refusal and signature.gradients:
            pair = accuracy.gradient_errors(call, (stock, backend.compute))[::-1]
            same = same and pair[0] == pair[1]
            refusal = self._verdict(backend, call, pair[0], pair[1], same)
            refusal = refusal and f"gradients: {refusal}"
        if not refusal and signature.dropout:
            runner(backend.compute, call)()
        return Measurement.of(call.query, backend.name, error, stock_error, same, refusal)

    def _refuse_short(self, backend: Backend, call: AttentionCall, stock: Compute) -> str:
        """Why a backend does not serve a short call with one query of NaN, or ""."""
        sample = accuracy.short_sample(call)
        try:
            with torch.no_grad():
                expected, y = stock(sample), backend.compute(sample)
        except Exception as failure:  # too short for it; a real call of that length then runs stock
            if is_of_user(failure):
                raise
            return ""
        if self.exact:
            return "" if identical(y, expected) else "is not bit-identical to the stock attention on a short sequence"
        # What becomes of NaN itself differs: PyTorch's kernel for the CPU drops it.
        known = torch.isfinite(sample.query).all(-1)
        if not backend.lossy and not torch.equal(torch.isfinite(y[known]), torch.isfinite(expected[known])):
            return "spreads NaN from one query to others"
        exact = accuracy.reference(sample)[known]
        error, stock_error = (accuracy.distance(result[known], exact) for result in (y, expected))
        refusal = self._verdict(backend, sample, error, stock_error, same=False)
        return refusal and f"{refusal} on a short sequence"

    def _verdict(self, backend: Backend, call: AttentionCall, error: float, stock_error: float, same: bool) -> str:
        if self.exact:
            return "" if same else "is not bit-identical to the stock attention here"
        few = call.query[..., 0].numel() * call.value.shape[-1] < ENOUGH
        slack = SLACK + (torch.finfo(call.query.dtype).eps if few else 0.0)
        if backend.lossy:
            within = backend.max_error == math.inf or error <= backend.max_error
            return "" if within else f"has an error of {error:.2e}, and states one of up to {backend.max_error}"
        if math.isfinite(error) and error <= RATIO * stock_error + slack:
            return ""
        return f"has an error of {error:.2e} against the stock attention's {stock_error:.2e}"


_STOCK_IS_BEST = "measured to be the best"
#: Why a route does not serve where hooks watch or change the attention that it stands for.
REPLACED = "the stock attention was replaced after the injection"


def _warn_of_rotation(backend: Backend, why: str) -> None:
    what = f"attention {backend.name!r} reads queries and keys behind their rotation from now on, not before it"
    warnings.warn(f"diffkern: {what}: {why}", stacklevel=4)


def _kind(call: AttentionCall) -> tuple[Hashable, ...]:
    """What a choice is made for: few keys, as those of a text, are another kind than those of an image."""
    return call.signature(), call.key.shape[1] >= MANY_KEYS


def _trial(backend: Backend, call: AttentionCall) -> Hashable:
    """What a backend is tried once for: with its lengths where the choice depends on them."""
    return backend.name, call.signature(), _size(call) if backend.timed else None


def _size(call: AttentionCall) -> Hashable:
    """Lengths within a factor of two: a cache that grows by a token at every call is not measured at every call."""
    batch, length, heads, _ = call.query.shape
    return (batch * heads).bit_length(), length.bit_length(), call.key.shape[1].bit_length()
