"""Can a group follow a job: is the manifest of this run, does it leave something to do, does the node have the memory.

Besides, pure: the flows of all ranks together, and what a state holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flowcheck.errors import UserError
from flowcheck.job.model import FEED, LOG, Job
from flowcheck.node.config.replica import ReplicaSettings
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.recipe import replica_bytes

__all__ = ["check_gathered", "check_job", "check_memory", "split", "union"]

STAGED = 2  # iterations that are on their way into a journal
SETS = 3  # of gathered parameters: one is copied out of its arena, one is the newest, one is being written


def union(sent: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Flows of all ranks: both ends of a connection name it, and must say the same. Without channels one end may not
    know the other's address, and to which of several ranks a queue pair goes: what only one end has named is left out.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for flow in (flow for flows in sent for flow in flows):
        named = ("channel", "src", "dst") if flow.get("channel") is not None else ("src", "dst", "qpns", "cts_qpns")
        key = tuple(str(flow.get(part)) for part in named)
        held = found.setdefault(key, {})
        for name, value in flow.items():
            if held.setdefault(name, value) != value and value:
                if held[name]:
                    raise UserError(f"the ends of connection {', '.join(key)} say different {name}", where="flows")
                held[name] = value
    whole = [found[key] for key in sorted(found) if found[key].get("src_addr") != "" != found[key].get("dst_addr")]
    if found and not whole:
        raise UserError("no connection has been named by both of its ends", where="flows",
                        remedy="all ranks' NCCL logs and queue pairs (docs/use/nccl.md); or topology=")
    return whole


def split(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """State payload -> parameters by name, optimizer state by name and key."""
    parameters: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part == "model":
            parameters[rest] = tensor
        else:
            owner, _, key = rest.rpartition(".")
            state.setdefault(owner, {})[key] = tensor
    return parameters, state


def check_job(job: Job, run: tuple[str, int, int], journal: bool, mirror: bool = True) -> None:
    """journal: does the node keep one? mirror: has it a port? Raises UserError if the manifest is not of this run (id,
    epoch, ranks), or leaves nothing to do."""
    if (job.run_id, job.epoch, job.communicator.ranks) != run:
        raise UserError(
            f"the manifest is of run {job.run_id!r}, epoch {job.epoch}, {job.communicator.ranks} ranks; this is"
            f" {run[0]!r}, {run[1]}, {run[2]}", where="manifest",
        )
    if job.source != FEED and not mirror:
        raise UserError("the job's gradients are to come from a mirror, and this node has no mirror port",
                        where="manifest: source",
                        remedy='[capture] in the node\'s settings; or attach with source="feed"')
    if job.kind == LOG and not journal:
        raise UserError("the job is to be kept as a log, and this node keeps no journal", where="manifest: kind",
                        remedy="[journal] in the node's settings (docs/use/log.md)")
    if job.optimizer is None and job.kind != LOG:
        raise UserError("the manifest names no optimizer: there is nothing to keep versions of", where="manifest")


def check_gathered(job: Job, where: str) -> None:
    """Raises UserError if nothing can be followed of a job without its trainers, or more than its parameters."""
    if not job.parameter_calls(0):
        raise UserError(
            "no AllGather of it carries parameters, so without its trainers there is nothing to follow", where=where,
            remedy="flowcheck.attach in the trainers of a job that reduces gradients; carries: \"parameters\" for one"
            " that gathers parameters (docs/reference/manifest.md)",
        )
    if not any(job.parameter_slices(call) for _, call in job.parameter_calls(0)):
        raise UserError("no AllGather of it says what lies in it", where=where, remedy="`layout` or `tensors` of its"
                        " calls that carry parameters (docs/reference/manifest.md)")
    if job.optimizer is not None or job.step_values or any(job.gradient_calls(t) for t in (0, 1)):
        raise UserError(
            "it has gradients, an optimizer or step_values, which need trainers that attach", where=where,
            remedy="leave them out, to follow gathered parameters alone; or flowcheck.attach in its trainers",
        )


def check_memory(plan: JobPlan, settings: ReplicaSettings, journal: bool = False) -> None:
    """journal: two iterations may be on their way into one. Raises UserError if a job takes more than the settings
    allow."""
    gradients = plan.engine.gradient_bytes  # and a bit for every 8 bytes, for what has come
    if plan.job.optimizer is not None:
        kept = replica_bytes(plan.job, settings.slots)
        what = f"{settings.slots} slots of parameters and optimizer state"
    elif plan.job.kind == LOG:
        kept, what = 0, "no replica"
    else:
        kept, what = SETS * gradients, f"{SETS} sets of parameters"
    of = "gradients" if plan.job.optimizer is not None or plan.job.kind == LOG else "them"
    staged = f", {STAGED} more on their way into the journal" if journal else ""
    most = kept + plan.engine.arenas * (gradients + gradients // 64) + STAGED * journal * gradients
    if most > settings.memory_mb << 20:
        raise UserError(
            f"the job takes {-(-most >> 20)} MiB ({what}, {plan.engine.arenas} iterations of {of}{staged})",
            where="replica.memory_mb",
            remedy=f"set it to {-(-most >> 20)} or more (it is {settings.memory_mb}), or use fewer slots or arenas",
        )
