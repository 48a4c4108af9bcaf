"""The agreement rule of the group all-reduce, in every interleaving of small groups: see agreement.py for the model.

A search that finds no split is complete: all orders of all steps, and up to so many deaths at any point. The negative
controls say that it finds what each part of the rule prevents; their shortest traces are here in words, to be read.
"""

import pytest
from agreement import Result, Rule, search

# n, deaths: states. Another number means another model: look why, then write it here.
STATES = {(3, 0): 35, (3, 1): 103, (3, 2): 118, (4, 0): 113, (4, 1): 760, (4, 2): 1377, (4, 3): 1479, (5, 2): 20199,
          (5, 3): 35767}  # fmt: skip


def told(n: int, deaths: int, result: Result) -> Result:
    print(f"n={n}, at most {deaths} deaths: {result.states} states, {result.ends} ends, "
          f"at most {result.exchanges} exchanges, final with one of {sorted(result.final)}")  # fmt: skip
    return result


@pytest.mark.parametrize(("n", "deaths"), STATES)
def test_rule(n: int, deaths: int) -> None:
    result = told(n, deaths, search(n, deaths, Rule()))
    assert result.split == []  # no two live members are final with different versions
    assert result.hung == []  # nobody waits for ever
    assert result.failed == []  # nobody gives up while another one lives, also with two and three deaths
    assert result.states == STATES[n, deaths]


def test_searches_reach_what_the_rule_is_for() -> None:
    """The results above would be empty if no later attempt, and no later exchange, were ever reached."""
    assert search(3, 0, Rule()).final == {0}
    one = search(4, 1, Rule())
    assert (one.final, one.exchanges) == ({0, 1}, 2)
    two = search(4, 2, Rule())
    assert (two.final, two.exchanges) == ({0, 1, 2}, 3)


@pytest.mark.parametrize("n", [3, 4])
def test_first_member_not_suspected_splits(n: int) -> None:
    """Without closing exchange one death is enough: attempt 0 is still in flight to 2 when 2 says it has nothing."""
    split = search(n, 1, Rule(closing=False)).split
    told_of_nothing = [f"{k} tells 1 of nothing" for k in range(2, n)]
    assert split == [
        "0 makes attempt 0",
        "0 dies, 1 notices: it acts",
        *told_of_nothing,
        "1 makes attempt 1 and is final",
        "2 receives attempt 0 and is final",
    ]


def test_one_exchange_splits() -> None:
    """Two deaths: 2 alone has attempt 0, hands it to 1, and dies before 3 hears of it."""
    assert search(4, 1, Rule(twice=False)).split == []
    assert search(4, 2, Rule(twice=False)).split == [
        "0 makes attempt 0",
        "0 dies, 1 notices: it acts",
        "2 tells 1 of nothing",
        "3 tells 1 of nothing",
        "1 makes attempt 1 and enters exchange 1",
        "2 receives attempt 0 and is final",
        "3 notices: it asks 1",
        "1 tells 3 of 1",
        "3 receives attempt 1 and enters exchange 1",
        "1 passes barrier 1 and sees 0",
        "2 sends 0 to 1",
        "1 is final with 0",
        "2 dies, 3 passes barrier 1 and is final with 1",
    ]


def test_another_loss_between_the_two_exchanges_splits() -> None:
    """Three deaths, so five members: each holder of 0 hands it to one member only, and dies before 4 hears of it."""
    assert search(4, 3, Rule(same=False)).split == []
    split = search(5, 3, Rule(same=False)).split
    assert split[-6:] == [
        "2 dies, 3 passes barrier 1 and enters exchange 2 with 1",
        "4 passes barrier 1 and enters exchange 2 with 1",
        "3 passes barrier 2 and sees 0",
        "1 sends 0 to 3",
        "3 is final with 0",
        "1 dies, 4 passes barrier 2 and is final with 1",
    ]


def test_no_barrier_splits() -> None:
    """Three deaths, so five members: 0 is handed on behind lists that are out already, by a member that then dies.

    2 hands it to 3 in exchange 1, and 3 to 1 in exchange 2. Both times the list of the receiver, 1, was fixed before,
    so 4 sees the same result and the same members lost twice. The rule with its barrier passes with the same deaths.
    """
    assert search(4, 3, Rule(barrier=False)).split == []
    split = search(5, 3, Rule(barrier=False)).split
    assert split[-6:] == [
        "2 dies, 1 passes barrier 1 and enters exchange 2 with 1",
        "3 passes barrier 1 and is final with 0",
        "1 fetches 0 from 3",
        "3 dies, 4 passes barrier 1 and enters exchange 2 with 1",
        "1 passes barrier 2 and is final with 0",
        "4 passes barrier 2 and is final with 1",
    ]
