"""A cluster and its job, as the goodput of checkpointing systems needs them. Every value has a default and its source.

    inputs = Inputs()
    cluster = read_cluster({"failures_per_day": 4.0}, inputs)      what is not given is noted with where it comes from

"example" as a source means: a value somebody would recognise, from no paper. Give your own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, get_type_hints

from flowcheck.plan.answers.answer import Inputs, Value, need, need_at_most, need_positive, need_probability
from flowcheck.plan.jobs.models import LARGE, PRESETS, flops_seconds

__all__ = ["DEFAULTS", "DAY", "OPTIONS", "Cluster", "named", "read_cluster"]

DAY = 86400.0
GB = 1e9
#: Inputs with an option of their own; the others are given by --set.
OPTIONS = ("gpus", "parameters", "iteration", "failures_per_day", "server_price", "node_price")


@dataclass(frozen=True)
class Training:
    """The job."""

    gpus: int
    gpus_per_server: int
    data_parallel: int
    parameters: float
    state_bytes: float
    iteration: float


@dataclass(frozen=True)
class Failures:
    """How often something fails, what that takes along, and what comes until it is loaded again."""

    failures_per_day: float
    hardware: float
    simultaneous: int
    detect: float
    replacement: float
    start: float


@dataclass(frozen=True)
class Speeds:
    """Bytes per second; given in GB/s."""

    storage: float
    disk: float
    device: float
    spare: float


@dataclass(frozen=True)
class Memory:
    """Systems that keep copies in memory: Gemini, ECCheck, REFT."""

    persist_hours: float
    replicas: int
    code_data: int
    code_parity: int
    reft_group: int
    reft_slowdown: float
    reft_load: float


@dataclass(frozen=True)
class JustInTime:
    """Checkpoints when something fails."""

    jit_user: float
    jit_hard: float
    jit_transient: float
    jit_steady: float


@dataclass(frozen=True)
class CheckpointNodes:
    """FlowCheck: its versions, and its nodes."""

    version_lag: float
    incomplete: float
    nodes: int
    node_speed: float
    node_failures: float
    node_repair: float


@dataclass(frozen=True)
class Prices:
    """$ per hour."""

    server_price: float
    node_price: float


@dataclass(frozen=True)
class Cluster:
    """Resolved inputs, in groups; DEFAULTS says of each its unit and where its default comes from."""

    job: Training
    failures: Failures
    speeds: Speeds
    memory: Memory
    jit: JustInTime
    flowcheck: CheckpointNodes
    prices: Prices

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> Cluster:
        """values: of every input, by name."""
        return cls(**{
            name: kind(**{one.name: values[one.name] for one in fields(kind)}) for name, kind in _groups().items()
        })

    def values(self) -> dict[str, float]:
        """Every input by its name."""
        return {name: value for one in fields(self) for name, value in vars(getattr(self, one.name)).items()}

    def but(self, **changes: float) -> Cluster:
        """The same with other values of these inputs."""
        return self.of(self.values() | changes)

    @property
    def servers(self) -> int:
        return self.job.gpus // self.job.gpus_per_server

    @property
    def model_parallel(self) -> int:
        """GPUs that hold one copy of the model."""
        return max(1, self.job.gpus // self.job.data_parallel)

    @property
    def state(self) -> float:
        """Bytes of one checkpoint of the whole job."""
        return self.job.parameters * self.job.state_bytes

    @property
    def rate(self) -> float:
        """Failures of the job per second."""
        return self.failures.failures_per_day / DAY

    @property
    def restart(self) -> float:
        """Seconds from a failure until a restarted job can begin to load: detected, replaced if need be, started."""
        return self.failures.detect + self.failures.hardware * self.failures.replacement + self.failures.start

    def with_failures(self, per_day: float) -> Cluster:
        return self.but(failures_per_day=per_day)


@cache
def _groups() -> dict[str, Any]:
    return get_type_hints(Cluster)


# name: (default, unit, source of the default)
DEFAULTS: dict[str, tuple[float | int, str, str]] = {
    "gpus": (1536, "", "FlowCheck, section 8.5: 175B"),
    "gpus_per_server": (8, "", "FlowCheck, section 8.5: 192 servers"),
    "data_parallel": (16, "", "FlowCheck, Table 2: 8 x 12 x 16 GPUs, as `flowcheck plan capacity`"),
    "parameters": (175e9, "", "FlowCheck, section 8.5"),
    "state_bytes": (12, "B/parameter", "Gemini, section 2: MT-NLG"),
    "iteration": (15.0, "s", "example: 6 x 175e9 x 1536 x 2048 FLOP at 46 % of 1536 x 312 TFLOP/s"),
    "failures_per_day": (2, "1/day", "FlowCheck, section 8.5: cost"),
    "hardware": (1.0, "share", "example: every failure takes a server"),
    "simultaneous": (1, "servers", "example: servers lost per failure that takes one"),
    "detect": (15, "s", "Gemini, section 7: detection"),
    "replacement": (330, "s", "Gemini, section 7: 4 to 7 minutes without standby"),
    "start": (240, "s", "Gemini, section 7: restart"),
    "storage": (2.5, "GB/s", "Gemini, section 2: 20 Gb/s to storage, all servers together"),
    "disk": (2.0, "GB/s", "example: a server's disks"),
    "device": (12.0, "GB/s", "example: from one GPU into its server's memory"),
    "spare": (5.0, "GB/s", "example: idle network of a server beside training, a tenth of 400 Gb/s"),
    "persist_hours": (3.0, "h", "example: from memory to storage"),
    "replicas": (2, "", "Gemini: one remote copy"),
    "code_data": (2, "servers", "ECCheck: k = 2 of 4"),
    "code_parity": (2, "servers", "ECCheck: m = 2 of 4"),
    "reft_group": (6, "servers", "REFT, Figure 8: n = 6"),
    "reft_slowdown": (0.03, "share", "REFT: HAS at most 3 %"),
    "reft_load": (0.75, "s", "REFT: load with AEC"),
    "jit_user": (55, "s", "just-in-time: 10 to 55 s at user level"),
    "jit_hard": (38, "s", "just-in-time: 9 to 38 s, hard errors, transparent"),
    "jit_transient": (16, "s", "just-in-time: 2 to 16 s, transient errors, transparent"),
    "jit_steady": (7.3e-5, "share", "just-in-time, Table 8, BERT-L-PT at N = 4, with Table 3's percent as percent"),
    "version_lag": (15.0, "s", "example: a version one iteration after its gradients; `flowcheck plan capacity`"),
    "incomplete": (6e-12, "", "FlowCheck, eq. (2), M = 3; `flowcheck plan loss`"),
    "nodes": (16, "", "FlowCheck, section 8.5: 526 $ a day are 16 nodes"),
    "node_speed": (50.0, "GB/s", "FlowCheck, section 9: 400 Gb/s"),
    "node_failures": (0.17, "1/day", "example: all nodes together, each as often as a server: 2 / 192 x 16"),
    "node_repair": (600.0, "s", "example: a node attached again, with state from the trainers"),
    "server_price": (30.0, "$/h", "FlowCheck, section 8.5"),
    "node_price": (1.37, "$/h", "FlowCheck, section 8.5"),
}


# name: (the most, why). Numbers of servers decide how long it takes to compute what survives.
MOST = {
    "gpus": (1_000_000, "no job has so many"),
    "parameters": (1e15, "no model has so many"),
    "state_bytes": (1000, "no optimizer keeps so many for a parameter"),
    "replicas": (64, "no server keeps so many"),
    "code_data": (128, "a code over bytes has no more"),
    "code_parity": (128, "a code over bytes has no more"),
    "reft_group": (1024, "no pipeline stage has so many servers"),
    "simultaneous": (64, "no failure takes so many servers"),
    "nodes": (1_000_000, "no job has so many"),
}
MOST_OF_OTHERS = (1e9, "no cluster has that")


def named(name: str) -> str:
    """How an input is given: `--gpus`, `--set storage=`."""
    option = name.replace("_", "-")
    return f"--{option}" if name in OPTIONS else f"--set {option}="


def _scale(name: str) -> dict[str, tuple[Value, str]]:
    """What a job of models.py says of its cluster, with the sources there; its iteration by FLOPs."""
    need(name in LARGE, f"{name} is not one of {', '.join(LARGE)}", "--scale", "name one of them")
    preset = PRESETS[name]
    seconds = flops_seconds(preset.parameters, preset.tokens, preset.gpus, preset.peak_tflops, preset.mfu)
    flops = f"{preset.title}: 6 x parameters x tokens / (GPUs x peak x MFU), as `flowcheck plan capacity`"
    return {
        "gpus": (preset.gpus, preset.source("dp")), "data_parallel": (preset.dp, preset.source("dp")),
        "parameters": (preset.parameters, preset.source("parameters")), "iteration": (seconds, flops),
        "version_lag": (seconds, "example: a version one iteration after its gradients"),
    }


def read_cluster(
    given: Mapping[str, Value], inputs: Inputs, scale: str = "", computed: Mapping[str, tuple[Value, str]] | None = None
) -> Cluster:
    """The cluster of what is given (None: not given), else computed, else of a scale, else of the defaults.

    scale: a large job of models.py. computed: (value, source) of another answer. Raises UserError for an unknown scale,
    and for values that make no sense together.
    """
    known = (_scale(scale) if scale else {}) | dict(computed or {})
    values: dict[str, Value] = {}
    for name, (default, unit, source) in DEFAULTS.items():
        option = name.replace("_", "-")
        one = given.get(name)
        if isinstance(one, int | float):
            most, why = MOST.get(name, MOST_OF_OTHERS)
            need_at_most(one, most, named(name), why)
        if one is None and name in known:
            values[name] = inputs.note(option, known[name][0], unit, known[name][1])
        else:
            values[name] = inputs.take(option, one, default, unit, source)
    for name in ("storage", "disk", "device", "spare", "node_speed"):
        need_positive(float(values[name] or 0), named(name), "GB/s")
        values[name] = float(values[name] or 0) * GB
    cluster = Cluster.of(values)
    _check(cluster)
    return cluster


def _check(cluster: Cluster) -> None:
    values, job = cluster.values(), cluster.job
    for name in ("gpus", "gpus_per_server", "data_parallel", "parameters", "state_bytes", "iteration",
                 "persist_hours", "replicas", "code_data", "code_parity", "reft_group", "nodes", "simultaneous"):
        need_positive(values[name], named(name))
    for name in ("hardware", "incomplete"):
        need_probability(values[name], named(name), below_one=name == "incomplete")
    for name in sorted(values.keys() - {"hardware", "incomplete"}):
        value = values[name]
        need(0 <= value < float("inf"), f"{value:g} is below 0 or not finite", named(name), "a number of 0 or more")
    need(job.gpus % job.gpus_per_server == 0, f"{job.gpus} GPUs do not fill servers of "
         f"{job.gpus_per_server}", "--gpus",
         f"a multiple of {job.gpus_per_server}, or another {named('gpus_per_server')}")
    servers = cluster.servers
    lost, memory, fits = cluster.failures.simultaneous, cluster.memory, f"at most {servers}, the servers of the job"
    need(lost <= servers, f"{lost} of {servers} servers cannot be lost", named("simultaneous"), fits)
    need(memory.replicas <= servers, f"{memory.replicas} replicas do not fit {servers} servers", named("replicas"),
         fits)
    need(servers % job.data_parallel == 0 or job.data_parallel > servers,
         f"{job.data_parallel} data-parallel replicas do not divide {servers} servers", named("data_parallel"),
         f"a divisor of {servers}, or more")
    need(job.gpus % job.data_parallel == 0,
         f"{job.gpus} GPUs cannot be shared by {job.data_parallel} data-parallel replicas",
         named("data_parallel"), f"a divisor of {job.gpus}, the GPUs of the job")
    for name, size in (("code_data", memory.code_data + memory.code_parity), ("reft_group", memory.reft_group)):
        need(size <= servers, f"a group of {size} does not fit {servers} servers", named(name), "a smaller group")
    need(job.iteration * cluster.rate < 1, "a failure comes more often than an iteration ends",
         "--failures-per-day", "fewer failures, or shorter iterations: nothing would ever be trained")
