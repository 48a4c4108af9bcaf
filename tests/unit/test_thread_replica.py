"""The difference rule in memory: theta_after = theta_now + (average - snapshot), at safe points of this thread only."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.tensors.flat import pack
from shoal.training.mailbox import Mailbox
from shoal.training.thread_replica import ThreadReplica


class Loop:
    """An event loop in a thread of its own, as the network's; this thread is the user's."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def ask(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        self.loop.close()


@pytest.fixture
def network():
    loop = Loop()
    yield loop
    loop.close()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.single = nn.Parameter(normal(5, 7))
        self.strided = nn.Parameter(normal(6, 4).T)
        self.wide = nn.Parameter(normal(11, dtype=torch.float64))
        self.narrow = nn.Parameter(normal(13, dtype=torch.float16))
        self.brain = nn.Parameter(normal(13, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(normal(3), requires_grad=False)
        self.tied = self.single
        self.register_buffer("floats", normal(4))
        self.register_buffer("integers", torch.arange(4))

    def averaged(self) -> list[torch.Tensor]:
        return [self.single, self.strided, self.wide, self.narrow, self.brain, self.floats]


class User:
    """The user's side: a model, its optimizer, and steps of a known size."""

    def __init__(self, network: Loop) -> None:
        self.network = network
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
        self.mailbox = Mailbox()
        self.replica = ThreadReplica(self.model, self.optimizer, self.mailbox, batch_size=4)
        self.optimizer.register_step_post_hook(lambda *_: self.replica.step_done())

    def step(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def during_safe_points(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Safe points, without a step, until the network's coroutine has its answer."""
        future = self.network.ask(coroutine)
        deadline = time.monotonic() + 5
        while not future.done():
            assert time.monotonic() < deadline
            self.mailbox.work()
            time.sleep(0.001)
        return future.result()

    def values(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self.model.averaged()]


@pytest.fixture
def user(network):
    return User(network)


def other_values(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """What an average may be: near the values, and different for each element."""
    return [
        value + (0.5 + torch.arange(value.numel()).reshape(value.shape) * 0.125).to(value.dtype) for value in values
    ]


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float16: 2**-9, torch.bfloat16: 2**-6}.get(got.dtype, 1e-6)
    apart = (got.detach().double() - expected).abs().max().item()
    assert apart <= tolerance * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_steps_taken_since_the_snapshot_are_kept(user, steps):
    user.step()
    snapshot = user.during_safe_points(user.replica.snapshot())
    old = user.values()
    average = other_values(old)
    for _ in range(steps):
        user.step()
    now = user.values()
    stale = user.during_safe_points(user.replica.offer(pack(average), snapshot))
    assert stale == steps
    for got, theta, mean, was in zip(user.model.averaged(), now, average, old, strict=True):
        check(got, theta.double() + (mean.double() - was.double()))


def test_without_a_step_in_between_every_bit_is_the_average(user):
    user.step()
    snapshot = user.during_safe_points(user.replica.snapshot())
    average = other_values(user.values())
    user.during_safe_points(user.replica.offer(pack(average), snapshot))
    for got, mean in zip(user.model.averaged(), average, strict=True):
        assert torch.equal(got, mean)


def test_what_the_user_wrote_since_the_snapshot_without_a_step_is_kept(user):
    """Weights loaded or clamped, statistics moved by a forward pass: theta_now is what counts, not how it came."""
    user.step()
    snapshot = user.during_safe_points(user.replica.snapshot())
    old = user.values()
    average = other_values(old)
    with torch.no_grad():
        for tensor in user.model.averaged():
            tensor.add_(3.0)
    now = user.values()
    user.during_safe_points(user.replica.offer(pack(average), snapshot))
    for got, theta, mean, was in zip(user.model.averaged(), now, average, old, strict=True):
        check(got, theta.double() + (mean.double() - was.double()))


def test_nothing_is_written_before_a_safe_point(user):
    snapshot = user.during_safe_points(user.replica.snapshot())
    before = user.values()
    future = user.network.ask(user.replica.offer(pack(other_values(before)), snapshot))
    settle = user.network.ask(asyncio.sleep(0.02))
    settle.result(5)
    assert not future.done()
    assert all(torch.equal(a, b) for a, b in zip(user.values(), before, strict=True))
    user.step()
    future.result(5)
    assert not torch.equal(user.model.single, before[0] - 0.25)


def test_the_snapshot_is_a_copy(user):
    snapshot = user.during_safe_points(user.replica.snapshot())
    kept = [vector.clone() for vector in snapshot.vectors]
    user.step()
    assert all(torch.equal(a, b) for a, b in zip(snapshot.vectors, kept, strict=True))


def test_frozen_integer_and_tied_values_are_not_in_the_snapshot_twice_or_at_all(user):
    snapshot = user.during_safe_points(user.replica.snapshot())
    model = user.model
    singles = sum(t.numel() for t in (model.single, model.strided, model.narrow, model.brain, model.floats))
    assert [vector.numel() for vector in snapshot.vectors] == [singles, model.wide.numel()]


def test_the_weight_is_the_samples_since_the_last_averaging(user):
    for _ in range(3):
        user.step()
    snapshot = user.during_safe_points(user.replica.snapshot())
    assert snapshot.weight == 12
    user.step()
    user.during_safe_points(user.replica.offer(snapshot.vectors, snapshot))
    assert user.during_safe_points(user.replica.snapshot()).weight == 4
    user.replica.count(10)
    user.replica.count(1)
    user.step()
    assert user.during_safe_points(user.replica.snapshot()).weight == 15


def test_a_failed_averaging_keeps_the_weight(user):
    user.step()
    user.during_safe_points(user.replica.snapshot())  # and nothing is offered
    user.step()
    assert user.during_safe_points(user.replica.snapshot()).weight == 8


@pytest.mark.parametrize("change", ["shape", "requires_grad"])
def test_a_changed_schema_is_a_typed_error(user, change):
    if change == "requires_grad":
        user.model.wide.requires_grad_(False)
    else:
        user.model.wide.data = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(shoal.SchemaChanged, match="wide"):
        user.during_safe_points(user.replica.snapshot())


def a_replica(optimizer_class=torch.optim.AdamW, positions: int = 4, **options) -> ThreadReplica:
    torch.manual_seed(positions)
    model = nn.Linear(3, 2)
    model.register_buffer("positions", torch.arange(positions))
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    replica = ThreadReplica(model, optimizer, Mailbox(), 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    replica.step_done()
    replica.model, replica.optimizer = model, optimizer
    return replica


def test_a_state_with_another_buffer_is_refused_before_anything_is_written() -> None:
    donor, newcomer = a_replica(positions=5), a_replica(positions=4)
    before = {name: value.clone() for name, value in newcomer.model.state_dict().items()}
    with pytest.raises(shoal.ModelMismatch, match="buffer positions"):
        newcomer._install(donor._take_state())
    assert all(torch.equal(value, before[name]) for name, value in newcomer.model.state_dict().items())


def test_optimizer_state_is_taken_over_from_the_same_kind_of_optimizer() -> None:
    donor, newcomer = a_replica(), a_replica()
    donor.optimizer.state[donor.model.weight]["exp_avg"].fill_(7.0)
    newcomer._install(donor._take_state())
    assert (newcomer.optimizer.state[newcomer.model.weight]["exp_avg"] == 7.0).all()
    assert torch.equal(newcomer.model.weight, donor.model.weight)


@pytest.mark.parametrize("other", [{"optimizer_class": torch.optim.SGD}, {"amsgrad": True}])
def test_where_the_optimizers_differ_it_starts_afresh_and_steps(other) -> None:
    donor, newcomer = a_replica(), a_replica(**other)
    newcomer._install(donor._take_state())
    assert not newcomer.optimizer.state[newcomer.model.weight]
    newcomer.optimizer.step()


def test_a_donors_moments_that_are_not_finite_are_not_taken_over() -> None:
    donor, newcomer = a_replica(), a_replica()
    donor.optimizer.state[donor.model.weight]["exp_avg"][0, 0] = float("nan")
    newcomer._install(donor._take_state())
    assert not newcomer.optimizer.state[newcomer.model.weight]


def test_work_that_ctrl_c_ends_is_answered_and_the_interrupt_goes_on(network) -> None:
    mailbox = Mailbox()

    def interrupted() -> None:
        raise KeyboardInterrupt

    asked = network.ask(mailbox.ask(interrupted))
    deadline = time.monotonic() + 10
    with pytest.raises(KeyboardInterrupt):
        while time.monotonic() < deadline:
            mailbox.work()
    with pytest.raises(shoal.RoundError, match="interrupted"):
        asked.result(10)
