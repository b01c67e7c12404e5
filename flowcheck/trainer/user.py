"""What a rank gives of itself at each boundary: random numbers, scheduler, scaler, and what the script adds.

    kept = Keeper(optimizer, scheduler, scaler)
    kept.give(user, step, rank, ranks, say) -> bytes    at the boundary where the next iteration begins

The state of random generators is taken as it is (generators.py): python's `random`, numpy's global one if numpy is
imported, torch's on the CPU and on the devices that the model is on. Where the groups of the optimizer stand is taken
too, because a scheduler may have changed them after the step that made the version. Torch and the standard library; the
training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import torch

from flowcheck.control.numbers import plain
from flowcheck.control.user_state import USER_BYTES, Packer, pack
from flowcheck.errors import FlowcheckError, UserError
from flowcheck.trainer.describe.extra import kept
from flowcheck.trainer.describe.parts import stepped
from flowcheck.trainer.generators import Generators, restore_rng, rng_state
from flowcheck.trainer.loop import Given
from flowcheck.trainer.unchanged import Unchanged

__all__ = ["Keeper", "restore_rng", "rng_state"]

_requires_grad = attrgetter("requires_grad")


ABOUT_BYTES = 64 << 10  # of a state that lacks something, for what that is
MOST_WHY = 400  # characters
MOST_NAMED = 100


class Keeper:
    """optimizer: whose options are kept. scheduler, scaler: with `state_dict`, or None. extra: says what modules give
    besides tensors (describe/extra.py), by part and entry; None: they give nothing. trained: of each parameter of the
    optimizer a byte, does it step it; None: look. why: the newest boundary has no state, "": it has."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any = None, scaler: Any = None) -> None:
        for what, one in (("scheduler", scheduler), ("scaler", scaler)):
            if one is not None and not callable(getattr(one, "state_dict", None)):
                raise UserError(f"a {type(one).__name__} has no state_dict()", where=what,
                                remedy="an object of torch's, or user= in step()")
        self.optimizer = optimizer
        self._generators: Generators | None = None
        self._options = Unchanged()
        self._packer = Packer()
        self._stood: tuple[Any, Any, list[dict[str, Any]]] = None, None, []  # options, `trained`, and as they are kept
        self._scheduler, self.scaler = scheduler, scaler
        self.extra: Callable[[], Mapping[str, Mapping[str, Any]]] | None = None
        self.trained: bytes | None = None
        self._again: tuple[Any, ...] | None = None  # what a file is of that has options besides, and nothing else
        self._given: Any = None  # how far the scheduler was at the last boundary
        self._warned = False
        self.why = ""

    def give(
        self, user: Given, step: int, rank: int, ranks: int, say: Callable[[str], None]
    ) -> bytes | None:
        """This rank's own state. user: what the script adds, or a function that says it. What cannot be kept is left
        out and named, in the state itself, too; that is said once as long as it lasts. None: nothing can be kept."""
        if self._again is not None and user is None and (
            same := self._as_before(step, (rank, ranks), *self._again)
        ) is not None:
            return same
        try:
            data, missing = self._pack(user, step, rank, ranks)
        except Exception as error:  # an object of the script's own may raise anything
            data, missing = None, {"": _words(error)}
        what = "; ".join(missing.values())
        if missing and not self.why:
            say(f"versions are without a part of this rank's own state: {what}")
        self.why = f"step {step} is without a part of this rank's own state: {what}" if missing else ""
        return data

    def _as_before(self, step: int, here: Any, rng: Any, trained: bytes, there: Any) -> bytes | None:
        """The file of the boundary before with another step; None: it has to be made."""
        if (self._rng() is rng and self.trained == trained and self.extra is None and here == there
                and self._options.same(self.optimizer.param_groups)):
            return self._packer.again(step)
        return None

    def over(self) -> None:
        """A boundary, whether a node takes what this rank would give or none is there."""
        self._given = self._far()

    def look(self, say: Callable[[str], None]) -> None:
        """Before a step of the optimizer: has the scheduler gone on since the boundary? What is kept does not have
        that. A script that calls it at the begin of an iteration does so again when it repeats that; at the end of one
        it does not, and nothing shows which of the two this is."""
        if self._given is not None and self._given != self._far() and not self._warned:
            self._warned = True
            say("the scheduler stepped after attachment.step(), so what is kept with a version is from before that:"
                " call scheduler.step() first, unless that is how an iteration begins")

    def _far(self) -> Any:
        return getattr(self._scheduler, "last_epoch", None)

    def _pack(self, user: Given, step: int, rank: int, ranks: int) -> tuple[bytes, dict[str, str]]:
        """The file, and what it lacks: paths and why."""
        made: dict[str, Callable[[], Any]] = {"rng": self._rng, "groups": self._groups}
        self._again = None
        for what, one in (("scheduler", self._scheduler), ("scaler", self.scaler)):
            if one is not None:
                made[what] = one.state_dict
        state, missing = dict[str, Any](), dict[str, str]()
        for what, make in {**made, "user": lambda: _given_by(user), "extra": self._extra}.items():
            try:
                state[what] = make()
            except Exception as error:
                missing[what] = f"{what}: {_words(error)}"[:MOST_WHY]
        if not state.get("extra", True):
            del state["extra"]
        packed = partial(self._packer.pack, step=step, rank=rank, ranks=ranks, fixed=("rng", "groups"))
        try:
            data = packed({**state, "missing": missing} if missing else state)
            if not missing and user is None and self.trained is not None and len(made) == 2 and len(state) == 3:
                self._again = state["rng"], self.trained, (rank, ranks)
            return data, missing
        except Exception:
            state, more = _keepable(state)
            return packed({**state, "missing": missing | more}), missing | more

    def _extra(self) -> dict[str, Any]:
        found = {} if self.extra is None else self.extra()
        return {part: {name: kept(value) for name, value in mine.items()} for part, mine in found.items()}

    def _rng(self) -> dict[str, Any]:
        if self._generators is None:
            held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            self._generators = Generators(sorted({parameter.device.type for parameter in held} - {"cpu", "meta"}))
        return self._generators.state()

    def _groups(self) -> list[dict[str, Any]]:
        """Options of the optimizer, numbers as torch computes with them; and of each parameter: is it stepped?"""
        groups = self.optimizer.param_groups
        options = self._options.of(groups, lambda: [{key: _number(value) for key, value in group.items()
                                                     if key != "params"} for group in groups])
        if self.trained is None:
            return _kept_groups(options, [_stepped(group["params"]) for group in groups])
        if self._stood[0] is not options or self._stood[1] != self.trained:
            flags = map(bool, self.trained)
            split = [list(islice(flags, len(group["params"]))) for group in groups]
            self._stood = options, self.trained, _kept_groups(options, split)
        return self._stood[2]


def _kept_groups(options: Sequence[Mapping[str, Any]], flags: Sequence[list[bool]]) -> list[dict[str, Any]]:
    return [{"params": mine, **said} for mine, said in zip(flags, options, strict=True)]


def _given_by(user: Given) -> dict[str, Any]:
    """What the script adds. Raises UserError: it is not a dict."""
    given = user() if callable(user) else user
    if given is not None and not isinstance(given, dict):
        raise UserError(f"a {type(given).__name__} is not a dict", where="user", remedy='user={"loader": ...}')
    return dict(given or {})  # such as recovered.user


def _number(value: Any) -> Any:
    """A float or an int, where it is a subclass of that: a number out of a configuration file, say."""
    value = plain(value)
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value


def _keepable(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """What can be kept of it, and paths of what cannot, with why. A scheduler, a scaler and random numbers are kept
    whole or not at all; of what the script adds, and of the groups' options, each for itself."""
    left, held, missing = USER_BYTES - ABOUT_BYTES, dict[str, Any](), dict[str, str]()

    def fits(path: str, piece: dict[str, Any]) -> bool:
        nonlocal left
        try:
            left -= len(pack(piece, step=0, rank=0, ranks=1, most=left))
        except Exception as error:  # one that is no Refused, too: nothing of it may end what else there is
            missing[path] = _words(error)[:MOST_WHY]
            return False
        return True

    if "groups" in state:
        held["groups"] = [{key: value for key, value in group.items() if _is_kept(value)} for group in state["groups"]]
        missing |= {f"groups[{at}][{key!r}]": f"option {key!r} of group {at} is a {type(group[key]).__name__}"
                    for at, group in enumerate(state["groups"]) for key in group.keys() - held["groups"][at].keys()}
        if not fits("groups", {"groups": held["groups"]}):
            del held["groups"]
    held |= {what: state[what] for what in ("rng", "scheduler", "scaler")
             if what in state and fits(what, {what: state[what]})}
    if "user" in state:
        held["user"] = {key: value for key, value in state["user"].items()
                        if fits(f"user[{key!r}]", {"user": {key: value}})}
    if "extra" in state:
        held["extra"] = {part: {name: value for name, value in found.items()
                                if fits(f"extra[{name!r}]", {"extra": {name: value}})}
                         for part, found in state["extra"].items()}
    named = dict(list(missing.items())[:MOST_NAMED])
    return held, named


def _is_kept(value: Any) -> bool:
    try:
        pack(value, step=0, rank=0, ranks=1)
    except Exception:
        return False
    return True


def _words(error: Exception) -> str:
    return error.message() if isinstance(error, FlowcheckError) else f"{type(error).__name__}: {error}"


def _stepped(parameters: Sequence[torch.Tensor]) -> list[bool]:
    """Of each whether an optimizer that has it steps it."""
    flags = list(map(_requires_grad, parameters))
    return flags if all(flags) else [stepped(parameter) for parameter in parameters]
