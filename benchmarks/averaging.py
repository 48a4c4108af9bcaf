"""How long one averaging takes, next to gloo's all-reduce of the same numbers by the same processes, interleaved.

    python benchmarks/averaging.py [--peers 2 4] [--floats 10000000] [--repeats 11] [--json FILE]

gloo sends in the clear, knows no secret, and a dead process ends it: the ratio is the price of the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

WAIT_SECONDS = 300


def child(rank: int, peers: int, floats: int, repeats: int, port: int, folder: Path) -> None:
    """One process: the same tensor by shoal and by gloo, in turn."""
    import torch
    import torch.distributed as dist

    import shoal

    torch.set_num_threads(1)
    address = folder / "address"
    if rank == 0:
        swarm = shoal.join("bench", listen="127.0.0.1:0")
        draft = folder / "draft"
        draft.write_text(swarm.address)
        draft.rename(address)
    else:
        while not address.exists():
            time.sleep(0.05)
        swarm = shoal.join("bench", peers=[address.read_text()], listen="127.0.0.1:0")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=peers, timeout=timedelta(seconds=60)
    )
    while len(swarm.peers()) < peers - 1:
        time.sleep(0.05)
    values = torch.full((floats,), float(rank))
    times: dict[str, list[float]] = {"shoal": [], "gloo": []}
    for _ in range(repeats + 1):
        dist.barrier()
        begun = time.perf_counter()
        averaged, _ = swarm.average([values])
        times["shoal"].append(time.perf_counter() - begun)
        dist.barrier()
        begun = time.perf_counter()
        summed = values.clone()
        dist.all_reduce(summed)
        times["gloo"].append(time.perf_counter() - begun)
        assert torch.allclose(averaged[0][:10], summed[:10] / peers)
    dist.barrier()
    swarm.leave()
    if rank == 0:
        print(json.dumps({name: series[1:] for name, series in times.items()}))  # the first one warms up


def measure(peers: int, floats: int, repeats: int) -> dict[str, object]:
    """Run the processes and return the figures of the first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"SHOAL_STATE": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--child"]
        sizes = [str(peers), str(floats), str(repeats), str(port), folder]
        children = [
            subprocess.Popen([*command, str(rank), *sizes], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(peers)
        ]
        try:
            output = children[0].communicate(timeout=WAIT_SECONDS)[0]
            times = json.loads(output.splitlines()[-1])
        finally:
            for process in children:
                process.kill()
                process.wait()
    ratios = [mine / theirs for mine, theirs in zip(times["shoal"], times["gloo"], strict=True)]
    return {
        "peers": peers,
        "floats": floats,
        "shoal_seconds": spread(times["shoal"]),
        "gloo_seconds": spread(times["gloo"]),
        "ratio": spread(ratios),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        rank, peers, floats, repeats, port = map(int, sys.argv[2:7])
        child(rank, peers, floats, repeats, port, Path(sys.argv[7]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--floats", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    figures = [measure(peers, options.floats, options.repeats) for peers in options.peers]
    for row in figures:
        print(f"{row['peers']} processes, {row['floats']} floats:")
        for name in ("shoal_seconds", "gloo_seconds", "ratio"):
            print(
                f"  {name:14} median {row[name]['median']:.3f}  from {row[name]['min']:.3f} to {row[name]['max']:.3f}"
            )
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
