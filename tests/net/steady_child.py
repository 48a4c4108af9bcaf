"""An honest peer that trains and averages all the while, and says how it is: averagings, memory, files, tasks."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import psutil
import torch
from swarm_process import LOOPBACK, serve
from torch import nn

import shoal

torch.set_num_threads(1)


class Steady:
    def __init__(self) -> None:
        self.swarm: Any = None
        self.model: Any = None
        self.optimizer: Any = None
        self.raised: list[str] = []
        self.pause = threading.Event()
        threading.excepthook = lambda hook: self.raised.append(repr(hook.exc_value))

    def enter(self, run: str, secret: str, peers: list[str], every_seconds: float, size: int) -> str:
        strategy = shoal.AllReduce(every_seconds=every_seconds)
        self.swarm = shoal.join(run, secret=secret, peers=peers, listen=LOOPBACK, strategy=strategy)
        model = nn.Linear(size, 1, bias=False)
        self.model, self.optimizer = self.swarm.attach(
            model, torch.optim.SGD(model.parameters(), lr=1e-3), batch_size=8
        )
        self.model.weight.grad = torch.ones(1, size)
        return self.swarm.address

    def step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
        self.pause.wait(0.01)

    def figures(self) -> dict[str, Any]:
        gc.collect()
        report, process = self.swarm.report(), psutil.Process()
        tasks = asyncio.run_coroutine_threadsafe(_count_tasks(), self.swarm._node._thread.loop).result(10)
        return {
            "averagings": report.averagings,
            "failures": [failure.reason for failure in report.failures],
            "peers": len(report.peers_now),
            "rss": process.memory_info().rss,
            "files": process.num_fds(),
            "tasks": tasks,
            "refused": report.event_counts.get("refused", 0),
            "faults": [str(event) for event in report.events if event.kind == "fault"],
            "told": [str(event) for event in report.events if event.kind == "refused"][-5:],
            "events": len(report.events),
            "numbers": [averaging.number for averaging in report.applied][-40:],
            "raised": self.raised,
        }

    def leave(self) -> None:
        self.swarm.leave()


async def _count_tasks() -> int:
    return len(asyncio.all_tasks()) - 1


if __name__ == "__main__":
    steady = Steady()
    serve(steady.enter, steady.figures, steady.leave, idle=steady.step)
