"""What stops of a chain say of each other, judged by the plan's leader. Pure: `now` is passed in. Knows no stream.

A complaint parts accuser and accused: the plan no longer makes neighbours of them for a while. So whoever lies loses
neighbours, one for each lie, and moves nobody else. Only a second accuser puts the accused out of the plan.
"""

from collections import OrderedDict, deque
from typing import Final

from echo_node.standing import Standing
from echo_p2p.net.reach import Allowance
from echo_protocols.peer import Complaint, Plan

PARTED_S: Final = 30.0
"""The first time; twice as long each time that follows, at most ten minutes."""

AGREEING_S: Final = 60.0
"""Two accusers within this time agree."""

COMPLAINTS_A_MINUTE: Final = 6
"""Of one peer."""

_REMEMBERED = 1024
_PLANS = 2  # who complained of the plan before this one has not seen this one yet

Pair = tuple[str, str]


class Complaints:
    """Who can't work with whom. Remembers the 1,024 pairs, and the 1,024 accused, of last."""

    def __init__(self) -> None:
        self._plans: deque[Plan] = deque(maxlen=_PLANS)
        self._parted = Standing()
        self._pairs: OrderedDict[Pair, None] = OrderedDict()
        self._accusers: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._allowance = Allowance(COMPLAINTS_A_MINUTE)

    def planned(self, plan: Plan) -> None:
        """From now on complaints are of this plan, or of the one before."""
        if not self._plans or self._plans[-1].number != plan.number:
            self._plans.append(plan)

    def hear(self, accuser: str, complaint: Complaint, now: float) -> str | None:
        """Note a complaint; why it doesn't count, as a reason, or None."""
        plan = next((plan for plan in self._plans if plan.number == complaint.plan), None)
        if plan is None:
            return "complaint-stale"
        chain = {stop.peer for stop in plan.chain_of(accuser) or ()}
        if accuser == complaint.accused or complaint.accused not in chain:
            return "complaint-stranger"
        if not self._allowance.take(accuser, now):
            return "complaint-flood"
        accusers = self._accusers.pop(complaint.accused, {})
        self._accusers[complaint.accused] = accusers | {accuser: now}
        pair = _pair(accuser, complaint.accused)
        if not self._parted.benched(_key(pair), now):  # else it is the same trouble
            self._parted.fail(_key(pair), now, cost_s=PARTED_S)
        self._pairs[pair] = None
        self._pairs.move_to_end(pair)
        for known in (self._pairs, self._accusers):
            while len(known) > _REMEMBERED:
                known.popitem(last=False)
        return None

    def parted(self, now: float) -> frozenset[Pair]:
        """The pairs that must not be neighbours now, each in the order of its names."""
        self._pairs = OrderedDict((pair, None) for pair in self._pairs if self._parted.benched(_key(pair), now))
        return frozenset(self._pairs)

    def agreed(self, accused: str, now: float) -> bool:
        """Whether two or more accuse a peer."""
        return sum(now - at < AGREEING_S for at in self._accusers.get(accused, {}).values()) >= 2


def _pair(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


def _key(pair: Pair) -> str:
    return " ".join(pair)
