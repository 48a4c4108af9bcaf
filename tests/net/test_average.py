"""`swarm.average` in real processes: the weighted mean, bit-identical everywhere, and its typed refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from average_child import WEIGHTS, mixed_inputs
from swarm_process import PeerFailed, PeerProcess, Peers, answers, ask_all, wait_until

CHILD = Path(__file__).with_name("average_child.py")
HALF = {torch.float16: (5, 10), torch.bfloat16: (8, 7)}


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with Peers(tmp_path_factory.mktemp("average")) as peers:
        started = [peers.start(CHILD) for _ in range(8)]
        ask_all(started, "pid", 120)
        yield started


@pytest.fixture(scope="module", params=[2, 4, 8], ids=lambda count: f"{count} peers")
def swarm(request, processes):
    """`request.param` processes that have joined one run and see each other."""
    members = processes[: request.param]
    run = f"average-{request.param}"
    first = members[0].ask("join", run=run, peers=[], found=True)
    joined = [first, *ask_all(members[1:], "join", run=run, peers=[first["address"]])]
    for process, own in zip(members, joined, strict=True):
        process.peer_id = own["peer_id"]
    ask_all(members, "wait_peers", count=len(members) - 1)
    yield members
    ask_all(members, "leave")


def averaged(members: list[PeerProcess], weights: list[float], save: Path | None = None) -> list[dict]:
    for rank, (process, weight) in enumerate(zip(members, weights, strict=True)):
        process.send("average_mixed", rank=rank, weight=weight, save=str(save) if save and rank == 0 else None)
    return answers(members, 60)


def weighted_mean(count: int, weights: list[float]) -> list[torch.Tensor]:
    """In float64, over the values as they were given."""
    total = sum(weights)
    sums = [torch.zeros(tensor.shape, dtype=torch.float64) for tensor in mixed_inputs(0)]
    for rank, weight in zip(range(count), weights, strict=True):
        for accumulator, tensor in zip(sums, mixed_inputs(rank), strict=True):
            accumulator.add_(tensor.detach().double() * (weight / total))
    return sums


def largest_inputs(count: int) -> list[float]:
    lists = [mixed_inputs(rank) for rank in range(count)]
    return [max((t.abs().max().item() if t.numel() else 0.0) for t in tensors) for tensors in zip(*lists, strict=True)]


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of neighbours of that type at float64 `value`."""
    exponent_bits, mantissa_bits = HALF[dtype]
    smallest = 2 - 2 ** (exponent_bits - 1)
    exponent = torch.frexp(value.abs())[1].clamp(min=smallest + 1) - 1
    return torch.ldexp(torch.ones_like(value), exponent - mantissa_bits)


def check_values(result: list[torch.Tensor], count: int, weights: list[float]) -> None:
    expected = weighted_mean(count, weights)
    inputs, largest = mixed_inputs(0), largest_inputs(count)
    assert len(result) == len(inputs)
    for index, (got, mean, given) in enumerate(zip(result, expected, inputs, strict=True)):
        assert got.dtype == given.dtype, index
        assert got.shape == given.shape, index
        if not got.numel():
            continue
        distance = (got.double() - mean).abs()
        if got.dtype in HALF:
            worst = (distance / ulp(mean, got.dtype)).max().item()
            assert worst <= 1.0, f"tensor {index}: {worst} ulp"
        else:
            relative = distance.max().item() / largest[index]
            assert relative <= (1e-6 if got.dtype == torch.float32 else 1e-12), f"tensor {index}: {relative}"


def test_ulp_is_what_it_says():
    for dtype in HALF:
        for number in (1.0, 1.5, 1.9, 3.0, 100.0, 6e-5, 3e-7):
            rounded = torch.tensor(number, dtype=dtype)
            neighbour = (rounded.view(torch.int16) + 1).view(dtype)
            step = neighbour.double() - rounded.double()
            assert ulp(rounded.double(), dtype).item() == step.item(), (dtype, number)


def test_the_weighted_mean_and_every_bit_the_same_everywhere(swarm, tmp_path):
    weights = WEIGHTS[: len(swarm)]
    results = averaged(swarm, weights, tmp_path / "result.pt")
    members = sorted(process.peer_id for process in swarm)
    for result in results:
        assert result["digest"] == results[0]["digest"]
        assert result["untouched"]
        assert result["new"]
        assert result["members"] == members
        assert result["contributed"] == members
        assert result["exact"] is True
        assert result["weight_total"] == pytest.approx(sum(weights), rel=1e-6)
        assert result["number"] == results[0]["number"]
        assert result["bytes_sent"] > 0
        assert result["bytes_received"] > 0
        assert 0 < result["seconds"] < 30
    check_values(torch.load(tmp_path / "result.pt"), len(swarm), weights)


def test_a_member_of_weight_zero_counts_for_nothing_and_gets_the_mean(swarm, tmp_path):
    weights = [0.0 if rank % 2 == 0 else WEIGHTS[rank] for rank in range(len(swarm))]
    results = averaged(swarm, weights, tmp_path / "result.pt")
    assert len({result["digest"] for result in results}) == 1
    check_values(torch.load(tmp_path / "result.pt"), len(swarm), weights)


def test_when_all_weights_are_zero_no_bit_changes(swarm):
    results = averaged(swarm, [0.0] * len(swarm))
    for result in results:
        assert result["digest"] == result["input_digest"]


@pytest.mark.parametrize(
    "kind", ["int64", "int32", "uint8", "bool", "complex64", "complex128", "nan", "inf", "bfloat16 nan"]
)
def test_a_tensor_that_cannot_be_averaged_is_refused_by_index(swarm, kind):
    with pytest.raises(PeerFailed) as failed:
        swarm[0].ask("average_bad", 10, kind=kind)
    assert failed.value.reply["error"] == "TensorError"
    assert "ShoalError" in failed.value.reply["bases"]
    assert failed.value.reply["fields"]["index"] == 2
    assert "2" in failed.value.reply["message"]


@pytest.mark.parametrize("weight", ["-1.0", "-1e-30", "nan", "inf"])
def test_a_bad_weight_is_refused(swarm, weight):
    with pytest.raises(PeerFailed) as failed:
        swarm[-1].ask("average_bad", 10, kind=f"weight {weight}")
    assert failed.value.reply["error"] == "OptionError"
    assert "ShoalError" in failed.value.reply["bases"]
    assert failed.value.reply["fields"]["field"] == "weight"


@pytest.mark.parametrize("differs", ["shape", "same size, other shape", "dtype"])
def test_unequal_tensors_are_refused_by_index_and_never_averaged(swarm, differs):
    """The last peer's tensor 1 differs. It gets no result; the others get the mean of their own, or the error too."""
    shapes, dtypes = [[3], [6], [2, 2]], ["float32"] * 3
    other_shapes, other_dtypes = [list(shape) for shape in shapes], list(dtypes)
    if differs == "dtype":
        other_dtypes[1] = "float64"
    else:
        other_shapes[1] = [7] if differs == "shape" else [2, 3]
    for rank, process in enumerate(swarm[:-1]):
        process.send("average_shaped", shapes=shapes, dtypes=dtypes, value=float(rank))
    swarm[-1].send("average_shaped", shapes=other_shapes, dtypes=other_dtypes, value=1000.0)
    replies = [process.receive(20) for process in swarm]

    named = [reply for reply in replies if reply.get("error") == "TensorError" and reply["fields"]["index"] == 1]
    assert named, replies
    assert "error" in replies[-1], "the odd one must not get a result"
    for reply in replies[:-1]:
        if "error" in reply:
            assert "ShoalError" in reply["bases"], reply
        else:
            value = reply["value"]
            assert value["shapes"] == shapes
            assert swarm[-1].peer_id not in value["contributed"]
            ranks = [rank for rank, process in enumerate(swarm) if process.peer_id in value["contributed"]]
            assert value["values"] == pytest.approx([sum(ranks) / len(ranks)])


def test_an_iterator_of_parameters_is_averaged_or_refused_but_never_lost(swarm):
    for rank, process in enumerate(swarm):
        process.send("average_parameters", rank=rank)
    for reply in [process.receive(20) for process in swarm]:
        if "error" in reply:
            assert "ShoalError" in reply["bases"], reply
        else:
            mean = (len(swarm) - 1) / 2
            assert reply["value"] == [pytest.approx([mean] * 6), pytest.approx([mean] * 3)]


def test_the_swarm_averages_on_after_all_refusals(swarm, tmp_path):
    ask_all(swarm, "wait_peers", count=len(swarm) - 1)
    weights = list(reversed(WEIGHTS[: len(swarm)]))
    results = averaged(swarm, weights, tmp_path / "result.pt")
    assert len({result["digest"] for result in results}) == 1
    assert all(result["exact"] for result in results)
    check_values(torch.load(tmp_path / "result.pt"), len(swarm), weights)
    wait_until(lambda: all(process.returncode is None for process in swarm), 1, "all alive")
