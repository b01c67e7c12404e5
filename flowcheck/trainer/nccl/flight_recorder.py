"""Torch's flight recorder: which collectives each process group was asked for, in order, with sizes and types.

    recorder = Recorder()                       of this process's torch
    flights = recorder.read()                   what its ring holds now
    mine = flights.group("0")                   calls of one process group since its birth, or refused by name

What torch calls it, by its sources (torch/csrc/distributed/c10d; FlightRecorder.hpp, before 2.6 NCCLUtils.hpp):

    entries in the ring     TORCH_FR_BUFFER_SIZE, before that TORCH_NCCL_TRACE_BUFFER_SIZE, which is read still where
                            the new name is not set. 0: nothing is recorded
    dump of NCCL's calls    torch._C._distributed_c10d._dump_nccl_trace_json (2.5 and later, builds with NCCL)
    dump of gloo's calls    ..._dump_fr_trace_json (2.8 and later): another recorder, of other backends
    version                 of the dump's form: "2.3" to "2.10" have what is read here

Pickles (`_dump_nccl_trace`, the one form before 2.5) are not read: a file of them can run anything. The recorder says
what torch asked for, not what NCCL chose, nor the root of a broadcast, nor the reduction. torch is loaded by `Recorder`
alone; the rest is the standard library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from flowcheck.errors import EnvironmentProblem, UserError

__all__ = ["BUFFER_VARIABLES", "Flight", "Flights", "Recorder", "parse_flights"]

BUFFER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the first that is set counts
DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
DUMP_MAX = 256 << 20
ENTRIES_MAX = 1 << 20
FORM = 2  # major number of the dump's version
_ELEMENTS = 1 << 48
_TYPES = {  # c10::toString
    "Char": "int8", "Byte": "uint8", "Bool": "uint8", "Int": "int32", "UInt32": "uint32", "Long": "int64",
    "UInt64": "uint64", "Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64",
}
_OPERATIONS = {  # profiling names without the backend, of ProcessGroupNCCL.cpp and ProcessGroupGloo.cpp
    "all_reduce": "AllReduce", "all_reduce_barrier": "AllReduce", "all_reduce_coalesced": "AllReduce",
    "allreduce": "AllReduce", "allreduce_coalesced": "AllReduce", "broadcast": "Broadcast",
    "_broadcast_oop": "Broadcast", "all_gather": "AllGather",
    "_all_gather_base": "AllGather", "all_gather_into_tensor_coalesced": "AllGather", "allgather": "AllGather",
    "reduce_scatter": "ReduceScatter", "_reduce_scatter_base": "ReduceScatter",
    "reduce_scatter_tensor_coalesced": "ReduceScatter",
}


@dataclass(frozen=True)
class Flight:
    """One call as torch asked for it. name: torch's, as "nccl:all_reduce". sequence: torch's number among the calls of
    the group, from 1. sizes, types: of the input tensors. outputs: of the output tensors."""

    record: int
    group: str
    described: str
    name: str
    sequence: int
    point_to_point: bool
    sizes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    outputs: tuple[tuple[int, ...], ...]

    def collective(self) -> dict[str, Any]:
        """In the manifest's form, without `root`, which is not recorded. Raises UserError if it has none."""
        operation = _OPERATIONS.get(self.name.partition(":")[2])
        if operation is None or self.point_to_point:
            self._refuse("a manifest cannot have")
        if len(self.sizes) != 1 or len(self.types) != 1:
            self._refuse(f"has {len(self.sizes)} tensors: how NCCL is called for them is not said", "")
        if self.types[0] not in _TYPES:
            self._refuse(f"is of {self.types[0]}", "")
        count = math.prod(self.sizes[0])
        if operation == "ReduceScatter":  # the manifest counts what each rank is left with
            count = sum(math.prod(one) for one in self.outputs) if len(self.outputs) == 1 else 0
        if operation == "AllGather" and len({math.prod(one) for one in self.outputs}) > 1:
            self._refuse("gathers tensors of different sizes, which NCCL does by broadcasts", "")
        return {"op": operation, "count": count, "dtype": _TYPES[self.types[0]]}

    def _refuse(self, what: str, which: str = "which ") -> NoReturn:
        raise UserError(f"{self.name} {which}{what}", where=f"torch's flight recorder, record {self.record}",
                        remedy="give DDP a process group of its own")


@dataclass(frozen=True)
class Flights:
    """What one dump holds. version: of its form. library: NCCL's, "" if not said. entries: in the order in which they
    were made."""

    version: str
    library: str
    entries: tuple[Flight, ...]

    @property
    def groups(self) -> dict[str, str]:
        """Name of each process group with calls -> its description."""
        return {one.group: one.described for one in self.entries}

    def group(self, name: str) -> list[Flight]:
        """The calls of one process group since its birth. Raises UserError if the group has none, or if some of them
        are no longer in the ring."""
        mine = [one for one in self.entries if one.group == name and not one.point_to_point]
        if not mine:
            raise UserError(f"has no call of process group {name!r}; there are: {', '.join(self.groups) or 'none'}",
                            where="torch's flight recorder", remedy="the group's group_name, after its first call")
        for expected, one in enumerate(mine, 1):
            if one.sequence != expected:
                raise UserError(
                    f"call {one.sequence} of process group {name!r} comes where call {expected} should be",
                    where="torch's flight recorder",
                    remedy=f"{BUFFER_VARIABLES[0]} large enough for all calls since the start, and each read once",
                )
        return mine


def parse_flights(text: str | bytes) -> Flights:
    """A dump in JSON. Raises UserError, saying what of it cannot be."""
    if len(text) > DUMP_MAX:
        _refuse(f"has {len(text)} bytes, more than {DUMP_MAX}")
    try:
        dump = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(f"is not JSON: {str(error)[:120]}")
    if not isinstance(dump, Mapping):
        _refuse("is not an object")
    version = dump.get("version")
    if not isinstance(version, str) or not version.partition(".")[0].isascii() or version.split(".")[0] != str(FORM):
        _refuse(f"has the version {version!r}: {FORM}.x is read")
    entries = dump.get("entries", [])
    if not isinstance(entries, list) or len(entries) > ENTRIES_MAX:
        _refuse("has no list of entries, or too long a one")
    library = dump.get("comm_lib_version", dump.get("nccl_version", ""))
    found = tuple(_entry(number, entry) for number, entry in enumerate(entries))
    for before, after in pairwise(found):
        if after.record <= before.record:
            _refuse(f"has record {after.record} after record {before.record}")
    return Flights(version, library if isinstance(library, str) else "", found)


def _refuse(what: str) -> NoReturn:
    raise UserError(what, where="torch's flight recorder", remedy="a dump of this torch's own, in JSON, whole")


def _entry(number: int, entry: object) -> Flight:
    if not isinstance(entry, Mapping):
        _refuse(f"entry {number} is not an object")

    def take(key: str, kind: type, otherwise: Any = None) -> Any:
        value = entry.get(key, otherwise)
        if type(value) is not kind or (type(value) is int and not 0 <= value < 1 << 63):
            _refuse(f"entry {number} has {key} as {repr(value)[:40]}")
        return value

    group = take("process_group", list)
    if len(group) != 2 or not all(isinstance(word, str) and len(word) < 1024 for word in group):
        _refuse(f"entry {number} has process_group as {repr(group)[:40]}")
    types = take("input_dtypes", list)
    if not all(isinstance(word, str) and len(word) < 64 for word in types):
        _refuse(f"entry {number} has input_dtypes as {repr(types)[:40]}")
    sizes = _sizes(number, take("input_sizes", list))
    if len(types) != len(sizes):
        _refuse(f"entry {number} has {len(sizes)} tensors and {len(types)} types")
    return Flight(
        take("record_id", int), group[0], group[1], take("profiling_name", str)[:256], take("collective_seq_id", int),
        take("is_p2p", bool, False), sizes, tuple(types), _sizes(number, take("output_sizes", list)),
    )


def _sizes(number: int, found: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    for one in found:
        whole = isinstance(one, list) and len(one) <= 64 and all(type(n) is int and 0 <= n < _ELEMENTS for n in one)
        if not whole or math.prod(one) >= _ELEMENTS:
            _refuse(f"entry {number} has a tensor of {repr(one)[:40]}")
    return tuple(tuple(one) for one in found)


class Recorder:
    """The flight recorder of this process."""

    def __init__(self, dump: str = DUMPS[0]) -> None:
        """dump: torch's name of the function that writes it. Raises EnvironmentProblem if this torch has none."""
        import torch._C  # not at the top: parsing a dump needs no torch

        self._dump: Callable[..., str] | None = getattr(torch._C._distributed_c10d, dump, None)
        if self._dump is None:
            raise EnvironmentProblem(f"torch {torch.__version__} has no {dump}", where="torch's flight recorder",
                                     remedy="torch 2.5 or later, built with NCCL")

    def read(self) -> Flights:
        """What its ring holds now. Raises UserError for a dump that cannot be."""
        assert self._dump is not None
        return parse_flights(self._dump(includeCollectives=True, onlyActive=False))
