"""From gradient buckets to tensors.

Model: a bucket is one 1-D array of `dtype` (what an AllReduce carried). A slice says: elements
[start, start+length) of the flattened tensor `name` lie at [offset, offset+length) of the bucket. A
Layout is the list of all buckets of one kind of iteration (DDP has one layout for its first iteration
and another one ever after); building it proves that every element of every optimized tensor lies in
exactly one place. Bucket elements that belong to no tensor (padding) are allowed and ignored.

A Layout is immutable and may be used from several threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from updater.errors import LayoutError

__all__ = ["Layout", "SliceLike"]


class SliceLike(Protocol):
    """Anything with these four fields, all counted in elements (a manifest's BucketSlice is one)."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def start(self) -> int: ...


class Layout:
    """Where the elements of each optimized tensor lie in the buckets of an iteration.

    buckets: per bucket its slices. shapes: name -> shape of every optimized tensor, and of no other.
    elements: length of each bucket, checked where given. Raises LayoutError naming the tensor and the
    element range that is outside, missing or covered twice.
    """

    def __init__(
        self, buckets: Sequence[Sequence[SliceLike]], shapes: Mapping[str, Sequence[int]],
        elements: Sequence[int] | None = None,
    ) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        self.buckets = tuple(tuple(bucket) for bucket in buckets)
        if elements is not None and len(elements) != len(self.buckets):
            raise LayoutError(f"{len(self.buckets)} buckets described, {len(elements)} bucket lengths given")
        self.elements = None if elements is None else tuple(elements)
        for index, bucket in enumerate(self.buckets):
            self._check_bucket(index, bucket)
        self._check_tensors()

    def bucket_names(self, index: int) -> list[str]:
        """Names of the tensors that have elements in a bucket, each once, in bucket order."""
        return list(dict.fromkeys(piece.name for piece in self.buckets[index] if piece.length))

    def take(
        self, index: int, data: np.ndarray | torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Bucket `index` as a contiguous 1-D tensor of fp32, bf16 or fp16, checked against the layout.

        dtype: element type on the wire, needed where `data` is raw bits (numpy has no bfloat16). No copy is made
        unless the data is read-only or has gaps.
        """
        if not 0 <= index < len(self.buckets):
            raise LayoutError(f"bucket {index}: the layout has {len(self.buckets)} buckets")
        bucket = as_tensor(data, dtype)
        need = max((piece.offset + piece.length for piece in self.buckets[index]), default=0)
        expected = self.elements[index] if self.elements is not None else None
        if bucket.numel() < need or (expected is not None and bucket.numel() != expected):
            wanted = expected if expected is not None else need
            raise LayoutError(f"bucket {index}: {bucket.numel()} elements given, the layout says {wanted}")
        if bucket.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise LayoutError(f"bucket {index}: a {bucket.dtype} gradient does not fit torch.float32 without rounding")
        return bucket.contiguous()

    # -- proofs -------------------------------------------------------------------------------------

    def _check_bucket(self, index: int, bucket: tuple[SliceLike, ...]) -> None:
        for piece in bucket:
            if piece.name not in self.sizes:
                raise LayoutError(f"bucket {index}: {piece.name!r} is not an optimized tensor")
            if min(piece.offset, piece.length, piece.start) < 0:
                raise LayoutError(f"bucket {index}: a slice of {piece.name!r} has a negative field")
            end = piece.start + piece.length
            if end > self.sizes[piece.name]:
                raise LayoutError(
                    f"bucket {index}: elements [{piece.start}, {end}) are outside {piece.name!r},"
                    f" which has {self.sizes[piece.name]}"
                )
            if self.elements is not None and piece.offset + piece.length > self.elements[index]:
                raise LayoutError(
                    f"bucket {index}: {piece.name!r} ends at element {piece.offset + piece.length}"
                    f" of a bucket of {self.elements[index]}"
                )
        reach, owner = 0, ""
        for piece in sorted((p for p in bucket if p.length), key=lambda p: p.offset):
            if piece.offset < reach:
                end = min(reach, piece.offset + piece.length)
                raise LayoutError(
                    f"bucket {index}: elements [{piece.offset}, {end}) are claimed by {owner!r}"
                    f" and {piece.name!r}"
                )
            reach, owner = piece.offset + piece.length, piece.name

    def _check_tensors(self) -> None:
        pieces: dict[str, list[tuple[int, int, int]]] = {name: [] for name in self.sizes}
        for index, bucket in enumerate(self.buckets):
            for piece in bucket:
                if piece.length:
                    pieces[piece.name].append((piece.start, piece.start + piece.length, index))
        for name, size in self.sizes.items():
            reach = 0
            for start, end, index in sorted(pieces[name]):
                if start > reach:
                    raise LayoutError(f"{name!r}: elements [{reach}, {start}) are in no bucket")
                if start < reach:
                    raise LayoutError(
                        f"{name!r}: elements [{start}, {min(end, reach)}) are covered twice"
                        f" (again by bucket {index})"
                    )
                reach = end
            if reach < size:
                raise LayoutError(f"{name!r}: elements [{reach}, {size}) are in no bucket")


def as_tensor(data: np.ndarray | torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A 1-D floating-point tensor over `data`, its bits taken as `dtype` where that is given."""
    if isinstance(data, np.ndarray):
        # torch has no read-only tensors and warns about read-only arrays; such an array is copied once.
        tensor = torch.from_numpy(data if data.flags.writeable else data.copy())
    else:
        tensor = data.detach()
    if tensor.dim() != 1:
        raise LayoutError(f"a bucket is one-dimensional, found shape {tuple(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        if tensor.is_floating_point() or tensor.numel() * tensor.element_size() % dtype.itemsize:
            raise LayoutError(f"a bucket of {tensor.dtype} cannot be taken as {dtype}")
        tensor = tensor.contiguous().view(dtype) if tensor.numel() else torch.empty(0, dtype=dtype)
    if not tensor.is_floating_point():
        raise LayoutError(f"a gradient bucket holds floating-point elements, found {tensor.dtype}")
    return tensor
