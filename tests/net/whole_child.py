"""A peer that trains and watches one large parameter: an averaging must change all of it at once, or nothing.

No loss uses `ballast`. Before each averaging every element is this peer's own number; the mean with others is another
number (not the same one in each part, when somebody dies), so elements that are still the own number were not written.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from swarm_process import LOOPBACK, serve
from torch import nn

SIZE = 4_000_000


class Watcher:
    def __init__(self) -> None:
        self.swarm: Any = None
        self.own = 0.0
        self.applied_at: list[float] = []
        self.half: list[int] = []

    def attach(self, run: str, peers: list[str], own: float) -> dict[str, str]:
        import shoal

        strategy = None if peers else shoal.AllReduce(every_seconds=0.05)
        self.swarm = shoal.join(run, peers=peers, listen=LOOPBACK, strategy=strategy)
        model = nn.Linear(4, 1)
        model.ballast = nn.Parameter(torch.zeros(SIZE))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.model, self.optimizer = self.swarm.attach(model, optimizer, batch_size=4)
        self.own = own
        self.reset()
        return {"address": self.swarm.address, "peer_id": self.swarm.peer_id}

    def reset(self) -> None:
        with torch.no_grad():
            self.model.ballast.fill_(self.own)

    def step(self) -> None:
        if self.swarm is not None:
            self.model(torch.ones(4, 4)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            kept = int((self.model.ballast == self.own).sum())
            if kept < SIZE:
                self.applied_at.append(time.monotonic())
                if kept:
                    self.half.append(kept)
                self.reset()
        time.sleep(0.002)

    def facts(self, since: float = 0.0) -> dict[str, Any]:
        report = self.swarm.report()
        return {
            "applied": [moment for moment in self.applied_at if moment > since],
            "half": self.half,
            "finite": bool(self.model.ballast.isfinite().all()),
            "failures": [failure.reason for failure in report.failures],
            "others": [peer.peer_id for peer in self.swarm.peers()],
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    watcher = Watcher()
    serve(watcher.attach, watcher.facts, idle=watcher.step)
