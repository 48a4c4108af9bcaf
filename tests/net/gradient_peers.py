"""Peers in gradient mode, each in a thread of its own with its own sockets, and one process that replays them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from swarm_process import LOOPBACK
from torch import Tensor, nn

import shoal
from shoal.protocols.history import Given

BATCH, FEATURES = 8, 10
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))


def data(who: int, batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100_000 * who + batch)
    inputs = torch.randn(BATCH, FEATURES, generator=generator)
    return inputs, inputs.sin().sum(1, keepdim=True) + 0.1 * torch.randn(BATCH, 1, generator=generator)


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (net(batch[0]) - batch[1]).square().mean()


@dataclass
class Ended:
    """What a peer had when it left."""

    peer_id: str
    report: shoal.Report
    parameters: list[Tensor]
    learning_rate: float
    by_step: dict[int, list[Tensor]]
    """Its parameters after each step of the swarm that it saw from its loop."""


@dataclass
class Fleet:
    """Runs `loop(self, swarm, who)` for each pace, all at once; raises what one of them raised."""

    strategy: Any
    optimizer: Optimizers
    paces: Sequence[float]
    steps: int
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    scaler: bool = False
    inf_at: tuple[int, int] | None = None
    """(peer, batch) whose loss is infinite."""
    keep: bool = False
    limit_seconds: float = 60.0
    ended: dict[int, Ended] = field(default_factory=dict)

    def run(self) -> Fleet:
        self._errors: list[BaseException] = []
        self._address: list[str] = []
        self._founded, self._all_there = threading.Event(), threading.Barrier(len(self.paces))
        self._all_done = threading.Barrier(len(self.paces))
        threads = [threading.Thread(target=self._guarded, args=(who,)) for who in range(len(self.paces))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.limit_seconds + 20)
        if self._errors:
            raise self._errors[0]
        assert self.ended.keys() == set(range(len(self.paces)))
        return self

    def _guarded(self, who: int) -> None:
        try:
            self._live(who)
        except BaseException as error:
            self._errors.append(error)
            self._founded.set()
            self._all_there.abort()
            self._all_done.abort()

    def _live(self, who: int) -> None:
        if who:
            self._founded.wait(30)
        swarm = shoal.join(
            "fleet",
            peers=self._address,
            listen=LOOPBACK,
            strategy=None if who else self.strategy,
            secret="a-fleet-of-peers",
        )
        if not who:
            self._address.append(swarm.address)
            self._founded.set()
        net = model()
        optimizer = self.optimizer(net)
        scheduler = self.scheduler(optimizer) if self.scheduler else None
        net, optimizer = swarm.attach(net, optimizer, batch_size=BATCH, scheduler=scheduler)
        self._all_there.wait(30)
        by_step: dict[int, list[Tensor]] = {}
        with swarm:
            self._train(swarm, who, net, optimizer, scheduler, by_step)
            values = [parameter.detach().clone() for parameter in net.parameters()]
            report, rate = swarm.report(), optimizer.param_groups[0]["lr"]
            self.ended[who] = Ended(swarm.peer_id, report, values, rate, by_step)
            self._all_done.wait(30)

    def _train(self, swarm: Any, who: int, net: nn.Module, optimizer: Any, scheduler: Any, by_step: Any) -> None:
        """A loop as it is without shoal. It ends at the step that all end at, which its last batch brought."""
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=self.scaler)
        until = time.monotonic() + self.limit_seconds
        batch = progress = 0
        while progress < self.steps:
            assert time.monotonic() < until, f"peer {who} is at step {progress}: {swarm.report()}"
            batch += 1
            loss = loss_of(net, data(who, batch))
            if self.inf_at == (who, batch):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            time.sleep(self.paces[who])
            scaler.step(optimizer)
            scaler.update()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            progress = swarm.progress
            if self.keep:
                by_step[progress] = [parameter.detach().clone() for parameter in net.parameters()]

    # -- what one process makes of it

    def given(self) -> dict[int, dict[int, Given]]:
        """For each step, what each peer gave, as all reports say."""
        who_is = {ended.peer_id: who for who, ended in self.ended.items()}
        found: dict[int, dict[int, Given]] = {}
        for ended in self.ended.values():
            for step in ended.report.global_steps:
                told = {who_is[peer_id]: given for peer_id, given in step.given.items()}
                assert found.setdefault(step.step, told) == told, "two peers report one step differently"
        return found

    def replay(self, max_grad_norm: float | None = None) -> dict[int, tuple[list[Tensor], float]]:
        """Parameters and learning rate after each step of one process that takes just the reported batches."""
        net = model()
        optimizer = self.optimizer(net)
        scheduler = self.scheduler(optimizer) if self.scheduler else None
        after = {}
        reported = self.given()
        for step in range(1, self.steps + 1):
            total = sum(given.samples for given in reported[step].values())
            optimizer.zero_grad()
            for who, given in reported[step].items():
                for first, last in given.batches:
                    for batch in range(first, last + 1):
                        (loss_of(net, data(who, batch)) * (BATCH / total)).backward()
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), max_grad_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            values = [parameter.detach().clone() for parameter in net.parameters()]
            after[step] = values, optimizer.param_groups[0]["lr"]
        return after


def farthest(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))
