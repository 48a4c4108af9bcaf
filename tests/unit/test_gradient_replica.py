"""A real model in gradient mode, in memory: what its training thread does at safe points, without a network."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn

from shoal.protocols.replica import GradientSum
from shoal.training.mailbox import Mailbox
from shoal.training.thread_replica import ThreadReplica

BATCH = 4.0


class User:
    """The user's side: a model, its optimizer, a loop; and the network's event loop in a thread of its own."""

    def __init__(
        self, optimizer_class: Any = torch.optim.SGD, scheduler: Callable[[Any], Any] | None = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.model.register_buffer("ema", torch.zeros(2))
        self.optimizer = optimizer_class(self.model.parameters(), **({"lr": 0.1} | options))
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.mailbox = Mailbox()
        self.replica = ThreadReplica(self.model, self.optimizer, self.mailbox, int(BATCH), self.scheduler)
        self.optimizer.register_step_post_hook(lambda *_: self.replica.step_done())
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()

    def ask(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def during_safe_points(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future = self.ask(coroutine)
        deadline = time.monotonic() + 5
        while not future.done():
            assert time.monotonic() < deadline
            self.mailbox.work()
            time.sleep(0.001)
        return future.result()

    def gather(self) -> None:
        self.during_safe_points(self.replica.gather(None))

    def step(self, gradient: float = 1.0) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        self.optimizer.step()

    def global_step(self, gradient: float = 1.0) -> GradientSum:
        """One batch, which is the target, and the step with its gradient."""
        asked = self.ask(self.replica.gradient_sum(lambda figures, now: "target"))

        async def finish() -> GradientSum:
            gathered: GradientSum = await asyncio.wrap_future(asked)
            await self.replica.step(gathered.vectors, missed=False)
            self.replica.end()
            return gathered

        finished = self.ask(finish())
        deadline = time.monotonic() + 5
        while self.replica._stop_rule is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.step(gradient)
        return finished.result(5)


@pytest.fixture
def users():
    made: list[User] = []

    def make(*args: Any, **options: Any) -> User:
        made.append(User(*args, **options))
        return made[-1]

    yield make
    for user in made:
        user.close()


def test_steps_taken_for_the_newcomer_in_attach_are_no_sign_of_a_restless_optimizer(users) -> None:
    """It catches up with the others' mean gradients before its own first batch."""
    user = users()
    user.gather()
    mean = user.replica._sums.take()
    mean[0][:8] = 1.0  # of all parameters
    mean[0][8:10] = 1.0  # each was used
    before = user.model.weight.detach().clone()
    user.during_safe_points(user.replica.step(mean, missed=True))
    assert not torch.equal(before, user.model.weight)
    user.replica.end()
    user.step()


def test_weights_that_the_loop_loads_after_attach_are_no_sign_of_a_restless_optimizer(users) -> None:
    user = users()
    user.gather()
    user.model.load_state_dict({name: value + 1 for name, value in user.model.state_dict().items()})
    user.replica.end()
    user.step()


class Wrapping(torch.optim.SGD):
    """As many optimizers: its own step, around that of its class. The hooks of a step are called for both."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_optimizer_that_calls_the_step_of_its_class_loses_no_gradient(users) -> None:
    plain, user = users(), users(Wrapping)
    for one in (plain, user):
        one.gather()
        gathered = one.global_step()
        assert gathered.samples == BATCH
        assert gathered.vectors[0][:8].tolist() == [1.0] * 8
    assert torch.equal(plain.model.weight, user.model.weight)


def test_the_schedulers_state_can_be_saved_and_loaded(users) -> None:
    """A loop writes it into its checkpoints."""
    user = users(scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10))
    user.gather()
    user.global_step()
    file = io.BytesIO()
    torch.save(user.scheduler.state_dict(), file)
    file.seek(0)
    user.scheduler.load_state_dict(torch.load(file))
    rate = user.optimizer.param_groups[0]["lr"]
    user.scheduler.step()  # the loop's own: it moves with the swarm's steps only
    assert user.optimizer.param_groups[0]["lr"] == rate < 0.1
    user.replica.detach()
    user.scheduler.step()
    assert user.optimizer.param_groups[0]["lr"] < rate


def test_a_buffer_that_the_model_replaces_travels_and_is_written(users) -> None:
    """After model.to(), or with self.ema = 0.9 * self.ema + ...: the tensor seen in attach is the model's no more."""
    user = users()
    user.gather()
    user.model.ema = torch.full((2,), 5.0)
    gathered = user.global_step()
    assert gathered.vectors[0][-2:].tolist() == [5.0, 5.0]
    user.model.ema = torch.full((2,), 7.0)
    gathered.vectors[0][-2:] = 3.0
    user.during_safe_points(user.replica.step(gathered.vectors, missed=True))
    assert user.model.ema.tolist() == [3.0, 3.0]


def test_asking_for_a_sum_may_be_given_up_while_it_is_made(users, monkeypatch) -> None:
    """The run yields to another, or leave() comes from elsewhere, while the sketch of a large model is computed."""
    user = users()
    user.gather()
    asked = user.ask(user.replica.gradient_sum(lambda figures, now: "target"))
    take = user.replica._sums.take

    def slow_take() -> Any:
        asked.cancel()
        deadline = time.monotonic() + 5
        while user.replica._stop_rule is not None or not asked.cancelled():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.05)
        user.replica.end()
        return take()

    monkeypatch.setattr(user.replica._sums, "take", slow_take)
    while user.replica._stop_rule is None:
        time.sleep(0.001)
    user.step()


class _Vanishing:
    """An attribute that another thread sets to None right after its first reading."""

    def __init__(self, value: Any) -> None:
        self._values = [value]

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self._values.pop() if self._values else None

    def __set__(self, instance: Any, value: Any) -> None:
        if value is None:
            self._values.clear()


@pytest.mark.parametrize("name", ["_held", "_stop_rule"])
def test_the_strategy_may_end_at_any_moment_of_a_step(users, monkeypatch, name) -> None:
    user = users()
    user.gather()
    rule = (lambda figures: "", Future()), Future()
    value = Future() if name == "_held" else rule[0]
    if name == "_held":
        value.set_result(None)
    user.replica._over = True
    monkeypatch.setattr(ThreadReplica, name, _Vanishing(value), raising=False)
    user.step()


@pytest.mark.parametrize(
    "make", [torch.optim.Adafactor, torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam, torch.optim.Rprop]
)
def test_a_newcomer_takes_over_the_whole_optimizer_state(users, make) -> None:
    donor, newcomer = users(make), users(make)
    donor.gather()
    donor.global_step()
    newcomer.replica._install(donor.replica._take_state())
    newcomer.gather()
    assert newcomer.replica._sums.rows() == donor.replica._sums.rows()
    assert newcomer.replica._sums.sketch() == donor.replica._sums.sketch()
    for user in (donor, newcomer):
        user.global_step(0.5)
    assert torch.equal(donor.model.weight, newcomer.model.weight)
    assert newcomer.replica._sums.sketch() == donor.replica._sums.sketch()


def test_optimizers_with_other_groups_are_refused(users) -> None:
    def two_groups(parameters: Any, lr: float) -> torch.optim.Optimizer:
        weight, bias = parameters
        return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "weight_decay": 0.5}], lr=lr)

    donor, newcomer = users(two_groups), users()
    newcomer.replica._install(donor.replica._take_state())
    with pytest.raises(Exception, match="group 1"):
        newcomer.gather()


def test_options_of_a_run_that_is_gone_do_not_bind_a_peer_that_goes_on_alone(users) -> None:
    """It downloaded a state at step 0; at step 5 its schedule has moved, and no donor of a newer state is left."""
    schedule = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    donor, newcomer = users(scheduler=schedule), users(scheduler=schedule)
    newcomer.replica._install(donor.replica._take_state())
    newcomer.gather()
    newcomer.global_step()
    newcomer.gather()
    assert newcomer.optimizer.param_groups[0]["lr"] == 0.05
