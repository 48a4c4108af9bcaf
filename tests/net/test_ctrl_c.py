"""How things end: Ctrl-C, SIGTERM, a script that forgets to leave, one of several local peers that fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_process import Bench, Command
from swarm_process import wait_until

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals and process groups of POSIX"),
    pytest.mark.timeout(90),
]

ENDS_WITHIN_SECONDS = 3.0
NOISE = ("Exception in", "Exception ignored", "Task was destroyed", "was never awaited", "Unhandled", "Fatal Python")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as made:
        yield made


def assert_nobody_left(command: Command) -> None:
    """The command has returned: nothing that descends from it runs on (what is on its way out gets 0.2 s)."""
    wait_until(lambda: not command.living(), 0.2, f"nothing runs on: {command.living()}\n{command.output}")


def assert_quiet(output: str) -> None:
    for noise in NOISE:
        assert noise not in output, output


def peers_that_average(command: Command, count: int) -> set[str]:
    """Waits until `count` different peers of this command have each averaged."""

    def averaged() -> set[str]:
        return {one["peer"] for one in command.said() if one.get("averagings", 0) >= 1}

    return command.wait_until(lambda: len(averaged()) >= count and averaged(), 60, f"{count} peers averaged")


def seconds_to_end(command: Command, limit: float = ENDS_WITHIN_SECONDS) -> tuple[int, float]:
    started = time.monotonic()
    code = command.returncode_within(limit)
    return code, time.monotonic() - started


def press(command: Command, way: str) -> None:
    if way == "only the parent":
        command.send(signal.SIGINT)
        return
    command.interrupt_terminal()
    if way == "twice":
        try:
            command.process.wait(0.15)
        except subprocess.TimeoutExpired:
            command.interrupt_terminal()


@pytest.mark.parametrize(
    "way",
    [
        "terminal",
        pytest.param("only the parent", marks=pytest.mark.acceptance),
        pytest.param("twice", marks=pytest.mark.acceptance),
    ],
)
def test_check_26_ctrl_c_on_shoal_run_ends_all_its_peers(bench: Bench, way: str) -> None:
    """Moshpit reference, section 7, check 26: in less than 10 s, and no process is left."""
    count = 3 if way == "terminal" else 2
    command = bench.shoal("run", "train.py", "--run", "birds", "--listen", "127.0.0.1:0", "--peers", str(count))
    peers_that_average(command, count)
    press(command, way)
    code, seconds = seconds_to_end(command)
    assert code == 130, command.output
    assert seconds <= ENDS_WITHIN_SECONDS
    assert_nobody_left(command)
    assert "Traceback" not in command.output, command.output
    assert_quiet(command.output)


@pytest.mark.acceptance
def test_ctrl_c_on_one_shoal_run_leaves_the_others_training(bench: Bench) -> None:
    stays = bench.shoal("run", "train.py", "--run", "birds", "--listen", "127.0.0.1:0")
    address = stays.wait_said(lambda one: "address" in one)["address"]
    goes = bench.shoal("run", "train.py", "--run", "birds", "--join", address, machine="b")
    peers_that_average(stays, 1)
    peer = peers_that_average(goes, 1).pop()
    goes.interrupt_terminal()
    code, _ = seconds_to_end(goes)
    assert code == 130, goes.output
    assert "Traceback" not in goes.output, goes.output
    stays.wait_said(lambda one: said_goodbye(one, peer), 3)
    steps = stays.last_said("step")["step"]
    stays.wait_said(lambda one: one.get("step", 0) > steps + 20, 10)


def said_goodbye(line: dict[str, object], peer: str) -> bool:
    left = line.get("left")
    return isinstance(left, list) and peer in left


@pytest.mark.parametrize("mode", ["with", "stubborn"])
def test_sigterm_on_shoal_run(bench: Bench, mode: str) -> None:
    """SIGTERM becomes a Ctrl-C for the scripts; one that ignores it is killed after 2.5 s."""
    words = ("run", "train.py", "--run", "birds", "--listen", "127.0.0.1:0", "--peers", "2", "--", f"mode={mode}")
    command = bench.shoal(*words)
    peers_that_average(command, 2)
    command.send(signal.SIGTERM)
    code, _ = seconds_to_end(command, ENDS_WITHIN_SECONDS if mode == "with" else 4.0)
    assert code == 143, command.output
    assert_nobody_left(command)
    assert "Traceback" not in command.output, command.output
    assert_quiet(command.output)


def test_ctrl_c_on_shoal_run_kills_a_script_that_ignores_it(bench: Bench) -> None:
    words = ("run", "train.py", "--run", "birds", "--listen", "127.0.0.1:0", "--", "mode=stubborn")
    command = bench.shoal(*words)
    command.wait_said(lambda one: one.get("step", 0) >= 5)
    command.interrupt_terminal()
    code, _ = seconds_to_end(command, 4.0)
    assert code == 130, command.output
    assert_nobody_left(command)


def plain_pair(bench: Bench, *words: str) -> tuple[Command, Command, str]:
    """A plain script that stays and one, started with `words`, that will go; both have averaged."""
    stays = bench.plain("stop=stop-stays")
    address = stays.wait_said(lambda one: "address" in one)["address"]
    goes = bench.plain(*words, machine="b", SHOAL_JOIN=address)
    peers_that_average(stays, 1)
    peer = peers_that_average(goes, 1).pop()
    return stays, goes, peer


def assert_goes_on_after_goodbye(stays: Command, peer: str) -> None:
    stays.wait_said(lambda one: said_goodbye(one, peer), 3)
    line = stays.last_said("step")
    assert line["peers"] == 0
    stays.wait_said(lambda one: one.get("step", 0) > line["step"] + 20, 10)
    assert_quiet(stays.output)


def test_ctrl_c_on_a_plain_script(bench: Bench) -> None:
    """It ends as a script that got a KeyboardInterrupt ends, without a traceback, and says goodbye."""
    stays, goes, peer = plain_pair(bench)
    goes.interrupt_terminal()
    code, _ = seconds_to_end(goes)
    assert code in (-signal.SIGINT, 130), goes.output
    assert_nobody_left(goes)
    assert "Traceback" not in goes.output, goes.output
    assert_quiet(goes.output)
    assert_goes_on_after_goodbye(stays, peer)


PAUSING_SCRIPT = """
import time
import torch
import shoal

torch.set_num_threads(1)
swarm = shoal.join(strategy=shoal.AllReduce(every_seconds=0.3))
model = torch.nn.Linear(8, 1)
model, optimizer = swarm.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), batch_size=1)
try:
    with swarm:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        print("pausing", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("the script saves its work", flush=True)
    raise RuntimeError("planted")
"""


def test_ctrl_c_in_a_long_pause_is_a_keyboard_interrupt_the_script_may_catch(bench: Bench) -> None:
    bench.script.write_text(PAUSING_SCRIPT)
    command = bench.plain()
    command.wait_line("pausing")
    command.interrupt_terminal()
    code, _ = seconds_to_end(command)
    assert code == 1, command.output
    assert "the script saves its work" in command.output
    assert command.output.count("Traceback") == 2, command.output
    assert command.output.rstrip().endswith("RuntimeError: planted"), "an error of the script itself is not hidden"
    assert_quiet(command.output)


def test_ctrl_c_while_join_waits_for_an_answer(bench: Bench) -> None:
    """An address that accepts and says nothing: the wait in `join` ends at once with the script."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"shoal://{'a' * 32}@127.0.0.1:{silent.getsockname()[1]}/some-secret-0123"
        command = bench.plain(SHOAL_JOIN=address, SHOAL_JOIN_TIMEOUT_SECONDS="30")
        command.wait_said(lambda one: "joining" in one)
        silent.settimeout(20)
        connection, _ = silent.accept()
        with connection:
            command.interrupt_terminal()
            code, _ = seconds_to_end(command)
    assert code in (-signal.SIGINT, 130), command.output
    assert command.output.count("Traceback") == 1, command.output
    assert_quiet(command.output)


def test_ctrl_c_while_attach_waits_for_the_founder(bench: Bench) -> None:
    founder = bench.plain("mode=late")
    address = founder.wait_said(lambda one: "address" in one)["address"]
    command = bench.plain(machine="b", SHOAL_JOIN=address)
    command.wait_said(lambda one: "attaching" in one)
    command.interrupt_terminal()
    code, _ = seconds_to_end(command)
    assert code in (-signal.SIGINT, 130), command.output
    assert_quiet(command.output)
    bench.stop("attach")
    founder.wait_said(lambda one: one.get("step", 0) >= 5)
    assert founder.last_said("step")["peers"] == 0


@pytest.mark.parametrize("mode", ["bare", "raises"])
def test_a_script_that_forgets_to_leave_ends_by_itself(bench: Bench, mode: str) -> None:
    stays, goes, peer = plain_pair(bench, f"mode={mode}", "stop=stop-goes")
    bench.stop("stop-goes")
    code, _ = seconds_to_end(goes)
    if mode == "bare":
        assert code == 0, goes.output
        assert "Traceback" not in goes.output, goes.output
    else:
        assert code == 1, goes.output
        assert goes.output.rstrip().endswith("RuntimeError: planted"), goes.output
        assert goes.output.count("Traceback") == 1, goes.output
    assert_nobody_left(goes)
    assert_quiet(goes.output)
    assert_goes_on_after_goodbye(stays, peer)


def test_one_failing_peer_does_not_end_the_others(bench: Bench) -> None:
    words = ("run", "train.py", "--run", "birds", "--listen", "127.0.0.1:0", "--peers", "3", "--", "mode=one fails")
    command = bench.shoal(*words)
    peers = peers_that_average(command, 3)
    bench.stop("fail")
    failed = command.wait_said(lambda one: "failing" in one, 10)["failing"]
    before = {peer: averagings_of(command, peer) for peer in peers - {failed}}
    command.wait_until(
        lambda: all(averagings_of(command, peer) >= count + 3 for peer, count in before.items()),
        15,
        "the two others averaged three times more",
    )
    bench.stop()
    code = command.returncode_within(15)
    assert code == 1, command.output
    assert {one["peer"] for one in command.said() if one.get("done")} == peers - {failed}
    reported = [line for line in command.output.splitlines() if "{" not in line and "7" in line]
    assert reported, f"the exit code of the script that failed is not told:\n{command.output}"
    assert_nobody_left(command)


def averagings_of(command: Command, peer: str) -> int:
    return max((one["averagings"] for one in command.said() if one.get("peer") == peer and "step" in one), default=0)


def test_scripts_that_end_well_give_exit_code_0(bench: Bench) -> None:
    command = bench.shoal("run", "train.py", "--run", "birds", "--listen", "127.0.0.1:0", "--peers", "2")
    peers_that_average(command, 2)
    bench.stop()
    assert command.returncode_within(15) == 0, command.output
    assert_nobody_left(command)
    assert_quiet(command.output)
    assert "Traceback" not in command.output, command.output


def test_the_interpreter_that_runs_shoal_runs_the_script(bench: Bench) -> None:
    """A script sees the interpreter, folder and arguments that it would see without `shoal run`."""
    bench.script.write_text("import os, sys; print('seen', sys.executable, os.getcwd(), sys.argv[1:], flush=True)")
    code, output = bench.complete(
        "run", "train.py", "--run", "birds", "--listen", "127.0.0.1:0", "--", "-v", "two words"
    )
    assert code == 0, output
    assert f"seen {sys.executable} {bench.folder} ['-v', 'two words']" in output
