"""What a person uses: `join`, and the swarm it returns.

swarm = shoal.join("birds", peers=["shoal://..."])
model, optimizer = swarm.attach(model, optimizer, batch_size=32)
with swarm:
    ...the loop, unchanged...
"""

from __future__ import annotations

import atexit
import hashlib
import math
import numbers
import os
import sys
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal.core.errors import AttachError, LeftError, OptionError, RoundError
from shoal.core.events import Event
from shoal.protocols.roll_record import CALL
from shoal.protocols.taking_part import take_part
from shoal.strategies import AnyStrategy, build_strategy
from shoal.strategies.moshpit import Moshpit
from shoal.strategies.options import options_of
from shoal.tensors.flat import check_tensors, pack, shapes_of, unpack
from shoal.training.announce import say
from shoal.training.mailbox import Mailbox
from shoal.training.node import Node
from shoal.training.report import AveragingReport, PeerInfo, Report
from shoal.training.settings import read_settings
from shoal.training.thread_replica import ThreadReplica

Result = TypeVar("Result")
LAST_AVERAGING_SECONDS = 10.0
SAY_EVERY_SECONDS = 10.0
MAX_WEIGHT = 1e15
_attached_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def join(
    run: str | None = None,
    *,
    peers: Sequence[str] = (),
    strategy: AnyStrategy | None = None,
    secret: str | None = None,
    listen: str | None = None,
    identity: str | os.PathLike[str] | None = None,
    join_timeout_seconds: float | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Swarm:
    """Enter a run through any of its peers, or found it when none is named.

    Without arguments it reads what `shoal run` set: SHOAL_RUN, SHOAL_JOIN, SHOAL_SECRET, SHOAL_LISTEN, SHOAL_IDENTITY.
    `strategy` None adopts the run's. `listen` is HOST:PORT; by default every interface, on a port from the run's name.
    `identity` is a file that keeps this peer's id; by default the id lives in memory. `on_event` is called on the
    network thread for each event.

    Raises JoinError within `join_timeout_seconds` (default 10) when peers were named and none answered, with one reason
    per address; CharterMismatch when the run's strategy is another; AddressError, OptionError, IdentityInUse.
    """
    settings = read_settings(run, peers, secret, listen, identity, join_timeout_seconds)
    if strategy is not None and not isinstance(strategy, AnyStrategy):
        raise OptionError("strategy", strategy, "a strategy such as shoal.Moshpit()")
    node = Node(settings, options_of(strategy) if strategy else None, on_event)
    return Swarm(node, strategy)


class Swarm:
    """A peer's membership in a run. `join` makes it; use it from one thread."""

    def __init__(self, node: Node, strategy: AnyStrategy | None) -> None:
        self._node, self._strategy = node, strategy
        self._mailbox = Mailbox()
        self._replica: ThreadReplica | None = None
        self._taking_part: Future[None] | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._hooks: list[Any] = []
        self._left = False
        atexit.register(self.leave)

    # -- who and where

    @property
    def address(self) -> str:
        """The address others join by: shoal://PEERID@HOST:PORT[,HOST:PORT]...[/SECRET]."""
        return self._node.address

    @property
    def peer_id(self) -> str:
        """This peer's id: 32 characters of a-z2-7."""
        return self._node.peer_id

    @property
    def data_seed(self) -> int:
        """A seed that differs from peer to peer: with equal seeds all would train on the same batches."""
        return int.from_bytes(hashlib.sha256(f"data {self.peer_id}".encode()).digest()[:4])

    def peers(self) -> list[PeerInfo]:
        """The other live peers, by their own word."""
        members = self._node.peer.members.members if not self._left else {}
        return [
            PeerInfo(r.peer_id, r.role, r.state, r.steps, r.step_seconds, r.averagings, r.bandwidth, tuple(r.endpoints))
            for r in list(members.values())
        ]

    @property
    def progress(self) -> int:
        """Optimizer steps behind the attached model's state, also those of others before it was taken over from them.

        Where the run averages gradients: steps of the swarm. 0 before `attach`.
        """
        return self._replica.progress if self._replica is not None else 0

    # -- taking part

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, batch_size: int | None = None,
        scheduler: Any = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:  # fmt: skip
        """Let the swarm train this model: everyone but the founder takes over the run's state here, before it returns.

        Only parameters in the optimizer's groups that require a gradient are averaged, and floating buffers; all else
        stays local. `batch_size`: samples of one step, the weight of this peer's work; `count` says it step by step;
        without either, a step weighs as one sample. `scheduler`: of the learning rate. Where the run averages gradients
        it moves once per step of the swarm, and the loop's own calls of scheduler.step() do nothing; else it is the
        loop's, and is left alone.

        Raises AttachError, ModelMismatch, CharterMismatch, DownloadError. Waits, and says so every 10 s, where the
        run's founder has not attached yet.
        """
        self._must_be_in()
        if self._replica is not None:
            raise AttachError(
                "this swarm has an attached optimizer already. One model and one optimizer per swarm: put all "
                "parameters into the groups of one optimizer, or join a second run for a second model"
            )
        if batch_size is not None and (isinstance(batch_size, bool) or not 0 < batch_size < 2**31):
            raise OptionError("batch_size", batch_size, "a positive number of samples")
        if optimizer in _attached_optimizers:
            raise AttachError("this optimizer is attached to another swarm of this process: leave that one first")
        replica = ThreadReplica(model, optimizer, self._mailbox, batch_size, scheduler)
        default = options_of(Moshpit())
        training: Future[None] = Future()

        def on_training() -> None:
            if not training.done():
                training.set_result(None)

        wanted = options_of(self._strategy) if self._strategy else None
        peer = self._node.peer
        self._node.watch(replica)
        taking_part = self._node.submit(
            take_part(peer, replica, replica.schema, wanted, default, build_strategy, on_training)
        )
        taking_part.add_done_callback(lambda done: on_training())
        taking_part.add_done_callback(lambda done: replica.end())
        try:
            self._wait(training, math.inf, self._what_attach_waits_for)
        except BaseException as error:
            taking_part.cancel()
            _end_quietly(error)
            raise
        if taking_part.done():
            self._node.unwatch()
            taking_part.result()
        self._replica, self._taking_part = replica, taking_part
        self._optimizer = optimizer
        _attached_optimizers.add(optimizer)
        self._hooks = [
            optimizer.register_step_post_hook(lambda optimizer, args, kwargs: self._step_done()),
            model.register_forward_pre_hook(self._first_batch, with_kwargs=True),
        ]
        return model, optimizer

    def count(self, samples: float) -> None:
        """Before a step: it is made of this many samples (instead of `batch_size`). Adds up over several calls."""
        if not 0 <= samples < math.inf:
            raise OptionError("samples", samples, "a number of samples, at least 0")
        if self._replica is not None:
            self._replica.count(samples)

    def sync_point(self) -> None:
        """A safe point for a loop that pauses, for example between batches of an evaluation."""
        self._check_strategy()
        self._mailbox.work()

    def _step_done(self) -> None:
        if self._replica is not None and not self._left:
            self._replica.step_done()
            self._check_strategy()

    def _check_strategy(self) -> None:
        """Raise, once, what ended the strategy: a changed model, for example."""
        if self._taking_part is not None and self._taking_part.done() and not self._left:
            taking_part, self._taking_part = self._taking_part, None
            if taking_part.cancelled():
                raise LeftError("the network thread of this swarm has ended; its averagings have stopped")
            taking_part.result()

    def _first_batch(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Remember a digest of the first training batch: two peers with the same one train on the same data."""
        if not model.training or not torch.is_grad_enabled() or not self._node.alive:
            return
        self._hooks.pop().remove()
        digest = batch_digest((*inputs, *named.values()))
        if digest:
            self._node.call_soon(lambda: self._node.peer.members.update(first_batch=digest))

    # -- averaging on demand

    def average(
        self, tensors: Iterable[Tensor], weight: float = 1.0, timeout_seconds: float = 30.0
    ) -> tuple[list[Tensor], AveragingReport]:
        """Average a list of tensors once, with the peers that call it too.

        Returns new tensors (same shapes, types and devices) and a report; the given ones stay as they are. The mean is
        weighted; without any weight everybody's values stay. It travels in float32 (float64 stays), rounded once.
        It waits for those who have not called yet for half of `timeout_seconds` at most.

        Raises NobodyThere at once when alone, TensorError with the index of a tensor that can't be averaged (integer,
        bool, complex, NaN, other shapes than the others'), OptionError for a weight, RoundError when it failed.
        """
        self._must_be_in()
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not 0 <= weight <= MAX_WEIGHT:
            raise OptionError("weight", weight, f"a finite number from 0 to {MAX_WEIGHT:g}")
        if not 0 < timeout_seconds <= 86400:
            raise OptionError("timeout_seconds", timeout_seconds, "from above 0 to 86400")
        if isinstance(tensors, Tensor):
            raise OptionError("tensors", "a tensor", "a list of tensors, also for one")
        tensors = list(tensors)
        check_tensors(tensors)
        peer, host = self._node.peer, self._node.peer.host
        vectors, shapes = pack(tensors), shapes_of(tensors)
        started_at, sent, received = time.monotonic(), host.sent.total_bytes, host.received.total_bytes
        charter = peer.members.charter
        strategy = build_strategy(charter.strategy) if charter and charter.strategy else Moshpit()
        work = strategy.all_reduce(peer, CALL, vectors, float(weight), shapes, timeout_seconds=timeout_seconds)
        outcome = self._run(work, timeout_seconds + 5.0)
        roll = outcome.roll
        report = AveragingReport(
            roll.number, tuple(roll.members), outcome.contributed, sum(roll.weights), outcome.exact,
            outcome.rounds, outcome.failures,
            host.sent.total_bytes - sent, host.received.total_bytes - received, time.monotonic() - started_at,
        )  # fmt: skip
        return unpack(outcome.vectors, tensors), report

    # -- the end

    def report(self) -> Report:
        """What happened so far, as figures and as text."""
        return self._node.report(self._replica)

    def leave(self, *, last_averaging: bool = False) -> None:
        """Say goodbye and end the network thread, within 3 s; with `last_averaging` after one more, at most 10 s."""
        if self._left:
            return
        try:
            if last_averaging and self._taking_part is not None and self._node.alive:
                farewell = self._node.submit(self._node.say_farewell(self._taking_part))
                self._mailbox.work_until(farewell, LAST_AVERAGING_SECONDS)
                farewell.cancel()
        except KeyboardInterrupt as interrupt:
            _end_quietly(interrupt)
            raise
        finally:
            self._left = True
            if self._optimizer is not None:
                _attached_optimizers.discard(self._optimizer)
            atexit.unregister(self.leave)
            for hook in self._hooks:
                hook.remove()
            if self._replica is not None:
                self._replica.detach()
            self._node.stop()

    def __enter__(self) -> Swarm:
        self._must_be_in()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        _end_quietly(error)
        self.leave(last_averaging=kind is None)

    def _must_be_in(self) -> None:
        if self._left:
            raise LeftError("this peer has left the run; join again for a new swarm")

    def _run(self, work: Coroutine[Any, Any, Result], timeout_seconds: float) -> Result:
        """Run on the network thread; the waiting user's thread serves as a safe point."""
        future = self._node.submit(work)
        try:
            self._wait(future, timeout_seconds, None)
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def _what_attach_waits_for(self) -> str:
        members = self._node.peer.members
        if members.charter is None or not members.charter.complete:
            return "waits for the run's founder to attach its model"
        return (
            "waits for the run's state: another peer gives it at its next optimizer step, or where its loop "
            "pauses, at swarm.sync_point()"
        )

    def _wait(self, future: Future[Any], timeout_seconds: float, what: Callable[[], str] | None) -> None:
        until = time.monotonic() + timeout_seconds
        while not self._mailbox.work_until(future, min(SAY_EVERY_SECONDS, until - time.monotonic())):
            if time.monotonic() >= until:
                raise RoundError(f"the network thread did not answer within {timeout_seconds:g} s")
            if what is not None:
                say(f"this peer {what()} (other peers here: {len(self.peers())})")


def batch_digest(inputs: Sequence[Any]) -> str:
    """A digest of the plain tensors in a model's inputs; empty where there are none."""
    digest = hashlib.sha256()
    tensors = [value for value in inputs if isinstance(value, Tensor) and value.layout is torch.strided]
    for tensor in tensors:
        digest.update(repr((tensor.shape, tensor.dtype)).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16] if tensors else ""


def _end_quietly(error: BaseException | None) -> None:
    """Where this very Ctrl-C ends the program, it does so without a traceback over the goodbye."""
    if not isinstance(error, KeyboardInterrupt):
        return
    usual = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: Any) -> None:
        if raised is error:
            say("interrupted; this peer said goodbye")
        else:
            usual(kind, raised, trace)

    sys.excepthook = hook
