"""Messages made from their schema, and mutated ones: what a peer that knows the secret can send.

Everything follows from one seeded `random.Random`, so a failure is repeated by its seed.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import random
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

import shoal
from shoal.net.envelope import Done, Message
from shoal.overlay.directory import Find, Found, Store, Stored
from shoal.overlay.member_record import Claim, Claimed, Complaint, Introduce, Introduced, Status
from shoal.protocols import download, round_record
from shoal.protocols.download import Chunk, Fetch, Hold, Manifest
from shoal.protocols.mean_gradients import FetchMean, MeanPiece
from shoal.protocols.meeting import Meet, Start
from shoal.protocols.roll_passing import TakeRoll
from shoal.protocols.roll_record import Here, Invite, Invited, Roll
from shoal.protocols.round_record import AskVersions, Begin, Given, PartMeanSent, PartSent, Recover, VersionsHeld

REPLIES: dict[type[Message], type[Message]] = {
    Introduce: Introduced, Claim: Claimed, Find: Found, Store: Stored, Here: Roll,
    Invite: Invited, TakeRoll: Roll, Meet: Roll, AskVersions: VersionsHeld, Hold: Manifest,
}  # fmt: skip
"""What the caller of each call expects."""
NOTICES: list[type[Message]] = [Status, Complaint, Start]
"""What is told and wants no answer."""
ITEMS: dict[type[Message], tuple[type[Message], type[Message]]] = {
    Begin: (PartSent, PartMeanSent), Recover: (round_record.Want, Given), Fetch: (download.Want, Chunk),
    FetchMean: (Done, MeanPiece),
}  # fmt: skip
"""What is sent on each stream after it was opened: there (Done where nothing is), and back."""

INTEGERS = [0, 1, 2, 3, -1, 7, 255, 1000, 2**31, 2**32, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63)]
FLOATS = [0.0, 1.0, -1.0, 0.1, 1e-300, 1e18, 1e300, math.inf, -math.inf, math.nan, 1_750_000_000.0]
TEXTS = ["", "train", "call", "plain", "trainer", "seed", "training", "joined", "host-0:1", "nowhere:1", "float32", "x"]


def message_types() -> list[type[Message]]:
    """Every message that the library defines."""
    for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
        if not module.name.startswith(("shoal.cli", "shoal.demo", "shoal.dashboard")):
            importlib.import_module(module.name)

    def below(kind: type[Message]) -> Iterator[type[Message]]:
        for one in kind.__subclasses__():
            if one.__module__.startswith("shoal."):
                yield one
            yield from below(one)

    return sorted(dict.fromkeys(below(Message)), key=lambda kind: (kind.__module__, kind.__name__))


class Fuzzer:
    """`texts`: words of the world that is attacked (peer ids, roll ids), which make it listen. `me`: the sender."""

    def __init__(self, seed: int | str, texts: list[str] | None = None, me: str = "") -> None:
        self.choose = random.Random(seed)
        self.texts = [*TEXTS, *(texts or [])]
        self.me = me
        self.claims_runs = True  # whoever knows the secret may name a charter with more steps: ours yields to it

    # -- valid by their schema, whatever they say

    def value(self, kind: inspect.Type, name: str = "", depth: int = 0) -> Any:
        """Plain data that decodes as this type."""
        choose = self.choose
        match kind:
            case inspect.NoneType():
                return None
            case inspect.BoolType():
                return choose.random() < 0.5
            case inspect.IntType():
                low = -(2**63) if kind.ge is None else kind.ge
                fitting = [number for number in INTEGERS if number >= low]
                return choose.choice(fitting) if choose.random() < 0.5 else choose.randrange(0, 12)
            case inspect.FloatType():
                low, high = -math.inf if kind.ge is None else kind.ge, math.inf if kind.le is None else kind.le
                anything = kind.ge is None and kind.le is None
                fitting = [number for number in FLOATS if anything or low <= number <= high]  # NaN only where all fits
                return choose.choice(fitting) if choose.random() < 0.5 else choose.uniform(0, 10)
            case inspect.StrType():
                return self._text(kind, name)
            case inspect.BytesType():
                least = kind.min_length or 0
                most = kind.max_length if kind.max_length is not None else choose.choice([0, 8, 16, 32, 100])
                return choose.randbytes(choose.randint(least, max(least, min(most, 200))))
            case _:
                return self._container(kind, name, depth)

    def _container(self, kind: inspect.Type, name: str, depth: int) -> Any:
        choose = self.choose
        match kind:
            case inspect.ListType() | inspect.VarTupleType():
                most = kind.max_length if kind.max_length is not None else 300
                length = min(most, choose.choice([0, 1, 1, 2, 3, 5, 300 if depth < 2 else 3]))
                return [self.value(kind.item_type, name, depth + 1) for _ in range(length)]
            case inspect.TupleType():
                return [self.value(one, name, depth + 1) for one in kind.item_types]
            case inspect.DictType():
                count = choose.choice([0, 1, 2, 3])
                pairs = [(self.value(kind.key_type), self.value(kind.value_type)) for _ in range(count)]
                return dict(pairs)
            case inspect.UnionType():
                claims = name != "charter" or self.claims_runs
                return self.value(choose.choice(kind.types), name, depth) if claims else None
            case inspect.StructType():
                return self.struct(kind, depth)
        raise AssertionError(f"no values of {kind} are made yet: teach tests/fuzzing.py")

    def struct(self, kind: inspect.StructType, depth: int = 0) -> Any:
        wanted = [field for field in kind.fields if field.required or kind.array_like or self.choose.random() < 0.8]
        values = {field.encode_name: self.value(field.type, field.name, depth + 1) for field in wanted}
        return list(values.values()) if kind.array_like else values

    def _text(self, kind: inspect.StrType, name: str) -> str:
        choose = self.choose
        if kind.pattern is not None:  # a peer id
            ids = [text for text in self.texts if len(text) == 32]
            return choose.choice(ids) if ids and choose.random() < 0.7 else "".join(choose.choices("abc234", k=32))
        if name == "peer_id" and self.me and choose.random() < 0.7:
            return self.me
        long = "long " * 400 if choose.random() < 0.05 else ""
        text = choose.choice(self.texts) + long
        return text[: kind.max_length].ljust(kind.min_length or 0, "x")

    def plain(self, kind: type) -> Any:
        """A valid message as plain data."""
        return self.value(inspect.type_info(kind))

    # -- mutated

    def body(self, kind: type) -> bytes:
        """A message as bytes: a valid one, one with other fields, or one with other bytes."""
        value, what = self.plain(kind), self.choose.random()
        if what < 0.4:
            return msgspec.msgpack.encode(value)
        if what < 0.7:
            return msgspec.msgpack.encode(self._other_fields(value))
        return self.other_bytes(msgspec.msgpack.encode(value))

    def _other_fields(self, value: Any) -> Any:
        if isinstance(value, dict) and value and self.choose.random() < 0.8:
            key = self.choose.choice(list(value))
            what = self.choose.random()
            if what < 0.15:
                return {name: one for name, one in value.items() if name != key}
            if what < 0.25:
                return value | {"more": 1}
            return value | {key: self._other_fields(value[key])}
        if isinstance(value, list) and value and self.choose.random() < 0.8:
            place = self.choose.randrange(len(value))
            what = self.choose.random()
            if what < 0.15:
                return value[:place] + value[place + 1 :]
            if what < 0.3:
                return value + value[place:] * self.choose.choice([1, 100])
            return [*value[:place], self._other_fields(value[place]), *value[place + 1 :]]
        return self.choose.choice(
            [None, True, *INTEGERS, *FLOATS, "text", "x" * 5000, b"bytes", [], {}, [[[[]]]], {"a": {}}, [1] * 1000]
        )

    def other_bytes(self, data: bytes) -> bytes:
        """Flipped, cut, doubled, or with a nest of lists in the middle."""
        changed, choose = bytearray(data), self.choose
        for _ in range(choose.choice([1, 1, 2, 8])):
            at = choose.randrange(len(changed) + 1)
            what = choose.random()
            if what < 0.5 and changed:
                changed[at % len(changed)] = choose.randrange(256)
            elif what < 0.65:
                del changed[at:]
            elif what < 0.8:
                changed[at:at] = changed[at : at + 40]
            elif what < 0.9:
                changed[at:at] = choose.randbytes(choose.choice([1, 4, 50]))
            else:
                changed[at:at] = b"\x91" * choose.choice([10, 2000])
        return bytes(changed) or b"\xc1"

    def payload(self) -> bytes:
        return self.choose.randbytes(self.choose.choice([0, 0, 1, 4, 400, 4096, 8192, 100_000]))
