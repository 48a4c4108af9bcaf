"""For how long a peer that broke the protocol is refused: 1 s, twice as long each time, and forgiven with time.

Short at first: an honest peer may meet a defect once. Forgiven: a defect of one version must not part a swarm for ever.
"""

from __future__ import annotations

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 300.0
FORGIVE_SECONDS = 60.0
"""For each of these without an offence, counted from the end of the last refusal, one offence is forgotten."""
MAX_REMEMBERED = 1000


def refusal_seconds(offences: int) -> float:
    """For how long the last of so many offences closes the door."""
    return min(FIRST_SECONDS * 2.0 ** min(offences - 1, 60), LONGEST_SECONDS)


def offences_left(offences: int, good_seconds: float) -> int:
    """How many still count after so long a time without one."""
    return max(0, offences - int(max(0.0, good_seconds) / FORGIVE_SECONDS))


class Penalties:
    """Who is refused until when. Beyond MAX_REMEMBERED the one that offended longest ago is forgotten."""

    def __init__(self) -> None:
        self._offenders: dict[str, tuple[int, float]] = {}  # offences, refused until; the newest offence last

    def punish(self, who: str, now: float) -> float:
        """It offended; returns for how many seconds it is refused from now on.

        While it is refused no offence adds to that: they are those of connections that it had before.
        """
        if (left := self.left_seconds(who, now)) > 0:
            return left
        before, until = self._offenders.pop(who, (0, now))
        offences = 1 + offences_left(before, now - until)
        self._offenders[who] = offences, now + refusal_seconds(offences)
        if len(self._offenders) > MAX_REMEMBERED:
            del self._offenders[next(iter(self._offenders))]
        return refusal_seconds(offences)

    def left_seconds(self, who: str, now: float) -> float:
        """For how long it is refused yet; 0 where it is not."""
        return max(0.0, self._offenders.get(who, (0, now))[1] - now)
