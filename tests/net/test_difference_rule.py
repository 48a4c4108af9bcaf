"""theta += average - snapshot: no local step is lost; what is averaged and what stays local, by perturbing one peer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from swarm_process import Peers, wait_until

CHILD = Path(__file__).with_name("difference_child.py")
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with Peers(tmp_path_factory.mktemp("difference")) as peers:
        yield [peers.start(CHILD) for _ in range(2)]


@pytest.fixture
def pair(request, processes):
    """A founder that trains, and a second peer, attached. `request.param`: optimizer, every_seconds, ballast."""
    kind, every_seconds, ballast = request.param
    run = f"difference-{kind}-{ballast}-{every_seconds}"
    founder, second = processes
    options = {"run": run, "kind": kind, "ballast": ballast}
    address = founder.ask("found", 60, every_seconds=every_seconds, **options)
    founder.ask("train", on=True)
    second.ask("join", 60, address=address, **options)
    yield founder, second
    for process in (second, founder):
        process.ask("leave", 20)


# ------------------------------------------------------------------------------------------- the rule, from the traces


@dataclass
class Correction:
    """What the swarm added to `x` during step `step` of a trace."""

    step: int
    added: torch.Tensor


def corrections(trace: dict[str, torch.Tensor]) -> list[Correction]:
    added = trace["after"] - trace["before"] - trace["local"]
    return [Correction(int(step), added[step]) for step in (added.abs().amax(1) > 1e-9).nonzero().flatten()]


def snapshots(trace: dict[str, torch.Tensor], correction: Correction) -> tuple[torch.Tensor, torch.Tensor]:
    """All values that `x` had at a safe point up to the correction, and the steps at which it had them."""
    end = correction.step + 1
    before, after = trace["before"][:end], trace["after"][:end]
    candidates = [before, before + trace["local"], after - trace["local"], after]
    values = torch.cat(candidates)
    steps = torch.arange(end).repeat(len(candidates))
    # At the correction itself only the values without it can have been the snapshot.
    own = torch.tensor([False, False, True, True]).repeat_interleave(end) & (steps == correction.step)
    return values[~own], steps[~own]


@dataclass
class Match:
    residual: float
    share: float
    lags: tuple[int, int]


def match(traces: list[dict], first: Correction, second: Correction) -> Match:
    """The latest snapshots that explain both corrections: one average, on the line between them.

    Only B - A enters, and in a steady pace that recurs; so the latest pair that fits is meant. If none fits, the best.
    """
    values_a, steps_a = snapshots(traces[0], first)
    values_b, steps_b = snapshots(traces[1], second)
    averages_a, averages_b = values_a + first.added, values_b + second.added
    best = Match(float("inf"), float("nan"), (0, 0))
    latest_first = steps_a.argsort(descending=True)
    for rows in latest_first.split(128):
        apart = torch.cdist(averages_a[rows], averages_b, p=float("inf"))
        for row, other in (apart < TOLERANCE).nonzero().tolist():
            index = int(rows[row])
            line = values_b[other] - values_a[index]
            share = float(first.added @ line / (line @ line)) if line.abs().max() > 1e-9 else float("nan")
            residual = max(float((first.added - share * line).abs().max()), float(apart[row, other]))
            lags = (first.step - int(steps_a[index]), second.step - int(steps_b[other]))
            fits, best_fits = residual < TOLERANCE, best.residual < TOLERANCE
            if (fits and (not best_fits or sum(lags) < sum(best.lags))) or (not best_fits and residual < best.residual):
                best = Match(residual, share, lags)
        if best.residual < TOLERANCE:
            break
    return best


def difference_rule(now: torch.Tensor, average: torch.Tensor, snapshot: torch.Tensor) -> torch.Tensor:
    return now + (average - snapshot)


def simulated(overwrite: bool, averagings: int = 4, period: int = 40, duration: int = 9) -> list[dict]:
    """Traces of two peers in memory that keep the rule, or that overwrite: the tests' own judge is judged first."""
    local = [torch.tensor([1e-3, 0, 0]), torch.tensor([0, 1e-3, 0])]
    local = [step.double() for step in local]
    x = [torch.tensor([0.0, 0, 0]).double(), torch.tensor([0.0, 0, 1]).double()]
    traces: list[dict] = [{"before": [], "after": [], "local": step} for step in local]
    snapshot, average = [*x], x[0]
    for step in range(averagings * period):
        if step % period == period // 2:
            snapshot = [value.clone() for value in x]
            average = 0.25 * x[0] + 0.75 * x[1]
        for peer in (0, 1):
            traces[peer]["before"].append(x[peer].clone())
            x[peer] = x[peer] + local[peer]
            if step % period == period // 2 + duration:
                kept = difference_rule(x[peer], average, snapshot[peer])
                x[peer] = average.clone() if overwrite else kept
            traces[peer]["after"].append(x[peer].clone())
    for trace in traces:
        trace["before"], trace["after"] = torch.stack(trace["before"]), torch.stack(trace["after"])
    return traces


def explain(traces: list[dict]) -> list[Match]:
    found = [corrections(trace) for trace in traces]
    return [match(traces, first, second) for first, second in zip(*found, strict=False)]


def test_the_judge_accepts_the_rule_and_rejects_overwriting():
    kept = explain(simulated(overwrite=False))
    assert len(kept) == 4
    assert all(one.residual < 1e-9 and one.lags == (9, 9) for one in kept), kept
    assert all(one.share == pytest.approx(0.75) for one in kept)
    lost = explain(simulated(overwrite=True))
    assert any(not one.residual < TOLERANCE for one in lost), lost


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pair", [("sgd", 0.4, 6_000_000)], indirect=True, ids=["sgd"])
def test_local_steps_taken_during_an_averaging_are_never_lost(pair, tmp_path):
    """Both peers step on while 24 MB travel. Every change must be own steps plus `average - snapshot`, to 1e-6."""
    founder, second = pair
    second.ask("move", values=[0.0, 0.0, 1.0])
    second.ask("until_averagings", 60, more=5)
    traces = []
    for name, process in (("founder", founder), ("second", second)):
        process.ask("train", on=False)
        process.ask("save_trace", path=str(tmp_path / f"{name}.pt"))
        traces.append(torch.load(tmp_path / f"{name}.pt"))
    for trace in traces:
        between = (trace["before"][1:] - trace["after"][:-1]).abs().amax(1)
        # The second peer's `move` came before its first traced step.
        assert between.max() == 0, "a parameter was written outside the optimizer's step"
    matches = explain(traces)
    print(f"\nsteps {[len(trace['before']) for trace in traces]}, averagings {matches}")
    assert len(matches) >= 4
    for one in matches:
        assert one.residual < TOLERANCE, f"no pair of snapshots explains this averaging: {matches}"
        assert 0 < one.share < 1, one
    assert max(max(one.lags) for one in matches) >= 3, "no step fell inside an averaging: this shows nothing"


# ------------------------------------------------------------------------------------------- what is local, what is not


@pytest.mark.parametrize("pair", [("momentum", 0.1, 1)], indirect=True, ids=["momentum"])
def test_momentum_is_downloaded_at_attach_and_then_stays_local(pair):
    founder, second = pair
    second.ask("set_state", name="momentum_buffer", value=5.0)
    second.ask("move", values=[3.0, 3.0, 3.0])
    steps = second.ask("until_averagings", 60, more=4)
    seen, own = second.ask("facts"), founder.ask("facts")
    assert own["averagings"] >= 4
    assert own["x"] == pytest.approx(seen["x"], abs=TOLERANCE)
    assert 0.0 < own["x"][0] < 3.0, "the parameter did meet"
    assert own["state"]["momentum_buffer"] == [0.0] * 3, "the other's momentum came over"
    done = seen["steps"]
    assert done >= steps
    assert seen["state"]["momentum_buffer"] == pytest.approx([5.0 * 0.999**done] * 3, rel=1e-9)


@pytest.mark.parametrize("pair", [("adam", 0.1, 1)], indirect=True, ids=["adam"])
def test_adam_moments_and_step_count_stay_local(pair):
    founder, second = pair
    start = second.ask("facts")
    second.ask("set_state", name="exp_avg", value=5.0)
    second.ask("set_state", name="exp_avg_sq", value=7.0)
    second.ask("set_state", name="step", value=1000.0)
    second.ask("move", values=[3.0, 3.0, 3.0])
    second.ask("until_averagings", 60, more=4)
    seen, own = second.ask("facts"), founder.ask("facts")
    assert start["state"]["step"] >= 1.0
    assert own["x"] == pytest.approx(seen["x"], abs=TOLERANCE)
    assert own["state"]["exp_avg"] == [0.0] * 3
    assert own["state"]["exp_avg_sq"] == [0.0] * 3
    assert own["state"]["step"] == own["steps"] + 1.0
    assert seen["state"]["step"] == 1000.0 + seen["steps"]
    assert seen["state"]["exp_avg"] == pytest.approx([5.0 * 0.999 ** seen["steps"]] * 3, rel=1e-6)
    assert seen["state"]["exp_avg_sq"] == pytest.approx([7.0 * 0.9999 ** seen["steps"]] * 3, rel=1e-6)


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_the_newcomer_takes_over_the_founders_optimizer_state(processes, kind):
    founder, second = processes
    run = f"take-over-{kind}"
    name = {"momentum": "momentum_buffer", "adam": "exp_avg"}[kind]
    address = founder.ask("found", 60, run=run, every_seconds=0.1, kind=kind)
    founder.ask("set_state", name=name, value=4.0)
    founder.ask("move", values=[2.0, 2.0, 2.0])
    founder.ask("set_buffers", floats=6.0, integers=7, flags=True)
    founder.ask("train", on=True)
    wait_until(lambda: founder.ask("facts")["steps"] >= 20, 10, "the founder has trained with this state")
    second.ask("join", 60, run=run, address=address, kind=kind)
    seen = second.ask("facts")
    own = founder.ask("facts")
    for process in (second, founder):
        process.ask("leave", 20)
    # The founder's own value falls by a thousandth a step; the newcomer has that of some step in between.
    assert own["state"][name][0] - 1e-9 <= seen["state"][name][0] <= 4.0
    assert seen["x"] == pytest.approx([2.0] * 3, abs=TOLERANCE)
    assert seen["floats"] == pytest.approx([6.0] * 4, abs=TOLERANCE)
    assert seen["integers"] == [7] * 4
    assert seen["flags"] == [True] * 4


@pytest.mark.parametrize("pair", [("sgd", 0.1, 1)], indirect=True, ids=["sgd"])
def test_floating_buffers_are_averaged_and_others_stay_local(pair):
    founder, second = pair
    second.ask("set_buffers", floats=8.0, integers=9, flags=True)
    second.ask("until_averagings", 60, more=4)
    seen, own = second.ask("facts"), founder.ask("facts")
    assert 0.001 < own["floats"][0] < 7.999
    assert own["floats"] == pytest.approx(seen["floats"], abs=1e-5)
    assert own["integers"] == [0] * 4
    assert own["flags"] == [False] * 4
    assert seen["integers"] == [9] * 4
    assert seen["flags"] == [True] * 4
