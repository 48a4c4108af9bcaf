"""Moshpit SGD (Ryabinin et al. 2021): local steps, and Moshpit All-Reduce of the parameters in small groups.

The peers of one averaging sit in a virtual grid; in each round every line of it is one group. The paper's grid is exact
for N = M^d peers. Here it is the mass-weighted one (reference, section 8.0), exact after d rounds for every N:

    roll <- who takes part, in order, with weights         one record, the same at everybody
    dims <- plan_grid(N, group_size)                       d rounds, no group above group_size
    source, mass <- myself, my weight
    for t in 1..d:
        G <- my group of round t                           a pure function of the roll
        theta, mass <- butterfly all-reduce over G         each source in G counts once, with its whole mass
        source <- my block after round t                   all its members hold the same mean
    a failed round: keep theta, source and mass, go on     it costs one group one round

Each peer sends about 2 s bytes a round, for s bytes of parameters, whatever N is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from shoal.core.errors import NobodyThere, OptionError, RoundError
from shoal.core.options import check_number
from shoal.planning.grid import SMALLEST_GROUP, block_of, grid_groups, plan_grid
from shoal.planning.keys import initial_key, next_key
from shoal.protocols.averaging import average_in_background
from shoal.protocols.butterfly import RoundReport, RoundResult, butterfly
from shoal.protocols.large_batch import begin_stepping, step_together
from shoal.protocols.outcome import Outcome, is_exact
from shoal.protocols.peer import Peer
from shoal.protocols.replica import Replica
from shoal.protocols.roll_record import PLAIN, TRAIN, Here, Roll, Stand
from shoal.protocols.round_record import Group, whole_group
from shoal.strategies.options import GRADIENTS, PARAMETERS, check_averaging
from shoal.tensors.flat import Shapes, Vectors


@dataclass(frozen=True, kw_only=True)
class Moshpit:
    """Averages all peers that take part in d rounds of groups of at most `group_size` members.

    `every_seconds` (2 where neither is given) or `every_steps` (of the fastest peer): how often. `timeout_seconds`:
    when an averaging is given up. `part_bytes`: how much is sent, averaged and returned at a time.

    `plain_rounds` d, from 2: the paper's own way, for swarms too large for one roll: groups form by keys of d-1
    digits, and wait `window_seconds` for their members. Every peer weighs the same, and d rounds bring the peers near
    to the mean, not exactly onto it. Without it, one roll of all who take part decides, and the mean is exact.

    `average`: "parameters" is all of the above. "gradients": the peers gather `target_batch` samples together, however
    unequal they are, and all take one step with the mean gradient, clipped to `max_grad_norm` where that is given.
    Where the target is not reached in `gather_timeout_seconds` (600), the step is taken with what there is.
    """

    group_size: int = 8
    every_seconds: float | None = None
    every_steps: int | None = None
    timeout_seconds: float = 30.0
    part_bytes: int = 1 << 19
    average: str = PARAMETERS
    target_batch: int | None = None
    max_grad_norm: float | None = None
    gather_timeout_seconds: float | None = None
    plain_rounds: int | None = None
    window_seconds: float = 1.0

    def __post_init__(self) -> None:
        check_number("plain_rounds", self.plain_rounds, 2, 10, whole=True, optional=True)
        smallest = SMALLEST_GROUP if self.plain_rounds is None else 2
        check_number("group_size", self.group_size, smallest, 1024, whole=True)
        check_number("window_seconds", self.window_seconds, 0.1, 60)
        check_averaging(self)
        if self.average == GRADIENTS and self.plain_rounds is not None:
            bounds = "left out with average='gradients': replicas that step together need the exact mean"
            raise OptionError("plain_rounds", self.plain_rounds, bounds)

    async def prepare(self, peer: Peer, replica: Replica) -> None:
        """With the run's state, before this peer trains. Raises AttachError or OutOfStep."""
        if self.average == GRADIENTS:
            await begin_stepping(peer, replica, self.max_grad_norm)

    async def run(self, peer: Peer, replica: Replica) -> None:
        """Average until this peer leaves."""
        all_reduce = partial(self.all_reduce, peer)
        if self.target_batch is not None and self.gather_timeout_seconds is not None:
            await step_together(peer, replica, all_reduce, self.target_batch, self.gather_timeout_seconds)
        else:
            await average_in_background(peer, replica, all_reduce, self.every_seconds, self.every_steps)

    async def all_reduce(
        self, peer: Peer, series: str, vectors: Vectors, weight: float, shapes: Shapes, *,
        timeout_seconds: float | None = None, stand: Stand | None = None,
    ) -> Outcome:  # fmt: skip
        """All d rounds of one averaging. Raises NobodyThere, TensorError, or RoundError when no round succeeded."""
        until = peer.clock.now() + (timeout_seconds or self.timeout_seconds)
        if self.plain_rounds is not None and series == TRAIN:
            return await self._average_plain(peer, vectors, shapes, until)
        roll = await peer.rolls.call(series, weight, peer.bandwidth(), shapes, until - peer.clock.now(), stand)
        dims = plan_grid(len(roll.members), self.group_size)
        me, mass, source = roll.members.index(peer.id), weight, peer.id
        reports: list[RoundReport] = []
        failures: list[str] = []
        last: RoundResult | None = None
        for round_index in range(len(dims)):
            seconds = max(0.1, until - peer.clock.now()) / (len(dims) - round_index)
            try:
                last = await self._round(
                    peer, group_in_round(roll, dims, round_index, me), vectors, source, mass, seconds
                )
            except RoundError as error:
                failures.append(error.reason)
                continue
            vectors, mass = last.vectors, last.mass
            source = f"block {block_of(me, dims, round_index + 1)} after round {round_index + 1}"
            reports.append(last.report)
        if last is None:
            raise RoundError("; ".join(failures), roll.number, tuple(roll.members))
        exact = not failures and is_exact(roll, last)
        return Outcome(vectors, roll, len(dims), tuple(reports), tuple(failures), exact)

    async def _round(
        self, peer: Peer, group: Group, vectors: Vectors, source: str, mass: float, timeout_seconds: float
    ) -> RoundResult:
        return await butterfly(
            peer.rounds, group, vectors, source=source, mass=mass,
            part_bytes=self.part_bytes, timeout_seconds=timeout_seconds,
        )  # fmt: skip

    async def _average_plain(self, peer: Peer, vectors: Vectors, shapes: Shapes, until: float) -> Outcome:
        """Reference, section 2.2: d groups by key, one after the other; the key slides along with each."""
        assert self.plain_rounds is not None
        meetings, number = peer.meetings, peer.meetings.begin()
        if meetings.key is None:
            meetings.key = initial_key(peer.id, self.group_size, self.plain_rounds - 1)
        reports: list[RoundReport] = []
        failures: list[RoundError | NobodyThere] = []
        roll: Roll | None = None
        for round_index in range(self.plain_rounds):
            now = peer.clock.now()
            seconds = max(0.1, until - now) / (self.plain_rounds - round_index)
            window_seconds, places = min(self.window_seconds, seconds / 2), tuple(peer.members.me.endpoints)
            here = Here(PLAIN, number, 1.0, peer.bandwidth(), shapes, window_seconds, places=places)
            try:
                roll = await meetings.meet(f"{number}.{round_index} {meetings.key}", self.group_size, here, seconds)
                left = max(0.1, now + seconds - peer.clock.now())
                result = await self._round(peer, whole_group(roll, round_index), vectors, peer.id, 1.0, left)
            except (NobodyThere, RoundError) as error:
                failures.append(error)
                continue  # theta stays, the key stays: it costs one group one round
            vectors = result.vectors
            meetings.key = next_key(meetings.key, roll.roll_id, roll.members, peer.id, self.group_size)
            reports.append(result.report)
        reasons = tuple(error.reason if isinstance(error, RoundError) else str(error) for error in failures)
        if roll is None or not reports:
            if all(isinstance(error, NobodyThere) for error in failures):
                raise failures[-1]
            raise RoundError("; ".join(reasons), number)
        return Outcome(vectors, roll, self.plain_rounds, tuple(reports), reasons, exact=False)


def group_in_round(roll: Roll, dims: tuple[int, ...], round_index: int, number: int) -> Group:
    """A member's group, and the weight of the block that each of its members speaks for."""
    groups = grid_groups(len(roll.members), dims, round_index)
    numbers = next(group for group in groups if number in group)
    masses: dict[int, float] = {}
    for one, weight in enumerate(roll.weights):
        block = block_of(one, dims, round_index)
        masses[block] = masses.get(block, 0.0) + weight
    return Group(roll, round_index, tuple(numbers), tuple(masses[block_of(one, dims, round_index)] for one in numbers))
