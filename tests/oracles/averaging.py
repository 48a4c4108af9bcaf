"""The baselines of the averaging experiment in NumPy, from sections 4.2, 5.1 and 6.1 of the Moshpit reference alone.

Each takes the values (peers,) and one mask of the alive per iteration, and gives the values after each. Mixing is by
whole matrices: slow, and plain to see. Nothing is shared with the code it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor, log2

import numpy as np

Masks = Sequence[np.ndarray]


def all_reduce(values: np.ndarray, alive: Masks) -> list[np.ndarray]:
    """All alive: the mean. Else nobody changes."""
    after = []
    for mask in alive:
        values = np.repeat(values.mean(), len(values)) if mask.all() else values
        after.append(values)
    return after


def gossip(values: np.ndarray, alive: Masks) -> list[np.ndarray]:
    """Ring: self and one neighbour on each side."""
    one = np.eye(len(values))
    return mix(values, alive, lambda number: one + np.roll(one, 1, axis=1) + np.roll(one, -1, axis=1))


def authors_sgp(values: np.ndarray, alive: Masks) -> list[np.ndarray]:
    """Self and shifts by 2^k and 2^(k+1), rolled flat; floor(log2(N - 1)) matrices in turn, iterations from 1."""
    one, count = np.eye(len(values)), floor(log2(len(values) - 1))
    return mix(values, alive, lambda number: one + sum(np.roll(one, 2 ** ((number + 1) % count + k)) for k in (0, 1)))


def mix(values: np.ndarray, alive: Masks, matrix_of: Callable[[int], np.ndarray]) -> list[np.ndarray]:
    """Rows are normalised over the columns of the alive; the rows of the dead keep their value."""
    after = []
    for number, mask in enumerate(alive):
        matrix = matrix_of(number) * mask[None, :]
        matrix[~mask] = np.eye(len(values))[~mask]
        values = matrix / matrix.sum(axis=1, keepdims=True) @ values
        after.append(values)
    return after


def push_sum(values: np.ndarray, alive: Masks) -> list[np.ndarray]:
    """Peer i halves (sum, weight) and sends one half to i + 2^k, k = iteration mod log2 N. Both must be alive."""
    peers = len(values)
    state, after = np.stack([values, np.ones(peers)], axis=1), []
    for number, mask in enumerate(alive):
        matrix = np.eye(peers)
        for peer in range(peers):
            to = (peer + 2 ** (number % ceil(log2(peers)))) % peers
            if mask[peer] and mask[to]:
                matrix[peer, peer] -= 0.5
                matrix[to, peer] += 0.5
        state = matrix @ state
        after.append(state[:, 0] / state[:, 1])
    return after


def random_groups(values: np.ndarray, alive: Masks, size: int, orders: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`orders`: the alive of each iteration, shuffled. floor(n / M) groups of M, leftovers dealt one by one."""
    after = []
    for order, mask in zip(orders, alive, strict=True):
        assert sorted(order) == list(np.flatnonzero(mask))
        groups = [list(order[first : first + size]) for first in range(0, len(order) - size + 1, size)] or [[]]
        for place, peer in enumerate(order[sum(map(len, groups)) :]):
            groups[place % len(groups)].append(peer)
        values = values.copy()
        for group in groups:
            if group:
                values[group] = values[group].mean()
        after.append(values)
    return after


def blocked_cells(values: np.ndarray, side: int, axes: int, cells: np.ndarray, alive: Masks) -> list[np.ndarray]:
    """Fixed cells; axis = iteration mod d; a line with a dead peer does nothing."""
    after = []
    for number, mask in enumerate(alive):
        place = np.full(side**axes, -1)
        place[cells] = np.arange(len(values))
        values = values.copy()
        for line in np.moveaxis(place.reshape((side,) * axes), number % axes, -1).reshape(-1, side):
            members = line[line >= 0]
            if len(members) and mask[members].all():
                values[members] = values[members].mean()
        after.append(values)
    return after
