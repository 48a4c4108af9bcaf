"""A peer that trains a scenario of test_pytorch_use.py: the founder in the background, the visitor on command.

Every model carries a `tag`: a trained parameter that no loss uses. No optimizer ever moves it, so what happens to it
is the swarm's work alone: the founder sets it to +1, the visitor to -1, and averaging must bring both to one value.
"""

from __future__ import annotations

import copy
import io
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from swarm_process import LOOPBACK, reply, serve, wait_until
from torch import nn

Facts = dict[str, Any]
VISITOR_SECONDS = 20.0


class Tagged(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.tag = nn.Parameter(torch.zeros(5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs)


def linear(founder: bool, width: int = 8) -> Tagged:
    torch.manual_seed(1 if founder else 2)
    return Tagged(nn.Linear(width, 1))


class Scenario:
    """A model, its optimizer and a step; subclasses change what they are about. One instance per peer and run."""

    width = 8
    batch_size: int | None = 16

    def __init__(self, founder: bool) -> None:
        self.founder = founder
        self.steps = 0
        self.model: Any = self.build_model()
        self.optimizer: Any = self.build_optimizer()
        self.optimizer_type = type(self.optimizer)
        self.swarm: Any = None

    def build_model(self) -> nn.Module:
        return linear(self.founder, self.width)

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.01)

    def attach(self, swarm: Any) -> None:
        self.swarm = swarm
        given = self.model
        keys = list(given.state_dict())
        self.model, self.optimizer = swarm.attach(self.model, self.optimizer, batch_size=self.batch_size)
        assert type(self.optimizer) is self.optimizer_type
        assert self.model is given
        assert list(self.model.state_dict()) == keys
        self.attached()

    def attached(self) -> None:
        """What the scenario does between `attach` and the first step."""

    def tags(self) -> torch.Tensor:
        return self.model.tag

    def set_tag(self, value: float) -> None:
        with torch.no_grad():
            self.tags().fill_(value)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(16, self.width)
        return inputs, inputs.sum(1, keepdim=True)

    def loss(self) -> torch.Tensor:
        inputs, targets = self.batch()
        return (self.model(inputs) - targets).square().mean()

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def visit(self) -> None:
        """The visitor's training: until three averagings were applied after its tag was set."""
        self.set_tag(-1.0)
        self.until_averagings(3, self.step)

    def until_averagings(self, more: int, step: Callable[[], None]) -> None:
        target = self.swarm.report().averagings + more

        def once() -> bool:
            step()
            return self.swarm.report().averagings >= target

        wait_until(once, VISITOR_SECONDS, f"{more} averagings more", every_seconds=0.003)

    def facts(self) -> Facts:
        report = self.swarm.report()
        return {
            "tag": self.tags().tolist(),
            "averagings": report.averagings,
            "steps": self.steps,
            "reported_steps": report.steps,
            "others": len(self.swarm.peers()),
            "failures": [failure.reason for failure in report.failures],
            "finite": all(bool(p.isfinite().all()) for p in self.model.parameters()),
            **self.more_facts(),
        }

    def more_facts(self) -> Facts:
        return {}


class Schedulers(Scenario):
    """The founder makes its schedulers before `attach`, the visitor after: both orders are common."""

    def build(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        schedule = torch.optim.lr_scheduler
        return [
            schedule.StepLR(optimizer, step_size=7, gamma=0.9),
            schedule.CosineAnnealingLR(optimizer, T_max=50),
            schedule.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.01 * step)),
        ][self.kind : self.kind + 1]

    kind = 0

    def __init__(self, founder: bool) -> None:
        super().__init__(founder)
        self.schedulers: list[Any] = []
        self.wrong: list[tuple[int, float, float]] = []
        self.warned: list[str] = []
        if founder:
            self.schedulers = self.build(self.optimizer)

    def attached(self) -> None:
        if not self.schedulers:
            self.schedulers = self.build(self.optimizer)
        twin = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=self.schedulers[0].base_lrs[0])
        self.twin, self.twin_schedulers = twin, self.build(twin)

    def step(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().step()
            for scheduler in self.schedulers:
                scheduler.step()
        self.warned += [str(one.message) for one in caught if "scheduler" in str(one.message).lower()]
        self.twin.step()
        for scheduler in self.twin_schedulers:
            scheduler.step()
        own, twin = self.optimizer.param_groups[0]["lr"], self.twin.param_groups[0]["lr"]
        if abs(own - twin) > 1e-12:
            self.wrong.append((self.steps, own, twin))

    def more_facts(self) -> Facts:
        return {"wrong": self.wrong[:3], "warned": self.warned[:3], "lr": self.optimizer.param_groups[0]["lr"]}


class StepSchedule(Schedulers):
    kind = 0


class CosineSchedule(Schedulers):
    kind = 1


class LambdaSchedule(Schedulers):
    kind = 2


class Accumulation(Scenario):
    """Four backward passes a step. The gradient is constant, so the sum must be exact whatever happens in between."""

    batch_size = None
    accumulate = 4

    def __init__(self, founder: bool) -> None:
        super().__init__(founder)
        self.backwards = 0
        self.wrong: list[float] = []

    def step(self) -> None:
        for number in range(1, self.accumulate + 1):
            self.model.body.weight.sum().backward()
            self.backwards += 1
            gradient = self.model.body.weight.grad
            if not torch.equal(gradient, torch.full_like(gradient, number)):
                self.wrong.append(gradient.max().item())
            time.sleep(0.002)
        self.swarm.count(16 * self.accumulate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def more_facts(self) -> Facts:
        return {"backwards": self.backwards, "wrong": self.wrong[:3]}


class Groups(Scenario):
    """Three groups of unlike learning rate and weight decay; the one with lr 0 must stay where the founder has it."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(1 if self.founder else 2)
        return Tagged(nn.Sequential(nn.Linear(self.width, 4), nn.Linear(4, 1)))

    def build_optimizer(self) -> torch.optim.Optimizer:
        self.still = [p.detach().clone() for p in self.model.body[0].parameters()]
        groups = [
            {"params": self.model.body[0].parameters(), "lr": 0.0},
            {"params": self.model.body[1].parameters(), "lr": 0.02, "momentum": 0.5},
            {"params": [self.model.tag], "weight_decay": 0.1},
        ]
        return torch.optim.SGD(groups, lr=0.01)

    def attached(self) -> None:
        self.moving = self.model.body[1].weight.detach().clone()

    def more_facts(self) -> Facts:
        return {
            "options": [
                [group["lr"], group["momentum"], group["weight_decay"]] for group in self.optimizer.param_groups
            ],
            "sizes": [len(group["params"]) for group in self.optimizer.param_groups],
            "still": [p.reshape(-1).tolist() for p in self.model.body[0].parameters()],
            "still_at_start": [p.reshape(-1).tolist() for p in self.still],
            "moved": (self.model.body[1].weight - self.moving).abs().max().item(),
        }


class Compiled(Scenario):
    """Both attach the compiled model; the visitor calls it compiled, the founder (spared the compiler) eagerly."""

    def build_model(self) -> nn.Module:
        self.plain = linear(self.founder, self.width)
        return torch.compile(self.plain)

    def loss(self) -> torch.Tensor:
        inputs, targets = self.batch()
        model = self.plain if self.founder else self.model
        return (model(inputs) - targets).square().mean()

    def more_facts(self) -> Facts:
        if self.founder:
            return {}
        from torch._dynamo.utils import counters

        inputs, _ = self.batch()
        with torch.no_grad():
            apart = (self.model(inputs) - self.plain(inputs)).abs().max().item()
        return {"apart": apart, "graphs": counters["stats"].get("unique_graphs", 0)}


class CompiledBeside(Compiled):
    """The visitor attaches a compiled model, the founder a plain one: parameter names differ, the model does not."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        return self.plain if self.founder else model


class CompiledAfter(Compiled):
    """`attach` gets the plain model, which is compiled then: the averaged values must reach the compiled one."""

    def build_model(self) -> nn.Module:
        self.plain = linear(self.founder, self.width)
        return self.plain

    def loss(self) -> torch.Tensor:
        inputs, targets = self.batch()
        model = self.plain if self.founder else self.compiled
        return (model(inputs) - targets).square().mean()

    def attached(self) -> None:
        self.compiled = torch.compile(self.plain)

    def more_facts(self) -> Facts:
        self.model = self.plain if self.founder else self.compiled
        return super().more_facts()


class Mixed(Scenario):
    """autocast in bfloat16 and a GradScaler; one step of the visitor overflows and is skipped by the scaler."""

    def __init__(self, founder: bool) -> None:
        super().__init__(founder)
        self.scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=1024.0)
        self.overflow = False
        self.skipped = 0

    def step(self) -> None:
        inputs, targets = self.batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = self.model(inputs)
            assert outputs.dtype == torch.bfloat16
            loss = (outputs.float() - targets).square().mean()
        if self.overflow:
            loss = loss * float("inf")
        before = self.model.body.weight.detach().clone()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.overflow:
            assert torch.equal(before, self.model.body.weight), "the scaler skipped this step"
            self.skipped += 1
        else:
            self.steps += 1
        self.overflow = False

    def visit(self) -> None:
        self.set_tag(-1.0)
        self.until_averagings(2, self.step)
        self.overflow = True
        self.until_averagings(2, self.step)

    def more_facts(self) -> Facts:
        return {"scale": self.scaler.get_scale(), "skipped": self.skipped}


class Loader(Scenario):
    """Batches come from forked DataLoader workers; averagings go on while they live and after they have ended."""

    batches = 0
    after_workers = 0

    def visit(self) -> None:
        from torch.utils.data import DataLoader, TensorDataset

        self.set_tag(-1.0)
        generator = torch.Generator().manual_seed(self.swarm.data_seed % (1 << 31))
        inputs = torch.randn(640, self.width, generator=generator)
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        loader = DataLoader(data, batch_size=16, num_workers=2, shuffle=True, generator=generator)
        target = self.swarm.report().averagings + 3
        deadline = time.monotonic() + VISITOR_SECONDS
        while self.swarm.report().averagings < target and time.monotonic() < deadline:
            for inputs, targets in loader:
                (self.model(inputs) - targets).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.steps += 1
                self.batches += 1
                time.sleep(0.003)
        during = self.swarm.report().averagings
        self.until_averagings(2, self.step)
        self.after_workers = self.swarm.report().averagings - during

    def more_facts(self) -> Facts:
        return {"batches": self.batches, "after_workers": self.after_workers}


class TiedBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 500)
        self.output = nn.Linear(500, 1000, bias=False)
        self.output.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(500_000), requires_grad=False)
        self.outside = nn.Parameter(torch.zeros(500_000), requires_grad=False)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.output(self.embedding(indices))


class Tied(Scenario):
    """2 MB of tied weight, 2 MB frozen inside the optimizer's groups, 2 MB frozen outside them."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(1 if self.founder else 2)
        return Tagged(TiedBody())

    def build_optimizer(self) -> torch.optim.Optimizer:
        trained = [p for name, p in self.model.named_parameters() if "outside" not in name]
        return torch.optim.SGD(trained, lr=0.01)

    def loss(self) -> torch.Tensor:
        return self.model(torch.randint(0, 1000, (2,))).square().mean()

    def attached(self) -> None:
        with torch.no_grad():
            self.model.body.frozen.fill_(1.0 if self.founder else 5.0)
            self.model.body.outside.fill_(1.0 if self.founder else 5.0)

    def visit(self) -> None:
        self.set_tag(-1.0)
        self.until_averagings(1, self.step)
        before = self.swarm.report()
        self.until_averagings(4, self.step)
        after = self.swarm.report()
        self.bytes_each = (after.bytes_sent - before.bytes_sent) / (after.averagings - before.averagings)

    def more_facts(self) -> Facts:
        body = self.model.body
        return {
            "tied": body.output.weight is body.embedding.weight,
            "frozen": sorted(set(body.frozen.tolist())),
            "outside": sorted(set(body.outside.tolist())),
            "bytes_each": getattr(self, "bytes_each", None),
            "requires_grad": body.frozen.requires_grad,
        }


class Normed(Scenario):
    """BatchNorm with momentum 0: nothing but the swarm moves its running statistics."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(1 if self.founder else 2)
        return Tagged(nn.Sequential(nn.Linear(self.width, 4), nn.BatchNorm1d(4, momentum=0.0), nn.Linear(4, 1)))

    def attached(self) -> None:
        self.norm = self.model.body[1]
        self.norm.running_mean.fill_(1.0 if self.founder else 9.0)
        self.norm.running_var.fill_(2.0 if self.founder else 4.0)
        if not self.founder:
            self.norm.num_batches_tracked.fill_(100_000)

    def more_facts(self) -> Facts:
        return {
            "mean": self.norm.running_mean.tolist(),
            "var": self.norm.running_var.tolist(),
            "tracked": self.norm.num_batches_tracked.item(),
            "tracked_dtype": str(self.norm.num_batches_tracked.dtype),
        }


class Optimized(Scenario):
    """Learns the sum of its inputs; the visitor's loss must fall."""

    first_loss = last_loss = float("nan")

    def loss(self) -> torch.Tensor:
        loss = super().loss()
        if self.steps == 0:
            self.first_loss = loss.item()
        self.last_loss = loss.item()
        return loss

    def visit(self) -> None:
        super().visit()
        wait_until(lambda: self.step() or self.steps >= 150, VISITOR_SECONDS, "150 steps", every_seconds=0.003)

    def more_facts(self) -> Facts:
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        finite = all(bool(torch.as_tensor(value).isfinite().all()) for value in state if value is not None)
        return {"losses": [self.first_loss, self.last_loss], "state_finite": finite}


class Plain(Optimized):
    pass


class Momentum(Optimized):
    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, nesterov=True)


class Adam(Optimized):
    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=0.01)


class AdamW(Optimized):
    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.01, amsgrad=True)


class FusedAdamW(Optimized):
    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)


class Saved(Scenario):
    """The visitor saves, trains on, loads back, and trains on: still one swarm. What it saved fits a plain model."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=0.01)

    def visit(self) -> None:
        self.set_tag(-1.0)
        self.until_averagings(2, self.step)
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        saved_weight = self.model.body.weight.detach().clone()
        self.until_averagings(2, self.step)
        assert not torch.equal(saved_weight, self.model.body.weight)

        file.seek(0)
        saved = torch.load(file)
        fresh = linear(founder=True)
        fresh_optimizer = torch.optim.Adam(fresh.parameters(), lr=0.5)
        fresh.load_state_dict(saved["model"])
        fresh_optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        assert torch.equal(fresh.body.weight, saved_weight)
        fresh(torch.ones(2, self.width)).sum().backward()
        fresh_optimizer.step()

        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        assert torch.equal(self.model.body.weight, saved_weight)
        self.set_tag(-1.0)
        self.before_load = self.swarm.report().averagings
        self.until_averagings(3, self.step)

    def more_facts(self) -> Facts:
        return {"after_load": self.swarm.report().averagings - getattr(self, "before_load", 0)}


class Metrics(Scenario):
    """Both peers call `swarm.average` themselves now and then, beside the averagings in the background."""

    def __init__(self, founder: bool) -> None:
        super().__init__(founder)
        self.means: list[list[float]] = []

    def visit(self) -> None:
        self.set_tag(-1.0)
        for _ in range(3):
            self.until_averagings(1, self.step)
            reply(reply="call me")
            self.average_metric(3.0)

    def average_metric(self, value: float) -> None:
        (mean,), report = self.swarm.average([torch.tensor([value])], timeout_seconds=10)
        self.means.append([mean.item(), len(report.contributed)])

    def more_facts(self) -> Facts:
        return {"means": self.means}


class Paused(Scenario):
    """The visitor trains, then evaluates for a while without a step: averagings go on at its sync points."""

    def visit(self) -> None:
        self.until_averagings(1, self.step)
        self.set_tag(-1.0)
        before, steps = self.swarm.report().averagings, self.steps
        self.until_averagings(3, self.evaluate)
        self.during_pause = self.swarm.report().averagings - before
        assert self.steps == steps

    def evaluate(self) -> None:
        with torch.no_grad():
            self.loss()
        self.swarm.sync_point()

    def more_facts(self) -> Facts:
        return {"during_pause": getattr(self, "during_pause", None)}


SCENARIOS = {kind.__name__: kind for kind in vars().copy().values() if isinstance(kind, type)}

current: Scenario | None = None


def found(scenario: str, run: str) -> str:
    """Found a run, attach, and train in the background from now on; the address."""
    global current
    import shoal

    swarm = shoal.join(run, listen=LOOPBACK, strategy=shoal.AllReduce(every_seconds=0.1))
    fresh = SCENARIOS[scenario](founder=True)
    fresh.attach(swarm)
    fresh.set_tag(1.0)
    current = fresh
    return swarm.address


def visit(scenario: str, run: str, address: str) -> Facts:
    """Join, attach, train the scenario, leave; what it saw."""
    import shoal

    swarm = shoal.join(run, peers=[address], listen=LOOPBACK)
    visitor = SCENARIOS[scenario](founder=False)
    with swarm:
        visitor.attach(swarm)
        visitor.visit()
        return visitor.facts()


def facts() -> Facts:
    assert current is not None
    return current.facts()


def average_metric(value: float) -> None:
    assert isinstance(current, Metrics)
    current.average_metric(value)


def leave() -> None:
    global current
    if current is not None:
        current.swarm.leave()
        current = None


def train() -> None:
    if current is not None:
        current.step()
    time.sleep(0.004)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(found, visit, facts, average_metric, leave, idle=train)
