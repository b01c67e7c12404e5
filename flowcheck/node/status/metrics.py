"""A node's metrics in Prometheus' form, made of the document that the node puts on its board (publisher.py).

    text, kind = exposition(document, accept)      accept: the header of the request
    METRICS                                        what there is; docs/reference/metrics.md says it in the same words

Pure: no registry but one for each question, and nothing is kept between two. Names and labels are fixed: dashboards and
alert rules (flowcheck/node/operate/) depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from flowcheck.job.version_status import DIVERGED, FOLLOWS, UNVERIFIED, VERIFIED, kind_of
from flowcheck.node.status.event_log import FORMER
from flowcheck.node.status.group_tally import BUCKETS, CONDITIONS, STAGES
from flowcheck.rebuild.iteration.merger import SOURCES
from flowcheck.rebuild.iteration.verdict import Clause

__all__ = ["METRICS", "MISSING", "STATUSES", "Kind", "exposition"]

# Of a group: by the kind of its newest version's status, whichever step that follows.
STATUSES = ("waiting", UNVERIFIED, FOLLOWS, VERIFIED, "parameters", "lost", DIVERGED, "refused")
# By which cause elements are missing (flowcheck/rebuild/iteration/evidence.py, and iterations that were given up).
MISSING = ("disagreed", "not_mirrored", "icrc", "unanchored", "disagreement", "lost", "overload", "not_fed")
ALERTED = ("problem", "refused", "moved", "job_refused")  # events that alert rules count
CELL = 8  # bytes
Document = Mapping[str, Any]
Samples = Iterable[tuple[list[str], Any]]


@dataclass(frozen=True)
class Kind:
    """name: as it is exposed. labels: besides `group` where of says so. samples: (label values, value) of a document,
    or of one of its groups."""

    name: str
    type: str
    labels: tuple[str, ...]
    text: str
    samples: Callable[[Any], Samples]
    of_group: bool = True

    def family(self, document: Document) -> Metric:
        labels = [*(["group"] if self.of_group else []), *self.labels]
        name = self.name.removesuffix("_total")
        if self.type == "histogram":
            family: Any = HistogramMetricFamily(name, self.text, labels=labels)
        else:
            family = (CounterMetricFamily if self.type == "counter" else GaugeMetricFamily)(
                name, self.text, labels=labels)
        for first, of in _parts(document) if self.of_group else [([], document)]:
            for values, value in self.samples(of):
                if self.type == "histogram":
                    bounds = [*map(str, BUCKETS), "+Inf"]
                    family.add_metric([*first, *values], list(zip(bounds, value["counts"], strict=True)), value["sum"])
                elif value is not None:
                    family.add_metric([*first, *values], value)
        return family


def _parts(document: Document) -> Iterator[tuple[list[str], Any]]:
    for group in document["groups"]:
        name = group["name"]
        more = {"connected": document["connected"].get(name, 0), "common": document["common"].get(name),
                "inbox": document["inboxes"].get(name), "telemetry": document["telemetry"].get(name)}
        yield [name], group | more


def _one(key: str, *keys: str) -> Callable[[Any], Samples]:
    """The value at that place; no sample where it is null."""

    def found(of: Any) -> Samples:
        value = of[key]
        for more in keys:
            value = value[more]
        return [([], value)]

    return found


def _each(key: str, always: Iterable[str] = (), times: int = 1) -> Callable[[Any], Samples]:
    """One sample for each entry of a table; always: those that begin with 0."""
    names = dict.fromkeys(always, 0)
    return lambda of: [([name], times * value) for name, value in (names | of[key]).items()]


def _when(key: str, *keys: str) -> Callable[[Any], Samples]:
    """A time; no sample where it has not come."""
    found = _one(key, *keys)
    return lambda of: [(labels, value) for labels, value in found(of) if value]


def _captures(key: str) -> Callable[[Any], Samples]:
    return lambda of: [([one["device"]], one[key]) for one in of["captures"]]


def _ages(of: Any) -> Samples:
    """Only of a version that there is."""
    return [([], of["step"])] if of["step_time"] else []


def _last_failure(key: str) -> Callable[[Any], Samples]:
    return lambda of: [([], of["failed"][-1][key])] if of["failed"] else []


def _common(found: Callable[[Any], Any]) -> Callable[[Any], Samples]:
    """Only of a group whose job has others."""
    return lambda of: [([], found(of["common"]))] if of["common"] else []


def _inbox(key: str) -> Callable[[Any], Samples]:
    """Only of a group that trainers can come to."""
    return lambda of: [([], of["inbox"][key])] if of["inbox"] else []


def _measured(key: str) -> Callable[[Any], Samples]:
    """Only of a group of which something was measured."""
    return lambda of: [([], of["telemetry"][key])] if of["telemetry"] else []


def _parts_measured(key: str) -> Callable[[Any], Samples]:
    return lambda of: [([part], one[key]) for part, one in of["telemetry"]["parts"].items()] if of["telemetry"] else []


def _not_finite(of: Any) -> Samples:
    return [([part, kind], one[key]) for part, one in of["telemetry"]["parts"].items()
            for kind, key in (("nan", "nans"), ("infinity", "infs"))] if of["telemetry"] else []


def _first_not_finite(key: str) -> Callable[[Any], Samples]:
    """Of the newest iteration that had any."""

    def found(of: Any) -> Samples:
        first = of["telemetry"]["first"] if of["telemetry"] else None
        return [([first["tensor"], first["kind"]], first[key])] if first else []

    return found


def _pair(key: str, index: int) -> Callable[[Any], Samples]:
    return lambda of: [([], of[key][index])]


def _events(of: Any) -> Samples:
    """Those with an alert begin with 0: most of them are said once, and the first one has to be an increase."""
    found = dict.fromkeys(
        ((event, group) for event in ALERTED for group in ("", *(one["name"] for one in of["groups"]))), 0)
    found |= {(event, group): count for event, by in of["counts"].items() for group, count in by.items()}
    found |= {(FORMER[event], group): count for (event, group), count in found.items() if event in FORMER}
    return [([*labels], count) for labels, count in found.items()]


def _node(name: str, type: str, labels: tuple[str, ...], text: str, samples: Callable[[Any], Samples]) -> Kind:
    return Kind(name, type, labels, text, samples, of_group=False)


METRICS: tuple[Kind, ...] = (
    _node("flowcheck_node_info", "gauge", ("node", "version"), "1; the node's name and version",
          lambda of: [([of["node"], of["version"]], 1)]),
    _node("flowcheck_node_start_time_seconds", "gauge", (), "When the node was started, in seconds since 1970",
          _one("started")),
    _node("flowcheck_node_told_timestamp_seconds", "gauge", (),
          "When the node last said what is in these metrics, in seconds since 1970", _one("time")),
    _node("flowcheck_shadow_matches", "gauge", (),
          "Checksums of the trainers that must have matched before a version is offered for recovery (api.shadow)",
          _one("shadow")),
    _node("flowcheck_events_total", "counter", ("event", "group"), "Events (docs/reference/events.md)", _events),
    _node("flowcheck_port_connections", "gauge", ("port", "state"),
          "Connections to the control port and to the HTTP API: known ones, which have proved a token or shown a key,"
          " and strangers", lambda of: [([port, state], one.get(state, 0)) for port, one in of["ports"].items()
                                    for state in ("known", "strangers")]),
    _node("flowcheck_strangers_ended_total", "counter", ("port",),
          "Connections that were ended before they had proved a token or shown a key",
          lambda of: [([port], one.get("ended", 0)) for port, one in of["ports"].items()]),
    _node("flowcheck_readers_turned_away_total", "counter", (),
          "Requests with a key that were asked to come again because api.connections were being answered",
          lambda of: [([], of["ports"]["api"].get("turned_away", 0))] if "api" in of["ports"] else []),
    _node("flowcheck_processes_replaced_total", "counter", ("process", "cause"),
          "Processes beside the node's own that were started anew: they had ended, or hung",
          lambda of: [([process, cause], of["replaced"].get(process, {}).get(cause, 0))
                      for process in dict.fromkeys(["api", *of["replaced"]]) for cause in ("ended", "hung")]),
    _node("flowcheck_capture_packets_total", "counter", ("device",), "Packets that the mirror port has handed over",
          _captures("received")),
    _node("flowcheck_capture_bytes_total", "counter", ("device",), "Their captured bytes", _captures("bytes")),
    _node("flowcheck_capture_last_packet_timestamp_seconds", "gauge", ("device",),
          "When the newest packet was there, to a quarter of a second, in seconds since 1970",
          lambda of: [(labels, value) for labels, value in _captures("last")(of) if value]),
    _node("flowcheck_capture_job_packets_total", "counter", ("device",), "Packets of jobs that the node follows",
          _captures("claimed")),
    _node("flowcheck_capture_last_job_packet_timestamp_seconds", "gauge", ("device",),
          "When the newest packet of such a job was there, to a quarter of a second, in seconds since 1970",
          lambda of: [(labels, value) for labels, value in _captures("last_claimed")(of) if value]),
    _node("flowcheck_capture_dropped_packets_total", "counter", ("device", "cause"),
          "Packets that were lost between the mirror port and the parser, by counter",
          lambda of: [([one["device"], cause], n) for one in of["captures"] for cause, n in one["lost"].items()]),
    _node("flowcheck_unclaimed_packets_total", "counter", ("outcome",), "Packets of no job that the node follows",
          _each("unclaimed")),
    Kind("flowcheck_ranks", "gauge", (), "Ranks of the job", _one("ranks")),
    Kind("flowcheck_ranks_connected", "gauge", (), "Ranks that are connected", _one("connected")),
    Kind("flowcheck_connections", "gauge", (), "Connections of the job on the wire", _one("flows")),
    Kind("flowcheck_inbox_bytes", "gauge", (), "Bytes that its ranks have sent and it has not handled",
         _inbox("bytes")),
    Kind("flowcheck_inbox_size_bytes", "gauge", (), "How many there may be (control.inbox_mb)", _inbox("most")),
    Kind("flowcheck_inbox_held_up_total", "counter", (), "Messages that were not read until there was room for them",
         _inbox("held_up")),
    Kind("flowcheck_iterations_total", "counter", ("result",), "Iterations that have closed",
         lambda of: [([name], of["counts"][name]) for name in ("published", "not_published")]),
    Kind("flowcheck_iterations_failed_total", "counter", ("clause",),
         "Iterations that were not published, by each clause of the verdict that failed",
         _each("clauses", [one.value for one in Clause])),
    Kind("flowcheck_packets_total", "counter", (), "Packets of the job's connections", _one("counts", "packets")),
    Kind("flowcheck_placed_packets_total", "counter", (), "Packets that put something new into the gradients",
         _one("counts", "placed")),
    Kind("flowcheck_duplicate_packets_total", "counter", (), "Packets that were seen before",
         _one("counts", "duplicates")),
    Kind("flowcheck_healed_packets_total", "counter", (),
         "Packets that some connection lacked although nothing is missing", _one("counts", "healed")),
    Kind("flowcheck_missing_elements_total", "counter", ("cause",), "Elements of gradients that were missing",
         _each("missing", MISSING)),
    Kind("flowcheck_filled_bytes_total", "counter", ("source",),
         "Bytes of gradients, or of state that was patched, by what brought them", _each("filled", SOURCES, CELL)),
    Kind("flowcheck_patched_elements_total", "counter", (), "Elements that were patched with the trainers' own state",
         _one("patched")),
    Kind("flowcheck_sampled_tensors_total", "counter", (),
         "Tensors of versions of which a step record had some elements, all of them equal", _one("sampled")),
    Kind("flowcheck_stale_elements", "gauge", (), "Elements that still wait for that", _one("stale")),
    Kind("flowcheck_asked_bytes_total", "counter", ("of",),
         "Bytes of ranges that trainers were asked for (state) and peers (gradients)",
         _each("asked")),
    Kind("flowcheck_last_complete_step", "gauge", (), "Step of the newest version that was published", _ages),
    Kind("flowcheck_last_complete_step_timestamp_seconds", "gauge", (),
         "When it was published, in seconds since 1970", _when("step_time")),
    Kind("flowcheck_last_verified_step", "gauge", (), "Step of the newest version whose own checksums matched",
         lambda of: [([], of["verified"])] if of["verified"] is not None else []),
    Kind("flowcheck_common_step", "gauge", (), "Newest step that all groups of its job have which are not apart",
         _common(lambda common: common["step"])),
    Kind("flowcheck_apart_groups", "gauge", (), "Groups of its job that are too far behind it",
         _common(lambda common: len(common["apart"]))),
    Kind("flowcheck_lag_iterations", "gauge", (), "Newest step record minus newest version", _one("lag")),
    Kind("flowcheck_checksum_matches", "gauge", (),
         "Checksums of the trainers that have matched in this run; a mismatch makes it 0", _one("matches")),
    Kind("flowcheck_replica_status", "gauge", ("status",), "1 for the status of the newest version, else 0",
         lambda of: [([status], int(kind_of(of["status"]) == status)) for status in STATUSES]),
    Kind("flowcheck_condition", "gauge", ("condition",), "1 while it holds, else 0",
         lambda of: [([name], int(name in of["since"])) for name in CONDITIONS]),
    Kind("flowcheck_slack_seconds", "gauge", (),
         "From the newest version that was timed to the first byte of the next iteration; negative: it was late",
         _one("slack")),
    Kind("flowcheck_late_versions_total", "counter", (), "Versions that were late", _one("late")),
    Kind("flowcheck_stage_seconds", "histogram", ("stage",), "How long each stage of an iteration took",
         lambda of: [([stage], of["stages"][stage]) for stage in STAGES]),
    Kind("flowcheck_ring_packets", "gauge", (),
         "The most packets that waited in a ring since the iteration before", _pair("rings", 0)),
    Kind("flowcheck_ring_size_packets", "gauge", (), "How many a ring holds", _pair("rings", 1)),
    Kind("flowcheck_arenas_used", "gauge", (), "The most iterations that were alive since the iteration before",
         _pair("arenas", 0)),
    Kind("flowcheck_arenas", "gauge", (), "How many can be", _pair("arenas", 1)),
    Kind("flowcheck_checkpoint_step", "gauge", (), "Step of the newest checkpoint on disk",
         lambda of: [([], of["checkpoint"]["step"])] if of["checkpoint"]["time"] else []),
    Kind("flowcheck_checkpoint_timestamp_seconds", "gauge", (), "When it was written, in seconds since 1970",
         _when("checkpoint", "time")),
    Kind("flowcheck_journal_iterations_total", "counter", (), "Iterations whose gradients were written to the journal",
         _one("journal", "entries")),
    Kind("flowcheck_journal_bytes_total", "counter", (), "Their bytes", _one("journal", "bytes")),
    Kind("flowcheck_journal_seconds_total", "counter", (),
         "Seconds from the copy of each in memory until it was whole in its file", _one("journal", "seconds")),
    Kind("flowcheck_journal_holes_total", "counter", ("cause",), "Iterations that are not in the journal",
         lambda of: [([cause], count) for cause, count in of["journal"]["holes"].items()]),
    Kind("flowcheck_journal_size_iterations", "gauge", (), "How many the journal holds",
         lambda of: [([], of["journal"]["room"])] if of["journal"]["room"] else []),
    Kind("flowcheck_journal_base_step", "gauge", (), "Step of the newest base of the journal",
         lambda of: [([], of["journal"]["base"])] if of["journal"]["base"] else []),
    Kind("flowcheck_parameters_step", "gauge", (),
         "Step of the newest parameters on disk that a job without trainers has gathered: no version",
         lambda of: [([], of["parameters"]["step"])] if of["parameters"]["time"] else []),
    Kind("flowcheck_parameters_timestamp_seconds", "gauge", (), "When they were written, in seconds since 1970",
         _when("parameters", "time")),
    Kind("flowcheck_gradient_iteration", "gauge", (), "Newest iteration whose gradients were measured (telemetry)",
         _measured("iteration")),
    Kind("flowcheck_gradient_norm", "gauge", ("part",), "L2 norm of its gradients, of what is finite",
         _parts_measured("norm")),
    Kind("flowcheck_gradient_largest", "gauge", ("part",), "Largest finite absolute value in them",
         _parts_measured("largest")),
    Kind("flowcheck_gradient_zeros_ratio", "gauge", ("part",), "Share of their elements that is 0",
         _parts_measured("zeros")),
    Kind("flowcheck_gradient_not_finite_elements", "gauge", ("part", "kind"), "Their elements that are not finite",
         _not_finite),
    Kind("flowcheck_gradient_not_finite_iteration", "gauge", ("tensor", "kind"),
         "Newest measured iteration with such an element; its first tensor with one", _first_not_finite("iteration")),
    Kind("flowcheck_gradient_not_finite_first_element", "gauge", ("tensor", "kind"),
         "The first of them in that tensor, counted from 0", _first_not_finite("element")),
    Kind("flowcheck_update_ratio", "gauge", ("part",),
         "Norm of what the step added to the weights over their norm before it", _parts_measured("ratio")),
    Kind("flowcheck_unmeasured_tensors", "gauge", (), "Tensors of that iteration of which elements were missing",
         _measured("unmeasured")),
    Kind("flowcheck_measured_iterations_total", "counter", (), "Iterations that were measured", _measured("passes")),
    Kind("flowcheck_measuring_seconds_total", "counter", (), "How long that took",
         _measured("seconds_total")),
    Kind("flowcheck_telemetry_rows_total", "counter", ("result",), "Rows of telemetry files",
         lambda of: [([result], of["telemetry"]["rows"][result]) for result in ("written", "dropped")]
         if of["telemetry"] else []),
    Kind("flowcheck_failures_total", "counter", (), "Failures of the job that it has come back from",
         _one("failures", "count")),
    Kind("flowcheck_failure_seconds_total", "counter", (), "From each one's being noticed to the first iteration after",
         _one("failures", "seconds")),
    Kind("flowcheck_steps_repeated_total", "counter", (), "Iterations that were done again after failures",
         _one("failures", "repeated")),
    Kind("flowcheck_failure_detected_timestamp_seconds", "gauge", (), "When the last failure was noticed",
         _last_failure("detected")),
    Kind("flowcheck_failure_restored_timestamp_seconds", "gauge", (), "When the job was attached again after it",
         _last_failure("restored")),
    Kind("flowcheck_failure_resumed_timestamp_seconds", "gauge", (), "When its first iteration after it was over",
         _last_failure("resumed")),
)


class _OfBoard(Collector):
    def __init__(self, document: Document) -> None:
        self._document = document

    def collect(self) -> Iterator[Metric]:
        for kind in METRICS:
            yield kind.family(self._document)


def exposition(document: Document, accept: str) -> tuple[bytes, str]:
    """The metrics as text, and its content type. document: of a BoardWriter."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_OfBoard(document))
    encode, kind = choose_encoder(accept)
    return encode(registry), kind
