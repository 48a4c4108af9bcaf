"""Moshpit averaging in NumPy, from the description alone: the mass-weighted grid, fixed cells, the key chain.

Mass-weighted grid (reference 8.0, for any number of rounds d). `blocks` = (k_2, ..., k_d).
* Level t has n_t = k_(t+1) * ... * k_d blocks, n_d = 1; member r is of block r mod n_t; at level 0 everyone is alone.
* Round 1: the groups are the n_1 blocks. Round t: block b is joined from its k_t sub-blocks, the numbers b + j n_t at
  level t-1. With m = the size of the smallest, index c in sub-block j joins group c if c < m, else (c + j) mod m.
* A member carries (source, mass): the block it last averaged in, and the mass of its group there, which is that of the
  block if nobody was absent. In a group one member stands for each source: the first by number.

Conserved shares (8.0): each member carries mu, first its weight; group value = sum mu x / sum mu; the whole mu of the
group is split equally over the next groups that its present members go to, and equally among those of one of them.

Fixed cells (5.1): N random cells of M^d; axis = iteration mod d; plain mean over the alive of each line.

Key chain (2.1 to 2.4): the key is the last d-1 base-M digits, at first those of the peer's number. The alive of one
key are a group; its members draw distinct digits of [0, M) and append them. Who is dead keeps value and key.
A group of n > M is split into ceil(n / M): peers in order of number, cut as evenly as can be, the longer cuts first.
With `split=False` it stays whole, and the members beyond M draw digits again: the figures of 5.2 are of such groups.

Values are (members, size). Nothing here is fast and nothing is shared with the code it is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

Groups = list[list[int]]


@dataclass
class Round:
    values: np.ndarray  # (members, size): what each member holds afterwards
    groups: Groups  # who averaged together
    keys: np.ndarray  # (members, d-1): the keys for the next round


def grid_groups(count: int, blocks: Sequence[int]) -> list[Groups]:
    """The groups of each of the len(blocks) + 1 rounds."""
    rounds = [[list(range(block, count, prod(blocks))) for block in range(prod(blocks))]]
    for done in range(len(blocks)):
        finer, coarser = prod(blocks[done:]), prod(blocks[done + 1 :])
        groups = []
        for block in range(coarser):
            lines = [range(block + j * coarser, count, finer) for j in range(blocks[done])]
            m = min(len(line) for line in lines)
            joined: Groups = [[] for _ in range(m)]
            for j, line in enumerate(lines):
                for c, member in enumerate(line):
                    joined[c if c < m else (c + j) % m].append(member)
            groups += [sorted(group) for group in joined]
        rounds.append(groups)
    return rounds


def mass_weighted(
    values: np.ndarray, weights: Sequence[float], blocks: Sequence[int], alive: Sequence[np.ndarray] | None = None
) -> list[np.ndarray]:
    """The values after each round. `alive[round]`: a mask; who is dead keeps value, source and mass."""
    held, mass = values.astype(np.float64), np.array(weights, dtype=np.float64)
    source: list[object] = list(range(len(values)))
    after = []
    for number, groups in enumerate(grid_groups(len(values), blocks)):
        for group in groups:
            present = [member for member in group if alive is None or alive[number][member]]
            stands = list({source[member]: member for member in reversed(present)}.values())
            total = mass[stands].sum()
            if total > 0:
                held[present] = mass[stands] @ held[stands] / total
            mass[present] = total
            for member in present:
                source[member] = (number, member % prod(blocks[number:]))
        after.append(held.copy())
    return after


def conserved(
    values: np.ndarray, weights: Sequence[float], blocks: Sequence[int], alive: Sequence[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(values, mu) after each round of `alive`; after the last round of the grid its first comes again."""
    held, mu = values.astype(np.float64), np.array(weights, dtype=np.float64)
    rounds, after = grid_groups(len(values), blocks), []
    for number, mask in enumerate(alive):
        following = {}
        for place, group in enumerate(rounds[(number + 1) % len(rounds)]):
            following.update(dict.fromkeys(group, place))
        held, mu = held.copy(), mu.copy()
        for group in rounds[number % len(rounds)]:
            present = [member for member in group if mask[member]]
            total = mu[present].sum()
            if total > 0:
                held[present] = mu[present] @ held[present] / total
            ways = [following[member] for member in present]
            for member, way in zip(present, ways, strict=True):
                mu[member] = total / len(set(ways)) / ways.count(way)
        after.append((held, mu))
    return after


def plain_on_grid(
    values: np.ndarray, blocks: Sequence[int], alive: Sequence[np.ndarray] | None = None
) -> list[np.ndarray]:
    """The same groups, each taking the plain mean of its members: what the mass is compared with."""
    held, after = values.astype(np.float64), []
    for number, groups in enumerate(grid_groups(len(values), blocks)):
        held = _plain_mean(held, groups, np.ones(len(values), bool) if alive is None else alive[number])
        after.append(held)
    return after


def fixed_cells(values: np.ndarray, side: int, axes: int, rounds: int, p: float, seed: int) -> list[np.ndarray]:
    """The values after each iteration. Every peer is alive with chance 1-p, anew in each."""
    random = np.random.default_rng(seed)
    cells = random.choice(side**axes, len(values), replace=False)
    digits = cells[:, None] // side ** np.arange(axes) % side
    held, after = values.astype(np.float64), []
    for iteration in range(rounds):
        lines = _same_key(np.delete(digits, iteration % axes, axis=1), range(len(values)))
        held = _plain_mean(held, lines, random.random(len(values)) >= p)
        after.append(held)
    return after


def key_chain(
    values: np.ndarray,
    side: int,
    axes: int,
    rounds: int,
    p: float,
    seed: int,
    split: bool = True,
    numbered: bool = True,
) -> list[Round]:
    """Every peer is alive with chance 1-p, anew in each round.

    `numbered=False`: the first keys are random digits, and a crowd is shuffled before it is cut.
    """
    random = np.random.default_rng(seed)
    keys = np.arange(len(values))[:, None] // side ** np.arange(axes - 1) % side
    keys = keys if numbered else random.integers(0, side, keys.shape)
    held, after = values.astype(np.float64), []
    for _ in range(rounds):
        alive = random.random(len(values)) >= p
        crowds = _same_key(keys, np.flatnonzero(alive))
        crowds = crowds if numbered else [random.permutation(crowd).tolist() for crowd in crowds]
        groups = [
            part.tolist() for crowd in crowds for part in np.array_split(crowd, -(-len(crowd) // side) if split else 1)
        ]
        held, keys = _plain_mean(held, groups, alive), keys.copy()
        for group in groups:
            again = random.integers(0, side, max(0, len(group) - side))
            drawn = np.concatenate([random.permutation(side), again])[: len(group)]
            keys[group] = np.column_stack([keys[group], drawn])[:, 1:]
        after.append(Round(held, groups, keys))
    return after


def _same_key(keys: np.ndarray, peers: Sequence[int] | np.ndarray) -> Groups:
    """The peers of each key, in order of number."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for peer in peers:
        groups.setdefault(tuple(keys[peer].tolist()), []).append(int(peer))
    return [groups[key] for key in sorted(groups)]


def _plain_mean(values: np.ndarray, groups: Groups, alive: np.ndarray) -> np.ndarray:
    means = values.copy()
    for group in groups:
        present = [member for member in group if alive[member]]
        if present:
            means[present] = values[present].mean(0)
    return means
