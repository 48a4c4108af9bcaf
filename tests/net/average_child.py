"""A peer process that averages what its test asks for. Inputs follow from the rank, so the test knows them all."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from typing import Any

import torch
from swarm_process import LOOPBACK, serve, wait_until

BIG = 10_000_000
WEIGHTS = [1.0, 3.5, 0.25, 2.0, 7.0, 0.5, 1.75, 4.0]


def mixed_inputs(rank: int) -> list[torch.Tensor]:
    """Sizes 1, 7, 1000003, scalars, empty, strided and unaligned tensors of the four floating types at once.

    The signs of the half-precision tensors are the same for all ranks: a mean that cancels to nearly nothing has no
    meaningful ulp when the sum travels in float32.
    """
    generator = torch.Generator().manual_seed(1000 + rank)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * (1 + rank)).to(dtype)

    def signed(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        magnitude = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64) * (1 + rank)
        sign = 1 - 2 * (torch.arange(magnitude.numel(), dtype=torch.float64).reshape(shape) % 2)
        return (magnitude * sign).to(dtype)

    return [
        normal(1),
        normal(7),
        normal(1000003),
        signed(1, dtype=torch.bfloat16),
        normal(1, dtype=torch.float64),
        signed(7, dtype=torch.float16),
        normal(3, 5, 2),
        normal(),
        normal(0, 4),
        normal(64, 33).T,
        normal(1000003, dtype=torch.float64) * 1e3,
        signed(1003, 3, dtype=torch.bfloat16),
        signed(1001, dtype=torch.float16),
        normal(2, 2).requires_grad_(),
        normal(1000)[::3],
        signed(1000003, dtype=torch.bfloat16),
    ]


def big_scale(rank: int) -> tuple[float, float]:
    return 1.0 + 0.375 * rank, 0.5 * rank - 1.0


LARGEST_NORMAL = 5.0
"""About the largest of BIG standard normal numbers."""
_pattern: list[torch.Tensor] = []


def big_input(rank: int) -> torch.Tensor:
    """scale * pattern + shift: the mean over any set of ranks is again of that shape, so it is cheap to know."""
    if not _pattern:
        _pattern.append(torch.randn(BIG, generator=torch.Generator().manual_seed(7)))
    scale, shift = big_scale(rank)
    return _pattern[0] * scale + shift


def is_mean(result: torch.Tensor, part: Any, ranks: dict[str, int], weights: list[float]) -> bool:
    """Whether the values of this part are the weighted mean of the inputs of its contributors. NaN is none."""
    inside = [ranks[who] for who in part.contributors]
    total = sum(weights[rank] for rank in inside)
    scale = sum(weights[rank] * big_scale(rank)[0] for rank in inside) / total
    shift = sum(weights[rank] * big_scale(rank)[1] for rank in inside) / total
    error = (result[part.start : part.stop] - (_pattern[0][part.start : part.stop] * scale + shift)).abs()
    largest = max(abs(scale) * LARGEST_NORMAL + abs(shift) for scale, shift in map(big_scale, inside))
    right = len(set(inside)) == len(inside) and abs(part.weight - total) <= 1e-9 * total
    return right and bool((error <= 1e-6 * largest).all())


def digest(tensors: list[torch.Tensor]) -> str:
    """Of shapes, types and every bit."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        state.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


class Peer:
    def __init__(self) -> None:
        self.swarm: Any = None
        self.events: list[tuple[float, str, str | None, str | None]] = []
        self.big: torch.Tensor | None = None
        self.big_rank = -1
        self.result: torch.Tensor | None = None
        self.parts: list[Any] | None = None
        self.armed: Any = None
        self.loader: Any = None

    def join(self, run: str, peers: list[str], found: bool = False, strategy: str = "AllReduce") -> dict[str, Any]:
        import shoal

        def on_event(event: Any) -> None:
            self.events.append((time.monotonic(), event.kind, event.peer_id, event.reason))

        options = getattr(shoal, strategy)() if found else None
        self.swarm = shoal.join(run, peers=peers, listen=LOOPBACK, strategy=options, on_event=on_event)
        return {"address": self.swarm.address, "peer_id": self.swarm.peer_id}

    def leave(self) -> None:
        self.swarm.leave()

    def wait_peers(self, count: int) -> list[str]:
        """Until exactly `count` others are there; their ids."""
        wait_until(lambda: len(self.swarm.peers()) == count, 20, f"{count} other peers")
        return sorted(peer.peer_id for peer in self.swarm.peers())

    def wait_gone(self, peer_id: str, timeout_seconds: float = 10.0) -> float:
        """time.monotonic() of the moment from which `peers()` does not list that peer."""
        gone = lambda: all(peer.peer_id != peer_id for peer in self.swarm.peers())  # noqa: E731
        wait_until(gone, timeout_seconds, f"{peer_id} is gone", every_seconds=0.005)
        return time.monotonic()

    def average_mixed(self, rank: int, weight: float, save: str | None = None) -> dict[str, Any]:
        tensors = mixed_inputs(rank)
        before = digest(tensors)
        averaged, report = self.swarm.average(tensors, weight=weight, timeout_seconds=30)
        if save:
            torch.save([tensor.detach() for tensor in averaged], save)
        pointers = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
        return {
            "digest": digest(averaged),
            "untouched": digest(tensors) == before,
            "input_digest": before,
            "new": all(tensor.untyped_storage().data_ptr() not in pointers for tensor in averaged if tensor.numel()),
            **plain_report(report),
        }

    def average_bad(self, kind: str) -> None:
        """A list whose tensor 2 is bad (or whose weight is); raises."""
        tensors = [torch.ones(3), torch.ones(2, 2, dtype=torch.float64), torch.ones(4), torch.ones(5)]
        weight = 1.0
        if kind in ("nan", "inf"):
            tensors[2][3] = float(kind)
        elif kind == "bfloat16 nan":
            tensors[2] = torch.tensor([1.0, float("nan")], dtype=torch.bfloat16)
        elif kind.startswith("weight "):
            weight = float(kind.split()[1])
        else:
            tensors[2] = torch.ones(4).to(getattr(torch, kind))
        self.swarm.average(tensors, weight=weight, timeout_seconds=10)

    def average_shaped(
        self, shapes: list[list[int]], dtypes: list[str], value: float, timeout_seconds: float = 10.0
    ) -> dict[str, Any]:
        tensors = [
            torch.full(shape, value, dtype=getattr(torch, dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        averaged, report = self.swarm.average(tensors, timeout_seconds=timeout_seconds)
        return {
            "values": sorted({float(number) for tensor in averaged for number in tensor.reshape(-1)}),
            "shapes": [list(tensor.shape) for tensor in averaged],
            **plain_report(report),
        }

    def average_parameters(self, rank: int) -> list[list[float]]:
        """What `average(model.parameters())` gives: an iterator, as everybody passes it to an optimizer."""
        model = torch.nn.Linear(2, 3)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, float(rank))
        averaged, _ = self.swarm.average(model.parameters(), timeout_seconds=10)
        return [tensor.reshape(-1).tolist() for tensor in averaged]

    def prepare_big(self, rank: int) -> None:
        self.big, self.big_rank = big_input(rank), rank

    def average_big(self, weight: float) -> dict[str, Any]:
        assert self.big is not None
        self.result = self.parts = None
        started_at = time.monotonic()
        (self.result,), report = self.swarm.average([self.big], weight=weight, timeout_seconds=30)
        returned_at = time.monotonic()
        self.parts = [part for done in report.rounds for part in done.parts]
        exchanges = [done.exchanges for done in report.rounds]
        return {"started_at": started_at, "returned_at": returned_at, "exchanges": exchanges, **plain_report(report)}

    def check_big(self, ranks: dict[str, int], weights: list[float]) -> dict[str, Any]:
        """The parts of the last result, and which of them are not the mean of their reported contributors.

        `ranks`: by peer id; `weights`: by rank.
        """
        assert self.big is not None
        facts: dict[str, Any] = {"untouched": torch.equal(self.big, big_input(self.big_rank))}
        if self.result is not None:
            assert self.parts is not None
            facts["parts"] = [dataclasses.astuple(part) for part in self.parts]
            facts["wrong"] = [
                dataclasses.astuple(part) for part in self.parts if not is_mean(self.result, part, ranks, weights)
            ]
            facts["digest"] = digest([self.result])
        return facts

    def strike(self, moment: str, signal_number: int, count: int | None = None) -> None:
        """Signal this process at that moment of its next averaging; see `moments`."""
        from moments import Strike

        self.armed = Strike(moment, signal_number, count)

    def spare(self) -> None:
        """No strike any more."""
        if self.armed is not None:
            self.armed.lift()

    def next_collector(self) -> list[Any]:
        """The number of the next averaging and the id of its collector, as this peer sees it."""
        rolls = self.swarm._node.peer.rolls
        number = max(rolls._next("call"), rolls._invitation("call")[0])
        return [number, rolls._collector("call", number, rolls._participants("call"))]

    def hold_workers(self, count: int = 2) -> list[int]:
        """Fork DataLoader workers and keep them; their pids."""
        from torch.utils.data import DataLoader, TensorDataset

        loader = DataLoader(
            TensorDataset(torch.arange(10_000.0)), batch_size=2, num_workers=count, multiprocessing_context="fork"
        )
        self.loader = iter(loader)
        next(self.loader)
        return [worker.pid for worker in self.loader._workers]

    def wait_lost(self, peer_id: str, timeout_seconds: float = 10.0) -> float:
        """time.monotonic() of the arrival of the event `lost` that names that peer."""

        def moments() -> list[float]:
            return [moment for moment, kind, lost, _ in list(self.events) if kind == "lost" and lost == peer_id]

        return min(wait_until(moments, timeout_seconds, f"an event `lost` for {peer_id} among {self.events}"))

    def pid(self) -> int:
        return os.getpid()


def plain_report(report: Any) -> dict[str, Any]:
    names = ("number", "weight_total", "exact", "bytes_sent", "bytes_received", "seconds")
    facts = {name: getattr(report, name) for name in names}
    out = [{**done.left_out, **done.lost} for done in report.rounds]
    facts["out"] = [[who, why] for round_ in out for who, why in round_.items()]
    return facts | {"members": sorted(report.members), "contributed": sorted(report.contributed)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    peer = Peer()
    serve(
        *(getattr(peer, name) for name in vars(Peer) if not name.startswith("_")),
    )
