"""Learners: real small torch models whose steps take as long as a cost model says, on the virtual clock.

The task needs no data set: a random network (the teacher) labels random points, and the learners have to find out how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from random import Random

import torch
from torch import Tensor, nn

from shoal.sim.replica import VirtualReplica

INPUTS, HIDDEN, CLASSES = 8, 8, 4
TRAIN_SAMPLES, TEST_SAMPLES = 4000, 1000

Cost = Callable[[], float]
"""The seconds that the next step takes."""


def constant(seconds: float) -> Cost:
    """Every step takes as long."""
    return lambda: seconds


def log_normal(random: Random, median_seconds: float, sigma: float) -> Cost:
    """exp(N(log median, sigma^2)): most steps are about the median, some take far longer."""
    return lambda: random.lognormvariate(math.log(median_seconds), sigma)


def trace(seconds: Sequence[float]) -> Cost:
    """What was measured somewhere, again and again."""
    following = cycle(seconds)
    return lambda: next(following)


@dataclass(frozen=True)
class Task:
    """Points (samples, 16) and their classes (samples,), to train with and to test with."""

    inputs: Tensor
    classes: Tensor
    test_inputs: Tensor
    test_classes: Tensor


def teacher_task(seed: int) -> Task:
    """What a random network of this seed says of random points."""
    draw = torch.Generator().manual_seed(seed)
    first, second = torch.randn(INPUTS, HIDDEN, generator=draw), torch.randn(HIDDEN, CLASSES, generator=draw)
    inputs = torch.randn(TRAIN_SAMPLES + TEST_SAMPLES, INPUTS, generator=draw)
    classes = (torch.tanh(inputs @ first) @ second).argmax(dim=1)
    return Task(inputs[:TRAIN_SAMPLES], classes[:TRAIN_SAMPLES], inputs[TRAIN_SAMPLES:], classes[TRAIN_SAMPLES:])


class Learner:
    """A two-layer network that learns a task by SGD with momentum, from batches of its own."""

    def __init__(self, task: Task, seed: int, cost: Cost, *, batch_size: int = 16, learning_rate: float = 0.1) -> None:
        self._task, self._batch_size = task, batch_size
        self._draw = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(INPUTS, 2 * HIDDEN), nn.Tanh(), nn.Linear(2 * HIDDEN, CLASSES))
        parameters = list(self.model.parameters())
        self._optimizer = torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)
        self.replica = VirtualReplica.learn(parameters, self._step, cost, float(batch_size))

    def _step(self, number: int) -> None:
        batch = torch.randint(len(self._task.inputs), (self._batch_size,), generator=self._draw)
        loss = nn.functional.cross_entropy(self.model(self._task.inputs[batch]), self._task.classes[batch])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    @torch.no_grad()
    def accuracy(self) -> float:
        """On the test points, 0 to 1."""
        said = self.model(self._task.test_inputs).argmax(dim=1)
        return float((said == self._task.test_classes).double().mean())
