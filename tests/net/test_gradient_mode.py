"""Gradient mode over real sockets: what one big machine would compute (reference section 7, check 21)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gradient_peers import Fleet, data, farthest, loss_of, model

import shoal

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)
FUSED = partial(torch.optim.AdamW, lr=0.01, fused=True)
PACES = {1: [0.01], 2: [0.01, 0.04], 4: [0.01, 0.01, 0.01, 0.04]}


def of(make):
    return lambda net: make(net.parameters())


ALL = [(1, SGD), (1, ADAMW), (2, SGD), (4, ADAMW), (2, ADAMW), (4, SGD)]
CASES = [pytest.param(*case, marks=pytest.mark.acceptance if number > 3 else ()) for number, case in enumerate(ALL)]


@pytest.mark.parametrize(
    ("count", "make"), CASES, ids=lambda value: getattr(getattr(value, "func", value), "__name__", value)
)
def test_check_21_one_process_with_the_reported_batches_ends_with_the_same_parameters(count: int, make) -> None:
    """20 steps, one of the peers four times slower."""
    strategy = shoal.AllReduce(average="gradients", target_batch=64)
    fleet = Fleet(strategy, of(make), PACES[count], steps=20).run()
    expected = fleet.replay()
    for ended in fleet.ended.values():
        assert ended.report.progress == 20
        assert farthest(ended.parameters, expected[20][0]) < 1e-5
    assert all(sum(given.samples for given in step.values()) >= 64 for step in fleet.given().values())
    assert len(fleet.given()[20]) == count


def test_check_21_the_loss_of_200_steps_is_that_of_one_process() -> None:
    """Within 1 %, at each step that a peer's loop came by."""
    strategy = shoal.Moshpit(group_size=3, average="gradients", target_batch=32)
    fleet = Fleet(strategy, of(SGD), [0.002, 0.002, 0.002, 0.008], steps=200, keep=True, limit_seconds=120).run()
    expected = fleet.replay()
    net, test = model(), [torch.cat(parts) for parts in zip(*(data(99, batch) for batch in range(32)), strict=True)]

    def loss(values: list[torch.Tensor]) -> float:
        torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(values), net.parameters())
        return float(loss_of(net, (test[0], test[1])).detach())

    for ended in fleet.ended.values():
        steps = [step for step in ended.by_step if step > 0]
        assert len(steps) > 100
        for step in steps:
            assert loss(ended.by_step[step]) == pytest.approx(loss(expected[step][0]), rel=0.01)
    assert loss(expected[200][0]) < 0.5 * loss(expected[1][0])


def test_schedule_clipping_scaler_and_fused_steps_are_those_of_one_process() -> None:
    """A cosine schedule that the loops step as they always did, clipping, a GradScaler, and an infinite loss at one."""
    strategy = shoal.AllReduce(average="gradients", target_batch=64, max_grad_norm=0.5)
    fleet = Fleet(
        strategy, of(FUSED), [0.01, 0.04], steps=20, scaler=True, inf_at=(1, 3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30),
    ).run()  # fmt: skip
    values, rate = fleet.replay(max_grad_norm=0.5)[20]
    for ended in fleet.ended.values():
        assert farthest(ended.parameters, values) < 1e-5
        assert ended.learning_rate == pytest.approx(rate, rel=1e-12)
    given = [step[1].batches for step in fleet.given().values() if 1 in step]
    assert 3 not in [batch for ranges in given for first, last in ranges for batch in range(first, last + 1)]
    assert fleet.ended[1].report.batches_left_out == 1
    assert fleet.ended[0].report.batches_left_out == 0
