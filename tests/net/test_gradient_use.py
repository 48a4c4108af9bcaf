"""Gradient mode as people use it: alone, with what can't be gathered, and what travels (reference section 7)."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import psutil
import pytest
import torch
from gradient_peers import BATCH, data, farthest, loss_of, model
from swarm_process import LOOPBACK
from torch import nn

import shoal
from optimizers import Restless

GRADIENTS = {"average": "gradients", "target_batch": 4 * BATCH}
LONE = [
    shoal.AllReduce(),
    shoal.AllReduce(every_steps=1),
    shoal.Moshpit(group_size=3),
    shoal.Moshpit(plain_rounds=2),
    shoal.AllReduce(**GRADIENTS),
    shoal.Moshpit(**GRADIENTS),
]


@pytest.fixture(autouse=True)
def one_core() -> None:
    torch.set_num_threads(1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, batches: range, accumulate: int = 1) -> list[float]:
    losses = []
    for batch in batches:
        loss = loss_of(net, data(0, batch))
        (loss / accumulate).backward()
        if batch % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", LONE, ids=lambda s: f"{type(s).__name__}-{s.average}")
def test_check_20_a_lone_peer_trains_as_without_shoal(strategy: Any) -> None:
    """It does not wait, and its loss falls: in gradient mode as that of the same large batches."""
    plain = model()
    accumulate = 4 if strategy.average == "gradients" else 1
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.005, momentum=0.9), range(1, 201), accumulate)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9)
    began = time.monotonic()
    with shoal.join("lone", listen=LOOPBACK, strategy=strategy) as swarm:
        net, optimizer = swarm.attach(net, optimizer, batch_size=BATCH)
        losses = train(net, optimizer, range(1, 201))
        report = swarm.report()
    assert time.monotonic() - began < 15
    assert losses == pytest.approx(expected, rel=1e-4)
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    assert farthest(list(net.parameters()), list(plain.parameters())) < 1e-5
    assert not report.failures
    assert report.progress == 200 // accumulate


def test_check_26_the_users_signal_handlers_stay_and_nothing_is_forked(swarm) -> None:
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    net = model()
    net, optimizer = swarm.attach(net, torch.optim.SGD(net.parameters(), lr=0.005), batch_size=BATCH)
    train(net, optimizer, range(1, 9))
    assert handlers == {number: signal.getsignal(number) for number in signal.valid_signals()}
    assert not psutil.Process().children()


def test_ctrl_c_reaches_a_loop_that_waits_for_the_swarm(two: Two) -> None:
    """The other peer does not come to its safe point for a second, and this one waits for it, in optimizer.step()."""
    loss_of(two.models[0], data(0, 1)).backward()
    two.optimizers[0].step()  # half of the target
    loss_of(two.models[0], data(0, 2)).backward()
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        two.optimizers[0].step()
    assert 0.2 < time.monotonic() - began < 0.9
    two.swarms[0].leave()
    assert time.monotonic() - began < 4


# ---------------------------------------------------------------- what can't be gathered


@pytest.fixture
def swarm():
    with shoal.join("refusals", listen=LOOPBACK, strategy=shoal.AllReduce(**GRADIENTS)) as swarm:
        yield swarm


def test_lbfgs_is_refused_at_attach(swarm) -> None:
    net = model()
    with pytest.raises(shoal.AttachError, match="LBFGS evaluates the loss many times"):
        swarm.attach(net, torch.optim.LBFGS(net.parameters()), batch_size=BATCH)


def test_a_plateau_schedule_is_refused_at_attach(swarm) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(shoal.AttachError, match="ReduceLROnPlateau follows each peer's own loss"):
        swarm.attach(net, optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_a_closure_is_refused_and_changes_nothing(swarm) -> None:
    net = model()
    net, optimizer = swarm.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), batch_size=BATCH)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(shoal.AttachError, match=r"optimizer.step\(closure\) can't be gathered"):
        optimizer.step(lambda: loss_of(net, data(0, 1)))
    assert farthest(before, list(net.parameters())) == 0


def test_an_optimizer_that_moves_without_a_gradient_is_refused(swarm) -> None:
    net = model()
    net, optimizer = swarm.attach(net, Restless(net.parameters(), lr=0.1), batch_size=BATCH)
    loss_of(net, data(0, 1)).backward()
    with pytest.raises(shoal.AttachError, match="Restless changes parameters that have no gradient"):
        optimizer.step()


def test_sparse_gradients_are_refused(swarm) -> None:
    net = nn.Embedding(10, 3, sparse=True)
    net, optimizer = swarm.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), batch_size=BATCH)
    net(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(shoal.AttachError, match="sparse gradients can't be gathered"):
        optimizer.step()


def test_a_second_optimizer_is_refused(swarm) -> None:
    net = model()
    swarm.attach(net, torch.optim.SGD(net[0].parameters(), lr=0.1), batch_size=BATCH)
    with pytest.raises(shoal.AttachError, match="has an attached optimizer already"):
        swarm.attach(net, torch.optim.SGD(net[2].parameters(), lr=0.1), batch_size=BATCH)


def test_a_changed_schema_ends_the_loop_with_the_reason(swarm) -> None:
    net = model()
    net, optimizer = swarm.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), batch_size=BATCH)
    train(net, optimizer, range(1, 9))
    net[0].weight.requires_grad_(False)
    with pytest.raises(shoal.SchemaChanged, match=r"0\.weight"):
        train(net, optimizer, range(9, 30))


def test_another_learning_rate_than_the_runs_is_refused(swarm) -> None:
    net = model()
    swarm.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), batch_size=BATCH)
    problems: list[BaseException] = []

    def visit() -> None:
        with shoal.join("refusals", peers=[swarm.address], listen=LOOPBACK) as visitor:
            other = model()
            try:
                visitor.attach(other, torch.optim.SGD(other.parameters(), lr=0.2), batch_size=BATCH)
            except shoal.ShoalError as error:
                problems.append(error)

    visiting = threading.Thread(target=visit)
    visiting.start()
    while visiting.is_alive():
        swarm.sync_point()
        time.sleep(0.01)
    (problem,) = problems
    assert isinstance(problem, shoal.AttachError)
    assert str(problem).startswith("lr of the optimizer's group 0 is 0.2 here, 0.1 in the run")


def test_options_of_the_other_mode_are_refused_with_the_reason() -> None:
    for make, field in [
        (lambda: shoal.AllReduce(average="weights"), "average"),
        (lambda: shoal.AllReduce(average="gradients"), "target_batch"),
        (lambda: shoal.AllReduce(target_batch=32), "target_batch"),
        (lambda: shoal.Moshpit(max_grad_norm=1.0), "max_grad_norm"),
        (lambda: shoal.Moshpit(gather_timeout_seconds=60), "gather_timeout_seconds"),
        (lambda: shoal.AllReduce(**GRADIENTS, every_steps=5), "every_steps"),
        (lambda: shoal.AllReduce(**GRADIENTS, every_seconds=5), "every_seconds"),
        (lambda: shoal.Moshpit(**GRADIENTS, plain_rounds=2), "plain_rounds"),
        (lambda: shoal.AllReduce(average="gradients", target_batch=0), "target_batch"),
        (lambda: shoal.AllReduce(**GRADIENTS, max_grad_norm=0), "max_grad_norm"),
    ]:
        with pytest.raises(shoal.OptionError) as refused:
            make()
        assert refused.value.field == field


# ---------------------------------------------------------------- what travels


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.body, self.unused = nn.BatchNorm1d(10), nn.Linear(10, 1), nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(self.norm(inputs))


class Two:
    """Two peers in this process, stepped in turns: no thread of theirs waits for the other's batch for long."""

    def __init__(self) -> None:
        self.swarms: list[Any] = []
        self.models: list[Normed] = []
        self.optimizers: list[torch.optim.Optimizer] = []

    def join(self, strategy: Any = None) -> None:
        peers = [self.swarms[0].address] if self.swarms else []
        swarm = shoal.join("two", peers=peers, listen=LOOPBACK, strategy=strategy, secret="two-of-them")
        net = Normed()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        self.beside(lambda: swarm.attach(net, optimizer, batch_size=BATCH))
        self.swarms.append(swarm)
        self.models.append(net)
        self.optimizers.append(optimizer)

    def beside(self, *works: Any) -> None:
        """Each in a thread; the peers that are there already have safe points meanwhile."""
        threads = [threading.Thread(target=work, daemon=True) for work in works]
        until = time.monotonic() + 20
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert time.monotonic() < until
            for swarm in self.swarms if len(works) == 1 else ():
                swarm.sync_point()
            time.sleep(0.005)

    def momentum(self, who: int) -> torch.Tensor:
        return self.optimizers[who].state[self.models[who].body.weight]["momentum_buffer"]

    def step(self, batch: int) -> None:
        """Both give one batch, which is the target, and take the step."""

        def one(who: int) -> None:
            before = self.swarms[who].progress
            loss_of(self.models[who], data(who, batch)).backward()
            while self.swarms[who].progress == before:
                self.optimizers[who].step()
                self.swarms[who].sync_point()
                time.sleep(0.002)
            self.optimizers[who].zero_grad()

        self.beside(lambda: one(0), lambda: one(1))


@pytest.fixture
def two():
    pair = Two()
    pair.join(shoal.AllReduce(average="gradients", target_batch=2 * BATCH))
    pair.join()
    yield pair
    for swarm in pair.swarms:
        swarm.leave()


def test_check_22_gradients_buffers_parameters_and_momentum_travel(two: Two) -> None:
    """Each is perturbed at one peer, and shows at the other."""
    first, second = two.models
    two.step(1)
    assert farthest(list(first.parameters()), list(second.parameters())) == 0
    for mine, other in zip(first.norm.buffers(), second.norm.buffers(), strict=True):
        assert torch.equal(mine, other)  # the floating ones are averaged, the integer one counts alike
    with torch.no_grad():
        second.norm.running_mean.add_(8.0)
    two.step(2)
    assert first.norm.running_mean.min() > 3.0
    assert torch.equal(first.norm.running_mean, second.norm.running_mean)

    with torch.no_grad():
        two.momentum(1).add_(100.0)
    two.step(3)  # they have parted: after it both take the average of everything
    assert torch.equal(two.momentum(0), two.momentum(1))
    assert two.momentum(0).mean() > 20.0
    assert farthest(list(first.parameters()), list(second.parameters())) == 0

    with torch.no_grad():
        second.body.weight.add_(200.0)
    two.step(4)
    assert torch.equal(first.body.weight, second.body.weight)
    assert first.body.weight.mean() > 50.0


def test_check_24_frozen_and_unused_parameters_are_never_touched(two: Two) -> None:
    first, second = two.models
    with torch.no_grad():
        second.frozen.fill_(7.0)
    unused = first.unused.weight.detach().clone()
    for batch in range(1, 4):
        two.step(batch)
    assert first.frozen.tolist() == [1.0] * 4
    assert second.frozen.tolist() == [7.0] * 4
    assert torch.equal(first.unused.weight, unused)  # nobody had a gradient of it: no step, no weight decay, no state
    assert first.unused.weight not in two.optimizers[0].state
    names = [name for name, *_ in two.swarms[0]._replica.schema]
    assert "frozen" not in names
    elements = sum(torch.Size(shape).numel() for shape, _ in two.swarms[0]._replica.gradient_shapes)
    trained = sum(p.numel() for p in first.parameters() if p.requires_grad)
    floating = sum(b.numel() for b in first.buffers() if b.is_floating_point())
    assert elements == trained + floating + len([p for p in first.parameters() if p.requires_grad])
