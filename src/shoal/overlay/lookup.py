"""The state of one iterative look-up of several points at once (Kademlia, section 2.3). It sends nothing."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence

from shoal.core.clock import Random
from shoal.overlay.records import SignedRecord
from shoal.overlay.routing import Contact
from shoal.planning.distance import point_of

MAX_POINTS_PER_CALL = 32
MAX_CANDIDATES = 4096


class LookUp:
    """For each point the candidates in order of distance; it is done when the `width` nearest live ones answered."""

    def __init__(self, points: Sequence[int], width: int, wants_records: bool, random: Random | None = None) -> None:
        self.wants_records = wants_records
        self._random = random  # who of the nearest is asked first, where not the nearest of all
        self.extra = 0
        """How many more may be asked than it takes: while the nearest are silent, the next nearest are asked too."""
        self.found: dict[int, dict[str, SignedRecord]] = {point: {} for point in points}
        self._width = width
        self._ranked: dict[int, list[tuple[int, str]]] = {point: [] for point in points}
        self._ways: dict[str, list[Contact]] = {}  # where to try each peer; with none left it is lost
        self._seen: dict[Contact, None] = {}
        self._answered: dict[tuple[str, int], bool] = {}  # (peer, point): False while it is asked

    def learn(self, contacts: Iterable[Contact]) -> None:
        """More candidates, or other endpoints of one: those who name it may lie."""
        for contact in contacts:
            if contact in self._seen or len(self._seen) >= MAX_CANDIDATES:
                continue
            self._seen[contact] = None
            if contact.peer_id not in self._ways:
                for point, ranked in self._ranked.items():
                    bisect.insort(ranked, (point_of(contact.peer_id) ^ point, contact.peer_id))
            self._ways.setdefault(contact.peer_id, []).append(contact)

    def lose(self, contact: Contact, points: Iterable[int]) -> None:
        """It did not answer about these points there: its other endpoints, or the next nearest, take its place."""
        ways = self._ways[contact.peer_id]
        if contact in ways:
            ways.remove(contact)
        for point in points:
            self._answered.pop((contact.peer_id, point), None)

    def _front(self, point: int, extra: int = 0) -> list[str]:
        live = (peer_id for _, peer_id in self._ranked[point] if self._ways[peer_id])
        return list(itertools.islice(live, self._width + extra))

    def due(self) -> tuple[Contact, list[int]] | None:
        """Whom to ask next, and about which points; they count as asked from now on."""
        unasked = {
            point: [peer_id for peer_id in self._front(point, self.extra) if (peer_id, point) not in self._answered]
            for point in self._ranked
        }
        candidates = next((peer_ids for peer_ids in unasked.values() if peer_ids), None)
        if candidates is None:
            return None
        chosen = candidates[0] if self._random is None else self._random.choice(candidates)
        points = [point for point, peer_ids in unasked.items() if chosen in peer_ids][:MAX_POINTS_PER_CALL]
        self._answered.update(((chosen, point), False) for point in points)
        return self._ways[chosen][0], points

    def answer(self, peer_id: str, points: Iterable[int]) -> None:
        """It answered about these points."""
        self._answered.update(((peer_id, point), True) for point in points)

    def known(self, points: Iterable[int], most: int) -> bytes:
        """The marks of at most so many records that were found under these points."""
        found = (record.mark for point in points for record in self.found[point].values())
        return b"".join(itertools.islice(found, most))

    def done(self) -> bool:
        """Whether the nearest of every point have answered."""
        return all(self._answered.get((who, point)) for point in self._ranked for who in self._front(point))

    def nearest(self, point: int) -> list[Contact]:
        """The nearest that answered, nearest first."""
        return [self._ways[who][0] for who in self._front(point) if self._answered.get((who, point))]
