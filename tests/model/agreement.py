"""A model of the agreement rule of the group all-reduce, and a search of everything it can do.

One part of the vector, in a group of n members. Member 0 owns the part; the order of its reducers is 0, 1, ..., n-1.
A version is the place of the member that made it (0 is the owner's). `Member` is what one member knows, a state is the
tuple of all members, `steps` yields every state that can come next, and `search` visits them breadth first, so that the
trace to a bad state is a shortest one. Messages are not objects. Each of these says why nothing is lost by that:

* Death with its first notice. A death shows only when somebody notices it; until then the dead member is one that
  takes no step. So death moves right, to the first notice, and the two are one step ("2 dies").
* Notice with its first use. Noticing is local and no step needs a death to be unnoticed for longer than it is, so a
  notice moves right to the step that uses it (ask the next one, pass the barrier, give up a holder).
* Prefix of a dead channel. Attempt 0 is delivered, or the death of the owner is noticed first: that is the choice of
  the prefix, made by each recipient when it matters. Sent and not yet sent look the same to the recipient.
* Acknowledgements. They only allow the owner an early end that it may also not take, so a slow one adds nothing.
* Lists. A list is fixed on entry to an exchange and is not looked at before the barrier, so the barrier reads the
  lists of the others. Only death needs care: an answer counts only if it was asked for before. When j dies, each
  member waiting in an exchange that j has entered chooses what is in flight to it: nothing, or the answer
  (`heard`). A final member may have answered with its list before it was final, or with its final version after:
  both are tried. Whoever enters an exchange after the death hears nothing.
* Other questions. An answer given at t1 and delivered at t2 is one step at t1 (the value is fixed then, and is safe
  from the death of the sender), and a second step at t2. An answer that is lost is as one never given.
* Opening. Who holds a version that no message can lower enters exchange 1, or ends early, at once: to enter sooner
  only adds possible answers, each of which may still be late or lost. The owner may wait in "hold" to end early.
* What nobody can read any more is erased (`canonical`). Members differ by their place: no symmetry is used.

A fetch from a member that holds a lower version by now may bring either of them: the rule does not say which.
"""

from collections.abc import Iterator
from itertools import combinations, product
from typing import NamedTuple

NONE = 9  # no version: larger than any
CLOSING = ("list", "fetch", "fetched")
SILENT = ("start", "wait", "ask", "told", "act")  # these hold nothing yet


class Rule(NamedTuple):
    """The rule, and what the negative controls leave out of it."""

    closing: bool = True  # else a member is final with the first version that it holds
    twice: bool = True  # else one exchange decides: the same result in two successive ones is not asked for
    same: bool = True  # else the two exchanges need not have lost the same members
    barrier: bool = True  # else a member may fetch a lower version as soon as one list shows it


class Member(NamedTuple):
    """What one member knows; `gone` (those it counts as lost), `asked` and `lost` are bit sets."""

    phase: str
    held: int = NONE
    gone: int = 0
    asked: int = 0  # ask: the member asked; act: those that answered; fetch: those that listed the merged version
    told: int = NONE  # told, act: the lowest version that an answer named
    e: int = 0
    listed: int = NONE  # its list of exchange e
    before: int = NONE  # its list of exchange e - 1
    merged: int = NONE  # at its last barrier
    lost: int = 0  # at its last barrier
    ready: bool = False  # it is final if it holds merged
    heard: tuple[int, ...] = ()  # by member: the list that a dead one got out in this exchange


State = tuple[Member, ...]
Step = tuple[str, int, State]  # what happens, how many die in it, and the state after it


def bits(mask: int) -> list[int]:
    return [k for k in range(mask.bit_length()) if mask >> k & 1]


def initial(n: int) -> State:
    return (Member("start"), *[Member("wait")] * (n - 1))


def put(state: State, i: int, member: Member) -> State:
    return (*state[:i], member, *state[i + 1 :])


def dead(state: State) -> int:
    return sum(1 << k for k, m in enumerate(state) if m.phase == "dead")


def answers(state: State, i: int, j: int) -> set[int]:
    """What the live j may answer to i in the exchange of i; NONE is the answer of one that failed."""
    e, other = state[i].e, state[j]
    found = set()
    if other.e == e:
        found.add(other.listed)
    elif other.e == e + 1:
        found.add(other.before)
    assert other.e <= e + 1, "nobody passes a barrier without us"
    if other.phase in ("final", "failed"):
        found.add(other.held if other.phase == "final" else NONE)
    return found


def kill(state: State, victims: int, noticed_by: int) -> Iterator[State]:
    """The victims die, with every choice of what is still in flight from them to those in an exchange."""
    chosen: list[list[tuple[int, int, int]]] = []
    for j in bits(victims):
        for k, member in enumerate(state):
            if k != noticed_by and member.phase == "list" and not (victims | member.gone) >> k & 1:
                chosen.append([(k, j, value) for value in answers(state, k, j) | {NONE}])
    for choice in product(*chosen):
        after = list(state)
        for k, j, value in choice:
            heard = after[k].heard
            after[k] = after[k]._replace(heard=(*heard[:j], value, *heard[j + 1 :]))
        for j in bits(victims):
            asked = after[j].asked if after[j].phase == "ask" else 0
            after[j] = Member("dead", after[j].held, asked=asked)
        yield tuple(after)


def notice(state: State, i: int, who: int, left: int) -> Iterator[tuple[str, int, State]]:
    """Member i counts `who` as lost; those of them that live die now."""
    new = who & ~state[i].gone & ~dead(state)
    if not new:
        yield "", 0, put(state, i, state[i]._replace(gone=state[i].gone | who))
        return
    if new.bit_count() > left:
        return
    label = "".join(f"{j} dies, " for j in bits(new))
    for after in kill(state, new, i):
        yield label, new.bit_count(), put(after, i, after[i]._replace(gone=after[i].gone | who))


def enter(member: Member, n: int) -> Member:
    """The next exchange: from here on its list is fixed."""
    return Member("list", member.held, member.gone, 0, NONE, member.e + 1, member.held, member.listed,
                  member.merged, member.lost, False, (NONE,) * n)  # fmt: skip


def opened(rule: Rule, member: Member, n: int, version: int, may_end: bool) -> Iterator[tuple[str, Member]]:
    """Member holds a version for good: it opens the closing exchange, or is final early where it may."""
    member = Member("hold", version, member.gone)
    if may_end or not rule.closing:
        yield "is final", Member("final", version)
    if rule.closing:
        yield "enters exchange 1", enter(member, n)


def obtain(rule: Rule, state: State, i: int, left: int) -> Iterator[Step]:
    """Steps of a member before its closing exchange."""
    n, me = len(state), state[i]
    if me.phase == "start":
        yield "0 makes attempt 0", 0, put(state, 0, Member("hold", 0))
    elif me.phase == "hold":
        acknowledged = all(other.held == 0 for other in state)
        for what, after in opened(rule, me, n, 0, acknowledged):
            yield f"0 {what}", 0, put(state, 0, after)
    if me.phase in ("wait", "act") and state[0].held == 0 and not me.gone & 1:
        for what, after in opened(rule, me, n, 0, not me.gone):
            yield f"{i} receives attempt 0 and {what}", 0, put(state, i, after)
    yield from ask(rule, state, i, left)
    if me.phase == "act":
        yield from reduce(rule, state, i, left)


def ask(rule: Rule, state: State, i: int, left: int) -> Iterator[Step]:
    """Member i holds nothing, and turns to the next in the order; or it is asked itself."""
    n, me = len(state), state[i]
    if me.phase in ("wait", "ask"):
        for j in range(max(bits(me.asked), default=0) + 1, i + 1):  # all before j are dead: j is next
            for label, deaths, after in notice(state, i, (1 << j) - 1, left):
                then = after[i]._replace(phase="act" if j == i else "ask", asked=0 if j == i else 1 << j)
                yield f"{label}{i} notices: {'it acts' if j == i else f'it asks {j}'}", deaths, put(after, i, then)
    if me.phase == "ask":
        j = bits(me.asked)[0]
        if state[j].phase not in (*SILENT, "dead"):
            yield f"{j} tells {i} of {state[j].held}", 0, put(state, i, me._replace(phase="told", told=state[j].held))
    if me.phase == "told":
        for what, then in opened(rule, me, n, me.told, False):
            yield f"{i} receives attempt {me.told} and {what}", 0, put(state, i, then)
    askers = sum(1 << j for j, m in enumerate(state) if m.phase in ("ask", "dead") and m.asked == 1 << i)
    if me.phase in ("wait", "ask", "told") and askers & ~me.gone:
        yield f"{i} was asked and acts", 0, put(state, i, me._replace(phase="act", asked=0))


def reduce(rule: Rule, state: State, i: int, left: int) -> Iterator[Step]:
    """Member i asks all for the part; when all answered or are lost, it takes the lowest, or reduces itself."""
    n, me = len(state), state[i]
    for k, other in enumerate(state):
        if k != i and not (me.asked | me.gone) >> k & 1 and other.phase != "dead":
            held = NONE if other.phase in SILENT else other.held
            asked = me._replace(asked=me.asked | 1 << k, told=min(me.told, held))
            yield f"{k} tells {i} of {'nothing' if held == NONE else held}", 0, put(state, i, asked)
    missing = (1 << n) - 1 & ~(1 << i | me.asked | me.gone)
    version = i if me.told == NONE else me.told
    for label, deaths, after in notice(state, i, missing, left):
        for what, then in opened(rule, after[i], n, version, False):
            did = f"makes attempt {i}" if me.told == NONE else f"adopts attempt {version}"
            yield f"{label}{i} {did} and {what}", deaths, put(after, i, then)


def decide(rule: Rule, me: Member, i: int, n: int) -> tuple[str, Member]:
    """What follows the barrier and the fetch of an exchange."""
    if me.gone == (1 << n) - 1 & ~(1 << i):
        return "fails: all others are lost", me._replace(phase="failed")
    if me.held == me.merged and (me.ready or not rule.twice):
        return f"is final with {me.held}", me._replace(phase="final")
    if me.e >= me.gone.bit_count() + 2:
        return "fails: not agreed", me._replace(phase="failed")
    return f"enters exchange {me.e + 1} with {me.held}", enter(me, n)


def heard(state: State, i: int, j: int) -> set[int]:
    """The lists of j that i may have at its barrier; NONE if it failed."""
    other = state[j]
    if state[i].gone >> j & 1:
        return set()
    return {state[i].heard[j]} - {NONE} if other.phase == "dead" else answers(state, i, j)  # fixed when it died


def gathered(state: State, i: int, left: int) -> set[tuple[int, int, int, int]]:
    """Every choice of the answers, and of the deaths noticed by now: (merged, who listed it, lost, lost alive)."""
    me, gone = state[i], dead(state)
    found = {(me.held, 0, 0, 0)}
    for j in (j for j in range(len(state)) if j != i):
        bit, lists = 1 << j, heard(state, i, j)
        options = {(value, 0, 0) if value != NONE else (NONE, bit, bit) for value in lists}
        if (gone | me.gone) & bit or left:
            options |= {(value, bit, 0) for value in lists | {NONE}}
        if me.gone & bit:
            options = {(NONE, bit, bit)}
        following = set()
        for (merged, holders, lost, failed), (value, out, alive) in product(found, options):
            listed = bit if value <= merged and value < me.held else 0
            kept = holders if value >= merged else 0
            if ((lost | out) & ~(failed | alive | gone)).bit_count() <= left:
                following.add((min(merged, value), kept | listed, lost | out, failed | alive))
        found = following
    return found


def barrier(rule: Rule, state: State, i: int, left: int) -> Iterator[Step]:
    """Each other member answered or is lost."""
    n, me = len(state), state[i]
    for merged, holders, lost, failed in sorted(gathered(state, i, left)):
        ready = merged == 0 or (merged == me.merged and (lost == me.lost or not rule.same))
        for label, deaths, after in notice(state, i, lost & ~failed, left):
            then = after[i]._replace(gone=lost, merged=merged, lost=lost, ready=ready, heard=())
            if merged < me.held:
                what, then = f"sees {merged}", then._replace(phase="fetch", asked=holders)
            else:
                what, then = decide(rule, then, i, n)
            yield f"{label}{i} passes barrier {me.e} and {what}", deaths, put(after, i, then)


def closing(rule: Rule, state: State, i: int, left: int) -> Iterator[Step]:
    """Steps of a member in its closing exchange."""
    n, me = len(state), state[i]
    if me.phase == "list":
        yield from barrier(rule, state, i, left)
        if not rule.barrier:
            yield from early(state, i)
    elif me.phase == "fetch":
        for j in bits(me.asked & ~me.gone & ~dead(state)):
            for held in {me.merged, min(me.merged, state[j].held)}:
                yield f"{j} sends {held} to {i}", 0, put(state, i, me._replace(phase="fetched", held=held, asked=0))
        for label, deaths, after in notice(state, i, me.asked, left):
            then = after[i]._replace(phase="fetched", asked=0)
            yield f"{label}{i} finds no holder of {me.merged}", deaths, put(after, i, then)
    elif me.phase == "fetched":
        what, then = decide(rule, me, i, n)
        yield f"{i} {what}", 0, put(state, i, then)
        if then.phase == "failed":  # a notice changes nothing here but the number of exchanges allowed
            others = [1 << j for j in range(n) if j != i and not me.gone >> j & 1]
            for who in (sum(c) for r in range(1, len(others) + 1) for c in combinations(others, r)):
                for label, deaths, after in notice(state, i, who, left):
                    what, then = decide(rule, after[i], i, n)
                    yield f"{label}{i} notices and {what}", deaths, put(after, i, then)


def early(state: State, i: int) -> Iterator[Step]:
    """Without the barrier: fetch what one list shows. The list of i for this exchange is out and stays as it is."""
    me = state[i]
    for j, other in enumerate(state):
        if j != i and other.phase != "dead" and other.held < me.held and other.held in answers(state, i, j):
            yield f"{i} fetches {other.held} from {j}", 0, put(state, i, me._replace(held=other.held))


def canonical(state: State) -> State:
    """The state without what nobody can read any more."""
    waiting = {m.e for m in state if m.phase == "list"}
    deaf = all(m.phase not in ("wait", "act") or m.gone & 1 for m in state)  # nobody can receive attempt 0
    after = []
    for k, m in enumerate(state):
        if m.phase == "dead":
            held = m.held if state[0].phase == "hold" or (k == 0 and not deaf) else NONE
            asks = any(state[j].phase in ("wait", "ask", "told") and not state[j].gone >> k & 1 for j in bits(m.asked))
            after.append(Member("dead", held, asked=m.asked if asks else 0))
        elif m.phase in ("final", "failed"):
            read = m.e in waiting
            after.append(Member(m.phase, m.held, e=m.e if read else 0, listed=m.listed if read else NONE))
        else:
            after.append(m if m.before == NONE or m.e - 1 in waiting else m._replace(before=NONE))
    return tuple(after)


def steps(rule: Rule, state: State, deaths: int) -> Iterator[Step]:
    """Everything that can happen next, with at most so many deaths in all."""
    left = deaths - dead(state).bit_count()
    for i, member in enumerate(state):
        of = closing if member.phase in CLOSING else obtain
        for label, died, after in of(rule, state, i, left):
            yield label, died, canonical(after)


class Result(NamedTuple):
    """What a search found. A trace is a list of labels, and a shortest one; it is empty if there is none."""

    states: int
    ends: int  # states in which nothing happens unless somebody dies
    exchanges: int  # the most that a member entered
    final: set[int]  # the versions that somebody was final with
    split: list[str]  # to two live members that are final with different versions: the search stops there
    hung: list[str]  # to an end in which somebody live is neither final nor failed
    failed: list[str]  # to an end in which somebody live failed although another one lives


def search(n: int, deaths: int, rule: Rule) -> Result:
    """Visit every state."""
    layer = [initial(n)]
    came: dict[State, tuple[State, str] | None] = {layer[0]: None}
    same: dict[Member, Member] = {}  # one object for equal members: memory
    ends, split, hung, failed = 0, layer[:0], layer[:0], layer[:0]
    while layer and not split:
        following = []
        for state in layer:
            stuck = True
            for label, died, after in steps(rule, state, deaths):
                stuck = stuck and died > 0
                if after not in came:
                    new = tuple(same.setdefault(m, m) for m in after)
                    came[new] = (state, label)
                    following.append(new)
            live = [m for m in state if m.phase != "dead"]
            if len({m.held for m in live if m.phase == "final"}) > 1:
                split.append(state)
            if stuck:
                ends += 1
                hung += [state] * any(m.phase not in ("final", "failed") for m in live)
                failed += [state] * (len(live) > 1 and any(m.phase == "failed" for m in live))
        layer = following
    final = {m.held for m in same if m.phase == "final"}
    traces = [trace(came, found[0]) if found else [] for found in (split, hung, failed)]
    return Result(len(came), ends, max(m.e for m in same), final, *traces)


def trace(came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    labels = []
    while (step := came[state]) is not None:
        state, label = step
        labels.append(label)
    return labels[::-1]
