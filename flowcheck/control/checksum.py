"""Checksum of a tensor's bits that a trainer computes on its GPU and a checkpoint node on its CPU.

Needs torch and nothing else. For n elements, taken as unsigned integers b[i] of their own width, all modulo 2^64:

    mix(k) = f(f((k+1) * 0x9e3779b97f4a7c15) * 0xd6e8feb86659fd93)     f(h) = h ^ (h >> 32)
    sum    = mix(n) + sum over blocks c of 65536: (mix(c + 65536) | 1) * sum over i in block: (mix(i) | 1) * b[i]

Blocks and positions take their weights from different numbers, or two places would share a product. Weights are odd,
so a single wrong element always shows; they depend on the position without a pattern, so exchanged
or shifted values and errors that cancel in a plain sum show too (chance of a miss: 2^-64 for unrelated errors).
The block's weights are the same for every block: 512 KiB that stay on the device, and the pass reads the tensor once.

    checksum(tensor) -> int                 checksums(model.state_dict()) -> {name: int}
    sum_text(data) -> str                   of bytes, 16 hexadecimal digits
    begin_checksums(state_dict).get()       the same; what is on a GPU is only queued there, and `get` waits for it

Of tensors in this machine's memory C forms them without the GIL (flowcheck/control/src/sums.c), where the library is
there or can be compiled. All others are summed together by a few kernels of torch, however many tensors they are.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from flowcheck.control.compiled import Library
from flowcheck.errors import EnvironmentProblem

__all__ = ["Sums", "begin_checksums", "checksum", "checksums", "library", "sum_text"]

BLOCK = 1 << 16
_PART = 256 * BLOCK  # elements at a time: bounds what the widened integers take (8 bytes each)
_PART_HERE = 16 * BLOCK  # in this machine's memory, where what is larger is new memory each time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASKS = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}
_ALL = (1 << 64) - 1
_weights: dict[torch.device, torch.Tensor] = {}
_log = logging.getLogger("flowcheck")
_HERE = Path(__file__).parent
LIBRARY = Library(
    "the library of checksums", _HERE / "sums.library.so", _HERE / "src" / "sums.c", _HERE / "include",
    "leave it: torch forms them, which takes longer",
)
_AT_ONCE = 4 << 20  # bytes that one thread of several sums up; whole blocks of every width
_LARGE = 64 << 20  # bytes from which on several threads are of use


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix(index: torch.Tensor) -> torch.Tensor:
    """int64 arithmetic wraps in torch as unsigned does; its >> keeps the sign and has to be masked."""
    h = (index + 1) * _signed(0x9E3779B97F4A7C15)
    h = (h ^ (h >> 32 & 0xFFFFFFFF)) * _signed(0xD6E8FEB86659FD93)
    return h ^ (h >> 32 & 0xFFFFFFFF)


def _block_weights(device: torch.device) -> torch.Tensor:
    if device not in _weights:
        _weights[device] = _mix(torch.arange(BLOCK, device=device)) | 1
    return _weights[device]


def sum_text(data: bytearray | memoryview) -> str:
    """Of bytes, which are not copied: 16 hexadecimal digits."""
    held = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.zeros(0, dtype=torch.uint8)
    return f"{checksum(held):016x}"


def checksum(tensor: torch.Tensor) -> int:
    """64-bit checksum of a tensor's elements in row-major order; shape and type are not part of it."""
    return begin_checksums({"": tensor}).get()[""]


def checksums(state_dict: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """name -> checksum; waits once per device."""
    return begin_checksums(state_dict).get()


def begin_checksums(state_dict: Mapping[str, torch.Tensor]) -> Sums:
    """Those of tensors as they are now. What lies in memory is summed up when this returns; kernels of a device are
    queued on its current stream, where whatever changes the tensors later has to be queued behind them. Raises
    ValueError: elements that have no checksum."""
    names, tensors = list(state_dict), list(state_dict.values())
    if wrong := [tensor.dtype for tensor in tensors if tensor.element_size() not in _INTEGERS]:
        raise ValueError(f"elements of {wrong[0].itemsize} bytes ({wrong[0]}) have no checksum")
    sums = Sums(names)
    here = [at for at, tensor in enumerate(tensors) if tensor.is_cpu]
    if here and (summing := library()) is not None:
        kept = [tensors[at] if tensors[at].is_contiguous() else tensors[at].detach().contiguous() for at in here]
        sums.known(here, _by_library(summing, kept))
        here = []
    elsewhere: dict[torch.device, list[int]] = {}
    if here or len(sums.done) < len(names):
        for at, tensor in enumerate(tensors):
            if at not in sums.done:
                elsewhere.setdefault(tensor.device, []).append(at)
    for device, places in elsewhere.items():
        sums.queued(places, device, sums_on_device([tensors[at].detach().contiguous() for at in places]))
    return sums


class Sums:
    """Checksums that a device may still be forming. done: those that are known, unsigned, by their place in names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.done: dict[int, int] = {}
        self._waiting: list[tuple[Sequence[int], torch.Tensor, Any]] = []
        self._lock = threading.Lock()

    def known(self, places: Sequence[int], found: Sequence[int]) -> None:
        self.done.update(zip(places, found, strict=True))

    def queued(self, places: Sequence[int], device: torch.device, found: torch.Tensor) -> None:
        """They are copied to this machine's memory behind what is queued by now."""
        if device.type in ("cpu", "meta"):
            self._waiting.append((places, found, None))
            return
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        host.copy_(found, non_blocking=True)
        event = torch.get_device_module(device).Event()
        event.record(torch.get_device_module(device).current_stream(device))
        self._waiting.append((places, host, event))

    def get(self) -> dict[str, int]:
        """By name, in the order given. Waits for devices, without the GIL. Any thread."""
        with self._lock:
            for places, host, event in self._waiting:
                if event is not None:
                    event.synchronize()
                self.known(places, [value & _ALL for value in host.tolist()])
            self._waiting.clear()
        return {name: self.done[at] for at, name in enumerate(self._names)}


# -- in this machine's memory ----------------------------------------------------------------------------------


@cache
def library() -> Any:
    """The function that sums pieces of tensors up; None: the library is missing, which is said once."""
    try:
        found = ctypes.CDLL(str(LIBRARY.path())).fcs_checksums
    except (EnvironmentProblem, OSError, AttributeError) as error:
        what = error.message() if isinstance(error, EnvironmentProblem) else str(error)
        _log.info("flowcheck: checksums are formed by torch, which takes longer: %s", what)
        return None
    found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p], None
    return found


def _by_library(summing: Any, tensors: Sequence[torch.Tensor]) -> list[int]:
    """Contiguous ones."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    threads = torch.get_num_threads() if nbytes > _LARGE else 1
    if threads < 2:
        whole = [(one.data_ptr(), 0, count := one.numel(), count, one.element_size()) for one in tensors]
        return list(_summed(summing, array("Q", itertools.chain.from_iterable(whole))))
    owners, cut = [], array("Q")
    for number, tensor in enumerate(tensors):
        count, size = tensor.numel(), tensor.element_size()
        most = _AT_ONCE // size
        for first in range(0, max(count, 1), most):
            cut.extend((tensor.data_ptr(), first, min(most, count - first), count, size))
            owners.append(number)
    ends = [len(owners) * share // threads for share in range(threads + 1)]
    found: list[Sequence[int]] = [()] * threads

    def share(number: int) -> None:
        found[number] = _summed(summing, cut[5 * ends[number] : 5 * ends[number + 1]])

    workers = [threading.Thread(target=share, args=(number,)) for number in range(1, threads)]
    for worker in workers:
        worker.start()
    share(0)
    for worker in workers:
        worker.join()
    out = [0] * len(tensors)
    for owner, part in zip(owners, itertools.chain(*found), strict=True):
        out[owner] = (out[owner] + part) & _ALL
    return out


def _summed(summing: Any, pieces: array[int]) -> array[int]:
    """pieces: of struct fcs_piece. The calling thread lets go of the GIL meanwhile."""
    count = len(pieces) // 5
    found = array("Q", bytes(8 * count))
    summing(pieces.buffer_info()[0], count, found.buffer_info()[0])
    return found


# -- on a device -----------------------------------------------------------------------------------------------


def sums_on_device(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The checksums of contiguous tensors of one device, int64, on it: no synchronisation, and kernels by the number
    of elements and not of tensors. Takes 32 bytes for each of 2^24 elements meanwhile."""
    plan = _plan(tensors[0].device, tuple((tensor.dtype, tensor.numel()) for tensor in tensors))
    weights = _block_weights(tensors[0].device)
    flat = [tensor.reshape(-1) for tensor in tensors]
    sums = [(_wide(flat, batch).view(-1, BLOCK) * weights).sum(1) for batch in plan.blocks]
    for batch, begins, lengths, ends in plan.rests:
        part = _wide(flat, batch)
        inside = torch.arange(len(part), device=part.device)
        inside -= begins.repeat_interleave(lengths, output_size=len(part))
        running = torch.cumsum(part.mul_(weights[inside]), 0)[ends]  # wraps as all sums here do
        sums.append(torch.cat([running[:1], running[1:] - running[:-1]]))
    if not sums:
        return plan.begins.clone()
    return plan.begins.index_add(0, plan.owners, torch.cat(sums).mul_(plan.outer))


_Piece = tuple[int, int, int]  # number of the tensor, first element, elements


@dataclass(frozen=True)
class _Plan:
    """How tensors of these sizes are summed up. blocks: batches of whole blocks. rests: batches of what is left of
    tensors, each with where its pieces begin in the batch, how long they are and the last element of each. owners,
    outer: of each block and rest in that order, its tensor and its weight. begins: what sums begin with."""

    blocks: list[list[_Piece]]
    rests: list[tuple[list[_Piece], torch.Tensor, torch.Tensor, torch.Tensor]]
    owners: torch.Tensor
    outer: torch.Tensor
    begins: torch.Tensor


def _wide(flat: Sequence[torch.Tensor], batch: Sequence[_Piece]) -> torch.Tensor:
    """Their elements one after the other as unsigned integers, in int64. They have one dtype."""
    pieces = [
        flat[number] if count == flat[number].numel() else flat[number][first : first + count]
        for number, first, count in batch
    ]
    joined = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    size = joined.element_size()
    wide = joined.view(_INTEGERS[size]).to(torch.int64, copy=True)
    return wide.bitwise_and_(_MASKS[size]) if size in _MASKS else wide


@lru_cache(8)
def _plan(device: torch.device, sizes: tuple[tuple[torch.dtype, int], ...]) -> _Plan:
    most = _PART_HERE if device.type == "cpu" else _PART
    blocks: list[list[_Piece]] = []
    rests: list[list[_Piece]] = []
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, (dtype, _) in enumerate(sizes):
        by_dtype.setdefault(dtype, []).append(number)
    for numbers in by_dtype.values():
        whole = [(number, sizes[number][1] // BLOCK * BLOCK) for number in numbers]
        cut = [(number, first, min(most, count - first))
               for number, count in whole for first in range(0, count, most)]
        left = [(number, count, sizes[number][1] - count) for number, count in whole if sizes[number][1] > count]
        blocks += _batches(cut, most)
        rests += _batches(left, most)
    owners: list[int] = []
    places: list[int] = []  # of each block in its tensor
    for number, first, count in itertools.chain(*blocks, *rests):
        of = range(first // BLOCK, -(-(first + count) // BLOCK))
        owners += [number] * len(of)
        places += of

    def held(values: Sequence[int]) -> torch.Tensor:
        return _moved(torch.tensor(values, dtype=torch.int64, device="cpu"), device)

    def described(batch: list[_Piece]) -> tuple[list[_Piece], torch.Tensor, torch.Tensor, torch.Tensor]:
        lengths = [count for _, _, count in batch]
        ends = list(itertools.accumulate(lengths))
        return batch, held([0, *ends[:-1]]), held(lengths), held([end - 1 for end in ends])

    outer = _mix(torch.tensor(places, dtype=torch.int64, device="cpu") + BLOCK) | 1
    begins = _mix(torch.tensor([count for _, count in sizes], dtype=torch.int64, device="cpu"))
    return _Plan(blocks, [*map(described, rests)], held(owners), _moved(outer, device), _moved(begins, device))


def _batches(pieces: Sequence[_Piece], most: int) -> Iterator[list[_Piece]]:
    """Of so many elements at most; no piece has more."""
    batch: list[_Piece] = []
    elements = 0
    for piece in pieces:
        if batch and elements + piece[2] > most:
            yield batch
            batch, elements = [], 0
        batch.append(piece)
        elements += piece[2]
    if batch:
        yield batch


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """From memory that the device reads by itself, so that nobody waits for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
