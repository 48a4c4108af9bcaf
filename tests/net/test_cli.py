"""The command line as a person meets it: what is printed can be copied, and says what to do next."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_process import Bench, Command
from swarm_process import HERE, Peers, ask_all, wait_until

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals and shells of POSIX"),
    pytest.mark.timeout(90),
]

ADDRESS = r"shoal://[A-Za-z0-9@:,./_-]+"
JOIN_COMMAND = rf"shoal run \S+ (?:--run \S+ )?--join {ADDRESS}(?: --run \S+)?"
NOBODY = r"(?i)nobody\b.*\bconnected"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as made:
        yield made


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    with Peers(tmp_path / "peers") as started:
        yield started


def printed_command(command: Command) -> str:
    """The command for another machine, cut from one line of what `shoal run` printed."""
    return command.wait_line(JOIN_COMMAND)[0]


def address_in(text: str) -> str:
    found = re.search(r"shoal://\S*", text)
    assert found, text
    return found[0]


@pytest.mark.parametrize("shell", ["bash", "zsh", "dash"])
def test_the_address_needs_no_quotes(bench: Bench, shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    command = bench.shoal("run", "train.py", "--run", "birds")
    address = address_in(printed_command(command))
    assert re.fullmatch(r"[A-Za-z0-9@:,./_-]+", address)
    assert re.fullmatch(r"shoal://[a-z2-7]{32}@[^/@]+:\d+(,[^/@]+:\d+)*/[A-Za-z0-9_-]+", address)
    for words in (address, f"--join {address}", f"--join={address}"):
        echoed = subprocess.run(
            [program, "-c", f"printf '%s\\n' {words}"], capture_output=True, text=True, timeout=10, check=True
        )
        assert echoed.stdout.split() == words.split()
        assert echoed.stderr == ""


def test_the_printed_line_run_in_a_shell_joins(bench: Bench) -> None:
    first = bench.shoal("run", "train.py", "--run", "birds", "--listen", "127.0.0.1:0", "--", "start=1", "lr=0")
    line = printed_command(first)
    assert line.startswith("shoal run train.py "), line
    first.wait_said(lambda one: one.get("attached"))
    second = bench.start("bash", "-c", f"exec {line} -- start=2 lr=0", machine="b")
    attached = second.wait_said(lambda one: one.get("attached"))
    assert attached["weight"] == 1.0, "the second takes over the founder's state"
    for command in (first, second):
        line_said = command.wait_said(lambda one: one.get("averagings", 0) >= 2)
        assert line_said["peers"] == 1
    bench.stop()
    for command in (first, second):
        assert command.returncode_within(15) == 0, command.output
        assert not re.search(NOBODY, command.output), "somebody did connect"


def test_two_shoal_runs_of_one_run_share_a_machine(bench: Bench) -> None:
    """Same machine, same state folder: each local peer gets an identity of its own."""
    first = bench.shoal("run", "train.py", "--run", "birds", "--listen", "127.0.0.1:0")
    address = first.wait_said(lambda one: "address" in one)["address"]
    words = ("run", "train.py", "--join", address, "--listen", "127.0.0.1:0", "--peers", "3")
    second = bench.shoal(*words)

    def complete() -> bool:
        assert "IdentityInUse" not in second.output, second.output
        return len({one["peer"] for one in second.said() if one.get("peers") == 3}) == 3

    second.wait_until(complete, 40, "each of the three has three others")
    bench.stop()
    for command in (first, second):
        assert command.returncode_within(15) == 0, command.output


def test_it_says_which_address_is_reachable_from_where(bench: Bench) -> None:
    """Loopback serves this machine only; on every interface each address comes with its reach."""
    local = bench.shoal("run", "train.py", "--run", "birds", "--listen", "127.0.0.1:0")
    printed_command(local)
    local.wait_line(r"(?im)^(?!.*(?:shoal run|{)).*127\.0\.0\.1:\d+.*\bthis (machine|computer)\b")
    every = bench.shoal("run", "train.py", "--run", "fish", "--listen", "0.0.0.0:0", machine="b")
    address = address_in(printed_command(every))
    endpoints = re.findall(r"[^,/@]+:\d+", address.split("@", 1)[1])
    assert endpoints
    assert not any(endpoint.startswith("0.0.0.0:") for endpoint in endpoints), "nobody can connect to 0.0.0.0"
    for endpoint in endpoints:
        line = every.wait_line(r"(?m)^(?!.*(?:shoal run|{))" + rf".*(?<![\d.]){re.escape(endpoint)}\b.*$")[0]
        assert re.search(r"(?i)machine|computer|network|internet|LAN", line), line


def test_it_says_that_nobody_has_connected_yet(bench: Bench) -> None:
    command = bench.shoal("run", "train.py", "--run", "birds", "--listen", "127.0.0.1:0", SHOAL_ALONE_SECONDS="1")
    address = address_in(printed_command(command))
    told = command.wait_line(NOBODY, 10)[0]
    assert "Traceback" not in told
    command.wait_said(lambda one: one.get("step", 0) >= 5)
    second = bench.shoal("run", "train.py", "--join", address, machine="b")
    second.wait_said(lambda one: one.get("averagings", 0) >= 1)
    command.wait_said(lambda one: one.get("averagings", 0) >= 1)


def test_it_stays_silent_for_30_seconds(bench: Bench) -> None:
    command = bench.shoal("run", "train.py", "--run", "birds", "--listen", "127.0.0.1:0")
    command.wait_said(lambda one: one.get("step", 0) >= 40)
    assert not re.search(NOBODY, command.output), command.output


def test_a_refused_join_ends_with_its_reason(bench: Bench) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    started = time.monotonic()
    code, output = bench.complete(
        "run", "train.py", "--run", "birds", "--join", f"shoal://{'a' * 32}@{endpoint}/some-secret-0123",
        SHOAL_JOIN_TIMEOUT_SECONDS="1",
    )  # fmt: skip
    assert time.monotonic() - started < 20
    assert code == 1, output
    assert "JoinError" in output
    assert endpoint in output


def started_seed(bench: Bench) -> tuple[Command, str]:
    seed = bench.shoal("seed", "--run", "birds", "--listen", "127.0.0.1:0", machine="seed")
    address = seed.wait_line(ADDRESS)[0]
    return seed, address


def test_the_first_to_attach_through_a_seed_founds_and_the_seed_may_die(bench: Bench, peers: Peers) -> None:
    seed, address = started_seed(bench)
    first, second = (peers.start(HERE / "driven_peer.py") for _ in range(2))
    ask_all((first, second), "join", peers=[address])
    assert second.ask("attach", start=2.0)["high"] == 2.0, "the first to attach, not the first to join, is the founder"
    assert first.ask("attach", start=1.0)["high"] == 2.0
    assert sorted(peer["role"] for peer in first.ask("peers")) == ["seed", "trainer"]
    if Path("/proc/self/maps").exists():
        loaded = Path(f"/proc/{seed.pid}/maps").read_text()
        assert "libtorch" not in loaded, "a seed needs no torch"
        assert "/torch/" not in loaded
    ask_all((first, second), "train")
    for trainer in (first, second):
        wait_until(lambda one=trainer: one.ask("report")["averagings"] >= 1, 15, "they average")
    seed.send(signal.SIGKILL)
    seed.process.wait(5)
    counts = [report["averagings"] for report in ask_all((first, second), "report")]
    for trainer, count in zip((first, second), counts, strict=True):
        wait_until(lambda one=trainer, n=count: one.ask("report")["averagings"] >= n + 3, 15, "they go on without it")
        assert [peer["role"] for peer in trainer.ask("peers")] == ["trainer"]
    third = peers.start(HERE / "driven_peer.py")
    third.ask("join", peers=[first.ask("address")])
    assert third.ask("attach", start=3.0)["high"] == pytest.approx(2.0, abs=1e-5)


def test_two_that_attach_at_once_through_a_seed_found_one_run(bench: Bench, peers: Peers) -> None:
    _, address = started_seed(bench)
    trainers = [peers.start(HERE / "driven_peer.py") for _ in range(2)]
    ask_all(trainers, "join", peers=[address])
    for trainer, start in zip(trainers, (1.0, 2.0), strict=True):
        trainer.send("attach", start=start)
    values = [trainer.answer(20) for trainer in trainers]
    assert values[0] == values[1]
    assert values[0]["high"] in (1.0, 2.0)


@pytest.mark.acceptance
def test_trainers_started_by_shoal_run_join_through_a_seed(bench: Bench) -> None:
    seed, address = started_seed(bench)
    trainers = [bench.shoal("run", "train.py", "--join", address, machine=name) for name in ("b", "c")]
    for trainer in trainers:
        trainer.wait_said(lambda one: one.get("averagings", 0) >= 1)
    bench.stop()
    for trainer in trainers:
        assert trainer.returncode_within(15) == 0, trainer.output
    assert seed.process.poll() is None, seed.output


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_seed_ends_by_signal(bench: Bench, number: int, expected: int) -> None:
    """That is how a seed is meant to end, so 0 is as good."""
    seed, _ = started_seed(bench)
    seed.send(number)
    assert seed.returncode_within(3) in (0, expected), seed.output
    assert "Traceback" not in seed.output, seed.output
    assert seed.living() == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("run", "seed", "demo", "shoal demo")),
        (("run",), ("--run", "--join", "--secret", "--listen", "--peers", "shoal run train.py", "130")),
        (("seed",), ("--run", "--join", "--secret", "--listen", "shoal seed")),
        (("demo",), ("--peers", "--seconds", "--out", "--seed", "shoal demo")),
    ],
    ids=["shoal", "run", "seed", "demo"],
)
def test_help_shows_an_example(bench: Bench, words: tuple[str, ...], expected: tuple[str, ...]) -> None:
    code, output = bench.complete(*words, "--help")
    assert code == 0, output
    assert re.search(r"(?i)\bexamples?\b", output), output
    for text in expected:
        assert text in output, f"{text!r} is not in:\n{output}"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("run",), "SCRIPT"),
        (("run", "no-such-file.py"), "no-such-file.py"),
        (("run", "train.py", "--no-such-option"), "--no-such-option"),
        (("run", "train.py", "--peers", "0"), "--peers"),
        (("run", "train.py", "--peers", "many"), "--peers"),
        (("run", "train.py", "--join", "birds"), "shoal://PEERID@HOST:PORT"),
        (("run", "train.py", "--listen", "4711x"), "HOST:PORT"),
        (("seed", "--join", "shoal://short@127.0.0.1:1"), "shoal://PEERID@HOST:PORT"),
        (("demo", "--seconds", "-1"), "--seconds"),
        (("demo", "--peers", "0"), "--peers"),
        (("no-such-command",), "no-such-command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_usage_is_exit_code_2_and_a_readable_message(bench: Bench, words: tuple[str, ...], names: str) -> None:
    code, output = bench.complete(*words)
    assert code == 2, output
    assert names.lower() in output.lower(), output
    assert "Traceback" not in output, output
    assert len(output.splitlines()) <= 12, "a message, not a page"


def test_help_is_quick(bench: Bench) -> None:
    """`--help` imports no torch."""
    probe = "import sys; from shoal.cli.main import main; print('torch' in sys.modules)"
    command = bench.start(sys.executable, "-c", probe)
    assert command.returncode_within(20) == 0, command.output
    assert command.output.strip() == "False"
