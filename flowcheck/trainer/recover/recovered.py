"""What `recover` gives: a version in the form of torch's own state_dicts, with this rank's own state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flowcheck.errors import UserError
from flowcheck.job.version_status import UNVERIFIED, VERIFIED, VersionStatus
from flowcheck.trainer.describe.extra import is_extra
from flowcheck.trainer.describe.megatron_pieces import is_megatron, pieces_of
from flowcheck.trainer.describe.optimizers import members, optimizer_of, parameters_of
from flowcheck.trainer.describe.parts import chunks_of, local
from flowcheck.trainer.recover.logged import Loaded, Logged
from flowcheck.trainer.recover.own import PARTS, Given
from flowcheck.trainer.user import restore_rng

__all__ = ["PARTS", "Recovered"]

_BY_HAND = "ask recovered.has({0!r}) first, and {1}; or step= of a version that has it"
_REMEDIES = {
    "user": _BY_HAND.format("user", "find the loader's place by recovered.step"),
    "scheduler": _BY_HAND.format("scheduler", "set the schedule to recovered.step by hand: made anew it begins at 0"),
    "scaler": _BY_HAND.format("scaler", "begin with a scale of your own"),
    "rng": _BY_HAND.format("rng", "seed the generators"),
}


@dataclass(repr=False)
class Recovered:
    """A version to go on from; false without one: the job starts fresh. `load` alone changes it, where the version is
    kept as a log.

    step: updates that it has seen, and so the number of the next iteration; 0 of a fresh start.
    epoch: for `attach`: one more than the newest that the nodes have of the run; 0 where they have nothing of it.
    version_epoch: in which start of the job the version was made; -1 of a fresh start.
    run_id, shard: whose it is.
    model: for `model.load_state_dict`, with what modules gave besides tensors (`..._extra_state`) where the version has
        this rank's own state; optimizer: for `optimizer.load_state_dict`, in torch's own numbering. Both empty
        of a fresh start.
    stepped: names of the parameters that the optimizer steps, in its order.
    parts: what the version has of this rank itself, by the names of PARTS: see the properties of these names.
    missing: of what it does not have why, by its path, such as "scheduler" or "user['loader']".
    status, unproven: as the version says of itself (docs/reference/checkpoint.md).
    source: node and tier that it came from. nbytes: received. seconds: that it took.
    passed: of each source that was nearer, or newer, or did not answer: why it was not taken.
    log: of a version that is kept as a log, what `load` redoes it from; then `model` and `optimizer` are empty, and
        `status` is what was known before that. None: it is not kept so.
    why: of a log, after `load`: why it was not made of the newest base, or why `step` is an older one than was chosen;
        "": it was, and is not.
    """

    step: int
    epoch: int
    run_id: str
    shard: str
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    stepped: Sequence[str] = ()
    parts: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    status: str = ""
    unproven: tuple[str, ...] = ()
    source: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    passed: tuple[str, ...] = ()
    version_epoch: int = -1
    log: Logged | None = None
    why: str = ""
    _read: set[str] = field(default_factory=set, init=False, compare=False)  # parts that the script has had

    def __bool__(self) -> bool:
        return bool(self.source)

    def has(self, part: str) -> bool:
        """Is that part there to be read? part: one of PARTS."""
        if part not in PARTS:
            raise UserError(f"{part!r} is not one of {', '.join(PARTS)}", where="recovered.has", remedy="one of these")
        return part in self.parts

    @property
    def user(self) -> dict[str, Any]:
        """What this rank gave to `attachment.step(user=...)` at the end of the iteration before `step`. Raises
        UserError, as the next ones do: the version does not have it, and why. So does a key of it that is `missing`."""
        lost = {path: why for path, why in self.missing.items() if path.startswith("user[")}
        given = self._part("user")
        return _User(given, lost, self.step) if lost else given

    @property
    def scheduler(self) -> dict[str, Any]:
        """The state_dict of the scheduler that this rank gave to `attach`."""
        return self._part("scheduler")

    @property
    def scaler(self) -> dict[str, Any]:
        """The state_dict of the scaler that it gave to `attach`."""
        return self._part("scaler")

    @property
    def rng(self) -> dict[str, Any]:
        """Random generators as they were then, for `restore_rng`."""
        return self._part("rng")

    def _part(self, name: str) -> dict[str, Any]:
        if name in self.parts:
            self._read.add(name)
            return self.parts[name]
        why = self.missing.get(name, "this rank gave none with it")
        raise _missing(name, self.step, why if self else "nothing was recovered, the job starts fresh")

    def load(self, model: Any, optimizer: Any) -> None:
        """What `load_state_dict` of both would do, also where they hold shards (DTensors of fully_shard, pieces of
        Megatron-Core's): what came is put into this rank's part of each. Raises UserError where it is of another shape
        or of other parameters.

        Of a version that is kept as a log: its base is put in place, and this optimizer makes the steps since then
        again, which takes what they took. What comes of it is held against the trainer's checksums. Where one differs,
        or a part of the log is damaged, older bases are tried. Where none makes `step`, and no step was asked for by
        its number, all ranks take the newest step whose checksums were the trainer's on the way: `step`, `status` and
        own states are then those of it, and `why` says why. Raises EnvironmentProblem: no step was verified. Model
        and optimizer are then as before. All ranks call it, if they recovered together."""
        given_optimizer, optimizer = optimizer, optimizer_of(optimizer)
        model = model if is_megatron(model) else chunks_of(model)
        _check_given(model, optimizer)
        if self.log is not None:
            self._load_log(self.log, model, given_optimizer, optimizer)
            return
        pieces = pieces_of(model, given_optimizer) if is_megatron(model) else None
        whole_state = model.state_dict(keep_vars=True) if pieces is None else pieces.entries()
        self._check_extra(whole_state)
        held = {name: value for name, value in whole_state.items() if not is_extra(name)}
        came = {name: value for name, value in self.model.items() if not is_extra(name)}
        extra = {name: value for name, value in self.model.items() if is_extra(name)}
        parameters = parameters_of(optimizer)
        groups = self.optimizer.get("param_groups", ())
        numbers = [number for group in groups for number in group["params"]]
        if not self or held.keys() != came.keys() or len(numbers) != len(parameters):
            raise UserError(
                f"{self!r} has {len(came)} entries and {len(numbers)} optimized parameters; here are {len(held)}"
                f" and {len(parameters)}, or others", where="recover",
                remedy="the model and the optimizer of the job that made it",
            )
        sizes = [[len(group["params"]) for group in one] for one in (groups, optimizer.param_groups)]
        wanted = [one.defaults.keys() for one in members(optimizer) for _ in one.param_groups]
        lacks = sorted({name for group, wants in zip(groups, wanted, strict=False) for name in wants - group.keys()})
        if sizes[0] != sizes[1] or lacks:
            what = f"its groups do not say {', '.join(lacks)}" if lacks else f"its groups have {sizes[0]} parameters"
            here = " with ".join(type(one).__name__ for one in members(optimizer))
            raise UserError(f"{self!r} is of another optimizer: {what}; here is {here} of"
                            f" {sizes[1]}", where="recover", remedy="the optimizer of the job that made it")
        self._check_order(held, parameters)
        # All of it is made before any of it is loaded: a rank that is refused keeps its current state.
        values = {name: _placed(name, value, held[name], exact=True) for name, value in came.items()}
        state = {
            number: {key: value if key == "step" else _placed(key, value, parameters[number])
                     for key, value in values.items()}
            for number, values in self.optimizer["state"].items()
        }
        whole = {**self.optimizer, "state": state}
        if pieces is not None:
            pieces.put(values)
            optimizer.load_state_dict(whole)
            pieces.to_model()
            for name, value in extra.items():
                pieces.module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
        else:
            model.load_state_dict(values | extra)
            optimizer.load_state_dict(whole)

    def _check_order(self, held: Mapping[str, torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        """torch gives states to parameters by their numbers. Raises UserError: these are others here."""
        names: dict[int, str] = {}
        for name, value in held.items():
            names.setdefault(id(value), name)
        wanted = set(self.stepped)
        here = [name for one in parameters if (name := names.get(id(one), "")) in wanted]
        if here != list(self.stepped):
            at = next((at for at, (one, other) in enumerate(zip(here, self.stepped, strict=False)) if one != other),
                      min(len(here), len(self.stepped)))
            what = f"has {here[at]!r} as its parameter {at}" if at < len(here) else f"lacks {self.stepped[at]!r}"
            raise UserError(f"{self!r} is of another optimizer: the one here {what}", where="recover",
                            remedy="the optimizers of the job that made it, with their parameters in its order")

    def _load_log(self, log: Logged, model: Any, given: Any, optimizer: torch.optim.Optimizer) -> None:
        """given: by the script; optimizer: what steps in it."""
        try:
            pieces = pieces_of(model, given, log=True) if is_megatron(model) else None
            module: torch.nn.Module = model if pieces is None else pieces.module
            entries = module.state_dict(keep_vars=True)
            self._check_extra(entries)
        except UserError as error:
            log.give_up(error)
            raise
        held = entries if pieces is None else pieces.entries()
        self._becomes(log.load(
            {name: value for name, value in held.items() if not is_extra(name)}, optimizer,
            lambda step, came: self._check_back(entries, step, came)))
        if pieces is not None:
            pieces.to_model()
        for name, value in self.model.items():
            module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)

    def _check_back(self, held: Mapping[str, Any], step: int, given: Given) -> None:
        """Raises UserError: the script cannot go on with an older step. held: the model's entries."""
        if self._read:
            read = ", ".join(sorted(self._read))
            raise UserError(f"step {self.step} cannot be made, and its {read} were read before: step {step} is the"
                            " newest that is verified", where="recover",
                            remedy="recovered.load before anything else of it is read; or step= of that one")
        replace(self, step=step, parts=given.parts, missing=given.missing, model=given.extra)._check_extra(held)

    def _becomes(self, loaded: Loaded) -> None:
        """What was made."""
        if loaded.given is not None:
            self.step, self.model = loaded.step, loaded.given.extra
            self.parts, self.missing = loaded.given.parts, loaded.given.missing
            self.passed += loaded.given.said
        verified = loaded.verified
        self.status = str(VersionStatus(UNVERIFIED) if verified is None else VersionStatus(VERIFIED)
                          if verified == self.step else VersionStatus.follows(verified))
        self.unproven, self.why = loaded.unproven, loaded.why

    def _check_extra(self, held: Mapping[str, Any]) -> None:
        """Raises UserError, by name, for what a module wants back, or has given, and the version has not."""
        lost = [name for name in held if is_extra(name) and name not in self.model]
        lost += [path for path in self.missing if path.startswith("extra[") and not lost]
        if not lost or not self:
            return
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        why = self.missing.get(f"extra[{lost[0]!r}]") or self.missing.get(lost[0]) or self.missing.get("extra") or (
            next(iter(self.missing.values()), "") if not self.parts else "the rank gave none")
        raise UserError(
            f"step {self.step} has no {lost[0]}{more}: {why or 'no state of a rank was asked for'}", where="recover",
            remedy="step= of a version that has it; or model.load_state_dict(recovered.model, strict=False), where"
                   " modules may begin without it",
        )

    def restore_rng(self) -> None:
        """Set the generators of this process (python's, numpy's, torch's on the CPU and on devices) to where they were
        when iteration `step` began. Raises UserError: the version has no such state, or it does not fit here."""
        restore_rng(self.rng)

    def __repr__(self) -> str:  # nodes' own words are in it, and any terminal may have to show them
        return self._words().encode("utf-8", "backslashreplace").decode()

    def _words(self) -> str:
        not_taken = f"; not taken: {'; '.join(self.passed)}" if self.passed else ""
        if not self:
            of = f" of run {self.run_id!r}" if self.run_id else ""
            return f"Recovered(nothing: no node has a version{of}, a fresh start at step 0{not_taken})"
        open_ = f", unproven: {'; '.join(self.unproven)}" if self.unproven else ""
        why = f"; {self.why}" if self.why else ""
        return (
            f"Recovered(step {self.step} of run {self.run_id!r}, epoch {self.version_epoch}, {self.status}{open_}, from"
            f" {self.source}: {self.nbytes:,} bytes in {self.seconds:.2f} s{not_taken}{why})"
        )


def _check_given(model: Any, optimizer: Any) -> None:
    """Raises UserError for one that is something else."""
    for given, fits, name in (
        (model, isinstance(model, torch.nn.Module) or is_megatron(model), "model"),
        (optimizer, isinstance(optimizer, torch.optim.Optimizer), "optimizer"),
    ):
        if not fits:
            raise UserError(f"a {type(given).__name__} is given for the {name}", where="recover",
                            remedy="recovered.load(model, optimizer)")


class _User(dict[str, Any]):
    """What a script gave. A key that could not be kept is not taken for one that was never given."""

    def __init__(self, given: Mapping[str, Any], lost: Mapping[str, str], step: int) -> None:
        super().__init__(given)
        self._lost, self._step = lost, step

    def __missing__(self, key: Any) -> Any:
        if (path := f"user[{key!r}]") in self._lost:
            raise _missing(path, self._step, self._lost[path])
        raise KeyError(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self or f"user[{key!r}]" in self._lost else default


def _missing(path: str, step: int, why: str) -> UserError:
    return UserError(f"step {step} does not have it for this rank: {why}", where=f"recovered.{path}",
                     remedy=_REMEDIES.get(path.partition("[")[0], ""))


def _placed(name: str, value: torch.Tensor, like: torch.Tensor, exact: bool = False) -> torch.Tensor:
    """A value in the form of what it goes into. exact: of its type, too."""
    here = local(like).shape
    if value.shape != here:
        raise UserError(f"{name} has the shape {list(value.shape)}, and here {list(here)}", where="recover",
                        remedy="the same layout of replicas and shards, and shard= as this rank has it")
    if exact and value.dtype != like.dtype:  # torch would round it without a word
        raise UserError(f"{name} is {value.dtype}, and here {like.dtype}", where="recover",
                        remedy="a model of the type that was trained; load_state_dict converts what is wanted so")
    if not isinstance(like, DTensor):
        return value
    return DTensor.from_local(value.to(like.device), like.device_mesh, like.placements, run_check=False,
                              shape=like.shape, stride=like.stride())
