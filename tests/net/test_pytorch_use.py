"""PyTorch as people use it, each in a live swarm of two real processes that average parameters every 0.1 s."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from swarm_process import PeerFailed, PeerProcess, Peers, PeerSilent, ask_all, wait_until

CHILD = Path(__file__).with_name("pytorch_child.py")


class Pair:
    """Two processes kept for all tests of this file; a new pair after a test that failed inside one."""

    def __init__(self, folder: Path) -> None:
        self.peers = Peers(folder)
        self.processes: list[PeerProcess] = []
        self.runs = 0

    def start(self) -> None:
        self.peers.close()
        self.processes = [self.peers.start(CHILD) for _ in range(2)]

    def train(self, scenario: str, calls: int = 0) -> tuple[dict, dict]:
        """The facts of founder and visitor, after what holds for every scenario was asserted.

        `calls`: how often the visitor asks that the founder calls `average` together with it.
        """
        if not self.processes:
            self.start()
        founder, visitor = self.processes
        run = f"use-{self.runs}"
        self.runs += 1
        try:
            address = founder.ask("found", 90, scenario=scenario, run=run)
            visitor.send("visit", scenario=scenario, run=run, address=address)
            for _ in range(calls):
                assert visitor.receive(90)["reply"] == "call me"
                founder.ask("average_metric", 20, value=1.0)
            seen = visitor.answer(90)
            own = settled(founder)
            founder.ask("leave", 20)
        except (PeerFailed, PeerSilent):
            self.peers.close()
            self.processes = []
            raise
        for facts in (own, seen):
            assert facts["averagings"] >= 3, facts
            assert facts["finite"], facts
            assert facts["reported_steps"] == facts["steps"] > 0, facts
        assert own["tag"] == pytest.approx(seen["tag"], abs=1e-6), (own, seen)
        assert max(seen["tag"]) - min(seen["tag"]) < 1e-6, seen
        return own, seen

    def train_and_mix(self, scenario: str, calls: int = 0) -> tuple[dict, dict]:
        """The same, when both peers weigh in: their tags met strictly between +1 and -1."""
        own, seen = self.train(scenario, calls)
        assert -0.999 < seen["tag"][0] < 0.999, (own, seen)
        return own, seen


def settled(founder: PeerProcess) -> dict:
    """The founder's facts; it may apply its last averaging a step after the visitor has left."""
    facts = founder.ask("facts", 20)
    deadline = time.monotonic() + 3
    while facts["averagings"] < 3 and time.monotonic() < deadline:
        facts = founder.ask("facts", 20)
    return facts


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pair = Pair(tmp_path_factory.mktemp("use"))
    with pair.peers:
        yield pair


@pytest.mark.parametrize("scenario", ["StepSchedule", "CosineSchedule", "LambdaSchedule"])
def test_lr_schedulers_advance_with_the_local_steps(pair, scenario):
    for facts in pair.train_and_mix(scenario):
        assert facts["wrong"] == [], "the learning rate differs from that of a twin that trains without shoal"
        assert facts["warned"] == []


def test_gradient_accumulation_loses_no_gradient(pair):
    for facts in pair.train_and_mix("Accumulation"):
        assert facts["wrong"] == []
        assert facts["steps"] == facts["backwards"] // 4


def test_parameter_groups_keep_their_options(pair):
    own, seen = pair.train_and_mix("Groups")
    for facts in (own, seen):
        assert facts["options"] == [[0.0, 0, 0], [0.02, 0.5, 0], [0.01, 0, 0.1]]
        assert facts["sizes"] == [2, 2, 1]
        assert facts["moved"] > 0
        for now, start in zip(facts["still"], own["still_at_start"], strict=True):
            assert now == pytest.approx(start, abs=1e-6), "lr 0: where the founder had it"
    assert seen["still_at_start"] != own["still_at_start"]


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("scenario", ["Compiled", "CompiledAfter", "CompiledBeside"])
def test_a_compiled_model_computes_with_the_averaged_parameters(pair, scenario):
    _, seen = pair.train_and_mix(scenario)
    assert seen["graphs"] >= 1, "nothing was compiled"
    assert seen["apart"] < 1e-5


def test_autocast_and_grad_scaler(pair):
    own, seen = pair.train_and_mix("Mixed")
    assert seen["skipped"] == 1
    assert seen["scale"] == 512.0
    assert own["scale"] == 1024.0


def test_dataloader_workers(pair):
    _, seen = pair.train_and_mix("Loader")
    assert seen["batches"] >= 40
    assert seen["after_workers"] >= 2
    assert seen["others"] == 1


def test_frozen_parameters_stay_home_and_tied_ones_travel_once(pair):
    own, seen = pair.train_and_mix("Tied")
    for facts, value in ((own, 1.0), (seen, 5.0)):
        assert facts["frozen"] == [value]
        assert facts["outside"] == [value]
        assert facts["requires_grad"] is False
        assert facts["tied"] is True
    # In a group of two, reducing and returning half each, a peer sends its trained bytes once.
    payload = 1000 * 500 * 4
    assert payload * 0.5 < seen["bytes_each"] < payload * 1.3


def test_batch_norm_floats_are_averaged_and_integers_stay_local(pair):
    own, seen = pair.train_and_mix("Normed")
    assert own["mean"] == pytest.approx(seen["mean"], abs=1e-5)
    assert own["var"] == pytest.approx(seen["var"], abs=1e-5)
    assert 1.001 < own["mean"][0] < 8.999
    assert 2.001 < own["var"][0] < 3.999
    assert seen["tracked"] == 100_000 + seen["steps"]
    assert own["tracked"] == own["steps"]
    assert own["tracked_dtype"] == seen["tracked_dtype"] == "torch.int64"


@pytest.mark.parametrize("scenario", ["Plain", "Momentum", "Adam", "AdamW", "FusedAdamW"])
def test_optimizers_learn(pair, scenario):
    own, seen = pair.train_and_mix(scenario)
    for facts in (own, seen):
        assert facts["state_finite"]
    assert own["losses"][1] < 0.5 * own["losses"][0]
    assert seen["losses"][1] < max(0.5 * own["losses"][0], seen["losses"][0])


def test_state_dict_is_saved_and_loaded_in_a_live_swarm(pair):
    _, seen = pair.train_and_mix("Saved")
    assert seen["after_load"] >= 3


def test_a_loop_that_pauses_averages_at_its_sync_points(pair):
    _, seen = pair.train("Paused")
    assert seen["during_pause"] >= 3
    assert seen["tag"][0] > -0.999, "the founder, who trained on, weighed in"


def test_average_is_called_beside_the_averagings_of_the_background(pair):
    for facts in pair.train_and_mix("Metrics", calls=3):
        assert facts["means"] == [[2.0, 2]] * 3


NOTEBOOK = """
import torch
from swarm_process import LOOPBACK, reply, next_command
torch.set_num_threads(1)
namespace = {}

def cell(text):
    exec(compile(text, "<cell>", "exec"), namespace)

address, run = next_command()["args"].values()
namespace.update(address=address, run=run, LOOPBACK=LOOPBACK)
cell('''
import time, torch, shoal
from pytorch_child import Plain
swarm = shoal.join(run, peers=[address], listen=LOOPBACK)
example = Plain(founder=False)
model, optimizer = swarm.attach(example.model, example.optimizer, batch_size=16)
example.swarm = swarm
''')
cell('''
with torch.no_grad():
    model.tag.fill_(-1.0)
example.until_averagings(3, example.step)
''')
cell('''
refused = None
try:
    swarm.attach(example.model, torch.optim.SGD(model.parameters(), lr=0.1), batch_size=16)
except shoal.AttachError as error:
    refused = str(error)
''')
cell('''
example.until_averagings(2, example.step)
print(swarm.report())
''')
reply(value=dict(tag=namespace["model"].tag.tolist(), averagings=namespace["swarm"].report().averagings,
                 refused=namespace["refused"], peer_id=namespace["swarm"].peer_id))
"""


def test_a_notebook_without_with(pair, tmp_path):
    """Cells in one namespace; the cell with `attach` is run twice; nobody calls `leave`; the kernel just ends."""
    if not pair.processes:
        pair.start()
    founder = pair.processes[0]
    address = founder.ask("found", 90, scenario="Plain", run="notebook")
    with Peers(tmp_path) as peers:
        notebook = peers.start(NOTEBOOK)
        notebook.send("start", address=address, run="notebook")
        seen = notebook.answer(90)
        assert notebook.wait(10) == 0, notebook.stderr
        assert "Traceback" not in notebook.stderr, notebook.stderr
        assert seen["averagings"] >= 5
        assert seen["refused"]
        assert notebook.lines, "the report prints"
    wait_until(lambda: founder.ask("facts", 20)["others"] == 0, 3, "the founder knows that the notebook left")
    own = founder.ask("facts", 20)
    assert own["tag"] == pytest.approx(seen["tag"], abs=1e-6)
    assert -0.999 < seen["tag"][0] < 0.999
    ask_all([founder], "leave", 20)
