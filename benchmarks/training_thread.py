"""What averaging and the training thread cost each other, in 2 processes on this machine.

    python benchmarks/training_thread.py [--floats 10000000] [--pairs 6] [--steps 200] [--runs 3] [--json FILE]

on demand    seconds of swarm.average while the main thread waits (idle), and while it runs a pure Python loop (busy)
background   seconds from one background averaging to the next, back to back, with a safe point every 10 ms between
             which the main thread sleeps (idle), or runs pure Python (busy)
training     seconds of a step with every_seconds=2, and of the same step of a twin that is not attached

Idle and busy, with and without, alternate within one run. Exit code 1 when a bound is broken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import shoal

PEERS, WAIT_SECONDS = 2, 240
MOST_BUSY_RATIO, MOST_STEP_RATIO = 4.0, 1.08
SAFE_POINT_SECONDS, AVERAGINGS = 0.01, 5
EVERY_SECONDS, PERIODS, BATCH, MOST_BLOCKS = 2.0, 3, 128, 60
TRAINING_SECONDS, BLOCK_SECONDS = 110, 60
"""A block of steps with averaging lasts from one averaging to the third after it: whole periods, no fraction."""
BACK_TO_BACK_SECONDS = 0.01

Series = dict[str, list[Any]]


# -- the processes


def enter(kind: str, rank: int, folder: Path) -> shoal.Swarm:
    """Found this part's run, or join it."""
    import shoal

    every_seconds = EVERY_SECONDS if kind == "training" else BACK_TO_BACK_SECONDS
    strategy = shoal.Moshpit(every_seconds=every_seconds)
    run, secret, listen = f"bench-{kind.replace(' ', '-')}", "bench-secret", "127.0.0.1:0"
    address = folder / "address"
    if rank == 0:
        swarm = shoal.join(run, strategy=strategy, secret=secret, listen=listen)
        draft = folder / "draft"
        draft.write_text(swarm.address)
        draft.rename(address)
    else:
        wait_until(address.exists)
        swarm = shoal.join(run, peers=[address.read_text()], secret=secret, listen=listen)
    wait_until(lambda: len(swarm.peers()) == PEERS - 1)
    return swarm


def wait_until(condition: Any) -> None:
    until = time.monotonic() + 30
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the other process did not come")
        time.sleep(0.02)


def spin(until: float) -> None:
    """Pure Python, as of a tokenizer or an augmentation, that never lets go of the interpreter's lock."""
    number = 0
    while time.perf_counter() < until:
        for _ in range(200):
            number = (number * 31 + 7) % 1_000_003


def on_demand(swarm: shoal.Swarm, floats: int, pairs: int, barrier: Any) -> Series:
    """Seconds of swarm.average, called from a second thread."""
    import torch

    values = torch.randn(floats)
    series: Series = {"idle": [], "busy": []}
    for number in range(2 * pairs + 2):
        seconds: list[float] = []

        def average(seconds: list[float] = seconds) -> None:
            begun = time.perf_counter()
            swarm.average([values])
            seconds.append(time.perf_counter() - begun)

        busy = number % 4 in (1, 2)
        thread = threading.Thread(target=average)
        barrier()
        thread.start()
        while busy and thread.is_alive():
            spin(time.perf_counter() + SAFE_POINT_SECONDS)
        thread.join()
        if number > 1:  # the first two warm up
            series["busy" if busy else "idle"] += seconds
    return series


def background(swarm: shoal.Swarm, floats: int, pairs: int, barrier: Any) -> Series:
    """Seconds between the ends of averagings, which begin as soon as the last has ended."""
    import torch

    model = torch.nn.Linear(floats // 1000, 1000, bias=False)
    _, optimizer = swarm.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    series: Series = {"idle": [], "busy": []}
    for number in range(2 * pairs + 1):
        busy = number % 4 in (1, 2)
        barrier()
        before, until = swarm.report().averagings, time.monotonic() + BLOCK_SECONDS
        while (done := swarm.report().averagings - before) <= AVERAGINGS:
            if time.monotonic() > until:
                raise TimeoutError(f"{done} averagings in {BLOCK_SECONDS} s: {swarm.report().failures}")
            if busy:
                spin(time.perf_counter() + SAFE_POINT_SECONDS)
            else:
                time.sleep(SAFE_POINT_SECONDS)
            optimizer.step()  # without gradients: it costs nothing, and counts, so that the values have weight
        ended = [one.at_seconds for one in swarm.report().applied[before : before + AVERAGINGS + 1]]
        seconds = [later - earlier for earlier, later in itertools.pairwise(ended)]
        if number > 0:
            series["busy" if busy else "idle"].append(statistics.median(seconds))
    return series


def training(swarm: shoal.Swarm, floats: int, steps: int, barrier: Any) -> Series:
    """Blocks of steps, with averaging and without, in turn."""
    import torch

    attached, plain, until = Trainer(floats), Trainer(floats), time.monotonic() + TRAINING_SECONDS
    swarm.attach(attached.model, attached.optimizer, batch_size=BATCH)
    series: Series = {"without": [], "with": []}
    for number in range(MOST_BLOCKS):
        block = attached.block(swarm, barrier)
        for _ in range(5):  # the model comes back into the caches
            plain.step()
        barrier()
        control = [plain.step() for _ in range(len(block))]
        if number > 0:
            series["with"].append(block)
            series["without"].append(control)
        enough = torch.tensor(int(sum(map(len, series["with"])) >= steps or time.monotonic() > until))
        torch.distributed.all_reduce(enough, torch.distributed.ReduceOp.MIN)
        if enough and number > 0:
            break
    series["failures"] = [failure.reason for failure in swarm.report().failures]
    return series


class Trainer:
    """A multi-layer perceptron of about so many parameters, and its loop."""

    def __init__(self, floats: int) -> None:
        import torch

        width = int((floats / 2) ** 0.5) - 200
        layers = [torch.nn.Linear(784, width), torch.nn.ReLU()]
        for _ in range(2):
            layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.inputs, self.targets = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))

    def step(self) -> tuple[float, float]:
        """One step: its seconds, and the CPU seconds of the whole process meanwhile."""
        import torch

        begun, used = time.perf_counter(), time.process_time()
        torch.nn.functional.cross_entropy(self.model(self.inputs), self.targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begun, time.process_time() - used

    def block(self, swarm: shoal.Swarm, barrier: Any) -> list[tuple[float, float]]:
        """The steps from the end of one averaging to the end of the PERIODS-th after it."""
        barrier()
        applied, until = swarm.report().averagings, time.monotonic() + BLOCK_SECONDS
        steps = []
        while (done := swarm.report().averagings - applied) <= PERIODS:
            if time.monotonic() > until:
                raise TimeoutError(f"{done} averagings in {BLOCK_SECONDS} s: {swarm.report().failures}")
            took = self.step()
            if done > 0:
                steps.append(took)
        return steps


def child(kind: str, rank: int, floats: int, repeats: int, port: int, folder: Path) -> None:
    """One process of one part."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    swarm = enter(kind, rank, folder)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=PEERS, timeout=timedelta(seconds=60)
    )
    part = {"on demand": on_demand, "background": background, "training": training}[kind]
    series = part(swarm, floats, repeats, dist.barrier)
    dist.barrier()
    swarm.leave()
    if rank == 0:
        print(json.dumps(series))
    dist.destroy_process_group()


# -- the figures


def measure(kind: str, floats: int, repeats: int) -> Series:
    """Run the processes of one part and return what the first of them measured.

    `others_cores`: how many cores all other programs kept busy meanwhile. They take from the steps, and from the
    averagings, what these would have used.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun, busy = time.monotonic(), busy_seconds()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        try:
            for rank in range(PEERS):
                environment = os.environ | {"SHOAL_STATE": f"{folder}/state-{rank}", "OMP_NUM_THREADS": "1"}
                sizes = [str(rank), str(floats), str(repeats), str(port), folder]
                command = [sys.executable, __file__, "--child", kind, *sizes]
                children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
            output = children[0].communicate(timeout=WAIT_SECONDS)[0]
            series: Series = json.loads(output.splitlines()[-1])
        finally:
            for process in children:
                process.kill()
                process.wait()
    series["others_cores"] = [(busy_seconds() - busy) / (time.monotonic() - begun)]
    return series


def busy_seconds() -> float:
    """CPU seconds of this machine since it started, without those of the processes that have ended here."""
    times, ours = psutil.cpu_times(), os.times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - ours.children_user - ours.children_system


def busy_figures(series: Series) -> dict[str, Any]:
    ratios = [busy / idle for idle, busy in zip(series["idle"], series["busy"], strict=True)]
    figures = {"idle_seconds": spread(series["idle"]), "busy_seconds": spread(series["busy"]), "ratio": spread(ratios)}
    figures["others_cores"] = series["others_cores"][0]
    return figures | {"bound": MOST_BUSY_RATIO, "kept": statistics.median(ratios) <= MOST_BUSY_RATIO}


def training_figures(series: Series) -> dict[str, Any]:
    """The ratio that counts is that of the means over all steps; `block_ratio` shows how much it varies.

    `cpu`: what a step used, of both threads. `alone` is the ratio to expect where each process has a core of its own.
    """
    figures: dict[str, Any] = {}
    for name in ("without", "with"):
        seconds, cpu = zip(*(step for block in series[name] for step in block), strict=True)
        p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
        figures[name] = {"steps": len(seconds), "mean": statistics.mean(seconds), "median": statistics.median(seconds)}
        figures[name] |= {"p99": p99, "max": max(seconds), "cpu": statistics.mean(cpu)}
    means = {name: [statistics.mean(step[0] for step in block) for block in series[name]] for name in figures}
    ratios = [block / control for block, control in zip(means["with"], means["without"], strict=True)]
    figures["ratio"] = figures["with"]["mean"] / figures["without"]["mean"]
    figures["block_ratio"], figures["others_cores"] = spread(ratios), series["others_cores"][0]
    figures["averagings"], figures["failures"] = PERIODS * len(ratios), series["failures"]
    more = (figures["with"]["cpu"] - figures["without"]["cpu"]) * figures["with"]["steps"]
    figures["averaging_cpu_seconds"] = more / figures["averagings"]
    figures["alone"] = EVERY_SECONDS / (EVERY_SECONDS - figures["averaging_cpu_seconds"])
    return figures


def judged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs of the training part, and the median of their ratios: one run alone says how busy the machine was."""
    ratios = spread([run["ratio"] for run in runs])
    return {"runs": runs, "ratio": ratios, "bound": MOST_STEP_RATIO, "kept": ratios["median"] <= MOST_STEP_RATIO}


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def show_busy(kind: str, figures: dict[str, Any]) -> None:
    print(f"{kind}: one averaging of the floats (other programs kept {figures['others_cores']:.1f} cores busy)")
    for name in ("idle_seconds", "busy_seconds", "ratio"):
        row = figures[name]
        print(f"  {name:14} median {row['median']:7.3f}   from {row['min']:.3f} to {row['max']:.3f}")
    print(f"  bound          {figures['bound']:g} x: {'kept' if figures['kept'] else 'BROKEN'}")


def show_training(figures: dict[str, Any]) -> None:
    averagings, failures = figures["averagings"], len(figures["failures"])
    print(f"training: a step, every_seconds={EVERY_SECONDS:g}: {averagings} averagings, {failures} failed ", end="")
    print(f"(other programs kept {figures['others_cores']:.1f} cores busy)")
    for name in ("without", "with"):
        row = figures[name]
        columns = "   ".join(f"{key} {row[key]:.4f}" for key in ("mean", "median", "p99", "max", "cpu"))
        print(f"  {name:14} {row['steps']} steps: {columns}")
    row = figures["block_ratio"]
    print(f"  mean / mean    {figures['ratio']:.3f}   blocks: median {row['median']:.3f}, ", end="")
    print(f"from {row['min']:.3f} to {row['max']:.3f}")
    print(f"  CPU            {figures['averaging_cpu_seconds']:.3f} s for an averaging: ", end="")
    print(f"{figures['alone']:.3f} x where nothing else runs")


def show_verdict(figures: dict[str, Any]) -> None:
    row = figures["ratio"]
    print(f"training, {len(figures['runs'])} runs: mean / mean   median {row['median']:.3f}   ", end="")
    print(f"from {row['min']:.3f} to {row['max']:.3f}")
    print(f"  bound          {figures['bound']:g} x: {'kept' if figures['kept'] else 'BROKEN'}")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        rank, floats, repeats, port = map(int, sys.argv[3:7])
        child(sys.argv[2], rank, floats, repeats, port, Path(sys.argv[7]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--floats", type=int, default=10_000_000)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    print(f"{PEERS} processes, {options.floats} floats; seconds", flush=True)
    figures: dict[str, Any] = {}
    for kind in ("on demand", "background"):
        figures[kind] = busy_figures(measure(kind, options.floats, options.pairs))
        show_busy(kind, figures[kind])
    runs = []
    for _ in range(options.runs):
        runs.append(training_figures(measure("training", options.floats, options.steps)))
        show_training(runs[-1])
    figures["training"] = judged(runs)
    show_verdict(figures["training"])
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if all(row["kept"] for row in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
