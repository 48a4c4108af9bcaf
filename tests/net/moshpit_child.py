"""A training peer (see driven_peer) with Moshpit in groups of three; what it averages on demand, its test knows."""

from __future__ import annotations

import time
from typing import Any

import torch
from driven_peer import Peer

import shoal

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SHAPES = [(1003,), (17, 5), (), (0, 4)]


def inputs(rank: int) -> list[torch.Tensor]:
    """Every shape in every type. Each element has one sign at all ranks, so that no mean cancels to nearly nothing."""
    generator = torch.Generator().manual_seed(100 + rank)
    tensors = []
    for dtype in DTYPES:
        for shape in SHAPES:
            magnitude = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64) * (1 + rank)
            sign = 1 - 2 * (torch.arange(magnitude.numel(), dtype=torch.float64).reshape(shape) % 2)
            tensors.append((magnitude * sign).to(dtype))
    return tensors


class MoshpitPeer(Peer):
    """The commands of driven_peer, and these."""

    def enter(self, run: str, peers: list[str], founds: bool) -> dict[str, str]:
        strategy = shoal.Moshpit(group_size=3, every_seconds=0.4) if founds else None
        self.swarm = shoal.join(run, peers=peers, listen="127.0.0.1:0", strategy=strategy)
        return {"address": self.swarm.address, "peer_id": self.swarm.peer_id}

    def meet(self, count: int) -> None:
        """Return when so many others are there."""
        until = time.monotonic() + 20
        while len(self.swarm.peers()) != count:
            assert time.monotonic() < until, f"{len(self.swarm.peers())} others, not {count}"
            time.sleep(0.01)

    def average(self, rank: int, weight: float, file: str) -> dict[str, Any]:
        """Average the inputs of this rank; the result goes into `file`."""
        averaged, report = self.swarm.average(inputs(rank), weight=weight, timeout_seconds=20)
        torch.save(averaged, file)
        return {
            "exact": report.exact,
            "weight_total": report.weight_total,
            "members": list(report.members),
            "groups": [list(round_.members) for round_ in report.rounds],
            "failures": list(report.failures),
        }

    def averagings(self) -> list[dict[str, Any]]:
        """Those of the training, as this peer's history has them."""
        names = ("number", "members", "exact", "rounds_done", "rounds_planned")
        return [{name: getattr(entry, name) for name in names} for entry in self.swarm.report().applied]


if __name__ == "__main__":
    MoshpitPeer().serve()
