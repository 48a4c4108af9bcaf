"""What is said in a roll, and how its collector closes it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shoal.core.address import MAX_ENDPOINTS
from shoal.core.errors import NobodyThere, OutOfStep, ProtocolError, RefusedError, RoundError, TensorError
from shoal.net.envelope import Message
from shoal.overlay.routing import Places
from shoal.planning.divergence import judge
from shoal.planning.gathering import level_of
from shoal.planning.shares import without_noise
from shoal.tensors.flat import Shapes, check_shapes

TRAIN, STEP, CALL, PLAIN = "train", "step", "call", "plain"
SERIES = TRAIN, STEP, CALL
"""Averagings of parameters; of gradients, one for each step; those that swarm.average asks for. PLAIN has no roll."""
OTHER_SHAPES, OTHER_STEP, DIVERGED, ALONE = "shapes", "step", "diverged", "alone"
MAX_FIGURE, MAX_NUMBER, MAX_RANGES, MAX_TURNED_AWAY = 1e18, 2**53, 1000, 1000


class Stand(Message, frozen=True):
    """Where a replica stands that must equal the others (gradient mode).

    `sketch` tells equal replicas of one `step` from others; `batches`: ranges, both ends included, of the caller's own
    batches that are behind its gradient.
    """

    step: int
    sketch: bytes
    batches: list[tuple[int, int]]


class Here(Message, frozen=True):
    """I take part in averaging `number`; I wait at most `patience_seconds` for the roll, and listen at `places`."""

    series: str
    number: int
    weight: float
    bandwidth: float | None
    shapes: Shapes
    patience_seconds: float
    stand: Stand | None = None
    places: Places = ()


class Roll(Message, frozen=True):
    """Who takes part in one averaging, in order. Everything later follows from it by pure functions.

    `places`: where each member listens, for those that have not met it. `batches`: of each member, see Stand.
    `turned_away`: who called, too, and is not in it, with code and reason. `disunited`: the members' replicas differ,
    and no majority says which one is right.
    """

    roll_id: str
    series: str
    number: int
    members: list[str]
    weights: list[float]
    bandwidths: list[float | None]
    places: list[list[str]] = msgspec.field(default_factory=list)
    batches: list[list[tuple[int, int]]] = msgspec.field(default_factory=list)
    turned_away: dict[str, tuple[str, str]] = msgspec.field(default_factory=dict)
    disunited: bool = False


class Invite(Message, frozen=True):
    """Averaging `number` is being collected."""

    series: str
    number: int


class Invited(Message, frozen=True):
    """The answer to Invite: the roll of that number, where this member has it already.

    `busy`: it is in an averaging, and calls when that has ended.
    """

    roll: Roll | None = None
    busy: bool = False


def check_here(here: Here) -> None:
    """Raises ProtocolError where a caller's figures are none."""
    for figure in (here.weight, here.bandwidth or 0.0, here.patience_seconds):
        if not 0 <= figure <= MAX_FIGURE:
            raise ProtocolError(f"a weight, bandwidth or patience of {figure}")
    if not 0 < here.number <= MAX_NUMBER:
        raise ProtocolError(f"averaging number {here.number}")
    if here.stand and (not 0 <= here.stand.step <= MAX_NUMBER or len(here.stand.batches) > MAX_RANGES):
        raise ProtocolError(f"a stand at step {here.stand.step} with {len(here.stand.batches)} ranges of batches")
    if here.series == STEP and here.stand is None:
        raise ProtocolError("a call for a step that does not tell which one")


def makes_sense(roll: Roll, me: str) -> bool:
    """Whether this peer can compute with a roll that it was sent: its collector may be broken."""
    figures = [*roll.weights, *(bandwidth or 0.0 for bandwidth in roll.bandwidths)]
    return (
        me in roll.members
        and len(set(roll.members)) == len(roll.members) == len(roll.weights) == len(roll.bandwidths)
        and all(0 <= figure <= MAX_FIGURE for figure in figures)
        and len(roll.places) in (0, len(roll.members))
        and all(len(places) <= MAX_ENDPOINTS for places in roll.places)
        and len(roll.batches) in (0, len(roll.members))
        and (roll.series != STEP or len(roll.batches) == len(roll.members))
        and len(roll.turned_away) <= MAX_TURNED_AWAY
    )


Callers = dict[str, Here]


def close_roll(roll_id: str, series: str, number: int, callers: Mapping[str, Here]) -> dict[str, Roll | RefusedError]:
    """The record for each caller. Whoever is not as most of the others are is told where it differs."""
    if not callers:
        return {}
    refused: dict[str, RefusedError]
    here, refused = _of_equal_shapes(callers)
    disunited = False
    if all(call.stand is not None for call in here.values()):
        here, behind = _of_one_step(here)
        here, parted, disunited = _of_one_state(here)
        refused |= behind | parted
    members = list(here)
    if len(members) == 1 and members[0] not in refused:
        refused[members[0]] = RefusedError("nobody else called in time", ALONE)
    if len(members) < 2:
        return dict(refused)
    roll = Roll(
        roll_id, series, number, members,
        [call.weight for call in here.values()], without_noise([call.bandwidth for call in here.values()]),
        [list(call.places) for call in here.values()],
        [call.stand.batches for call in here.values() if call.stand is not None],
        {who: (error.code, error.reason) for who, error in list(refused.items())[:MAX_TURNED_AWAY]}, disunited,
    )  # fmt: skip
    return refused | dict.fromkeys(members, roll)


def _of_equal_shapes(callers: Mapping[str, Here]) -> tuple[Callers, dict[str, RefusedError]]:
    """The largest group that has the same shapes. Of two strangers both are told, also the one that stays alone."""
    by_shapes: dict[str, list[str]] = {}
    for peer_id, here in sorted(callers.items()):
        by_shapes.setdefault(repr([(tuple(shape), dtype) for shape, dtype in here.shapes]), []).append(peer_id)
    members = max(by_shapes.values(), key=lambda peers: (len(peers), peers))
    strangers = [peer_id for peer_id in sorted(callers) if peer_id not in members]
    refused = {peer_id: _other_shapes(callers[peer_id].shapes, callers[members[0]].shapes) for peer_id in strangers}
    if strangers and len(members) == 1:
        refused[members[0]] = _other_shapes(callers[members[0]].shapes, callers[strangers[0]].shapes)
    return {peer_id: callers[peer_id] for peer_id in members}, refused


def _of_one_step(callers: Callers) -> tuple[Callers, dict[str, RefusedError]]:
    """Those at the step that most are at."""
    steps = {peer_id: here.stand.step for peer_id, here in callers.items() if here.stand is not None}
    level = level_of(steps.values())
    refused = {peer_id: RefusedError(str(level), OTHER_STEP) for peer_id, step in steps.items() if step != level}
    return {peer_id: callers[peer_id] for peer_id, step in steps.items() if step == level}, refused


def _of_one_state(callers: Callers) -> tuple[Callers, dict[str, RefusedError], bool]:
    """Without the minority whose state has parted from the others'; and whether there is no majority."""
    verdict = judge({peer_id: here.stand.sketch for peer_id, here in callers.items() if here.stand is not None})
    refused = {
        peer_id: RefusedError(f"{row} {distance:.1e}", DIVERGED) for peer_id, (row, distance) in verdict.parted.items()
    }
    return {who: here for who, here in callers.items() if who not in refused}, refused, verdict.disunited


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
    if refusal.code == OTHER_STEP:
        return OutOfStep(f"the others are at step {number_in(refusal.reason)}")
    if refusal.code == DIVERGED:
        return OutOfStep(refusal.reason, diverged=True)
    if refusal.code == ALONE:
        return NobodyThere(refusal.reason)
    return RoundError(f"collector {collector[:8]}: {refusal.reason}", number)


def number_in(text: str) -> int:
    """A number that a peer sent as text; 0 where it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 16 else 0
