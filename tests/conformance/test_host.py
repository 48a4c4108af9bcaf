"""The peer host over every transport: calls, one-way messages, goodbyes and deaths."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from worlds import MemoryWorld, Trial, link, now, raw_link, soon, within

from shoal.core.errors import CallTimeout, OptionError, PeerLost, ProtocolError, RefusedError
from shoal.net.envelope import Answer, Ask, Done, End, Message, encode, raw
from shoal.net.serving import MAX_CALLS_PER_PEER


class Echo(Message, frozen=True):
    text: str
    numbers: list[int] = msgspec.field(default_factory=list)


class Wait(Message, frozen=True):
    seconds: float


class Note(Message, frozen=True):
    text: str


class Fails(Message, frozen=True):
    how: str


def other_message(name: str, **fields: object) -> Message:
    """A message of this name with other fields, as a peer of another making might send it."""
    kind = msgspec.defstruct(name, [(field, type(value)) for field, value in fields.items()], bases=(Message,))
    return kind(**fields)


def serve_echo(trial: Trial) -> None:
    async def echo(peer_id: str, request: Echo) -> Message:
        return Echo(f"{request.text} from {peer_id}", request.numbers[::-1])

    async def wait(peer_id: str, request: Wait) -> Message:
        await asyncio.sleep(request.seconds)
        return Done()

    async def fail(peer_id: str, request: Fails) -> Message:
        if request.how == "refused":
            raise RefusedError("come back later", "busy")
        if request.how == "option":
            raise OptionError("batch_size", -1, "a positive number")
        raise ZeroDivisionError("a defect of the handler")

    trial.host.serve(Echo, echo)
    trial.host.serve(Wait, wait)
    trial.host.serve(Fails, fail)


async def assert_answers(caller: Trial, callee: Trial) -> None:
    answer = await caller.host.call(callee.id, Echo("hello", [1, 2, 3]), Echo, timeout_seconds=5)
    assert answer == Echo(f"hello from {caller.id}", [3, 2, 1])


# ---------------------------------------------------------------- calls


async def test_a_call_is_answered_with_the_type_it_asked_for_in_both_directions(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_echo(a)
        serve_echo(b)
        await assert_answers(a, b)
        await assert_answers(b, a)
        assert not a.host.faults and not b.host.faults


async def test_a_large_body_passes(world) -> None:
    async with world.hosts(2) as (a, b), within(20):
        serve_echo(b)
        numbers = list(range(300_000))
        answer = await a.host.call(b.id, Echo("", numbers), Echo, timeout_seconds=15)
        assert answer.numbers == numbers[::-1]


async def test_answers_come_in_the_order_they_are_ready(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_echo(b)
        slow = asyncio.create_task(a.host.call(b.id, Wait(0.5), Done, timeout_seconds=5))
        await assert_answers(a, b)
        assert not slow.done()
        assert await slow == Done()


async def test_a_refusal_comes_with_code_and_reason(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_echo(b)
        with pytest.raises(RefusedError, match="come back later") as refused:
            await a.host.call(b.id, Fails("refused"), Done, timeout_seconds=5)
        assert refused.value.code == "busy"
        await assert_answers(a, b)


async def test_an_error_of_shoals_own_is_told_under_its_name(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_echo(b)
        with pytest.raises(RefusedError, match="batch_size = -1 is not allowed") as refused:
            await a.host.call(b.id, Fails("option"), Done, timeout_seconds=5)
        assert refused.value.code == "OptionError"
        assert not b.host.faults


async def test_a_call_that_nobody_answers_is_refused(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        with pytest.raises(RefusedError, match="nobody here answers 'Echo'") as refused:
            await a.host.call(b.id, Echo(""), Echo, timeout_seconds=5)
        assert refused.value.code == "unknown"


async def test_a_call_to_somebody_without_a_link_fails_at_once(world) -> None:
    async with world.hosts(2, linked=False) as (a, b):
        began = now()
        with pytest.raises(PeerLost, match="is not connected"):
            await a.host.call(b.id, Echo(""), Echo, timeout_seconds=5)
        assert now() == pytest.approx(began, abs=0.5)


async def test_a_call_times_out_at_its_deadline_and_its_late_answer_changes_nothing(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_echo(b)
        began = now()
        with pytest.raises(CallTimeout, match=r"did not answer Wait within 0\.3 s"):
            await a.host.call(b.id, Wait(0.6), Done, timeout_seconds=0.3)
        assert 0.299 <= now() - began < 0.9
        assert await a.host.call(b.id, Wait(0.6), Done, timeout_seconds=5) == Done()
        await assert_answers(a, b)
        assert not a.host.remotes[b.id].pending


async def test_as_many_calls_at_once_as_are_allowed_are_all_answered(world) -> None:
    async with world.hosts(2) as (a, b), within(15):
        serve_echo(b)
        calls = [a.host.call(b.id, Wait(0.2), Done, timeout_seconds=10) for _ in range(MAX_CALLS_PER_PEER)]
        assert await asyncio.gather(*calls) == [Done()] * MAX_CALLS_PER_PEER


async def test_one_call_more_closes_the_connection_and_nothing_leaks(world) -> None:
    async with world.hosts(2) as (a, b), within(15):
        serve_echo(b)
        calls = [a.host.call(b.id, Wait(0.5), Done, timeout_seconds=10) for _ in range(MAX_CALLS_PER_PEER + 1)]
        async with within(2):
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(result) for result in results} == {PeerLost}
        assert any(f"more than {MAX_CALLS_PER_PEER} calls at once" in event for event in b.events("refused"))
        await soon(lambda: b.host.remotes[a.id].calls_running == 0, 3)
        await asyncio.sleep(1.1)  # of penalty
        await link(a, b)
        await assert_answers(a, b)


# ---------------------------------------------------------------- what is wrong stays where it is


async def test_a_handler_that_raises_closes_only_that_connection_and_is_recorded(world) -> None:
    async with world.hosts(3) as (a, b, c), within(10):
        for trial in (a, b, c):
            serve_echo(trial)
        async with within(2):
            with pytest.raises(PeerLost):
                await b.host.call(a.id, Fails("badly"), Done, timeout_seconds=5)
        await soon(lambda: a.host.faults)
        assert [type(fault) for fault in a.host.faults] == [ZeroDivisionError]
        assert a.events("fault") == ["call Fails: ZeroDivisionError: a defect of the handler"]
        await soon(lambda: not a.host.linked(b.id))
        await assert_answers(a, c)
        await assert_answers(c, a)
        await link(a, b)
        await assert_answers(b, a)


async def test_a_body_of_another_type_closes_the_connection(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_echo(b)
        async with within(2):
            with pytest.raises(PeerLost):
                await a.host.call(b.id, other_message("Echo", text=5), Echo, timeout_seconds=5)
        assert any("no valid Echo" in event for event in b.events("refused"))
        assert not b.host.faults


async def test_a_body_with_an_unknown_field_closes_the_connection(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_echo(b)
        with pytest.raises(PeerLost):
            await a.host.call(b.id, other_message("Echo", text="x", more=1), Echo, timeout_seconds=5)
        assert any("unknown field `more`" in event for event in b.events("refused"))


async def test_an_answer_of_another_type_is_a_protocol_error_and_closes_the_connection(world) -> None:
    """As errors.py says of ProtocolError: its connection is closed and it is penalised."""
    async with world.hosts(2) as (a, b), within(10):
        serve_echo(b)
        with pytest.raises(ProtocolError, match="no valid Note"):
            await a.host.call(b.id, Echo("x"), Note, timeout_seconds=5)
        await soon(lambda: not a.host.linked(b.id), 1, "the end of the link")
        assert any("no valid Note" in event for event in a.events("refused"))


RAW_FRAMES = {
    "garbage": b"\xc1 garbage",
    "a frame of streams": encode(End()),
    "an unknown tag": msgspec.msgpack.encode([99, 1, "x"]),
    "too few fields": msgspec.msgpack.encode([1, 1]),
    "text that is no text": b"\x94\x01\x01\xa2\xff\xff\xc0",
    "a deeply nested body": b"\x94\x01\x01\xa4Echo" + b"\x91" * 3000 + b"\xc0",
}


@pytest.mark.parametrize("frame", RAW_FRAMES.values(), ids=RAW_FRAMES)
async def test_what_is_no_frame_of_a_link_closes_it_and_is_no_fault_of_ours(world, frame) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_echo(a)
        serve_echo(b)
        async with raw_link(world, a) as (peer_id, channel):
            await soon(lambda: a.host.linked(peer_id))
            await channel.send(frame)
            async with within(2):
                with pytest.raises(PeerLost):
                    while True:
                        await channel.receive()
            assert len(a.events("refused")) == 1
            assert not a.host.faults
            assert [(who, polite) for who, _, polite in a.lost] == [(peer_id, False)]
        await assert_answers(a, b)


async def test_an_answer_to_a_call_that_was_never_made_changes_nothing(world) -> None:
    async with world.hosts(1) as (a,), within(10):
        async with raw_link(world, a) as (_, channel):
            await channel.send(encode(Answer(12345, raw(Done()))))
            await channel.send(encode(Ask(7, "Nothing", raw(Done()))))
            while msgspec.msgpack.decode((await channel.receive())[0])[:2] != [3, 7]:
                pass
        assert not a.host.faults


# ---------------------------------------------------------------- one-way messages


async def test_tell_reaches_the_other_once_and_wants_no_answer(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        notes: list[tuple[str, str]] = []

        b.host.hear(Note, lambda peer_id, message: notes.append((peer_id, message.text)))
        serve_echo(b)
        for text in ("one", "two", "three"):
            a.host.tell([b.id], Note(text))
        await soon(lambda: len(notes) == 3)
        assert sorted(notes) == sorted((a.id, text) for text in ("one", "two", "three"))
        await assert_answers(a, b)


async def test_tell_never_raises(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_echo(b)
        a.host.tell(["nobody"], Note("x"))
        a.host.tell([b.id], Note("nobody hears this"))
        a.host.tell([b.id], Fails("refused"))
        await assert_answers(a, b)
        assert not a.host.faults and not b.host.faults


# ---------------------------------------------------------------- links


async def test_two_that_dial_each_other_at_once_stay_linked_and_lose_each_other_once(world) -> None:
    async with world.hosts(2, linked=False) as (a, b), within(10):
        serve_echo(a)
        serve_echo(b)
        await asyncio.gather(a.host.link(b.host.endpoints, b.id), b.host.link(a.host.endpoints, a.id))
        await soon(lambda: len(a.host.remotes[b.id].links) == len(b.host.remotes[a.id].links) == 2)
        await assert_answers(a, b)
        await assert_answers(b, a)
        world.kill(b.transport)
        await soon(lambda: a.lost)
        assert not a.host.linked(b.id)
        assert len(a.lost) == 1


async def test_one_of_two_links_may_end_and_nobody_is_lost(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        serve_echo(b)
        await a.host.link(b.host.endpoints, b.id)
        await soon(lambda: len(b.host.remotes[a.id].links) == 2)
        a.host.remotes[b.id].links[0].abort()
        await soon(lambda: len(b.host.remotes[a.id].links) == len(a.host.remotes[b.id].links) == 1)
        await assert_answers(a, b)
        assert not a.lost and not b.lost


async def test_goodbye_is_polite(world) -> None:
    async with world.hosts(2) as (a, b), within(10):
        async with within(1):
            await a.host.goodbye("it left the run")
        await soon(lambda: b.lost)
        assert b.lost == [(a.id, "it left the run", True)]
        assert not b.host.linked(a.id)
        assert not a.lost


async def test_after_goodbye_nobody_is_let_in(world) -> None:
    async with world.hosts(2, linked=False) as (a, b), within(10):
        await a.host.goodbye("it left the run")
        with pytest.raises(PeerLost):
            await b.host.link(a.host.endpoints, a.id)


async def test_a_killed_peer_is_noticed_at_once_by_all_and_by_those_who_wait(world) -> None:
    async with world.hosts(3) as (a, b, c), within(10):
        serve_echo(a)
        calling = asyncio.create_task(b.host.call(a.id, Wait(5), Done, timeout_seconds=8))
        await soon(lambda: a.host.remotes[b.id].calls_running == 1)
        world.kill(a.transport)
        await soon(lambda: b.lost and c.lost, 1)
        assert [(who, polite) for who, _, polite in b.lost + c.lost] == [(a.id, False)] * 2
        async with within(1):
            with pytest.raises(PeerLost):
                await calling


async def test_a_host_that_ends_without_a_word_is_lost_not_left(world) -> None:
    async with world.hosts(1) as (a,), within(10):
        async with world.hosts(1) as (b,):
            await link(a, b)
        await soon(lambda: a.lost, 2)
        assert [(who, polite) for who, _, polite in a.lost] == [(b.id, False)]


async def test_an_idle_link_lives_on(world) -> None:
    """Signs of life are sent where nothing else is: 2 s here, an hour where time costs nothing."""
    async with world.hosts(2) as (a, b):
        serve_echo(b)
        total = a.host.received.total_bytes
        if isinstance(world, MemoryWorld):
            await asyncio.sleep(500)
        else:
            await soon(lambda: a.host.received.total_bytes > total, 3, "a sign of life")
        await assert_answers(a, b)
        assert not a.lost and not b.lost
