"""What the person who learns already knows: it settles what traffic alone leaves open."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from flowcheck.errors import UserError
from flowcheck.job.model import ALGORITHMS, DTYPE_BYTES, OPTIMIZERS, Job, Optimizer, ParameterGroup
from parser.nccl import WireError, minor_of
from updater.errors import OptimizerError
from updater.optimizers import OptimizerSpec

__all__ = ["Hints", "optimizer_of", "parse_optimizer", "parse_ranks"]


@dataclass(frozen=True)
class Hints:
    """optimizer: (name, options), applied to every parameter. dtype: of gradients and parameters. buckets: elements
    of each AllReduce of an iteration. ranks: address -> rank. version: NCCL's. algorithm: of every AllReduce. given: a
    manifest whose communicator and flows hold; its calls are learnt all the same, its model gives names."""

    optimizer: tuple[str, dict[str, Any]] | None = None
    dtype: str = ""
    buckets: tuple[int, ...] = ()
    ranks: dict[str, int] = field(default_factory=dict)
    version: str = ""
    algorithm: str = ""
    given: Job | None = None

    def __post_init__(self) -> None:
        if self.dtype and self.dtype not in DTYPE_BYTES:
            raise UserError(
                f"{self.dtype!r} is not an element type", where="--dtype", remedy=f"one of {', '.join(DTYPE_BYTES)}"
            )
        if any(count < 1 for count in self.buckets):
            raise UserError("a bucket has at least one element", where="--buckets", remedy="write 5000 or 700,300")
        if self.algorithm and self.algorithm not in ALGORITHMS:
            raise UserError(
                f"{self.algorithm!r} is not an algorithm", where="--algorithm", remedy=" or ".join(ALGORITHMS),
            )
        if self.version:
            _check_version(self.version)
        if self.optimizer is not None:
            name, options = self.optimizer
            try:
                OptimizerSpec.check(name, [(["parameter.0"], options)])
            except OptimizerError as error:
                said = str(error).replace(f"{name} group 0: ", "")
                raise UserError(said, where="--optimizer", remedy="write sgd:lr=0.001 or adamw:lr=1e-3") from None

    def names(self, shapes: Sequence[tuple[int, ...]]) -> list[str]:
        """Of parameters with these shapes, in model order."""
        if self.given is not None:
            entries = [entry for entry in self.given.model if entry.kind == "optimized"]
            if [tuple(entry.shape) for entry in entries] == list(shapes):
                return [entry.name for entry in entries]
        return [f"parameter.{i}" for i in range(len(shapes))]


def _check_version(text: str) -> None:
    try:
        if re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}(\.[0-9]{1,3})?", text, re.ASCII) is None:
            raise WireError(f"{text!r} is not an NCCL version")
        minor_of(text)
    except WireError as error:
        raise UserError(str(error), where="--nccl-version", remedy="write it like 2.19.4 or 2.27.7") from None


def parse_optimizer(text: str) -> tuple[str, dict[str, Any]]:
    """ "sgd:lr=0.001,momentum=0.9" -> ("sgd", {"lr": 0.001, "momentum": 0.9}). betas=0.9/0.999 is a pair."""
    name, _, rest = text.partition(":")
    if name not in OPTIMIZERS:
        raise UserError(
            f"{name!r} is not an optimizer known here", where="--optimizer",
            remedy=f"{' or '.join(OPTIMIZERS)}, with options as in sgd:lr=0.001,momentum=0.9",
        )
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key or key in options:
            raise UserError(
                f"{part!r} is not an option, or is given twice", where="--optimizer",
                remedy="write sgd:lr=0.001,momentum=0.9",
            )
        options[key] = _value(value, part)
    return name, options


def _value(text: str, part: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        if "/" in text:
            return [float(piece) for piece in text.split("/")]
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        raise UserError(
            f"{part!r}: {text!r} is not a number", where="--optimizer",
            remedy="numbers, true, false, or pairs as 0.9/0.999",
        ) from None


def parse_ranks(texts: Sequence[str]) -> dict[str, int]:
    """All of --rank: ["10.0.0.1=0"] -> {"10.0.0.1": 0}. Raises UserError for what is named twice, too."""
    named: dict[str, int] = {}
    for text in texts:
        try:
            address, _, number = text.rpartition("=")
            address, rank = str(ip_address(address)), int(number)
        except ValueError:
            raise UserError(f"{text!r} is not ADDRESS=RANK", where="--rank", remedy="write 10.0.0.1=0") from None
        if address in named:
            raise UserError(
                f"{address} is said to be rank {named[address]} and rank {rank}", where="--rank",
                remedy="name every address once",
            )
        if rank < 0 or rank in named.values():
            raise UserError(
                f"rank {rank} is negative, or two addresses have it", where="--rank",
                remedy="ranks begin at 0, each stands for one address",
            )
        named[address] = rank
    return named


def optimizer_of(hints: Hints, names: list[str]) -> Optimizer | None:
    """The manifest's optimizer over all learnt parameters."""
    if hints.optimizer is None or not names:
        return None
    name, options = hints.optimizer
    return Optimizer(name, [ParameterGroup(names, dict(options))])
