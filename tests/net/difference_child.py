"""A peer whose every change of a parameter is known: what the swarm added at each step is the rest.

Parameter `x` is (own coordinate of the founder, own coordinate of the other, nobody's) in float64. Each peer steps a
known distance along its own coordinate, so a value of `x` tells how many steps either peer had made. `ballast` has no
gradient; it makes an averaging last many steps.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from swarm_process import LOOPBACK, serve, wait_until
from torch import nn

LR = 1e-3


class Model(nn.Module):
    def __init__(self, ballast: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.ballast = nn.Parameter(torch.zeros(ballast))
        self.register_buffer("floats", torch.zeros(4))
        self.register_buffer("integers", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(4, dtype=torch.bool))


class Tracer:
    def __init__(self) -> None:
        self.swarm: Any = None
        self.model: Any = None
        self.optimizer: Any = None
        self.training = False
        self.gradient = torch.zeros(3, dtype=torch.float64)
        self.trace: list[tuple[torch.Tensor, torch.Tensor]] = []

    def found(self, run: str, every_seconds: float, kind: str, ballast: int = 1) -> str:
        """Found the run and attach; the address. `kind` is that of the optimizer."""
        import shoal

        strategy = shoal.AllReduce(every_seconds=every_seconds)
        self.swarm = shoal.join(run, listen=LOOPBACK, strategy=strategy)
        self._attach(kind, ballast, coordinate=0)
        return self.swarm.address

    def join(self, run: str, address: str, kind: str, ballast: int = 1) -> None:
        import shoal

        self.swarm = shoal.join(run, peers=[address], listen=LOOPBACK)
        self._attach(kind, ballast, coordinate=1)

    def _attach(self, kind: str, ballast: int, coordinate: int) -> None:
        model = Model(ballast)
        optimizer = {
            "sgd": lambda: torch.optim.SGD(model.parameters(), lr=LR),
            "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.999),
            "adam": lambda: torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.999, 0.9999)),
        }[kind]()
        if kind != "sgd":
            model.x.grad = torch.zeros(3, dtype=torch.float64)
            optimizer.step()
        self.model, self.optimizer = self.swarm.attach(model, optimizer, batch_size=8)
        if kind == "sgd":
            self.gradient[coordinate] = -1.0
        self.model.x.grad = self.gradient.clone()

    def train(self, on: bool) -> None:
        self.training = on

    def step(self) -> None:
        if self.training:
            before = self.model.x.detach().clone()
            self.optimizer.step()
            self.trace.append((before, self.model.x.detach().clone()))
        time.sleep(0.001)

    def move(self, values: list[float]) -> None:
        """Set `x`, as the user's thread may between steps."""
        with torch.no_grad():
            self.model.x.copy_(torch.tensor(values, dtype=torch.float64))

    def set_buffers(self, floats: float, integers: int, flags: bool) -> None:
        self.model.floats.fill_(floats)
        self.model.integers.fill_(integers)
        self.model.flags.fill_(flags)

    def state_names(self) -> list[str]:
        return sorted(self.optimizer.state[self.model.x])

    def set_state(self, name: str, value: float) -> None:
        self.optimizer.state[self.model.x][name].fill_(value)

    def averagings(self) -> int:
        return self.swarm.report().averagings

    def until_averagings(self, more: int) -> int:
        """Train until so many more were applied; the steps that took."""
        target, steps = self.averagings() + more, len(self.trace)
        self.training = True

        def once() -> bool:
            self.step()
            return self.averagings() >= target

        wait_until(once, 30, f"{more} averagings more", every_seconds=0.0)
        return len(self.trace) - steps

    def facts(self) -> dict[str, Any]:
        state = self.optimizer.state.get(self.model.x, {})
        return {
            "x": self.model.x.tolist(),
            "floats": self.model.floats.tolist(),
            "integers": self.model.integers.tolist(),
            "flags": self.model.flags.tolist(),
            "state": {name: torch.as_tensor(value).tolist() for name, value in state.items() if value is not None},
            "averagings": self.averagings(),
            "steps": len(self.trace),
        }

    def save_trace(self, path: str) -> int:
        befores = torch.stack([before for before, _ in self.trace])
        afters = torch.stack([after for _, after in self.trace])
        torch.save({"before": befores, "after": afters, "local": -LR * self.gradient}, path)
        return len(self.trace)

    def leave(self) -> None:
        self.training = False
        self.swarm.leave()
        self.model = self.optimizer = None
        self.gradient = torch.zeros(3, dtype=torch.float64)
        self.trace = []


if __name__ == "__main__":
    torch.set_num_threads(1)
    tracer = Tracer()
    serve(
        *(getattr(tracer, name) for name in vars(Tracer) if not name.startswith("_")),
        idle=tracer.step,
    )
