"""Max-min fair rates of flows over shared lines, by water-filling (Bertsekas and Gallager, Data Networks, 6.5.2).

A line shared by n flows gives each 1/n of what is left of it. Where none of its flows could get less on its other line,
that share is their rate, and both lines go on without them. What is left per flow never falls by that, so all lines
that are the tightest of their neighbourhood are filled at once: a few rounds, however many lines there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FEW_FLOWS = 200
"""Up to so many, plain Python is faster than NumPy."""
TIE = 1.0 + 1e-12
"""Shares that differ by less are equal: what differs is rounding."""


def fair_rates(ups: Sequence[int], downs: Sequence[int], capacities: Sequence[float]) -> list[float]:
    """The rate of each flow i, which crosses the lines `ups[i]` and `downs[i]`, two places in `capacities`."""
    few = len(ups) <= FEW_FLOWS
    return _fill_few(ups, downs, capacities) if few else _fill_many(ups, downs, capacities)


def _fill_few(ups: Sequence[int], downs: Sequence[int], capacities: Sequence[float]) -> list[float]:
    if len(ups) == 1:
        return [min(capacities[ups[0]], capacities[downs[0]])]
    left, counts = list(capacities), [0] * len(capacities)
    for up, down in zip(ups, downs, strict=True):
        counts[up] += 1
        counts[down] += 1
    rates, waiting = [0.0] * len(ups), list(range(len(ups)))
    while waiting:
        shares = [what / count if count else 0.0 for what, count in zip(left, counts, strict=True)]
        tightest = [True] * len(shares)
        for flow in waiting:
            up, down = ups[flow], downs[flow]
            if shares[up] > shares[down] * TIE:
                tightest[up] = False
            elif shares[down] > shares[up] * TIE:
                tightest[down] = False
        others = []
        for flow in waiting:
            up, down = ups[flow], downs[flow]
            if not (tightest[up] or tightest[down]):
                others.append(flow)
                continue
            rate = rates[flow] = min(shares[up], shares[down])
            for line in (up, down):
                left[line] = max(0.0, left[line] - rate)
                counts[line] -= 1
        waiting = others
    return rates


def _fill_many(ups: Sequence[int], downs: Sequence[int], capacities: Sequence[float]) -> list[float]:
    up, down, left = np.array(ups, np.intp), np.array(downs, np.intp), np.array(capacities, np.float64)
    lines = len(left)
    counts = np.bincount(up, minlength=lines) + np.bincount(down, minlength=lines)
    rates, waiting = np.zeros(len(up)), np.arange(len(up))
    while len(waiting):
        shares = left / np.maximum(counts, 1)
        up_share, down_share = shares[up], shares[down]
        tightest = np.ones(lines, bool)
        tightest[up[up_share > down_share * TIE]] = False
        tightest[down[down_share > up_share * TIE]] = False
        filled = tightest[up] | tightest[down]
        rate = np.minimum(up_share, down_share)[filled]
        rates[waiting[filled]] = rate
        for line in (up[filled], down[filled]):
            left -= np.bincount(line, rate, minlength=lines)
            counts -= np.bincount(line, minlength=lines)
        np.maximum(left, 0.0, out=left)
        others = ~filled
        up, down, waiting = up[others], down[others], waiting[others]
    return rates.tolist()
