"""What a checksum of a record is of, where a job has a log: all that a redo has to make again.

    begin_checksums(summed(parameters, optimizer)).get()

Of each parameter itself, and of its state every tensor and every number, however deep, by names: those on top are
called as for a replica ("optimizer.layer.weight.exp_avg"), deeper ones by their path
("optimizer.layer.weight.one.codes"). A float is summed as 8 bytes, a whole number as its last 63 bits. torch and the
standard library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from flowcheck.job.sampling import ONCE, state_name
from flowcheck.trainer.describe.parts import local

__all__ = ["summed"]

_POSITIVE = (1 << 63) - 1


def summed(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """parameters: by name, as the optimizer has them. names: of those that are wanted; None: of all."""
    out = {}
    for name, parameter in parameters.items():
        if names is None or name in names:
            out[name] = local(parameter).detach()
            for path, value in _leaves(optimizer.state.get(parameter, {}), ""):
                out[state_name(name, path)] = value
    return out


def _leaves(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        held = local(value).detach()
        if held.layout is torch.sparse_coo:
            yield f"{path}.values", held._values()
            yield f"{path}.indices", held._indices()
        else:
            yield path, held.float() if path == ONCE else torch.view_as_real(held) if held.is_complex() else held
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for at, one in enumerate(value):
            yield from _leaves(one, f"{path}.{at}")
    elif isinstance(value, float):
        yield path, torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, int):
        yield path, torch.tensor(value & _POSITIVE, dtype=torch.int64)
