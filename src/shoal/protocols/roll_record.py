"""What is said in a roll, and how its collector closes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shoal.core.address import MAX_ENDPOINTS, parse_endpoint
from shoal.core.errors import AddressError, NobodyThere, ProtocolError, RefusedError, RoundError, TensorError
from shoal.net.envelope import Message
from shoal.net.host import Host
from shoal.tensors.flat import Shapes, check_shapes

TRAIN, CALL, PLAIN = "train", "call", "plain"
OTHER_SHAPES, ALONE = "shapes", "alone"
MAX_FIGURE, MAX_NUMBER = 1e18, 2**53


class Here(Message, frozen=True):
    """I take part in averaging `number`; I wait at most `patience_seconds` for the roll."""

    series: str
    number: int
    weight: float
    bandwidth: float | None
    shapes: Shapes
    patience_seconds: float


class Roll(Message, frozen=True):
    """Who takes part in one averaging, in order. Everything later follows from it by pure functions.

    `places`: where each of them listens, for those who have not met it yet.
    """

    roll_id: str
    series: str
    number: int
    members: list[str]
    weights: list[float]
    bandwidths: list[float | None]
    places: list[list[str]] = msgspec.field(default_factory=list)


class Invite(Message, frozen=True):
    """Averaging `number` is being collected."""

    series: str
    number: int


def check_here(here: Here) -> None:
    """Raises ProtocolError where a caller's figures are none."""
    for figure in (here.weight, here.bandwidth or 0.0, here.patience_seconds):
        if not 0 <= figure <= MAX_FIGURE:
            raise ProtocolError(f"a weight, bandwidth or patience of {figure}")
    if not 0 < here.number <= MAX_NUMBER:
        raise ProtocolError(f"averaging number {here.number}")


def makes_sense(roll: Roll, me: str) -> bool:
    """Whether this peer can compute with a roll that it was sent: its collector may be broken."""
    figures = [*roll.weights, *(bandwidth or 0.0 for bandwidth in roll.bandwidths)]
    return (
        me in roll.members
        and len(set(roll.members)) == len(roll.members) == len(roll.weights) == len(roll.bandwidths)
        and all(0 <= figure <= MAX_FIGURE for figure in figures)
        and len(roll.places) in (0, len(roll.members))
        and all(len(places) <= MAX_ENDPOINTS for places in roll.places)
    )


def learn_places(host: Host, roll: Roll) -> None:
    """Where those members listen that this peer has never heard of: it will meet some of them in a group."""
    for peer_id, texts in zip(roll.members, roll.places, strict=False):
        known = host.remotes.get(peer_id)
        if peer_id == host.peer_id or (known and known.endpoints):
            continue
        try:
            host.know(peer_id, [parse_endpoint(text) for text in texts])
        except AddressError as error:
            host.log.add("refused", str(error), peer_id)


def close_roll(
    roll_id: str, series: str, number: int, callers: Mapping[str, Here], places: Mapping[str, Sequence[str]]
) -> dict[str, Roll | RefusedError]:
    """The record for each caller. Whoever came with other shapes than most is told where they differ."""
    by_shapes: dict[str, list[str]] = {}
    for peer_id, here in sorted(callers.items()):
        by_shapes.setdefault(repr([(tuple(shape), dtype) for shape, dtype in here.shapes]), []).append(peer_id)
    if not by_shapes:
        return {}
    members = max(by_shapes.values(), key=lambda peers: (len(peers), peers))
    strangers = [peer_id for peer_id in sorted(callers) if peer_id not in members]
    outcome: dict[str, Roll | RefusedError] = {
        peer_id: _other_shapes(callers[peer_id].shapes, callers[members[0]].shapes) for peer_id in strangers
    }
    if len(members) > 1:
        roll = Roll(
            roll_id, series, number, members,
            [callers[peer_id].weight for peer_id in members], [callers[peer_id].bandwidth for peer_id in members],
            [list(places.get(peer_id, ())) for peer_id in members],
        )  # fmt: skip
        return outcome | dict.fromkeys(members, roll)
    alone = members[0]
    if strangers:
        outcome[alone] = _other_shapes(callers[alone].shapes, callers[strangers[0]].shapes)
    else:
        outcome[alone] = RefusedError("nobody else called in time", ALONE)
    return outcome


def _other_shapes(ours: Shapes, theirs: Shapes) -> RefusedError:
    try:
        check_shapes(ours, theirs)
    except TensorError as error:
        return RefusedError(f"{error.index} {error.problem}", OTHER_SHAPES)
    raise AssertionError("two groups of callers with the same shapes")


def outcome_of(refusal: RefusedError, collector: str, number: int) -> Exception:
    """A collector's refusal as the error that the caller of an averaging understands."""
    if refusal.code == OTHER_SHAPES:
        index, _, problem = refusal.reason.partition(" ")
        return TensorError(number_in(index), problem)
    if refusal.code == ALONE:
        return NobodyThere(refusal.reason)
    return RoundError(f"collector {collector[:8]}: {refusal.reason}", number)


def number_in(text: str) -> int:
    """A number that a peer sent as text; 0 where it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 16 else 0
