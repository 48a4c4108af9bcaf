"""One process that runs the model and data of examples/masked_lm.py: a peer of a swarm, or alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from swarm_process import LOOPBACK, serve
from torch import Tensor, nn

import shoal

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import masked_lm

EVALUATE_EVERY, UNSEEN = 10, 512

torch.set_num_threads(1)
text, held_out = masked_lm.read_text()
unseen = next(masked_lm.batches(held_out, UNSEEN, seed=0))
swarm: Any = None


def build(steps: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    return masked_lm.build(steps)


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def curve(kept: dict[int, Tensor], steps: int) -> list[tuple[int, float]]:
    """The loss on unseen text after each of the kept steps."""
    model = build(steps)[0]
    losses = []
    with torch.no_grad():
        for step, values in sorted(kept.items()):
            nn.utils.vector_to_parameters(values, model.parameters())
            losses.append((step, masked_lm.loss_of(model, *unseen).item()))
    return losses


def join(peers: list[str], steps: int) -> dict[str, Any]:
    global swarm, model, optimizer, scheduler
    swarm = shoal.join("masked-lm", peers=peers, listen=LOOPBACK, strategy=masked_lm.STRATEGY)
    model, optimizer, scheduler = build(steps)
    swarm.attach(model, optimizer, batch_size=masked_lm.BATCH, scheduler=scheduler)
    return {"address": swarm.address, "peer_id": swarm.peer_id, "seed": swarm.data_seed}


def train(pace: float, steps: int) -> dict[str, Any]:
    """The loop of the example, at `pace` seconds a batch."""
    kept: dict[int, Tensor] = {}
    for inputs, targets in masked_lm.batches(text, masked_lm.BATCH, swarm.data_seed):
        began = time.monotonic()
        masked_lm.loss_of(model, inputs, targets).backward()
        time.sleep(max(0.0, began + pace - time.monotonic()))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step = swarm.progress
        if step and step % EVALUATE_EVERY == 0 and step not in kept:
            kept[step] = vector(model).clone()
        if step >= steps:
            break
    torch.save(kept, "kept.pt")
    report = swarm.report()
    return {
        "given": [[s.step, {who: [g.samples, g.batches] for who, g in s.given.items()}] for s in report.global_steps],
        "failures": [failure.reason for failure in report.failures],
        "events": [str(event) for event in report.events if event.kind in ("diverged", "behind", "repaired", "lost")],
        "dropped": report.samples_dropped,
        "seconds": report.global_steps[-1].at_seconds - report.global_steps[0].at_seconds,
    }


def losses(steps: int) -> list[tuple[int, float]]:
    return curve(torch.load("kept.pt"), steps)


def leave() -> None:
    global swarm
    swarm.leave()
    swarm = None


def alone(given: list[list[tuple[int, int, int]]]) -> list[tuple[int, float]]:
    """One process. For each step (data seed, first batch, last batch): what its gradient is the mean over."""
    model, optimizer, scheduler = build(len(given))
    sources: dict[int, tuple[Iterator[Any], int]] = {}
    kept = {}
    for step, ranges in enumerate(given, 1):
        count = sum(last - first + 1 for _, first, last in ranges)
        for seed, first, last in ranges:
            source, read = sources.get(seed) or (masked_lm.batches(text, masked_lm.BATCH, seed), 0)
            sources[seed] = source, last
            for inputs, targets in islice(source, first - read - 1, last - read):
                (masked_lm.loss_of(model, inputs, targets) / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), masked_lm.STRATEGY.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % EVALUATE_EVERY == 0:
            kept[step] = vector(model).clone()
    torch.save(kept, "alone.pt")
    return curve(kept, len(given))


def idle() -> None:
    if swarm is not None:
        swarm.sync_point()
    time.sleep(0.01)


serve(join, train, losses, leave, alone, idle=idle)
