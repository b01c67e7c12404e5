"""What `flowcheck plan capacity` says of a job, and the paper's Figures 10, 15 and 16. Results out; no options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowcheck.plan.answers.answer import Answer, Grid, Inputs, Plot, Result, Series, Value
from flowcheck.plan.capacity.capacity import MOST_CORES, STATE_BYTES, Capacity, capacity
from flowcheck.plan.capacity.capacity_options import Asked
from flowcheck.plan.capacity.capacity_request import Case, case_of
from flowcheck.plan.capacity.port_answer import burst_results, changes, packets_of, port_grid, ports_refused
from flowcheck.plan.capacity.server import missing
from flowcheck.plan.jobs.models import LARGE, PRESETS, SMALL

__all__ = ["FIGURES", "capacity_answer", "checks_of", "cores_of", "figure_answer"]

STAGES = ("receive", "place", "update")
#: Figure of the paper -> models, and what it asks.
FIGURES = {
    10: (SMALL, "How long does each stage take, beside the iteration? (FlowCheck, Figure 10)"),
    15: (SMALL, "What does working bucket by bucket gain? (FlowCheck, Figure 15)"),
    16: (LARGE, "Does a node keep up with the largest jobs? (FlowCheck, Figure 16)"),
}
NOT_PRINTED = (
    "the paper takes iteration and gap times from Calculon and prints neither: here the iteration is computed from "
    "FLOPs, the GPU's peak and MFU, and the gap is what the allreduces at link speed leave of it"
)
THREADS = "threads are taken to share a stage evenly"
MEMORY = (
    "what the memory of one machine carries in all is not in these figures: give --copy-gbs, or --bench with the rows "
    "of `flowcheck bench pipeline`"
)
FOLLOWED = (
    "the figures are those of AllReduced gradients, as if the job could be followed; it cannot (docs/use/qualify.md)"
)


def cores_of(case: Case, found: Capacity) -> int:
    """Threads of a node: receiving, placing, updating, one that follows each group, and main."""
    return found.receive_cores + case.node.place_cores + case.node.update_cores + case.node.groups + 1


def checks_of(case: Case, asked: Asked, found: Capacity) -> list[tuple[str, bool, str]]:
    """(what, does it hold, by how much) of everything that a node has to meet."""
    refused = ports_refused(case, found)
    checks = [
        ("deadline", found.slack_s >= 0, f"{abs(found.slack_s):.4g} s {'early' if found.slack_s >= 0 else 'late'}"),
        ("ports", not refused and found.peak_gbps <= found.room_gbps,
         f"{found.peak_gbps:,.0f} of {found.room_gbps:,.0f} Gb/s at the peak{f': {refused}' if refused else ''}"),
    ]
    if asked.node.cores is not None:
        cores = cores_of(case, found)
        checks.append(("cores", cores <= asked.node.cores, f"{cores} of {asked.node.cores}"))
    if asked.node.memory_gb is not None:
        most = found.memory_most / 1e9
        checks.append(("memory", most <= asked.node.memory_gb, f"{most:,.1f} of {asked.node.memory_gb:,g} GB"))
    lacks = missing(case.node, found, cores_of(case, found))
    if lacks:
        checks.append(("a server that exists", False, "; ".join(lacks)))
    return checks


def capacity_answer(asked: Asked, case: Case | None = None) -> Answer:
    """Of one job. case: what `asked` comes to, if that is known already. Raises UserError for what makes no sense."""
    case = case or case_of(asked)
    found = capacity(case.job, case.node, case.speeds)
    checks = checks_of(case, asked, found)
    good = case.followed.can and all(holds for _, holds, _ in checks)
    can = "the job can be followed" if case.followed.can else f"the job CANNOT be followed: {case.followed.why}"
    verdict = "; ".join([can, *(f"{what} {'met' if holds else 'MISSED'}: {text}" for what, holds, text in checks)])
    notes = [] if case.followed.can else [f"instead: {case.followed.instead}", FOLLOWED]
    notes += case.followed.untried
    notes.append(THREADS)
    if case.speeds.copy_gbs is None:
        notes.append(MEMORY)
    if asked.pace.iteration_s is None and asked.pace.gap_s is None:
        notes.append(NOT_PRINTED)
    if case.node.update_cores == MOST_CORES:
        notes.append("no number of updating cores meets the deadline: everything else alone takes too long")
    if not checks[1][1]:
        notes.append("copies that do not fit into the monitor ports are dropped by the switch (`flowcheck plan loss`)")
        fits = changes(case.ports) if case.ports is not None else []
        if fits:
            notes.append(f"the ports would fit, cheapest first, with {'; or '.join(fits)}; or with a lower "
                         "--peak-gbps, if it was measured")
    if case.fabric is not None:
        notes += case.fabric.notes
    grids = [_stage_grid(case, found), port_grid(case, found)]
    if case.fabric is not None:
        rows: list[list[Value]] = [[row.name, row.nodes, row.mirrored, row.monitor] for row in case.fabric.leaves]
        grids.append(Grid("leaves", "By leaf", ("leaf", "nodes", "mirrored ports", "monitor ports"), rows,
                          "the plan that `flowcheck switch plan` makes of this topology"))
    return Answer(
        "capacity", f"Can {case.title} be followed, and does a checkpoint node keep up with it?", case.inputs,
        _results(case, found), grids,
        verdict, good, notes, _pictures([(case.title, case, found)]),
    )


def figure_answer(figure: int, asked: Asked) -> Answer:
    """Figure 10, 15 or 16: the same options for each of its models."""
    names, question = FIGURES[figure]
    cases = []
    for name in names:
        case = case_of(replace(asked, job=replace(asked.job, model=name)))
        cases.append((PRESETS[name].title, case, capacity(case.job, case.node, case.speeds)))
    rows: list[list[Value]] = [
        [title, case.job.ranks, case.job.groups, found.traffic.payload / 1e9, case.job.iteration_s, found.gap_s,
         *found.stages, found.serial_s, found.pipelined_s, cores_of(case, found), found.slack_s]
        for title, case, found in cases
    ]
    columns = ("model", "replicas", "groups", "GB a port", "iteration s", "gap s", "receive s", "place s", "update s",
               "in turn s", "pipelined s", "cores", "slack s")
    grid = Grid("models", "A node of each model", columns, rows, "capacity.py")
    late = [title for title, _, found in cases if found.slack_s < 0]
    not_followed = [title for title, case, _ in cases if not case.followed.can]
    verdict = f"too late: {', '.join(late)}" if late else "each meets its deadline"
    if not_followed:
        verdict += f"; CANNOT be followed: {', '.join(not_followed)}"
    pictures = _pictures(cases)
    drawn = {10: pictures[:1], 15: pictures[1:2], 16: pictures[2:]}[figure]
    notes = [NOT_PRINTED, THREADS, MEMORY] + [FOLLOWED] * bool(not_followed)
    good = not late and not not_followed
    return Answer("capacity", question, _common(names, cases), [], [grid], verdict, good, notes, drawn)


def _common(names: Sequence[str], cases: Sequence[tuple[str, Case, Capacity]]) -> Inputs:
    """The inputs of all models: one row where all have the same, else one for each model."""
    inputs = Inputs()
    rows = [{row.name: row for row in case.inputs} for _, case, _ in cases]
    for name, first in rows[0].items():
        if all(one[name].value == first.value for one in rows):
            inputs.note(name, first.value, first.unit, first.source)
            continue
        for model, one in zip(names, rows, strict=True):
            inputs.note(f"{name} ({model})", one[name].value, first.unit, one[name].source)
    return inputs


def _stage_grid(case: Case, found: Capacity) -> Grid:
    cores = (found.receive_cores, case.node.place_cores, case.node.update_cores)
    rows: list[list[Value]] = [
        [name, seconds, 100 * seconds / case.job.iteration_s, number]
        for name, seconds, number in zip(STAGES, found.stages, cores, strict=True)
    ]
    rows.append(["one after the other", found.serial_s, 100 * found.serial_s / case.job.iteration_s, None])
    for name, seconds in (("all bytes, by memory", found.moved_s), ("all work, by cores", found.shared_s)):
        if seconds:
            rows.append([name, seconds, 100 * seconds / case.job.iteration_s, None])
    rows.append(["bucket by bucket", found.pipelined_s, 100 * found.pipelined_s / case.job.iteration_s, None])
    return Grid("stages", "Stages of an iteration", ("stage", "seconds", "% of iteration", "cores"), rows,
                "capacity.py: bytes / speed / cores; a flow shop of equal buckets, and no less than memory and cores")


def _results(case: Case, found: Capacity) -> list[Result]:
    job, node, port = case.job, case.node, found.traffic
    state = STATE_BYTES[job.optimizer]
    streams = node.mirrors * node.groups
    wire = "wire_volume.py, nccl-wire 2 and 4"
    results = [
        Result("can be followed", "yes" if case.followed.can else "no", "", case.followed.why),
        Result("data-parallel groups", job.groups, "", "tp x pp x shard"),
        Result("replicas in a group", job.ranks, "", "dp / shard"),
        Result("parameters of a group", job.group_parameters, "", "parameters / groups"),
        Result("AllReduces of an iteration", found.buckets, "", "gradient bytes / bucket-mb"),
        Result("gradient in reduced form, once", port.final_payload / max(port.final_data, 1) * job.group_parameters
               * job.call.element_bytes / 1e9, "GB on the wire", wire),
        Result("reduced packets, for `plan loss`", packets_of(job), "", wire),
        Result("wire bytes of a mirrored port", port.payload / 1e9, "GB per iteration", wire),
        Result("packets of a mirrored port", port.packets + port.control, "per iteration", wire),
        Result("bytes that come to the node", streams * port.all_frames / 1e9, "GB per iteration",
               "x mirrors x groups, with headers"),
        Result("allreduces, at link speed", found.comm_s, "s", "bytes of the busier direction / port-gbps"),
        Result("gap to the next allreduce", found.gap_s, "s", "iteration - allreduces"),
        Result("version stands", found.pipelined_s - found.comm_s, "s after them", "bucket by bucket"),
        Result("deadline kept by", found.slack_s, "s", "iteration - bucket by bucket"),
        *burst_results(case, found),
        Result("cores of a node", cores_of(case, found), "", "receive, place, update, followers, main"),
        Result("memory of a node", found.memory / 1e9, "GB",
               f"parameters x (slots x {state} + arenas x gradient) + rings"),
        Result("at most, with a new state", found.memory_most / 1e9, "GB", "docs/use/qualify.md"),
    ]
    if case.fabric is not None:
        results.append(Result("nodes", case.fabric.nodes, "", "flowcheck switch plan"))
    if case.leaves is not None:
        even = "groups spread evenly over leaves"
        results += [
            Result("GPUs", job.gpus, "", "tp x pp x dp"),
            Result("leaves", case.leaves.leaves, "", "GPUs / leaf-gpus"),
            Result("nodes, each full", case.leaves.nodes, "", "groups / groups-per-node"),
            Result("nodes per leaf, at most", case.leaves.nodes_per_leaf, "", even),
            Result("nodes, as many on each leaf", case.leaves.leaves * case.leaves.nodes_per_leaf, "", even),
            Result("monitor ports per leaf, at most", case.leaves.monitor_ports, "", "x node-ports"),
        ]
    return results


def _pictures(cases: Sequence[tuple[str, Case, Capacity]]) -> list[Plot]:
    """Figures 10, 15 and 16, of these jobs."""
    names = [title for title, _, _ in cases]

    def series(label: str, values: Sequence[float]) -> Series:
        return Series(label, names, list(values))

    stages = [series(stage, [found.stages[at] for _, _, found in cases]) for at, stage in enumerate(STAGES)]
    turn = series("one after the other", [found.serial_s for _, _, found in cases])
    overlapped = series("bucket by bucket", [found.pipelined_s for _, _, found in cases])
    iteration = series("iteration", [case.job.iteration_s for _, case, _ in cases])
    gap = series("gap between allreduces", [found.gap_s for _, _, found in cases])
    return [
        Plot("Stages of a node (Figure 10)", "", "seconds", stages, kind="stacked"),
        Plot("Pipelined or not (Figure 15)", "", "seconds", [turn, overlapped, iteration], kind="bars",
             log_y=True),
        Plot("Iteration, gap and node (Figure 16)", "", "seconds", [iteration, gap, overlapped], kind="bars",
             log_y=True),
    ]
