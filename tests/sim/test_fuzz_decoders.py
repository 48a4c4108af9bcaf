"""Every message type, every frame and the handshake, decoded from valid, mutated and random bytes.

Nothing comes out but a message of the type that was asked for, or a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fuzzing import ITEMS, NOTICES, REPLIES, Fuzzer, message_types
from shoal.core.errors import PeerLost, ProtocolError, RemoteError
from shoal.core.loop import run_virtual
from shoal.net import envelope, handshake
from shoal.net.envelope import Message, decode_body, decode_link, decode_stream
from shoal.net.identity import Identity

INPUTS = 150
HANDSHAKE = [handshake.Hello, handshake.Challenge, handshake.Proof, handshake.Accepted, handshake.Refusal]
FRAMES = [
    envelope.Ask, envelope.Answer, envelope.Fail, envelope.Ping, envelope.Bye, envelope.Part, envelope.Open,
    envelope.Item, envelope.End,
]  # fmt: skip


def check(decode: Callable[[bytes], Any], data: bytes) -> bool:
    try:
        decode(data)
    except ProtocolError:
        return False
    return True


@pytest.mark.parametrize("kind", message_types(), ids=lambda kind: f"{kind.__module__[6:]}.{kind.__name__}")
def test_a_message(kind: type[Message]) -> None:
    fuzzer = Fuzzer(kind.__name__)

    def decode(data: bytes) -> None:
        assert type(decode_body(msgspec.Raw(data), kind)) is kind

    for _ in range(INPUTS // 3):
        assert check(decode, msgspec.msgpack.encode(fuzzer.plain(kind))), "the generator makes what fits the schema"
    taken = [check(decode, fuzzer.body(kind)) for _ in range(INPUTS)]
    assert any(taken)
    assert not all(taken), "the mutations change something"
    for _ in range(INPUTS):
        check(decode, fuzzer.choose.randbytes(fuzzer.choose.randrange(1, 60)))


@pytest.mark.parametrize("kind", FRAMES, ids=lambda kind: kind.__name__)
def test_a_frame(kind: type) -> None:
    fuzzer = Fuzzer(kind.__name__)
    for _ in range(INPUTS):
        values = [fuzzer.choose.choice([0, 1, "Find", "x" * 50, b"", None, [], 2**64 - 1]) for _ in range(3)]
        tag = kind.__struct_config__.tag
        data = msgspec.msgpack.encode([tag, *values[: fuzzer.choose.randrange(4)]])
        for decode in (decode_link, decode_stream):
            check(decode, data)
            check(decode, fuzzer.other_bytes(data))
            check(decode, fuzzer.choose.randbytes(fuzzer.choose.randrange(1, 60)))


def test_all_frames_are_tried() -> None:
    assert set(FRAMES) == {kind for kind in envelope._Frame.__subclasses__()}


class Said:
    """The other end of a handshake, which has said these things already."""

    def __init__(self, *frames: bytes) -> None:
        self.trusted = False
        self.frames, self.server_key, self.binding, self.remote = list(frames), ME.public_key, b"b" * 32, "somewhere"

    async def send(self, header: bytes, payload: bytes = b"") -> None:
        return

    async def receive(self) -> tuple[bytes, memoryview]:
        if not self.frames:
            raise PeerLost("it said no more")
        return self.frames.pop(0), memoryview(b"")

    def trust(self) -> None:
        self.trusted = True


ME, OTHER = Identity(b"m" * 32), Identity(b"o" * 32)


@pytest.mark.parametrize("kind", HANDSHAKE, ids=lambda kind: kind.__name__)
def test_the_handshake(kind: type) -> None:
    """Each message of it in the place of any other, valid and mutated, at both ends."""
    fuzzer, outcomes = Fuzzer(kind.__name__), dict[str, int]()
    hello = msgspec.msgpack.encode(handshake.Hello(handshake.PROTOCOL_VERSION, b"n" * 16, OTHER.public_key))

    def data() -> bytes:
        value, what = fuzzer.plain(kind) | {"type": kind.__struct_config__.tag}, fuzzer.choose.random()
        encoded = msgspec.msgpack.encode(value)
        return encoded if what < 0.4 else fuzzer.other_bytes(encoded)

    async def shake() -> None:
        for number in range(INPUTS):
            said = Said(data(), data()) if number % 2 else Said(hello, data())
            ends = (
                handshake.answer(said, ME, b"k" * 32, b"n" * 16),
                handshake.greet(said, OTHER, b"k" * 32, b"n" * 16, None, "link"),
            )
            try:
                await ends[number // 2 % 2]  # whoever is let in, returns
            except RemoteError as error:
                outcomes[type(error).__name__] = outcomes.get(type(error).__name__, 0) + 1
            assert not (said.trusted and number // 2 % 2 == 0), "a listener trusts nobody before it knows who it is"
            for end in ends:
                end.close()

    run_virtual(shake())
    assert sum(outcomes.values()) == INPUTS, "nobody was let in"


def test_every_message_of_the_handshake_is_tried() -> None:
    made = {kind for kind in vars(handshake).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)}
    assert set(HANDSHAKE) == made


def test_every_message_type_is_a_call_a_stream_a_reply_an_item_or_a_part_of_one() -> None:
    """A new one has a place in the tables that tests/sim/test_fuzz.py sends by; this names those that have none."""
    told = {*REPLIES, *NOTICES, *REPLIES.values(), *ITEMS, *(one for items in ITEMS.values() for one in items)}
    inside = set[type]()

    def below(info: Any) -> None:
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls in inside:
                return
            inside.add(info.cls)
        for child in (*getattr(info, "types", ()), *getattr(info, "item_types", ()), getattr(info, "item_type", None)):
            if child is not None:
                below(child)
        for field in getattr(info, "fields", ()):
            below(field.type)

    for kind in told:
        below(msgspec.inspect.type_info(kind))
    unsent = {kind.__name__ for kind in message_types()} - {kind.__name__ for kind in inside}
    assert unsent <= {"Standing"}, "Standing is compared, never sent"
