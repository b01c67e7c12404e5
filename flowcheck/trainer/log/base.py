"""A base: the state of an optimizer, whatever it is, that a log's entries are applied to; some parameters a boundary.

    taker = Taker(optimizer, parameters, budget)
    taken = taker.take(step)             at a boundary, `step` iterations done: the next parameters; None: all are taken
    taken.parts()                        any thread: BaseHead (the first time), BasePiece; waits for devices
    taker.begin()                        the next base

    base = Base(head)
    base.add(piece); base.whole          and back, where a redo is to begin

A piece has a parameter and what `optimizer.state` has of it: tensors of any type and shape, numbers, None, nested. Each
is of a step of its own: the entries of iterations `piece.step` and later are applied to it. State is read raw: a
state_dict has other types. An optimizer whose parameters depend on each other is taken as a whole (`at_once`).

torch and the standard library. `take`: the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flowcheck.errors import UserError
from flowcheck.trainer.describe.optimizers import members, parameters_of
from flowcheck.trainer.describe.parts import local
from flowcheck.trainer.log.copies import TensorCopy, copy_of, nbytes_of, on_host

__all__ = ["Base", "BaseHead", "BasePiece", "Made", "Taken", "Taker", "groups_of"]


def groups_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Of each group the names of those of its parameters that have one."""
    names = {id(one): name for name, one in parameters.items()}
    return [[names[id(one)] for one in group["params"] if id(one) in names] for group in optimizer.param_groups]


@dataclass(frozen=True)
class Made:
    """By what the steps were made. Another optimizer rounds otherwise; so may each of the rest.

    optimizer: its class, of several all of them.
    module: where that is from; a script's own may be called otherwise the next time.
    version: of torch.
    device: type and name of what the parameters are on.
    threads: of torch's, on a CPU; 0 elsewhere.
    matmul: torch's precision for float32.
    """

    optimizer: str
    module: str
    version: str
    device: str
    threads: int
    matmul: str

    @classmethod
    def by(cls, optimizer: torch.optim.Optimizer) -> Made:
        kinds = [type(one) for one in members(optimizer)]
        device = next((local(one).device for group in optimizer.param_groups for one in group["params"]),
                      torch.device("cpu"))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        return cls(", ".join(kind.__qualname__ for kind in kinds), ", ".join(kind.__module__ for kind in kinds),
                   str(torch.__version__), f"{device.type} {name}".strip(),
                   torch.get_num_threads() if device.type == "cpu" else 0, torch.get_float32_matmul_precision())


@dataclass(frozen=True)
class BaseHead:
    """names: parameters that the base has when it is whole. groups: those of each group of the optimizer, in order.
    others: what `optimizer.state` has under keys that are no parameters (all pieces are then of one step)."""

    made: Made
    names: list[str]
    groups: list[list[str]]
    others: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BasePiece:
    """step: iterations done when it was taken. state: None: the optimizer has none of it, not even an empty one."""

    name: str
    step: int
    value: TensorCopy
    state: dict[str, Any] | None


class Base:
    """Pieces as they come."""

    def __init__(self, head: BaseHead) -> None:
        self.head = head
        self.pieces: dict[str, BasePiece] = {}

    def add(self, piece: BasePiece) -> None:
        """Raises UserError: it is not of this base, or the second of its parameter."""
        if piece.name not in self.head.names or piece.name in self.pieces:
            what = "came twice" if piece.name in self.pieces else "is not one of its parameters"
            raise UserError(f"{piece.name!r} {what}", where="base", remedy="another base")
        self.pieces[piece.name] = piece

    @property
    def whole(self) -> bool:
        return len(self.pieces) == len(self.head.names)

    @property
    def first(self) -> int:
        """The iteration that entries are needed from."""
        return min((piece.step for piece in self.pieces.values()), default=0)

    @property
    def last(self) -> int:
        """No earlier step than this can be made of it."""
        return max((piece.step for piece in self.pieces.values()), default=0)


class Taken:
    """What one boundary took. nbytes: of all tensors. count: of parts."""

    def __init__(self, head: BaseHead | None, pieces: list[BasePiece]) -> None:
        self._head, self._pieces = head, pieces
        self.nbytes = sum(nbytes_of([piece.value, piece.state]) for piece in pieces)
        self.count = len(pieces) + (head is not None)
        others = head.others if head is not None else {}
        self._bring: Callable[[], list[Any]] = on_host([others, *([one.value, one.state] for one in pieces)])

    def parts(self) -> list[BaseHead | BasePiece]:
        """In this machine's memory."""
        others, *held = self._bring()
        out: list[BaseHead | BasePiece] = []
        if self._head is not None:
            out.append(replace(self._head, others=others))
        out += [BasePiece(one.name, one.step, value, state)
                for one, (value, state) in zip(self._pieces, held, strict=True)]
        return out


class Taker:
    """parameters: by name, as the optimizer has them. budget: bytes a boundary; one parameter is taken in any case.
    at_once: all parameters at one boundary, whatever they take."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], budget: int,
        at_once: bool = False,
    ) -> None:
        self._optimizer, self._parameters, self._budget, self._at_once = optimizer, dict(parameters), budget, at_once
        self._left: list[str] = []
        self._head_due = False
        self.begin()

    def begin(self) -> None:
        """A new base; of the one before what is not yet taken is given up."""
        self._left, self._head_due = list(reversed(self._parameters)), True

    @property
    def whole(self) -> bool:
        return not self._left and not self._head_due

    @property
    def due(self) -> int:
        """Bytes of the parameter that comes next, and of its state."""
        return self._nbytes(self._left[-1]) if self._left else 0

    def _nbytes(self, name: str) -> int:
        parameter = self._parameters[name]
        return nbytes_of(parameter) + nbytes_of(self._optimizer.state.get(parameter))

    def take(self, step: int) -> Taken | None:
        """step: iterations done. Raises UserError for state that cannot be written: nothing is taken then."""
        if self.whole:
            return None
        head = self._head() if self._head_due else None
        pieces: list[BasePiece] = []
        room = self._budget
        for name in reversed(self._left):
            state, nbytes = self._optimizer.state.get(self._parameters[name]), self._nbytes(name)
            if pieces and nbytes > room and not self._at_once:
                break
            pieces.append(self._piece(name, state, step))
            room -= nbytes
        del self._left[len(self._left) - len(pieces) :]  # all of them are given, or none is
        self._head_due = False
        return Taken(head, pieces)

    def _head(self) -> BaseHead:
        held = set(map(id, parameters_of(self._optimizer)))
        state: Mapping[Any, Any] = self._optimizer.state
        others = {key: value for key, value in state.items() if id(key) not in held}
        for key in others:
            if type(key) is not str or not self._at_once:
                raise UserError(f"keeps state under {key if type(key) is str else type(key).__name__!r}, which is no"
                                " parameter", where="optimizer", remedy="a base of all parameters at once")
        return BaseHead(Made.by(self._optimizer), list(self._parameters), groups_of(self._optimizer, self._parameters),
                        {key: copy_of(value, None, f"optimizer.state[{key!r}]") for key, value in others.items()})

    def _piece(self, name: str, state: Any, step: int) -> BasePiece:
        parameter = self._parameters[name]
        if state is not None and type(state) is not dict:
            state = dict(state)
        return BasePiece(name, step, copy_of(parameter, parameter, name),
                         copy_of(state, parameter, f"optimizer.state[{name}]"))
