"""Which connection is which channel, where nobody says it: found by the traffic, with the job's calls given.

    assign(job, withheld, connections) -> Assignment        job.flows and the channels of `withheld` are not looked at
    iterations_seen(job, withheld, connections)             of a running job: how much there is to go by

Each connection of a pair of ranks is held against each channel that the calls use between the two: message by message,
the start PSN, the size, the LL or LL128 flag, the slot that is written, and the slot that clear-to-send announced for
the number of the message. What contradicts excludes; what was not seen excludes nothing. But a connection that stays
silent while others of its hosts send is not taken where these are enough for all channels: named are the connections of
this communicator alone, and one of these that sends is one of the channels in use. One way to give every such channel a
connection of its own must be left. Otherwise it is refused, with what would decide it: channels often send alike, and a
gradient placed on a guess would look like any other.

Of a running job (running.py) channels that its iterations do not use are nobody's any more, and the numbers of packets
must not have wrapped (24 bits) since the connection was made.

Pure. What is on the wire is the plan's (flowcheck/rebuild/plan.py); a message is held against it by search/position.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from ipaddress import ip_address
from math import inf

from parser.lane import messages

from flowcheck.errors import UserError
from flowcheck.job.model import Flow, Job
from flowcheck.learning.connections import Connection
from flowcheck.learning.messages import Flow as ObservedFlow
from flowcheck.learning.messages import packets
from flowcheck.learning.search.hypotheses import of_flows
from flowcheck.learning.search.position import Mismatch, Position
from flowcheck.rebuild.plan import nccl_of, plan_job
from parser.chunk_layout import Protocol
from parser.engine_config import Phase
from parser.nccl import WireError
from parser.wire import CallPlan, edge_lane

__all__ = ["Assignment", "assign", "iterations_seen"]

MESSAGES_MAX = 50_000_000  # of all channels' plans together: minutes
AHEAD = 16  # iterations that a running job may be ahead of its description
Pair = tuple[int, int]
_ByEnds = dict[tuple[str, str, int], tuple[Connection, ObservedFlow]]


@dataclass(frozen=True)
class Assignment:
    """flows: with their channels, as the manifest has them, by (channel, src, dst). spare: connections on which none of
    the job's calls sends anything, or more than there are channels. unseen: of pairs of ranks of which nothing was
    captured, and where there is a choice. seen: by place in `flows`, how many messages of it bear it out; 0: it is what
    the others leave."""

    flows: list[Flow]
    spare: list[Flow]
    unseen: list[Flow]
    seen: list[int]


def assign(
    job: Job, withheld: Sequence[Flow], found: Sequence[Connection], running: bool = False
) -> Assignment:
    """withheld: the communicator's connections, of which the channels are not known, and none of another's. found:
    those of the captures. running: only channels that steady calls use count, and the captures show these calls.

    Raises UserError: a connection fits no channel; several assignments fit; the job cannot be planned.
    """
    schedule = _Schedule(replace(job, flows=[]), running)
    by_flow, pairs = _by_ends(found), _by_pair(withheld)
    placed: list[tuple[Flow, int]] = []
    spare: list[Flow] = []
    unseen: list[Flow] = []
    ends = {(one.src, one.dst) for one in found}
    for pair, flows in sorted(pairs.items()):
        seen = [_observed(job, flow, by_flow) for flow in flows]
        mirrored = [tuple(str(ip_address(end)) for end in flow.addresses(0)) in ends for flow in flows]
        choice = _Choice(schedule, pair, flows, seen, mirrored)
        if choice.open and not any(seen):
            unseen += flows
            continue
        chosen = choice.only()
        for channel, at in chosen.items():
            one = seen[at]
            placed.append((replace(flows[at], channel=channel), 0 if one is None else one.total))
        spare += [flow for at, flow in enumerate(flows) if at not in chosen.values()]
    placed.sort(key=lambda one: (one[0].channel, one[0].src, one[0].dst))
    return Assignment([flow for flow, _ in placed], spare, unseen, [number for _, number in placed])


def iterations_seen(job: Job, withheld: Sequence[Flow], found: Sequence[Connection]) -> float:
    """Messages of the pair of ranks with the fewest, in iterations; of those pairs of which there are any. Raises
    UserError as `assign`."""
    schedule, by_flow, least = _Schedule(replace(job, flows=[]), running=True), _by_ends(found), inf
    steady = schedule.calls(Phase.STEADY)
    for pair, flows in _by_pair(withheld).items():
        seen = sum(one.total for flow in flows if (one := _observed(job, flow, by_flow)) is not None)
        each = sum(len(sent.sizes) * job.communicator.queue_pairs_used
                   for channel in schedule.channels_of(pair) for number in steady
                   if (sent := schedule.sent(number, channel, pair)) is not None)
        if seen and each:
            least = min(least, seen / each)
    return 0.0 if least == inf else least


def _by_ends(found: Sequence[Connection]) -> _ByEnds:
    return {(flow.src, flow.dst, flow.qpn): (one, flow) for one in found for flow in one.flows}


def _by_pair(withheld: Sequence[Flow]) -> dict[Pair, list[Flow]]:
    pairs: dict[Pair, list[Flow]] = {}
    for flow in withheld:
        pairs.setdefault((flow.src, flow.dst), []).append(flow)
    return pairs


def _observed(
    job: Job, flow: Flow, by_flow: _ByEnds
) -> Connection | None:
    """What was captured of a connection; None if nothing."""
    ends = []
    for queue, qpn in enumerate(flow.qpns):
        src, dst = flow.addresses(queue)
        ends.append((str(ip_address(src)), str(ip_address(dst)), qpn))
    one = of_flows(by_flow, ends, job.communicator.queue_pairs_used)
    if one is not None and one.unsure:
        raise UserError(f"nothing can be told of its messages: {one.unsure}", where=one.name(),
                        remedy="the QP numbers of a connection in their order, and qps_per_connection")
    return one


@dataclass(frozen=True)
class _Sent:
    """What a call sends on one channel from one rank to another: wire bytes of each message."""

    protocol: Protocol
    slot_bytes: int
    align: int
    steps: int
    sizes: tuple[int, ...]


class _Schedule:
    """All calls of a job by channel and pair of ranks. running: as of `assign`."""

    def __init__(self, job: Job, running: bool) -> None:
        self.plan, self.running = plan_job(job), running
        c = job.communicator
        self.mtu, self.channels = c.mtu, c.channels
        self.pair_above = c.ar_threshold if c.adaptive_routing or nccl_of(job).always_pairs else None
        self.spent = 0
        self._sent: dict[tuple[int, int, Pair], _Sent | None] = {}

    def calls(self, *phases: Phase) -> list[int]:
        return [number for number, (phase, *_) in enumerate(self.plan.calls) if phase in phases]

    def sent(self, number: int, channel: int, pair: Pair) -> _Sent | None:
        key = number, channel, pair
        if key not in self._sent:
            self._sent[key] = self._plan(self.plan.calls[number][2], channel, pair)
        return self._sent[key]

    def _plan(self, call: CallPlan, channel: int, pair: Pair) -> _Sent | None:
        try:
            lane = edge_lane(call, channel, *pair)
        except WireError as error:
            raise UserError(str(error), where="communicator", remedy="docs/understand/wire.md lists what is supported"
                            ) from None
        if lane is None:
            return None
        self.spend(lane.messages)
        sizes = tuple(size for _, _, size, _, _ in messages(lane))
        return _Sent(lane.protocol, lane.slot_bytes, lane.step_align, lane.step_inc, sizes)

    def spend(self, number: int) -> None:
        self.spent += number
        if self.spent > MESSAGES_MAX:
            raise UserError(
                f"more than {MESSAGES_MAX} messages lie between the first call and the end of the captures",
                where="connections", remedy="captures from nearer the job's start",
            )

    def all_of(self, channel: int, pair: Pair) -> tuple[_Sent | None, ...]:
        """Of every call of the job, once."""
        return tuple(self.sent(number, channel, pair) for number in range(len(self.plan.calls)))

    def channels_of(self, pair: Pair) -> list[int]:
        """Those on which some call of the job sends something from the one to the other."""
        calls = self.calls(*([Phase.STEADY] if self.running else Phase))
        return [channel for channel in range(self.channels)
                if any((sent := self.sent(number, channel, pair)) is not None and sent.sizes for number in calls)]

    def check_numbers(self, channel: int, pair: Pair) -> None:
        """Raises UserError if packets of a running job may have wrapped by now."""
        before, each = (
            sum(packets(size, self.mtu) + (self.pair_above is not None and size > self.pair_above)
                for number in self.calls(*phases) if (sent := self.sent(number, channel, pair)) is not None
                for size in sent.sizes)
            for phases in ((Phase.STARTUP, Phase.ITERATION_0, Phase.REBUILD), (Phase.STEADY,))
        )
        if before + AHEAD * each >= 1 << 24:
            raise UserError(
                f"{before:,} packets have passed on channel {channel} from rank {pair[0]} to rank {pair[1]}, and their"
                " numbers have 24 bits", where="connections", remedy="attach at the job's start; or give the channels",
            )


def _contradicted(schedule: _Schedule, channel: int, pair: Pair, one: Connection) -> Mismatch | None:
    """What is on this connection and cannot be what the channel sends; None if there is nothing of that kind."""
    place, explained = Position.start(one), 0
    try:
        for sent in _program(schedule, channel, pair, one, place):
            place.step = -(-place.step // sent.align) * sent.align
            schedule.spend(len(sent.sizes))
            for size in sent.sizes:
                explained += _message(schedule, one, place, sent, size)
                place.step += sent.steps
    except Mismatch as error:
        return Mismatch(error.text, explained, error.where)
    return None


def _program(
    schedule: _Schedule, channel: int, pair: Pair, one: Connection, place: Position
) -> Iterator[_Sent]:
    """What the channel sends, call by call, until all that was captured has had its turn. Raises Mismatch where
    messages are left after the last call."""
    def done() -> bool:
        return all(at >= len(flow.messages) for at, flow in zip(place.at, one.flows, strict=True))

    def these(*phases: Phase) -> Iterator[_Sent]:
        yield from (s for number in schedule.calls(*phases) if (s := schedule.sent(number, channel, pair)) is not None)

    yield from these(Phase.STARTUP)
    yield from these(Phase.ITERATION_0)
    if not done():
        yield from these(Phase.REBUILD)
    while not done():
        before = place.number
        yield from these(Phase.STEADY)
        if place.number == before:
            raise Mismatch("messages after the last one that this channel sends")


def _message(schedule: _Schedule, one: Connection, place: Position, sent: _Sent, size: int) -> int:
    """The next message of `size` bytes; how many pieces of it were seen. Raises Mismatch."""
    pair = schedule.pair_above is not None and size > schedule.pair_above
    number = place.number
    parts = place.take(one, size, sent.protocol, sent.slot_bytes, schedule.mtu, pair)
    starts = [one.slots[number]] if number in one.slots else []
    if len(one.flows) == 1:  # of several, Position has looked
        starts += [message.va for _, message in parts if message.va]
    for start in starts:
        base = start - place.step % 8 * sent.slot_bytes
        if place.bases.setdefault(sent.protocol, base) != base:
            raise Mismatch(f"message {number} in the slot of step {place.step}, another one is named or written")
    return len(parts)


@dataclass
class _Choice:
    """The connections of one pair of ranks, and the channels between the two. seen: what was captured of each.
    mirrored: was anything captured from the one of its hosts to the other?"""

    schedule: _Schedule
    pair: Pair
    flows: Sequence[Flow]
    seen: Sequence[Connection | None]
    mirrored: Sequence[bool]
    against: dict[tuple[int, int], Mismatch] = field(default_factory=dict)  # by (channel, place in flows)

    @cached_property
    def channels(self) -> list[int]:
        return self.schedule.channels_of(self.pair)

    @property
    def open(self) -> bool:
        """Is there anything to choose? Raises UserError for fewer connections than channels."""
        if len(self.flows) < len(self.channels):
            raise UserError(
                f"{len(self.flows)} connections from rank {self.pair[0]} to rank {self.pair[1]} are named, and the"
                f" calls use {len(self.channels)} channels", where="flows", remedy="name every connection of the pair",
            )
        return len(self.flows) > 1

    @cached_property
    def possible(self) -> dict[int, list[int]]:
        """By channel the places of the connections that may be it: silent ones only where the others do not suffice."""
        if self.schedule.running:
            for channel in self.channels:
                self.schedule.check_numbers(channel, self.pair)
        every = self._fitting
        loud = {
            channel: [at for at in places if self.seen[at] is not None or not self.mirrored[at]]
            for channel, places in every.items()
        }
        return every if self._way({}, loud) is None else loud

    @cached_property
    def _fitting(self) -> dict[int, list[int]]:
        """By channel the places of the connections that nothing excludes."""
        for channel in self.channels:
            for at, one in enumerate(self.seen):
                if one is not None and (why := _contradicted(self.schedule, channel, self.pair, one)) is not None:
                    self.against[channel, at] = why
        return {
            channel: [at for at in range(len(self.flows)) if (channel, at) not in self.against]
            for channel in self.channels
        }

    def only(self) -> dict[int, int]:
        """The one way: by channel the place of its connection. Raises UserError."""
        way = self._way({}, self.possible)
        if way is None:
            raise self._none()
        others = {
            c: other[c] for c, first in way.items() if (other := self._way({c: first}, self.possible)) is not None
        }
        if others:
            raise self._several(way, others)
        return way

    def _way(self, barred: Mapping[int, int], possible: Mapping[int, Sequence[int]]) -> dict[int, int] | None:
        """A connection for each channel, none twice; None: no way is left. barred: not this one for that channel."""
        holder: dict[int, int] = {}  # by place of a connection

        def place(channel: int, tried: set[int]) -> bool:
            for at in possible[channel]:
                if at in tried or barred.get(channel) == at:
                    continue
                tried.add(at)
                if at not in holder or place(holder[at], tried):
                    holder[at] = channel
                    return True
            return False

        if not all(place(channel, set()) for channel in self.channels):
            return None
        return {channel: at for at, channel in sorted(holder.items())}

    def _name(self, at: int) -> str:
        flow = self.flows[at]
        return f"QP {', '.join(f'{qpn:#x}' for qpn in flow.qpns)} of {flow.dst_addr}"

    def _where(self) -> str:
        return f"connections from rank {self.pair[0]} to rank {self.pair[1]}"

    def _none(self) -> UserError:
        fitting = {at for places in self.possible.values() for at in places}
        odd = [at for at in range(len(self.flows)) if at not in fitting]
        if len(self.flows) > len(self.channels) or not odd:  # which of them is at fault nobody knows
            reasons = [(why.progress, str(why), channel, at) for (channel, at), why in self.against.items()]
        else:
            reasons = [(why.progress, str(why), channel, at) for (channel, at), why in self.against.items()
                       if at == odd[0]]
        progress, text, channel, at = max(reasons)
        return UserError(
            f"no assignment to the channels {', '.join(map(str, self.channels))} fits: {self._name(at)} as channel"
            f" {channel} explains {progress} messages, then needs {text}", where=self._where(),
            remedy="the calls, version and settings of this very job, from the communicator's birth on",
        )

    def _several(self, way: Mapping[int, int], others: Mapping[int, int]) -> UserError:
        channels = sorted(others)
        listed = "; ".join(
            f"{self._name(way[c])} may be channel {c}, and so may {self._name(others[c])}" for c in channels[:4]
        )
        told = len({self.schedule.all_of(c, self.pair) for c in channels}) == len(channels)
        unseen = [at for at in way.values() if self.seen[at] is None]
        remedy = "NCCL's TCP bootstrap in a capture names every connection; or NCCL_MAX_NCHANNELS=1"
        if self.schedule.running:
            remedy = ("connections with their channels (`topology=`); NCCL_MAX_NCHANNELS=1; or a number of channels"
                      " that share each call unevenly")
        elif unseen:
            remedy = f"mirror what rank {self.pair[0]} sends, from the start; or: {remedy}"
        elif told:
            remedy = f"a longer capture: other calls of this job have different sizes on these channels; or: {remedy}"
        return UserError(
            f"more than one assignment fits every message: {listed}", where=self._where(), remedy=remedy,
        )
