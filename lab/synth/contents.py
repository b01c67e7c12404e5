"""What the calls of a job carry: gradients, parameters, DDP's bucket announcement, or anything at all.

`inputs_of` gives every rank's input to a call. Gradients are values.generate_values with the seed that the
truth names, so they can be recomputed elsewhere. Source of DDP's contents: nccl-wire.md 9.1.
Any thread.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from flowcheck.durable import write_atomic
from flowcheck.errors import UserError
from flowcheck.job.model import Collective, Job, carries, dtype_size
from lab.synth.values import Array, generate_values, storage

__all__ = ["broadcast_tensors", "data_seed", "initial_parameters", "inputs_of", "load_parameters", "save_parameters"]

def data_seed(seed: int, iteration: int, index: int) -> int:
    """Generator seed of call `index` of an iteration (startup: iteration -1); gradients use 1000 + bucket."""
    return (seed * 1_000_003 + (iteration + 1) * 8191 + index) & 0x7FFFFFFF


def initial_parameters(job: Job, seed: int) -> dict[str, Array]:
    """A value for every model entry, by seed, flattened."""
    return {
        entry.name: generate_values(entry.dtype, data_seed(seed, -1, 5000 + i), 0, entry.elements)
        for i, entry in enumerate(job.model)
    }


def load_parameters(job: Job, path: str | os.PathLike[str]) -> dict[str, Array]:
    """Model entries from a safetensors file or a checkpoint, flattened. Raises UserError as `replay --init` does."""
    import torch  # a second that only those wait for who bring weights

    from flowcheck.checkpoint.directory import load_init

    loaded = load_init(path, job.model).parameters
    flat = {entry.name: loaded[entry.name].contiguous().reshape(-1).view(torch.uint8) for entry in job.model}
    return {entry.name: flat[entry.name].numpy().view(storage(entry.dtype)) for entry in job.model}


def save_parameters(job: Job, parameters: dict[str, Array], path: str | os.PathLike[str]) -> None:
    """Write model entries as safetensors, for a reader's --init. Raises EnvironmentProblem."""
    import torch
    from safetensors.torch import save

    tensors = {
        entry.name: torch.from_numpy(parameters[entry.name].view(np.uint8).copy()).view(getattr(torch, entry.dtype))
        .reshape(entry.shape)
        for entry in job.model
    }
    write_atomic(Path(path), save(tensors))


def broadcast_tensors(job: Job, call: Collective) -> list[str]:
    """Model entries that a call with carries="parameters" broadcasts, in order."""
    return call.tensors or [entry.name for entry in job.model if "float" in entry.dtype]


def inputs_of(
    job: Job, call: Collective, *, seed: int, iteration: int, index: int, bucket: int | None,
    parameters: dict[str, Array],
) -> list[Array]:
    """One array per rank: the call's input, in the call's dtype (AllGather: the rank's block)."""
    ranks = job.communicator.ranks
    if bucket is not None:
        drawn = data_seed(seed, iteration, 1000 + bucket)
        return [generate_values(call.dtype, drawn, rank, call.count) for rank in range(ranks)]
    if carries(call) == "parameters":
        names = broadcast_tensors(job, call)
        flat = b"".join(parameters[name].tobytes() for name in names)
        if len(flat) != call.count * dtype_size(call.dtype):
            raise UserError(
                f"a broadcast of {call.count} {call.dtype} carries {len(names)} model entries of "
                f"{len(flat)} bytes", where="collectives", remedy="correct count or tensors of this call",
            )
        return [np.frombuffer(flat, storage(call.dtype))] * ranks
    startup = _ddp_startup(job, call) if iteration < 0 else None
    if startup is not None:
        return [startup] * ranks
    announced = _ddp_announcement(job, iteration, index)
    is_int32 = (call.op, call.dtype) == ("Broadcast", "int32")
    if is_int32 and announced is not None and len(announced) == call.count:
        return [announced] * ranks
    count = call.count * (ranks if call.op == "ReduceScatter" else 1)
    drawn = data_seed(seed, iteration, index)
    return [generate_values(call.dtype, drawn, rank, count) for rank in range(ranks)]


def _ddp_startup(job: Job, call: Collective) -> Array | None:
    """Number of parameters, then sizes and strides of each, if the job's start-up has a broadcast of that size."""
    numbers: list[int] = []
    entries = [entry for entry in job.model if entry.kind == "optimized"]
    for entry in entries:
        strides = [1] * len(entry.shape)
        for axis in range(len(entry.shape) - 1, 0, -1):
            strides[axis - 1] = strides[axis] * max(entry.shape[axis], 1)
        numbers += [*entry.shape, *strides]
    if not any((c.op, c.dtype, c.count) == ("Broadcast", "int64", len(numbers)) for c in job.collectives.startup):
        return None
    if (call.op, call.dtype, call.count) == ("Broadcast", "int64", len(numbers)):
        return np.array(numbers, "<i8")
    if (call.op, call.dtype, call.count) == ("AllGather", "int64", 1):
        return np.array([len(entries)], "<i8")
    return None


def _ddp_announcement(job: Job, iteration: int, index: int) -> Array | None:
    """The rebuilt bucket layout as DDP broadcasts it: parameter indices and bucket count; then sizes."""
    if iteration != 1 or index > 1 or not job.buckets.steady:
        return None
    order = {entry.name: i for i, entry in enumerate(e for e in job.model if e.kind == "optimized")}
    layout = [[order[piece.name] for piece in bucket.slices] for bucket in job.buckets.steady]
    if index == 0:
        return np.array([i for bucket in layout for i in bucket] + [len(layout)], "<i4")
    return np.array([len(bucket) for bucket in layout], "<i4")
