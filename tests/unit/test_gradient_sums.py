"""What one peer gathers towards a step of the swarm, without a swarm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from optimizers import Restless
from shoal.training.gradient_sums import GradientSums
from shoal.training.schema import attached


class Learner:
    """A model, and what it gathers."""

    def __init__(self, optimizer_class: type[torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = optimizer_class(self.model.parameters(), lr=0.1)
        self.sums = GradientSums(self.optimizer, attached(self.model, self.optimizer), None, None)

    def batch(self, number: int) -> None:
        self.model(torch.full((4, 3), float(number))).square().mean().backward()
        self.optimizer.step()
        self.sums.add(4, number)
        self.optimizer.zero_grad()


def test_a_newcomer_may_take_steps_of_the_swarm_before_its_own_first_batch() -> None:
    """It is not mistaken for one whose optimizer moves parameters that have no gradient."""
    donor, newcomer = Learner(torch.optim.AdamW), Learner(torch.optim.AdamW)
    donor.batch(1)
    mean = donor.sums.take()
    donor.sums.step(mean)
    newcomer.sums.step(mean)
    newcomer.batch(1)
    assert newcomer.sums.samples == 4
    assert torch.equal(newcomer.model.weight, donor.model.weight)


@pytest.mark.parametrize("caught_up", [False, True])
def test_an_optimizer_that_moves_without_a_gradient_is_refused_at_the_first_batch(caught_up: bool) -> None:
    learner = Learner(Restless)
    if caught_up:
        learner.sums.step(learner.sums.take())
    with pytest.raises(shoal.AttachError, match="Restless changes parameters that have no gradient"):
        learner.batch(1)
