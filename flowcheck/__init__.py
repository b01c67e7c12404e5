"""FlowCheck: checkpoints rebuilt from mirrored RoCEv2 allreduce traffic.

    prepare()                    in a training process, first of all: NCCL and torch say what they do
    attach(ddp_model, optimizer, node=..., token=...)     in a training process: tell a checkpoint node of the job
    recover("10.0.0.2:7071", token=...)     in a training process: the newest version that nodes have, into training
    fetch("10.0.0.2:7071", out, token=...)  the same into files: safetensors, torch.save or torch's DCP
    replay(captures, job)        gradients, checkpoints and a report from captures
    inspect(captures)            what is in captures, with no job given
    learn(captures)              the job manifest, from the traffic itself
    load_job(path)               read and check a job manifest
    load_checkpoint(path)        a checkpoint directory, every hash checked
    Replica.latest()             the replica of a node on this machine

Names are loaded when they are first used: importing this package imports the standard library alone, and `attach` needs
torch and nothing else. docs/reference/python.md has an example of each.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowcheck.checkpoint.coding.manual_parity import protect, restore_shard
    from flowcheck.checkpoint.coding.parity import Protected
    from flowcheck.checkpoint.fetch import Taken, fetch
    from flowcheck.checkpoint.open_replica import Replica
    from flowcheck.checkpoint.state import Checkpoint, load_checkpoint
    from flowcheck.errors import EnvironmentProblem, FlowcheckError, InternalError, UserError
    from flowcheck.job.manifest import load_job
    from flowcheck.job.model import Job
    from flowcheck.offline.calls import inspect, learn, replay
    from flowcheck.offline.result import Inspection, Iteration, Missing, Result
    from flowcheck.trainer.attachment import Attachment, attach
    from flowcheck.trainer.describe.parts import Reduced
    from flowcheck.trainer.loop import AttachmentState
    from flowcheck.trainer.nccl.prepare import Prepared, prepare
    from flowcheck.trainer.recover.recovery import Recovered, recover

__version__ = "0.1.0"

__all__ = [
    "Attachment", "AttachmentState", "Checkpoint", "EnvironmentProblem", "FlowcheckError", "Inspection",
    "InternalError", "Iteration", "Job", "Missing", "Prepared", "Protected", "Recovered", "Reduced", "Replica",
    "Result", "Taken", "UserError", "attach", "fetch", "inspect", "learn", "load_checkpoint", "load_job", "prepare",
    "protect", "recover", "replay", "restore_shard",
]

_HOMES = {
    "flowcheck.checkpoint.coding.manual_parity": ("protect", "restore_shard"),
    "flowcheck.checkpoint.coding.parity": ("Protected",),
    "flowcheck.checkpoint.fetch": ("Taken", "fetch"),
    "flowcheck.checkpoint.open_replica": ("Replica",),
    "flowcheck.checkpoint.state": ("Checkpoint", "load_checkpoint"),
    "flowcheck.errors": ("EnvironmentProblem", "FlowcheckError", "InternalError", "UserError"),
    "flowcheck.job.manifest": ("load_job",),
    "flowcheck.job.model": ("Job",),
    "flowcheck.offline.calls": ("inspect", "learn", "replay"),
    "flowcheck.offline.result": ("Inspection", "Iteration", "Missing", "Result"),
    "flowcheck.trainer.attachment": ("Attachment", "attach"),
    "flowcheck.trainer.loop": ("AttachmentState",),
    "flowcheck.trainer.describe.parts": ("Reduced",),
    "flowcheck.trainer.nccl.prepare": ("Prepared", "prepare"),
    "flowcheck.trainer.recover.recovery": ("Recovered", "recover"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            try:
                found = globals()[name] = getattr(importlib.import_module(module), name)
            except ModuleNotFoundError as error:
                from flowcheck.errors import missing_module

                raise missing_module(error, f"flowcheck.{name}") from None
            return found
    raise AttributeError(f"module 'flowcheck' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
