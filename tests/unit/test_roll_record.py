"""How a collector closes a roll: who is in it, and what the others are told."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core.errors import ProtocolError, RefusedError
from shoal.protocols.large_batch import _diverged
from shoal.protocols.roll_record import (
    ALONE,
    OTHER_SHAPES,
    STEP,
    TRAIN,
    Here,
    Roll,
    check_here,
    close_roll,
    makes_sense,
)

SMALL, LARGE = [((3,), "float32")], [((4,), "float32")]


def here(shapes=SMALL, weight=1.0, places=()) -> Here:
    return Here(TRAIN, 5, weight, None, shapes, 1.0, places=places)


def close(**callers) -> dict:
    return close_roll("id", TRAIN, 5, callers)


def test_all_callers_get_one_record_in_the_order_of_their_ids() -> None:
    outcome = close(b=here(weight=2.0), a=here(places=("a:1",)), c=here(weight=0.0, places=("c:1", "c:2")))
    assert outcome["a"] is outcome["b"] is outcome["c"]
    assert outcome["a"].members == ["a", "b", "c"]
    assert outcome["a"].weights == [1.0, 2.0, 0.0]
    assert outcome["a"].places == [["a:1"], [], ["c:1", "c:2"]]


def test_whoever_calls_alone_is_told_so() -> None:
    (outcome,) = close(a=here()).values()
    assert isinstance(outcome, RefusedError)
    assert outcome.code == ALONE


def test_nobody_left_is_no_roll() -> None:
    assert close() == {}


def test_the_odd_one_is_told_where_its_shapes_differ_and_the_rest_average() -> None:
    outcome = close(a=here(), b=here(LARGE), c=here())
    assert outcome["a"].members == ["a", "c"]
    assert outcome["b"].code == OTHER_SHAPES
    assert outcome["b"].reason.startswith("0 here it is (4,) float32, at the others (3,) float32")


def test_of_two_with_different_shapes_both_are_told() -> None:
    outcome = close(a=here(), b=here([*SMALL, ((), "float64")]))
    assert {refusal.code for refusal in outcome.values()} == {OTHER_SHAPES}
    assert all(refusal.reason.startswith("1 this peer gave") for refusal in outcome.values())


def roll(members=("a", "b"), weights=(1.0, 2.0), bandwidths=(None, 5.0)) -> Roll:
    return Roll("id", TRAIN, 5, list(members), list(weights), list(bandwidths))


@pytest.mark.parametrize(
    "broken",
    [
        roll(members=("b", "c")),
        roll(members=("a", "a")),
        roll(weights=(1.0,)),
        msgspec.structs.replace(roll(), places=[["a:1"]]),
        msgspec.structs.replace(roll(), places=[["a:1"] * 100, []]),
        roll(weights=(1.0, -1.0)),
        roll(weights=(1.0, float("nan"))),
        roll(bandwidths=(None, float("inf"))),
        roll(bandwidths=()),
        msgspec.structs.replace(roll(), series=STEP),
        msgspec.structs.replace(roll(), series=STEP, batches=[[(1, 2)]]),
        msgspec.structs.replace(roll(), turned_away={str(number): ("step", "5") for number in range(1001)}),
    ],
)
def test_a_record_that_can_not_be_computed_with_is_seen(broken) -> None:
    assert makes_sense(roll(), "a")
    assert not makes_sense(broken, "a")


def test_whoever_calls_for_a_step_has_to_tell_which() -> None:
    """Else the others' steps and states would not be compared, and no member could read the roll."""
    check_here(here())
    with pytest.raises(ProtocolError, match="does not tell which one"):
        check_here(Here(STEP, 5, 1.0, None, SMALL, 1.0))


@pytest.mark.parametrize("row", ["1", "-1", "7", "9" * 5000, "", "nan"])
def test_a_verdict_is_told_whatever_a_collector_wrote(row) -> None:
    assert _diverged(f"{row} 1.0e-2", ["a", "b"]).endswith("differs from the others' by 1.0e-2 of its norm")
    assert _diverged("1 1.0e-2", ["a", "b"]).startswith("b ")
