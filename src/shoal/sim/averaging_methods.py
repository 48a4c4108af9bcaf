"""The ways to average one number per peer, vectorised: sections 5.1, 6.1 and 8.0 of the Moshpit reference.

A method is called with its setup and gives its `step(iteration, values, alive)`: the values after one iteration (from
0) in which the peers of the mask `alive` take part. What it carries from one to the next stays inside the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoal.planning.conserved import conserved_claims, conserved_shares
from shoal.planning.grid import block_of, grid_groups
from shoal.planning.keys import Key, drawn_digits, initial_key, split_crowd

Values = NDArray[np.float64]
Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]
Step = Callable[[int, Values, Mask], Values]


@dataclass(frozen=True)
class Setup:
    """What a method starts from. `dims`: the sides of its grid; `weights` matter to those of the planned grid alone."""

    values: Values
    weights: Values
    group_size: int
    dims: tuple[int, ...]
    random: np.random.RandomState

    @property
    def peers(self) -> int:
        return len(self.values)


def group_means(values: Values, group: Numbers, present: Mask) -> Values:
    """Who is present gets the mean of those present in its group, `group[peer]`; the others keep theirs."""
    who = np.flatnonzero(present)
    mine = group[who]
    after = values.copy()
    after[who] = (np.bincount(mine, values[who]) / np.maximum(np.bincount(mine), 1))[mine]
    return after


def all_reduce(setup: Setup) -> Step:
    """With restarts: the mean where all are alive; else nothing, and all try again."""

    def step(iteration: int, values: Values, alive: Mask) -> Values:
        return np.full_like(values, values.mean()) if alive.all() else values

    return step


def gossip(setup: Setup) -> Step:
    """Ring: the mean over this peer and one neighbour on each side, of those alive."""

    def step(iteration: int, values: Values, alive: Mask) -> Values:
        heard = np.where(alive, values, 0.0)
        total, count = (one + np.roll(one, 1) + np.roll(one, -1) for one in (heard, alive.astype(np.float64)))
        return np.where(alive, total / np.maximum(count, 1), values)

    return step


def authors_sgp(setup: Setup) -> Step:
    """What the authors' experiment calls SGP (6.1, trap 2): rows of ones, no push-sum weights, and a hop too few.

    Matrix k is I + I shifted by 2^k + I shifted by 2^(k+1), each shifted as one flat vector: what falls off the end of
    a row comes in at the start of the next. Iterations are counted from 1 there, so matrix 1 comes first.
    """
    peers = setup.peers
    diagonal = np.arange(peers) * (peers + 1)
    hops = []
    for k in range(max(1, (peers - 1).bit_length() - 1)):
        flat = np.concatenate([(diagonal + shift) % peers**2 for shift in (0, 2**k, 2 ** (k + 1))])
        hops.append((flat // peers, flat % peers))

    def step(iteration: int, values: Values, alive: Mask) -> Values:
        rows, columns = hops[(iteration + 1) % len(hops)]
        count = np.bincount(rows, alive[columns])
        total = np.bincount(rows, np.where(alive, values, 0.0)[columns])
        return np.where(alive, total / np.maximum(count, 1), values)

    return step


def push_sum(setup: Setup) -> Step:
    """True push-sum on the exponential graph: half of (sum, weight) goes 2^k peers further, if both ends are alive."""
    hops = max(1, (setup.peers - 1).bit_length())
    sums, weights = setup.values.copy(), np.ones(setup.peers)

    def step(iteration: int, values: Values, alive: Mask) -> Values:
        nonlocal sums, weights
        shift = 2 ** (iteration % hops)
        sent = np.where(alive & np.roll(alive, -shift), 0.5, 0.0)
        sums, weights = ((1 - sent) * one + np.roll(sent * one, shift) for one in (sums, weights))
        return sums / weights

    return step


def random_groups(setup: Setup) -> Step:
    """Those alive, shuffled: floor(n / M) groups of M, the leftovers dealt to them in turn."""

    def step(iteration: int, values: Values, alive: Mask) -> Values:
        who = setup.random.permutation(np.flatnonzero(alive))
        group = np.zeros(setup.peers, dtype=np.int64)
        place, groups = np.arange(len(who)), max(1, len(who) // setup.group_size)
        group[who] = np.where(place < groups * setup.group_size, place // setup.group_size, place % groups)
        return group_means(values, group, alive)

    return step


def random_lines(setup: Setup) -> list[Numbers]:
    """For each axis the line that each peer is in: fixed random cells of the grid, no two peers in one."""
    cells = setup.random.choice(int(np.prod(setup.dims)), setup.peers, replace=False)
    places = np.unravel_index(cells, setup.dims)
    lines = []
    for axis in range(len(setup.dims)):
        line = np.zeros(setup.peers, dtype=np.int64)
        for other, side in enumerate(setup.dims):
            line = line if other == axis else line * side + places[other]
        lines.append(line)
    return lines


def moshpit(setup: Setup) -> Step:
    """Fixed cells; axis = iteration mod d; the mean over those alive of each line."""
    lines = random_lines(setup)
    return lambda iteration, values, alive: group_means(values, lines[iteration % len(lines)], alive)


def moshpit_blocking(setup: Setup) -> Step:
    """The same, but one dead peer blocks its whole line for that iteration."""
    lines = random_lines(setup)

    def step(iteration: int, values: Values, alive: Mask) -> Values:
        line = lines[iteration % len(lines)]
        return group_means(values, line, (np.bincount(line, ~alive) == 0)[line])

    return step


def moshpit_keys(setup: Setup) -> Step:
    """The paper's key chain, as peers run it in plain mode: first keys from ids, crowds split; alone, a key is kept."""
    random, base = setup.random, setup.group_size
    keys: list[Key] = [initial_key(random.bytes(16).hex(), base, len(setup.dims) - 1) for _ in range(setup.peers)]

    def step(iteration: int, values: Values, alive: Mask) -> Values:
        callers: dict[Key, list[int]] = {}
        for peer in random.permutation(np.flatnonzero(alive)).tolist():
            callers.setdefault(keys[peer], []).append(peer)
        groups = [group for crowd in callers.values() for group in split_crowd(crowd, base)]
        number = np.zeros(setup.peers, dtype=np.int64)
        for place, group in enumerate(groups):
            number[group] = place
            if len(group) > 1:
                for peer, digit in zip(group, drawn_digits(random.bytes(16).hex(), base), strict=False):
                    keys[peer] = (*keys[peer][1:], digit)
        return group_means(values, number, alive)

    return step


@lru_cache(maxsize=64)
def grid_numbers(peers: int, dims: tuple[int, ...], round_index: int) -> Numbers:
    """Every peer's group in one round of the planned grid."""
    number = np.zeros(peers, dtype=np.int64)
    for place, group in enumerate(grid_groups(peers, dims, round_index)):
        number[group] = place
    return number


@lru_cache(maxsize=64)
def _blocks(peers: int, dims: tuple[int, ...], rounds_done: int) -> Numbers:
    return np.array([block_of(peer, dims, rounds_done) for peer in range(peers)])


@lru_cache(maxsize=64)
def _claims(peers: int, dims: tuple[int, ...], round_index: int) -> Values:
    return np.array(conserved_claims(peers, dims, round_index))


def moshpit_weighted(setup: Setup) -> Step:
    """The strategy's own grid: in a group each source counts once, with its whole mass.

    A pass of d rounds is one averaging; the next begins anew, everybody with its own weight.
    """
    peers, dims, weights = setup.peers, setup.dims, setup.weights
    mass, source = weights.copy(), np.arange(peers)

    def step(iteration: int, values: Values, alive: Mask) -> Values:
        round_index = iteration % len(dims)
        if round_index == 0:
            mass[:], source[:] = weights, np.arange(peers)
        group, who = grid_numbers(peers, dims, round_index), np.flatnonzero(alive)
        spokesmen = who[np.unique(group[who] * (len(dims) + 1) * peers + source[who], return_index=True)[1]]
        total = np.bincount(group[spokesmen], mass[spokesmen], minlength=peers)
        after = _weighted_means(values, mass, group, spokesmen, who)
        mass[who] = total[group[who]]
        source[who] = peers * (round_index + 1) + _blocks(peers, dims, round_index + 1)[who]
        return after

    return step


class MoshpitConserved:
    """The same grid with conserved shares: all of a group's `mu` goes on, split over the next groups of its members."""

    def __init__(self, setup: Setup) -> None:
        self.mu = setup.weights.copy()
        self._dims = setup.dims

    def __call__(self, iteration: int, values: Values, alive: Mask) -> Values:
        peers, dims, round_index = len(values), self._dims, iteration % len(self._dims)
        group, following = (grid_numbers(peers, dims, (round_index + more) % len(dims)) for more in (0, 1))
        claims, who = _claims(peers, dims, round_index), np.flatnonzero(alive)
        after = _weighted_means(values, self.mu, group, who, who)
        in_order = who[np.argsort(group[who], kind="stable")]
        for members in np.split(in_order, np.flatnonzero(np.diff(group[in_order])) + 1):
            total = float(self.mu[members].sum())
            self.mu[members] = conserved_shares(total, following[members].tolist(), claims[members].tolist())
        return after


def _weighted_means(values: Values, weights: Values, group: Numbers, speaking: Numbers, present: Numbers) -> Values:
    """Those present get the weighted mean of who speaks in their group; without any weight they keep their values."""
    total = np.bincount(group[speaking], weights[speaking], minlength=len(values))
    sums = np.bincount(group[speaking], weights[speaking] * values[speaking], minlength=len(values))
    moved = present[total[group[present]] > 0]
    after = values.copy()
    after[moved] = sums[group[moved]] / total[group[moved]]
    return after


METHODS: dict[str, Callable[[Setup], Step]] = {
    "allreduce": all_reduce,
    "gossip": gossip,
    "sgp": authors_sgp,
    "push_sum": push_sum,
    "random_groups": random_groups,
    "moshpit": moshpit,
    "moshpit_blocking": moshpit_blocking,
    "moshpit_keys": moshpit_keys,
    "moshpit_weighted": moshpit_weighted,
    "moshpit_conserved": MoshpitConserved,
}
