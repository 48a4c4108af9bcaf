"""The scenario `averaging`: how many iterations bring the peers' values together when some of them are absent.

Source: sections 5.1 to 5.3 of the Moshpit reference. One float64 number per peer from N(0, 1); the seed is the number
of the restart. In each of 50 iterations every peer is alive with probability 1 - failure_rate, independently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np

from shoal.core.errors import OptionError
from shoal.core.options import check_number
from shoal.planning.grid import SMALLEST_GROUP, plan_grid
from shoal.sim.averaging_methods import METHODS, Setup, Values

ITERATIONS = 50
FLOOR = 2.2e-16
"""No variance is told below it (5.1)."""
MOST_CELLS = 10**7
CELLS, KEYS, PLANNED = ("moshpit", "moshpit_blocking"), ("moshpit_keys",), ("moshpit_weighted", "moshpit_conserved")
"""Methods whose grid has fixed random cells; is a chain of keys; is the one that the strategy plans."""
EQUAL, RANDOM = "equal", "random"
"""What `weights` may be."""


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """One way of averaging. `failure_rate`: the chance that a peer is absent from an iteration.

    Its random numbers are those of NumPy's legacy generator, whose stream is the same in every version: seeds 0 to 9 of
    allreduce, sgp and random_groups end at the very iterations that table 5.2 has.

    `dims`: the sides of the grid. By default two of `group_size`; for `moshpit_weighted` and `moshpit_conserved` what
    the strategy plans for `peers` and `group_size`. The other methods have no grid. `weights`: of these two, "equal" or
    "random": whole numbers from 0 to 99, by the seed.
    """

    name: ClassVar[str] = "averaging"

    method: str = "moshpit"
    peers: int = 1024
    group_size: int = 32
    dims: tuple[int, ...] | None = None
    failure_rate: float = 0.0
    weights: str = EQUAL

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise OptionError("method", self.method, f"one of {', '.join(METHODS)}")
        planned = self.method in PLANNED
        check_number("peers", self.peers, 2, 10**6, whole=True)
        check_number("group_size", self.group_size, SMALLEST_GROUP if planned else 2, 1024, whole=True)
        check_number("failure_rate", self.failure_rate, 0, 1)
        if self.weights not in ((EQUAL, RANDOM) if planned else (EQUAL,)):
            bounds = f"{EQUAL!r}, or {RANDOM!r} with method {' or '.join(PLANNED)}"
            raise OptionError("weights", self.weights, bounds)
        if self.dims is not None:
            self._check_dims(self.dims)
        elif self.method in CELLS + KEYS:
            object.__setattr__(self, "dims", (self.group_size, self.group_size))
            self._check_dims((self.group_size, self.group_size))
        elif planned:
            object.__setattr__(self, "dims", plan_grid(self.peers, self.group_size))

    def _check_dims(self, dims: tuple[int, ...]) -> None:
        for side in dims:
            check_number("dims", side, 2, MOST_CELLS, whole=True)
        if self.method in CELLS:
            if not self.peers <= prod(dims) <= MOST_CELLS:
                raise OptionError(
                    "dims", dims, f"a grid of {self.peers} (one cell for each peer) to {MOST_CELLS} cells"
                )
        elif self.method in KEYS:
            if len(dims) < 2 or set(dims) != {self.group_size}:
                raise OptionError("dims", dims, f"two or more times group_size = {self.group_size}")
        elif self.method in PLANNED:
            if not dims or not prod(dims[1:]) <= self.peers <= prod(dims):
                raise OptionError("dims", dims, f"a grid of {self.peers} cells or more with no line empty")
        else:
            raise OptionError("dims", dims, f"left out with method {self.method}: it has no grid")

    def run(self, seed: int) -> dict[str, Any]:
        """One restart. Variances and squared errors to the (weighted) mean of the start are after each iteration.

        `error_of_present_by_iteration`: of those who were in every iteration so far; None where nobody was.
        `iterations_1e9`: the first after which the variance is below 1e-9, 50 where none is; `trace_digest`: SHA-256
        of all values after each iteration. Every restart goes on to the 50th: later variances are means over all seeds.
        """
        random = np.random.RandomState(seed)
        values = random.standard_normal(self.peers)
        weights = np.ones(self.peers)
        if self.weights == RANDOM:
            weights = random.randint(0, 100, self.peers).astype(np.float64)
            weights[0] = max(weights[0], 1.0)
        true_mean = float((weights * values).sum() / weights.sum())
        step = METHODS[self.method](Setup(values, weights, self.group_size, self.dims or (), random))
        digest = hashlib.sha256()
        variances: list[float] = []
        errors: list[float] = []
        errors_of_present: list[float | None] = []
        present = np.ones(self.peers, bool)
        for iteration in range(ITERATIONS):
            alive = random.random_sample(self.peers) >= self.failure_rate
            present &= alive
            values = step(iteration, values, alive)
            digest.update(values.astype("<f8").tobytes())
            variances.append(max(_mean_square(values - values.sum() / self.peers), FLOOR))
            errors.append(_mean_square(values - true_mean))
            errors_of_present.append(_mean_square(values[present] - true_mean) if present.any() else None)
        return {
            "seed": seed,
            "iterations_1e9": _first_below(variances, 1e-9),
            "iterations_1e4": _first_below(variances, 1e-4),
            "error_by_iteration": variances,
            "error_to_mean_by_iteration": errors,
            "error_of_present_by_iteration": errors_of_present,
            "trace_digest": digest.hexdigest(),
        }

    def summary(self, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The options, and means over the seeds."""
        curves = [run["error_by_iteration"] for run in runs]
        return {
            "method": self.method,
            "peers": self.peers,
            "group_size": self.group_size,
            "dims": None if self.dims is None else list(self.dims),
            "failure_rate": self.failure_rate,
            "seeds": len(runs),
            "iterations_1e9": fmean(run["iterations_1e9"] for run in runs),
            "iterations_1e4": fmean(run["iterations_1e4"] for run in runs),
            "error_by_iteration": [fmean(after) for after in zip(*curves, strict=True)],
            "trace_digest": hashlib.sha256("".join(run["trace_digest"] for run in runs).encode()).hexdigest(),
        }

    @staticmethod
    def plot(summaries: Sequence[dict[str, Any]], path: Path) -> None:
        """Draw the mean variance after each iteration, one curve per summary, into a PNG file."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for summary in summaries:
            floor = _first_below(summary["error_by_iteration"], 2 * FLOOR)
            variances = summary["error_by_iteration"][:floor]
            label = f"{summary['method']}, {summary['peers']} peers, {summary['failure_rate']:g} absent"
            axes.plot(range(1, len(variances) + 1), variances, marker=".", label=label)
        axes.set(
            yscale="log", xlabel="iteration", ylabel="variance over the peers", title="Averaging with absent peers"
        )
        axes.axhline(1e-9, color="0.6", linewidth=0.8, linestyle="--")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        FigureCanvasAgg(figure).print_png(path)


def _mean_square(values: Values) -> float:
    return float((values * values).sum()) / len(values)


def _first_below(variances: list[float], bound: float) -> int:
    return next((number for number, variance in enumerate(variances, start=1) if variance < bound), ITERATIONS)
