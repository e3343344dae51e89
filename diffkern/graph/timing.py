"""Whether a graph is worth having: calls of a kind are timed as they are, then as replays, and the faster form stays.

Nothing waits for a clock: events on the GPU are read once they have passed. What decides is a function of four numbers.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

#: By how much a step as it is must take longer than its replay for the graph to stay.
MARGIN = 1.1
#: A GPU that takes longer than this many times the host's time for a step has work enough; a graph is not tried. Below
#: it may have waited in between, which only replays show.
BUSY = 1.25
#: Calls that are timed as they are, and as many replays; the fastest of them counts.
TIMED_CALLS = 2
#: Calls that may pass until so many were replayed.
MAX_TRIES = 16


@dataclass(frozen=True)
class StepTime:
    """How long one step took, in milliseconds.

    Attributes:
        host: From the call of the forward to its return.
        gpu: From the moment at which the GPU could begin the step to its end of it, waits for the host included.
    """

    host: float
    gpu: float

    @property
    def step(self) -> float:
        """What a loop of such steps takes for each."""
        return max(self.host, self.gpu)


def fastest(times: Sequence[StepTime]) -> StepTime:
    """The least that host and GPU took: what is more is a full queue, or work that a first call has."""
    return StepTime(min(time.host for time in times), min(time.gpu for time in times))


def reason_not_to_capture(now: StepTime) -> str | None:
    """Why no graph can gain enough: the GPU is still at work when the host has long launched everything; or None."""
    if now.gpu <= BUSY * now.host:
        return None
    return f"the GPU takes {now.gpu:.1f} ms for a step and the host {now.host:.1f} ms: a graph would gain nothing"


def reason_not_to_keep(now: StepTime, replayed: StepTime) -> str | None:
    """Why a graph was dropped: its replays take about as long as the calls did; or None."""
    if now.step > MARGIN * replayed.step:
        return None
    return f"a step takes {now.step:.1f} ms as it is and {replayed.step:.1f} ms as a graph: too little gained"


class Stopwatch:
    """Times one call on the current stream of a device."""

    def __init__(self, device: torch.device, since: float | None = None) -> None:
        """Starts it; ``since`` is when the host began, if that was earlier."""
        self._stream = torch.cuda.current_stream(device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record(self._stream)
        self._since = time.perf_counter() if since is None else since
        self._host = 0.0

    def stop(self) -> None:
        """Ends it for the host; the GPU gets there later."""
        self._end.record(self._stream)
        self._host = (time.perf_counter() - self._since) * 1e3

    def read(self) -> StepTime | None:
        """The time, once the GPU is done."""
        return StepTime(self._host, self._start.elapsed_time(self._end)) if self._end.query() else None


class Stage(enum.Enum):
    """What the next call of a kind is for."""

    WARM_UP = "its first calls run as they are: the first is not timed"
    TIMED = "its first calls run as they are and are timed"
    UNREAD = "its first calls were timed, and the GPU is not done with them yet"
    STOCK = "a graph is not worth it"
    REPLAY_TIMED = "replays are timed"
    REPLAY = "replayed"


@dataclass
class Trial:
    """What is known of the times of one kind of call.

    Attributes:
        stage: What its latest call was for.
        reason: Why there is no graph, or what the graph gains; "" until that is known.
        as_is: The timed calls as they are.
        replays: The timed replays.
        told: Whether the reason was told.
        tries: Calls that were to be replayed while that was tried.
        obstacle: Why the last of them was not.
        signature: That of the call of its blocks, where only these are captured.
        step: The fastest of the calls as they are, once it is known.
        replay: The fastest of the replays, likewise.
    """

    stage: Stage | None = None
    reason: str = ""
    as_is: list[Stopwatch] = field(default_factory=list)
    replays: list[Stopwatch] = field(default_factory=list)
    told: bool = False
    tries: int = 0
    obstacle: str = "something changed before each of them"
    signature: Hashable = None
    step: StepTime | None = None
    replay: StepTime | None = None

    def advance(self) -> Stage:
        """What the next call is for, by the clocks that have been read so far."""
        if self.stage not in (Stage.STOCK, Stage.REPLAY):
            self.stage = self._next()
        return self.stage

    def _next(self) -> Stage:
        if self.stage is None:
            return Stage.WARM_UP
        if len(self.as_is) < TIMED_CALLS:
            return Stage.TIMED
        now = self.step = self.step or _read(self.as_is)
        if now is None:
            return Stage.UNREAD
        if reason := reason_not_to_capture(now):
            return self.give_up(reason)
        replayed = self.replay = _read(self.replays[:TIMED_CALLS]) if len(self.replays) >= TIMED_CALLS else None
        if replayed is None:
            self.tries += 1
            if self.tries <= MAX_TRIES or len(self.replays) >= TIMED_CALLS:
                return Stage.REPLAY_TIMED
            return self.give_up(f"of {MAX_TRIES} calls {len(self.replays)} could be replayed: {self.obstacle}")
        if reason := reason_not_to_keep(now, replayed):
            return self.give_up(reason)
        self.reason = f"a step took {now.step:.1f} ms as it is and takes {replayed.step:.1f} ms as a CUDA graph"
        return Stage.REPLAY

    def give_up(self, reason: str) -> Stage:
        """Leaves calls of the kind as they are for good."""
        self.reason, self.stage = reason, Stage.STOCK
        return self.stage


def _read(clocks: Sequence[Stopwatch]) -> StepTime | None:
    times = [clock.read() for clock in clocks]
    return None if any(time is None for time in times) else fastest([time for time in times if time is not None])
