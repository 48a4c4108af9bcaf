"""The charter: what a peer that does not fit is told, and which of two runs stays."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import CharterMismatch, MismatchError, ModelMismatch
from shoal.net.envelope import decode_body, raw
from shoal.overlay.charter import Charter, Standing, check_schema, check_strategy, stays

STRATEGY = {"name": "AllReduce", "every_seconds": 2.0, "every_steps": None, "part_bytes": 1024}
SCHEMA = [("0.weight", (4, 2), "float32"), ("0.bias", (4,), "float32"), ("scale", (), "bfloat16")]
INCOMPLETE = Charter("birds", "charter-1", "registrar", 5.0)
COMPLETE = INCOMPLETE.completed("founder", STRATEGY, SCHEMA)


def test_a_charter_is_complete_once_its_founder_attached() -> None:
    assert not INCOMPLETE.complete
    assert COMPLETE.complete
    assert (COMPLETE.run, COMPLETE.charter_id, COMPLETE.registrar) == ("birds", "charter-1", "registrar")
    assert (COMPLETE.founder, COMPLETE.strategy, COMPLETE.schema) == ("founder", STRATEGY, SCHEMA)


def test_a_charter_survives_the_wire() -> None:
    for charter in (INCOMPLETE, COMPLETE):
        assert decode_body(raw(charter), Charter) == charter
    check_schema(decode_body(raw(COMPLETE), Charter), SCHEMA)
    check_strategy(decode_body(raw(COMPLETE), Charter), STRATEGY)


def test_who_asks_for_nothing_adopts_the_runs_strategy_and_an_incomplete_charter_fits_all() -> None:
    check_strategy(COMPLETE, None)
    check_strategy(INCOMPLETE, {"name": "Anything"})
    check_schema(INCOMPLETE, [("x", (1,), "float32")])
    check_strategy(COMPLETE, dict(reversed(STRATEGY.items())))


@pytest.mark.parametrize(
    ("changes", "field", "ours", "theirs"),
    [
        ({"name": "Moshpit"}, "strategy", "Moshpit", "AllReduce"),
        ({"name": "Moshpit", "every_seconds": 9.0}, "strategy", "Moshpit", "AllReduce"),
        ({"every_seconds": 3.0}, "strategy.every_seconds", 3.0, 2.0),
        ({"every_seconds": None, "every_steps": 5}, "strategy.every_seconds", None, 2.0),
        ({"every_steps": 5}, "strategy.every_steps", 5, None),
        ({"new_option": True}, "strategy.new_option", True, None),
    ],
)
def test_another_strategy_is_refused_with_the_field(changes, field, ours, theirs) -> None:
    with pytest.raises(CharterMismatch) as error:
        check_strategy(COMPLETE, STRATEGY | changes)
    assert (error.value.field, error.value.ours, error.value.theirs) == (field, ours, theirs)
    assert f"this run's charter says {field} = {theirs}, this peer asks for {ours}" in str(error.value)
    assert "no strategy at all to adopt the run's" in str(error.value)
    assert isinstance(error.value, MismatchError)


def test_an_option_that_only_the_run_has_is_refused_too() -> None:
    ours = {field: value for field, value in STRATEGY.items() if field != "part_bytes"}
    with pytest.raises(CharterMismatch) as error:
        check_strategy(COMPLETE, ours)
    assert error.value.field == "strategy.part_bytes"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            [("0.weight", (2, 4), "float32"), *SCHEMA[1:]],
            "this model has 0.weight (2, 4) float32 where the run's model has 0.weight (4, 2) float32",
        ),
        (
            [SCHEMA[0], ("0.bias", (4,), "float64"), SCHEMA[2]],
            "this model has 0.bias (4,) float64 where the run's model has 0.bias (4,) float32",
        ),
        (
            [SCHEMA[0], SCHEMA[2]],
            "this model has scale () bfloat16 where the run's model has 0.bias (4,) float32",
        ),
        (SCHEMA[:2], "only the run's model has scale () bfloat16"),
        ([], "only the run's model has 0.weight (4, 2) float32"),
        ([*SCHEMA, ("more", (1,), "float32")], "only this model has more (1,) float32"),
    ],
)
def test_another_model_is_refused_with_the_first_tensor_that_differs(schema, message) -> None:
    with pytest.raises(ModelMismatch) as error:
        check_schema(COMPLETE, schema)
    assert (
        str(error.value) == f"{message}; all peers of a run attach the same model, and train the same parameters of it"
    )


# ---------------------------------------------------------------- which of two runs stays

standings = st.builds(Standing, st.integers(0, 3), st.sampled_from([1.0, 2.0, 2.5]), st.sampled_from("abc"))


@given(standings, standings)
def test_of_two_different_runs_exactly_one_stays(ours, theirs) -> None:
    if ours == theirs:
        assert not stays(ours, theirs)
    elif ours.charter_id == theirs.charter_id:
        return  # one run: nobody asks
    else:
        assert stays(ours, theirs) != stays(theirs, ours)


def test_all_pairs_of_a_grid_are_decided_alike_at_both_ends() -> None:
    grid = [Standing(*fields) for fields in itertools.product([0, 1, 7], [1.0, 2.0], ["a", "b"])]
    for one, other in itertools.permutations(grid, 2):
        assert stays(one, other) != stays(other, one)


@given(standings, standings, standings)
def test_the_order_is_transitive(one, two, three) -> None:
    if stays(one, two) and stays(two, three):
        assert stays(one, three)


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [
        (Standing(5, 9.0, "z"), Standing(4, 1.0, "a")),
        (Standing(5, 1.0, "z"), Standing(5, 2.0, "a")),
        (Standing(5, 1.0, "a"), Standing(5, 1.0, "b")),
    ],
    ids=["more trained", "older", "by id"],
)
def test_the_more_trained_then_the_older_run_stays(stronger, weaker) -> None:
    assert stays(stronger, weaker)
    assert not stays(weaker, stronger)


def test_a_standing_survives_the_wire() -> None:
    standing = Standing(10**12, 1_750_000_000.123456, "a")
    assert decode_body(msgspec.Raw(msgspec.msgpack.encode(standing)), Standing) == standing
