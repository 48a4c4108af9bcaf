"""Moshpit in real processes: 5 to 9 peers in groups of three get the weighted mean of all, and train as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moshpit_child import SHAPES, inputs
from swarm_process import PeerProcess, Peers, answers, ask_all, wait_until

from shoal.planning.grid import plan_grid

CHILD = Path(__file__).with_name("moshpit_child.py")
WEIGHTS = [1.0, 3.5, 0.25, 2.0, 7.0, 0.0, 1.75, 4.0, 0.5]
GROUP_SIZE = 3
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2.0**-8}
"""Of the largest input; a bfloat16 is rounded once, at the end, by half of its last digit at most."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with Peers(tmp_path_factory.mktemp("moshpit")) as peers:
        started = [peers.start(CHILD) for _ in range(9)]
        ask_all(started, "ping", 120)
        yield started


def enter(processes: list[PeerProcess], run: str) -> None:
    """They join one run, all through the first, and know each other."""
    first = processes[0].ask("enter", run=run, peers=[], founds=True)
    rest = ask_all(processes[1:], "enter", run=run, peers=[first["address"]], founds=False)
    for process, own in zip(processes, [first, *rest], strict=True):
        process.peer_id = own["peer_id"]
    ask_all(processes, "meet", count=len(processes) - 1)


def check_values(result: list[torch.Tensor], weights: list[float]) -> None:
    everybody = [inputs(rank) for rank in range(len(weights))]
    for index, got in enumerate(result):
        given = [tensors[index] for tensors in everybody]
        assert got.dtype == given[0].dtype
        assert got.shape == given[0].shape == SHAPES[index % len(SHAPES)]
        mean = sum(tensor.double() * weight for tensor, weight in zip(given, weights, strict=True)) / sum(weights)
        if got.numel():
            largest = max(float(tensor.double().abs().max()) for tensor in given)
            assert float((got.double() - mean).abs().max()) <= TOLERANCE[got.dtype] * largest, index


@pytest.mark.parametrize("count", [5, 6, 7, 9])
def test_the_weighted_mean_of_all_in_groups_of_three(count: int, processes, tmp_path: Path) -> None:
    members, weights = processes[:count], WEIGHTS[:count]
    enter(members, f"moshpit-{count}")
    files = [tmp_path / f"{rank}.pt" for rank in range(count)]
    for rank, process in enumerate(members):
        process.send("average", rank=rank, weight=weights[rank], file=str(files[rank]))
    reports = answers(members, 60)
    results = [torch.load(file) for file in files]
    planned = len(plan_grid(count, GROUP_SIZE))
    last_groups: dict[tuple[str, ...], set[bytes]] = {}
    for process, report, result in zip(members, reports, results, strict=True):
        assert report["exact"] is True
        assert not report["failures"]
        assert sorted(report["members"]) == sorted(other.peer_id for other in members)
        assert report["weight_total"] == pytest.approx(sum(weights), rel=1e-9)
        assert len(report["groups"]) == planned
        assert all(process.peer_id in group and len(group) <= GROUP_SIZE for group in report["groups"])
        check_values(result, weights)
        bits = b"".join(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in result)
        last_groups.setdefault(tuple(report["groups"][-1]), set()).add(bits)
    assert all(len(versions) == 1 for versions in last_groups.values())
    assert sum(map(len, last_groups)) == count
    ask_all(members, "leave")


def test_five_train_and_become_one(processes) -> None:
    """Each has other values; steps that change nothing give them weight, and averagings bring all onto one mean."""
    members = processes[:5]
    enter(members, "moshpit-trains")
    members[0].ask("attach", layers=[8, 4], lr=0.0)
    ask_all(members[1:], "attach", layers=[8, 4], lr=0.0)
    scattered = [process.ask("scatter", seed=seed) for seed, process in enumerate(members)]
    assert len({values["digest"] for values in scattered}) == len(members)
    ask_all(members, "train")

    def averaged() -> bool:
        applied = ask_all(members, "averagings")
        return all(sum(len(entry["members"]) == 5 and entry["exact"] for entry in entries) >= 4 for entries in applied)

    wait_until(averaged, 30, "four exact averagings of all five at each", every_seconds=0.2)
    ask_all(members, "rest")
    values = ask_all(members, "values")
    for side in ("low", "high"):
        assert max(each[side] for each in values) - min(each[side] for each in values) <= 1e-5
    lowest, highest = (pick(each[side] for each in scattered) for pick, side in ((min, "low"), (max, "high")))
    assert lowest < values[0]["low"] < values[0]["high"] < highest  # the mean of them, not one of them
    for entries in ask_all(members, "averagings"):
        full = [entry for entry in entries if len(entry["members"]) == 5]
        assert all(entry["rounds_done"] == entry["rounds_planned"] == len(plan_grid(5, GROUP_SIZE)) for entry in full)
    assert all(not report["failures"] for report in ask_all(members, "report"))
    ask_all(members, "leave")
