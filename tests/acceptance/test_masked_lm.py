"""The ALBERT recipe (reference section 5.5) with 4 unequal peers: the loss of one process at the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_process import Peers, answers, ask_all

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(400)]
STEPS, WARM_UP = 200, 20
PACES = [0.03, 0.03, 0.06, 0.12]
SEED_ALONE = 4321
"""Of the one process with a data order of its own."""
SMOOTHED_OVER = 5
BOUND, REPLAY_BOUND = 0.02, 1e-4

PEER = Path(__file__).with_name("masked_lm_peer.py")


def test_the_loss_curve_is_that_of_one_process_at_the_same_samples(tmp_path: Path) -> None:
    with Peers(tmp_path) as peers:
        processes = [peers.start(PEER) for _ in PACES]
        told = [processes[0].ask("join", peers=[], steps=STEPS)]
        told += ask_all(processes[1:], "join", peers=[told[0]["address"]], steps=STEPS)
        seeds = {one["peer_id"]: one["seed"] for one in told}
        for process, pace in zip(processes, PACES, strict=True):
            process.send("train", pace=pace, steps=STEPS)
        facts = answers(processes, 240)
        ask_all(processes, "leave", 20)
        given = all_steps(facts)
        tell(facts, given, told)

        order = [[[seeds[who], *batches] for who in step for batches in step[who][1]] for step in given]
        processes[1].send("alone", given=order)
        processes[2].send("alone", given=with_own_order(order))
        curves = dict(ask_all([processes[0], processes[3]], "losses", 60, steps=STEPS)[0])
        replayed, own = (dict(curve) for curve in answers(processes[1:3], 240))

    kept = [torch.load(process.folder / "kept.pt") for process in processes]
    replay = torch.load(processes[1].folder / "alone.pt")
    farthest = [max(distance(mine[step], replay[step]) for step in mine) for mine in kept]
    print(f"parameters against one process with the same batches, largest relative distance: {farthest}")
    print_curve(given, curves, replayed, own)
    steps = [step for step in sorted(curves) if step > WARM_UP]
    assert len(steps) > 0.8 * (STEPS - WARM_UP) / 10
    same = max(abs(curves[step] / replayed[step] - 1) for step in steps)
    apart = max(abs(smooth(curves, step) / smooth(own, step) - 1) for step in steps)
    print(f"largest difference of the loss: {same:.2e} with the same batches, {apart:.2%} with others")
    assert curves[STEPS] < 0.8 * curves[WARM_UP]
    assert max(farthest) < REPLAY_BOUND
    assert same < REPLAY_BOUND
    assert apart < BOUND


def all_steps(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each peer gave to each step, as all of them tell it."""
    found: dict[int, dict[str, Any]] = {}
    for one in facts:
        for step, given in one["given"]:
            assert found.setdefault(step, given) == given, f"two peers report step {step} differently"
    assert sorted(found) == list(range(1, STEPS + 1))
    return [found[step] for step in sorted(found)]


def with_own_order(order: list[list[list[int]]]) -> list[list[list[int]]]:
    """As many batches in each step, all from one source."""
    ranges, read = [], 0
    for step in order:
        count = sum(last - first + 1 for _, first, last in step)
        ranges.append([[SEED_ALONE, read + 1, read + count]])
        read += count
    return ranges


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def smooth(curve: dict[int, float], step: int) -> float:
    """The mean of the newest evaluations after warm-up, up to this step."""
    newest = [curve[one] for one in sorted(curve) if WARM_UP < one <= step][-SMOOTHED_OVER:]
    return sum(newest) / len(newest)


def tell(facts: list[dict[str, Any]], given: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
    samples = [sum(step.get(one["peer_id"], [0])[0] for step in given) for one in told]
    print(f"\n{STEPS} steps in {facts[0]['seconds']:.1f} s; samples of each peer: {samples}, {sum(samples)} in all")
    print(f"seconds a batch: {PACES}; samples that came too late: {[one['dropped'] for one in facts]}")
    print(f"failures: {[one['failures'] for one in facts]}, events: {[one['events'] for one in facts]}")
    assert samples[0] > samples[3] > 0


def print_curve(given: list[dict[str, Any]], *curves: dict[int, float]) -> None:
    print("  step  samples   swarm  same batches  own order")
    for step in sorted(curves[0]):
        samples = sum(gave for one in given[:step] for gave, _ in one.values())
        print(f"{step:6d} {samples:8.0f} {curves[0][step]:7.3f} {curves[1][step]:13.3f} {curves[2][step]:10.3f}")
