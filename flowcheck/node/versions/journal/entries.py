"""What an entry of a node's journal says besides its gradients: the head, as JSON.

    heads = Heads(plan, digest)
    heads.spans(iteration)                     (n, 2) int64 of its buckets in the arena, as a ring takes them
    heads.most                                 bytes of the largest entry
    head = heads.head(number, iteration, line, record, unproven, matches)
    entry = read(head, spans)                  entry.made is what the updater takes; raises FlowcheckError

    iteration   the trainer's number
    line        the chain of versions that it belongs to (folders.py)
    record      groups, clip, scale, skipped, checksums, sample: as the step record has them
    spans       [dtype, elements] of each bucket, in the order of the spans
    plan        64 hexadecimal digits that stand for the job, and where its bytes lie
    buffers     {name: [dtype, shape, bytes in base64]}
    unproven    marks of the verdict
    matches     checksums of the trainer that had matched before it
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flowcheck.control.tensors import in_text, of_text
from flowcheck.errors import FlowcheckError
from flowcheck.journal.format import entry_bytes
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.again import Made
from flowcheck.rebuild.version.records import StepRecord

__all__ = ["Heads", "KeptEntry", "line_of", "read"]

HEAD_BYTES = 1 << 16  # of all but what grows with the model
ENTRY_OF_MODEL = 512  # bytes of checksums of one entry of the model, with its name's length four times
GROUP_BYTES = 2048  # of hyper-parameters
TREE_BYTES = 1 << 18  # of all options of an optimizer that is not known


class Heads:
    """digest: `plan` of the heads."""

    def __init__(self, plan: JobPlan, digest: str) -> None:
        self._plan, self._digest = plan, digest
        self._spans = [np.array([(one.offset, one.nbytes) for one in plan.iteration_buckets(iteration)], np.int64
                                ).reshape(-1, 2) for iteration in (0, 1)]
        self._said = [[[one.dtype, one.elements] for one in plan.iteration_buckets(iteration)] for iteration in (0, 1)]

    def spans(self, iteration: int) -> np.ndarray:
        return self._spans[min(iteration, 1)]

    @property
    def most(self) -> int:
        job = self._plan.job
        buffers = sum(one.elements for one in job.model if one.kind == "buffer") * 8
        head = HEAD_BYTES + buffers * 4 // 3 + sum(ENTRY_OF_MODEL + 4 * len(one.name) for one in job.model)
        head += GROUP_BYTES * len(job.optimizer.groups) if job.optimizer is not None else TREE_BYTES
        return max(entry_bytes(head, spans[:, 1].tolist()) for spans in self._spans)

    def head(
        self, number: int, iteration: int, line: str, record: StepRecord | None, unproven: Sequence[str], matches: int
    ) -> bytes:
        """number: the trainer's of `iteration`, which is the manifest's."""
        said = record or StepRecord()
        return json.dumps({
            "iteration": number, "line": line, "plan": self._digest, "spans": self._said[min(iteration, 1)],
            "record": {
                "groups": [dict(one) for one in said.groups], "clip": said.clip, "scale": said.scale,
                "skipped": said.skipped, "checksums": dict(said.checksums), "sample": said.sample,
            },
            "buffers": {name: in_text(tensor) for name, tensor in said.buffers.items()},
            "unproven": list(unproven), "matches": matches,
        }).encode()


@dataclass(frozen=True)
class KeptEntry:
    """number: the trainer's of the iteration. made: its record, with checksums, and its buckets."""

    number: int
    line: str
    made: Made
    unproven: tuple[str, ...]
    matches: int


def line_of(head: bytes, plan: str) -> str:
    """The line of an entry; "": it is of another job, or nothing that can be read."""
    try:
        said = json.loads(head)
        return str(said["line"]) if said["plan"] == plan else ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def read(head: bytes, spans: Sequence[np.ndarray]) -> KeptEntry:
    """spans: uint8, whole. Raises FlowcheckError: that is not an entry of a node's journal."""
    try:
        said = json.loads(head)
        record, kinds = said["record"], said["spans"]
        buckets = [_elements(span, dtype, elements) for span, (dtype, elements) in zip(spans, kinds, strict=True)]
        buffers = {name: of_text(*one) for name, one in said["buffers"].items()}
        made = Made(StepRecord(record["groups"], record["clip"], record["scale"], record["skipped"],
                               record["checksums"], buffers, record["sample"]), buckets)
        return KeptEntry(said["iteration"], said["line"], made, tuple(said["unproven"]), said["matches"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise FlowcheckError(f"an entry cannot be read: {error}", where="journal") from None


def _elements(span: np.ndarray, dtype: str, elements: int) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nor does anybody write it
        found = torch.from_numpy(span).view(kind) if span.size else torch.zeros(0, dtype=kind)
    if found.numel() != elements:
        raise ValueError(f"a bucket of {found.numel()} elements, not {elements}")
    return found
