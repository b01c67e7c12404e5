"""The sample of a step record, held against the version that was built for it.

    sampled = Sampled(job)
    sample = sampled.sample(text, number, where)        of the trainer's iteration `number`; raises UserError
    name, count = sampled.compare(sample, number, version, trusted)

A sample has some elements of some tensors (flowcheck/job/sampling.py), as integers of their width: a NaN has to
have the trainer's bits. One that agrees proves nothing of the others, and so verifies no version; one that differs
proves that it is not the trainer's. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from flowcheck.job.model import Job
from flowcheck.job.sampling import KEYS, UNSAID, Look, Positions, Sample, Sampling, state_name, unpack

__all__ = ["Held", "Sampled"]

_INTEGERS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16), 4: (torch.int32, np.int32),
             8: (torch.int64, np.int64)}


class Held(Protocol):
    """Tensors of a version: parameters by entry, states by entry and key."""

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]: ...


class Sampled:
    """Of one job."""

    def __init__(self, job: Job) -> None:
        self._sampling = Sampling(job.model)
        self._positions = Positions(b"")

    def sample(self, text: str, number: int, where: str) -> Sample:
        return unpack(text, self._sampling.entries(number), where)

    def compare(
        self, sample: Sample, number: int, version: Held, trusted: Callable[[str], bool] = lambda entry: True
    ) -> tuple[str, int]:
        """(the first tensor that differs, "": none does; how many tensors were compared). trusted: may this entry's
        tensors be compared? Others of the version wait for the trainer's state."""
        if self._positions.salt != sample.salt:
            self._positions = Positions(sample.salt)
        states, count = version.optimizer_state, 0
        entries = self._sampling.entries(number)
        lacking = {
            entry.name: self._lacking(mask, states.get(entry.name, {}))
            for entry, mask in zip(entries, sample.masks, strict=True) if entry.kind == "optimized"
        }
        for look, theirs in sample.found:
            if not trusted(look.entry):
                continue
            held = states.get(look.entry, {}).get(look.key) if look.key else version.parameters.get(look.entry)
            if held is None or self._of(look, held, number) != theirs:
                return look.name, count
            count += 1
            if not look.key and lacking.get(look.entry):
                return state_name(look.entry, lacking[look.entry]), count
        return "", count

    @staticmethod
    def _lacking(mask: int, state: Mapping[str, Any]) -> str:
        """What the version has of an entry, and the trainer has not."""
        if mask & UNSAID:
            return ""
        return next((key for bit, key in enumerate(KEYS) if key in state and not mask >> bit & 1), "")

    def _of(self, look: Look, held: torch.Tensor, number: int) -> bytes:
        if (held.numel(), held.element_size()) != (look.elements, look.width):
            return b""
        bits = held.detach().reshape(-1).view(_INTEGERS[look.width][0]).numpy()
        taken: bytes = bits[self._positions.of(look.name, look.elements, number)].tobytes()
        return taken
