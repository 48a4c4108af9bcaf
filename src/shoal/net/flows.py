"""Flows over shared access lines on an event loop: a fluid model of bulk transfers, with max-min fair rates.

A pipe carries one thing after the other from one host's uplink to another's downlink. While something is under way the
pipe is a flow on both lines. Rates change only where a flow begins or ends, or a line changes: then they are computed
once for that instant, for the flows that share lines with it, over however many others (`planning/fair_rates.py`).

Most events cost less than that. A pipe that ends and begins again within one instant, as the next part of a stream
does, leaves all rates as they were. Small packets are no flows: a line books them, and bulk yields what they took.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

from shoal.core.loop import CLOCK_GRAIN
from shoal.net.lines import Line
from shoal.planning.fair_rates import fair_rates

Ts = TypeVarTuple("Ts")

TICK_SECONDS, LATENCY_STEP_SECONDS = 0.025, 0.005
"""A host's gauge sees its flows' sum, half a window at a time. All flows tell of their progress at once, which is seen
at the other end after the latency, in whole steps: so many arrive at once."""
FLOWS_PER_TICK, LONGEST_PAUSE_SECONDS = 250, 0.5
"""More flows tell of theirs more rarely: it is a sign of life, and takes time in proportion to the flows."""
CROWD_FLOWS, CROWD_SECONDS, LONGEST_CROWD_SECONDS = 100, 0.005, 0.1
"""Where more flows are connected, rates follow their beginnings and ends within this time, in proportion to the flows
as the time is that it takes to compute them. TCP's rates need a few round trips for it; elsewhere it is one instant."""


class Pipe:
    """One direction of a connection.

    `on_sent(bytes)` hears of each piece that left and `on_arrived(bytes)` of it a latency later; of the last piece of
    each thing hears `on_end(bytes)` alone, as it leaves.
    """

    __slots__ = (
        "_left_bytes",
        "_on_end",
        "_on_sent",
        "_rate",
        "_settled_at",
        "_untold_bytes",
        "down",
        "ends_at",
        "is_joined",
        "is_measured",
        "latency_steps",
        "on_arrived",
        "up",
    )

    def __init__(
        self, up: Line, down: Line, latency_seconds: float, on_sent: Callable[[int], None],
        on_arrived: Callable[[int], None], on_end: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.up, self.down, self.latency_steps = up, down, int(latency_seconds / LATENCY_STEP_SECONDS)
        self._on_sent, self.on_arrived, self._on_end = on_sent, on_arrived, on_end
        self.is_joined = False  # whether its flow is on the lines
        self.is_measured = False  # whether the lines' gauges hear of it
        self.ends_at = math.inf
        self._left_bytes = self._rate = self._settled_at = 0.0
        self._untold_bytes = 0

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        return self._untold_bytes > 0

    def begin(self, now: float, count_bytes: int) -> None:
        """So many bytes are to pass, at the rate that this pipe has."""
        self._left_bytes, self._untold_bytes = float(count_bytes), count_bytes
        self._settled_at = now

    def settle(self, now: float) -> None:
        """What passed up to now is no longer left."""
        left = self._left_bytes - self._rate * (now - self._settled_at)
        self._left_bytes, self._settled_at = (left if left > 0.0 else 0.0), now

    def set_rate(self, now: float, rate: float) -> None:
        """From now on; `ends_at` follows."""
        self.settle(now)
        self._rate = rate
        self.foresee()

    def foresee(self) -> None:
        """When it will end, if nothing changes."""
        has_end = self._untold_bytes and self._rate
        self.ends_at = self._settled_at + self._left_bytes / self._rate if has_end else math.inf

    def has_other_rate(self, rate: float) -> bool:
        """Whether this rate differs from its own by more than rounding."""
        return abs(rate - self._rate) > 1e-9 * rate

    def tell(self, now: float) -> int:
        """Tell of what has left since it was told last, but for the last piece; returns how many bytes that is."""
        self.settle(now)
        passed = self._untold_bytes - math.ceil(self._left_bytes)
        if not 0 < passed < self._untold_bytes:
            return 0
        self._untold_bytes -= passed
        self._carry(passed)
        self._on_sent(passed)
        return passed

    def end(self) -> None:
        """The last byte is through."""
        passed, self._untold_bytes = self._untold_bytes, 0
        self.ends_at = math.inf
        self._carry(passed)
        self._on_end(passed)

    def drop(self) -> None:
        """What was under way comes no further."""
        self._untold_bytes, self.ends_at = 0, math.inf

    def _carry(self, count_bytes: int) -> None:
        self.up.carried_bytes += count_bytes
        self.down.carried_bytes += count_bytes


class Flows:
    """All pipes of a network. `context`: that of its timers, which belong to no host."""

    def __init__(self) -> None:
        self.context = Context()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pipes: dict[Pipe, None] = {}  # those on the lines
        self._lines: dict[Line, None] = {}  # those with pipes
        self._ended: dict[Pipe, None] = {}  # of them, those that ended in this instant
        self._changed: dict[Line, None] = {}
        self._ended_in_crowds: dict[Pipe, None] = {}
        self._changed_in_crowds: dict[Line, None] = {}
        self._ends: list[tuple[float, int, Pipe]] = []
        self._serials, self._mark = itertools.count(), 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at, self._tell_at = math.inf, 0.0
        self._is_settling = self._is_settling_crowds = self._is_ticking = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop on which it runs."""
        self._loop = loop

    def now(self) -> float:
        """0 before it runs."""
        return self._loop.time() if self._loop else 0.0

    def send(self, pipe: Pipe, count_bytes: int) -> None:
        """So many bytes begin to pass through this pipe, which is not busy."""
        pipe.begin(self.now(), count_bytes)
        if pipe.is_joined:
            self._forget_end(pipe)
            pipe.foresee()
            self._expect(pipe)
            self._set_timer()
        else:
            self.join(pipe)

    def join(self, pipe: Pipe) -> None:
        """Put its flow on the lines; it goes on where it stood."""
        pipe.is_joined = True
        pipe.set_rate(self.now(), 0.0)  # until the instant is settled
        self._pipes[pipe] = pipe.up.pipes[pipe] = pipe.down.pipes[pipe] = None
        self._lines[pipe.up] = self._lines[pipe.down] = None
        self.change(pipe.up, pipe.down)
        if not self._is_ticking:
            self._is_ticking = True
            self._loop_at(self.now() + TICK_SECONDS, self._tick)

    def leave(self, pipe: Pipe) -> None:
        """Take its flow from the lines; nothing moves until it joins again."""
        if pipe.is_joined:
            pipe.is_joined = False
            pipe.set_rate(self.now(), 0.0)
            self._forget_end(pipe)
            del self._pipes[pipe], pipe.up.pipes[pipe], pipe.down.pipes[pipe]
            for line in (pipe.up, pipe.down):
                if not line.pipes:
                    line.measure(self.now())
                    self._lines.pop(line, None)
            self.change(pipe.up, pipe.down)

    def drop(self, pipe: Pipe) -> None:
        """What is under way comes no further."""
        pipe.drop()
        self.leave(pipe)

    def change(self, *lines: Line, at_once: bool = False) -> None:
        """These lines need new rates, once all of this instant has happened; a crowd's may wait a little longer."""
        if not at_once and any(line.crowd > CROWD_FLOWS for line in lines):
            self._changed_in_crowds.update(dict.fromkeys(lines))
            if not self._is_settling_crowds:
                self._settle_crowds_later(max(line.crowd for line in lines))
        else:
            self._changed.update(dict.fromkeys(lines))
            self._settle_soon()

    def _forget_end(self, pipe: Pipe) -> None:
        self._ended.pop(pipe, None)
        self._ended_in_crowds.pop(pipe, None)

    def _loop_at(self, when: float, work: Callable[[*Ts], None], *what: *Ts) -> asyncio.TimerHandle:
        assert self._loop is not None, "a transport that listens has a loop"
        return self._loop.call_at(when, work, *what, context=self.context)

    def _settle_soon(self) -> None:
        """Two grains of the clock later: when all that is ready in this instant has run."""
        if not self._is_settling:
            self._is_settling = True
            now = self.now()
            self._loop_at(now + 2 * max(CLOCK_GRAIN, math.ulp(now)), self._settle)

    def _settle_crowds_later(self, crowd: int) -> None:
        self._is_settling_crowds = True
        seconds = min(CROWD_SECONDS * crowd / CROWD_FLOWS, LONGEST_CROWD_SECONDS)
        self._loop_at(self.now() + seconds, self._settle_crowds)

    def _settle_crowds(self) -> None:
        for pipe in list(self._ended_in_crowds):
            self.leave(pipe)
        changed, self._changed_in_crowds = self._changed_in_crowds, {}
        self._is_settling_crowds = False
        self.change(*changed, at_once=True)

    def _settle(self) -> None:
        for pipe in list(self._ended):
            self.leave(pipe)
        changed, self._changed = self._changed, {}
        self._is_settling = False
        self._mark += 1
        now = self.now()
        for line in changed:
            if line.mark != self._mark:
                self._share(now, *self._connected(line))
        self._set_timer()

    def _connected(self, first: Line) -> tuple[list[Line], list[Pipe]]:
        """The lines and flows that share, directly or through others, something with this line."""
        mark = first.mark = self._mark
        first.index = 0
        lines, pipes = [first], []
        for line in lines:  # it grows
            for pipe in line.pipes:
                other = pipe.up
                if other is line:
                    pipes.append(pipe)  # each has one uplink, and is met there once
                    other = pipe.down
                if other.mark != mark:
                    other.mark, other.index = mark, len(lines)
                    lines.append(other)
        return lines, pipes

    def _share(self, now: float, lines: list[Line], pipes: list[Pipe]) -> None:
        capacities = [line.left_for_bulk(now) for line in lines]
        for line in lines:
            line.bulk_rate = line.measured_rate = 0.0
            line.crowd = len(pipes)
        if not pipes:
            return
        rates = fair_rates([pipe.up.index for pipe in pipes], [pipe.down.index for pipe in pipes], capacities)
        for pipe, rate in zip(pipes, rates, strict=True):
            pipe.up.bulk_rate += rate
            pipe.down.bulk_rate += rate
            if pipe.is_measured:
                pipe.up.measured_rate += rate
                pipe.down.measured_rate += rate
            if pipe.has_other_rate(rate):
                pipe.set_rate(now, rate)
                if pipe.is_busy:
                    self._expect(pipe)

    # -- what comes next

    def _expect(self, pipe: Pipe) -> None:
        heapq.heappush(self._ends, (pipe.ends_at, next(self._serials), pipe))
        if len(self._ends) > 1000 + 4 * len(self._pipes):
            self._ends = [entry for entry in self._ends if entry[2].ends_at == entry[0]]
            heapq.heapify(self._ends)

    def _set_timer(self) -> None:
        ends = self._ends
        while ends and ends[0][2].ends_at != ends[0][0]:
            heapq.heappop(ends)
        if ends and ends[0][0] < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = ends[0][0]
            self._timer = self._loop_at(self._timer_at, self._end_due)

    def _end_due(self) -> None:
        self._timer, self._timer_at = None, math.inf
        due_at = self.now() + CLOCK_GRAIN
        while self._ends and self._ends[0][0] <= due_at:
            foreseen, _, pipe = heapq.heappop(self._ends)
            if pipe.ends_at == foreseen:
                (self._ended_in_crowds if pipe.up.crowd > CROWD_FLOWS else self._ended)[pipe] = None
                pipe.end()
        if self._ended:
            self._settle_soon()
        if self._ended_in_crowds and not self._is_settling_crowds:
            self._settle_crowds_later(max(pipe.up.crowd for pipe in self._ended_in_crowds))
        self._set_timer()

    def _tick(self) -> None:
        now = self.now()
        for line in self._lines:
            line.measure(now)
            if line.should_yield():
                self.change(line)
        if now >= self._tell_at:
            self._tell(now)
            self._tell_at = now + min(TICK_SECONDS * (len(self._pipes) // FLOWS_PER_TICK), LONGEST_PAUSE_SECONDS)
        self._is_ticking = bool(self._pipes)
        if self._is_ticking:
            self._loop_at(now + TICK_SECONDS, self._tick)

    def _tell(self, now: float) -> None:
        arriving: dict[int, list[tuple[Pipe, int]]] = {}
        for pipe in list(self._pipes):
            if passed := pipe.tell(now):
                arriving.setdefault(pipe.latency_steps, []).append((pipe, passed))
        for steps, pieces in arriving.items():
            self._loop_at(now + steps * LATENCY_STEP_SECONDS, self._arrive, pieces)

    def _arrive(self, pieces: list[tuple[Pipe, int]]) -> None:
        for pipe, count_bytes in pieces:
            pipe.on_arrived(count_bytes)
