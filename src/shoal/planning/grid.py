"""The virtual grid of an averaging: who meets whom in which round, exact after d rounds for every number of peers.

Source: Moshpit reference, section 8.0. Members are numbered by the roll, 0 to N - 1. With d rounds the grid is a tuple
of sides (k_1, ..., k_d). After round t the members fall into n_t = k_(t+1) * ... * k_d blocks, member r into block
r mod n_t, and all members of a block hold one value: the mean of the block. At the start everybody is a block of its
own, at the end all are one.

    round 1       each of the n_1 blocks is a group
    round t > 1   a block is made of k_t blocks of before ("lines"). Its smallest line has m members, and it meets in m
                  groups: the member at place c of its line joins group c, or (c + line) mod m where c is beyond m

So each group holds at least one member of every line, and the mean over its lines is the mean of the whole block. Each
line stands in it with its whole weight, once, whoever speaks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod

from shoal.core.errors import OptionError

SMALLEST_GROUP = 3
"""With groups of two there is no exact grid for three peers."""


@cache
def plan_grid(count: int, group_size: int) -> tuple[int, ...]:
    """The sides (k_1, ..., k_d) with the fewest rounds in which no group has more than `group_size` members.

    Among those, the one with the smallest largest group. k_1 is the largest group of the first round; `count` members
    that fit into one group meet in one. Raises OptionError.
    """
    if count < 1:
        raise OptionError("count", count, "at least 1")
    if group_size < SMALLEST_GROUP:
        raise OptionError("group_size", group_size, f"at least {SMALLEST_GROUP}")
    rounds = 1
    while True:
        grids = [(-(-count // prod(sides)), *sides) for sides in _sides(rounds - 1, group_size, count)]
        largest = {grid: _largest_group(count, grid) for grid in grids}
        fitting = [grid for grid in grids if largest[grid] <= group_size]
        if fitting:
            return min(fitting, key=lambda grid: (largest[grid], max(grid) - min(grid), grid))
        rounds += 1


def _sides(rounds: int, group_size: int, most_blocks: int) -> Iterator[tuple[int, ...]]:
    """Every (k_2, ..., k_d) of that length with at most `most_blocks` blocks after the first round."""
    if rounds == 0:
        yield ()
        return
    for side in range(2, min(group_size, most_blocks) + 1):
        for rest in _sides(rounds - 1, group_size, most_blocks // side):
            yield (side, *rest)


def _largest_group(count: int, dims: tuple[int, ...]) -> int:
    """The most members that any group has: the lines of a block differ by one member at most, and extras are spread."""
    largest = -(-count // prod(dims[1:]))
    for done in range(1, len(dims)):
        lines, blocks = prod(dims[done:]), prod(dims[done + 1 :])
        shortest, longer = divmod(count, lines)
        extras = min(-(-longer // blocks), dims[done] - 1)  # where all lines of a block are longer, none is an extra
        largest = max(largest, dims[done] + -(-extras // shortest))
    return largest


def block_of(number: int, dims: tuple[int, ...], rounds_done: int) -> int:
    """The block of a member after that many rounds: all its members hold one value."""
    return number % prod(dims[rounds_done:]) if rounds_done else number


def grid_groups(count: int, dims: tuple[int, ...], round_index: int) -> list[list[int]]:
    """The groups of a round (from 0), each in rising order. Every member is in exactly one."""
    blocks = prod(dims[round_index + 1 :])
    if round_index == 0:
        return [list(range(block, count, blocks)) for block in range(blocks)]
    groups = []
    step = prod(dims[round_index:])
    for block in range(blocks):
        lines = [range(first, count, step) for first in range(block, step, blocks)]
        shortest = min(len(line) for line in lines)
        met: list[list[int]] = [[] for _ in range(shortest)]
        for number, line in enumerate(lines):
            for place, member in enumerate(line):
                met[place if place < shortest else (place + number) % shortest].append(member)
        groups += [sorted(group) for group in met]
    return groups
