"""A version back into training: asked of checkpoint nodes, checked, and the same on every rank.

    recovered = flowcheck.recover("10.0.0.2:7071", token=secret)
    if recovered:
        model.load_state_dict(recovered.model)
        optimizer.load_state_dict(recovered.optimizer)
        scheduler.load_state_dict(recovered.scheduler)      # what was given to attach, and to step(user=...)
        loader.load_state_dict(recovered.user["loader"])
        recovered.restore_rng()
    attachment = flowcheck.attach(..., epoch=recovered.epoch, iteration=recovered.step)

Where torch.distributed is up, all ranks call it and take one step: the newest that each of them can have (of its own
shard). They agree through the store that the job was started with; no collective is called, so nothing of it is on the
training network. If one rank finds that step bad at every source, it is bad for all, and they take the next one.
Torch and the standard library only.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from flowcheck.control.ask import SECONDS, Node, Offer, reader_key
from flowcheck.control.sources import (
    MOST_ROUNDS,
    Fetched,
    Found,
    Key,
    NoSource,
    addresses,
    choose,
    fetch,
    look,
)
from flowcheck.control.torch_state import torch_state
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.trainer.parts import local
from flowcheck.trainer.settings import context_of, token_of
from flowcheck.trainer.user import restore_rng

__all__ = ["Recovered", "recover"]

_log = logging.getLogger("flowcheck")
NODES = "FLOWCHECK_NODES"
OLDER_WITH_USER = 10  # steps that a version may be older which has every rank's own state
PREFIX = "flowcheck/recover"  # of names in torch.distributed's store
POLL_SECONDS = 0.02
TOGETHER_SECONDS = 600.0  # that ranks wait for each other


@dataclass(frozen=True, repr=False)
class Recovered:
    """A version to go on from; false where there is none: the job starts fresh.

    step: updates that it has seen, and so the number of the next iteration; 0 of a fresh start.
    epoch: for `attach`: one more than the version's; 0 of a fresh start.
    run_id, shard: whose it is.
    model: for `model.load_state_dict`; optimizer: for `optimizer.load_state_dict`, in torch's own numbering. Both empty
        of a fresh start.
    user: what this rank gave to `attachment.step(user=...)` at the end of the iteration before `step`; scheduler,
        scaler: state_dicts of those that it gave to `attach`; rng: random generators as they were then, for
        `restore_rng`. Empty where the version has nothing of this rank.
    status, unproven: as the version says of itself (docs/reference/checkpoint.md).
    source: node and tier that it came from. nbytes: received. seconds: that it took.
    passed: of each source that was nearer, or newer, or did not answer: why it was not taken.
    """

    step: int
    epoch: int
    run_id: str
    shard: str
    model: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)
    status: str = ""
    unproven: tuple[str, ...] = ()
    source: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    passed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.source)

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """What `load_state_dict` of both would do, also where they hold shards (DTensors, of fully_shard): what came is
        put into this rank's part of each. Raises UserError where it is of another shape or of other parameters."""
        held = model.state_dict()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = [number for group in self.optimizer.get("param_groups", ()) for number in group["params"]]
        if not self or held.keys() != self.model.keys() or len(numbers) != len(parameters):
            raise UserError(
                f"{self!r} has {len(self.model)} entries and {len(numbers)} optimized parameters; here are {len(held)}"
                f" and {len(parameters)}, or others", where="recover",
                remedy="the model and the optimizer of the job that made it",
            )
        model.load_state_dict({name: _placed(name, value, held[name]) for name, value in self.model.items()})
        state = {
            number: {key: value if key == "step" else _placed(key, value, parameters[number])
                     for key, value in values.items()}
            for number, values in self.optimizer["state"].items()
        }
        optimizer.load_state_dict({**self.optimizer, "state": state})

    def restore_rng(self) -> None:
        """Set the generators of this process (python's, numpy's, torch's on the CPU and on devices) to where they were
        when iteration `step` began. Raises UserError: the version has no such state, or it does not fit here."""
        if not self.rng:
            raise UserError(f"step {self.step} has no state of this rank's random generators", where="recover",
                            remedy="a node and trainers that keep it; without it seed them: `recovered.rng` is empty")
        restore_rng(self.rng)

    def __repr__(self) -> str:
        not_taken = f"; not taken: {'; '.join(self.passed)}" if self.passed else ""
        if not self:
            of = f" of run {self.run_id!r}" if self.run_id else ""
            return f"Recovered(nothing: no node has a version{of}, a fresh start at step 0{not_taken})"
        open_ = f", unproven: {'; '.join(self.unproven)}" if self.unproven else ""
        return (
            f"Recovered(step {self.step} of run {self.run_id!r}, epoch {self.epoch - 1}, {self.status}{open_}, from"
            f" {self.source}: {self.nbytes:,} bytes in {self.seconds:.2f} s{not_taken})"
        )


def _placed(name: str, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A value in the form of what it goes into."""
    here = local(like).shape
    if value.shape != here:
        raise UserError(f"{name} has the shape {list(value.shape)}, and here {list(here)}", where="recover",
                        remedy="the same layout of replicas and shards, and shard= as this rank has it")
    if not isinstance(like, DTensor):
        return value
    return DTensor.from_local(value.to(like.device), like.device_mesh, like.placements, run_check=False,
                              shape=like.shape, stride=like.stride())


def recover(
    nodes: str | Sequence[str] | None = None, *, token: str | None = None, run_id: str | None = None,
    shard: str | None = None, step: int | None = None, into: Mapping[str, torch.Tensor] | None = None,
    prefer_verified: int = 10, fresh: bool = False, seconds: float = SECONDS, together: bool = True,
    rank: int | None = None, ca: str | None = None,
) -> Recovered:
    """The newest version that the nodes have, every hash checked; on every rank, after init_process_group.

    nodes: HOST:PORT of their `api.listen`, a list or one text with commas; None: the variable FLOWCHECK_NODES.
    token: the nodes' shared secret; None: the first line of the file that FLOWCHECK_TOKEN_FILE names.
    run_id, shard: which run, and which group of ranks (attach's `group`) of it; None: the only one that there is.
    step: this one and no other.
    into: tensors that the model's are received into, by name, such as `model.state_dict()`: no second copy in memory.
    prefer_verified: a version that a checksum of the trainer has confirmed is taken although it is so many steps older.
    fresh: start fresh although a node did not answer, which may have had a version.
    seconds: that a node may be silent; one that is silent for longer is absent.
    together: agree with the other ranks, where torch.distributed is up.
    rank: whose own state is wanted, of the job that gave it; None: of this rank, in a job of as many.
    ca: ask over TLS, and trust these certificates: a PEM file, or "system". None: what FLOWCHECK_CA says; "": no TLS.

    Raises EnvironmentProblem: no version was found and a node did not answer; `step` is not there; none of the versions
    found proved good (then `into` holds anything); another rank is gone. UserError for arguments that cannot be.
    """
    tls = context_of(ca)
    asked = [Node(address, reader_key(token_of(token)), seconds, tls) for address in addresses(_nodes(nodes))]
    ranks, own = _ranks(together), _own(rank)
    bad: list[Key] = []
    passed: list[str] = []
    for _ in range(MOST_ROUNDS):
        found = look(asked, run_id, shard)  # anew each time: what was there may have made room for newer versions
        said = ranks.exchange({"run_id": found.run_id, "versions": [[*k, s] for k, s in found.versions.items()],
                               "user": sorted(found.with_user(own)) if own is not None else [],
                               "absent": list(found.absent), "withheld": list(found.withheld),
                               "lacks": found.lacks, "other": found.other})
        users = [{(epoch, at) for epoch, at in one["user"]} for one in said]
        held = [{(epoch, at): status for epoch, at, status in one["versions"]} for one in said]
        _same_run(said)
        key = choose(held, step=step, prefer_verified=prefer_verified, bad=bad, users=users,
                     prefer_user=OLDER_WITH_USER)
        if key is None:
            return _fresh(found, said, held, step, passed, fresh)
        fetched: Fetched | None = None
        optimizer: dict[str, Any] = {}
        why = ""
        try:
            fetched = fetch(found, key, into or {}, lambda offer: _wanted(offer, own))
        except NoSource as error:
            why = error.what
        if fetched is not None:
            try:
                optimizer = torch_state(fetched.version.optimizer, fetched.state, fetched.version.rounding, "recover")
            except UserError as error:
                why = f"{fetched.source}, step {key[1]}: {error.what}"
        reasons = [one["why"] for one in ranks.exchange({"why": why})]
        if fetched is not None and not any(reasons):
            return _recovered(fetched, optimizer, passed, own, rank is None)
        bad.append(key)
        passed += [f"rank {rank}: {reason}" if len(reasons) > 1 else reason
                   for rank, reason in enumerate(reasons) if reason]
    raise EnvironmentProblem(f"none of {MOST_ROUNDS} versions proved good: {'; '.join(passed)}", where="recover",
                             remedy="see the nodes' lines; a checkpoint directory")


def _same_run(said: Sequence[Mapping[str, Any]]) -> None:
    """Steps of different runs must not be taken for each other."""
    runs = sorted({one["run_id"] for one in said if one["versions"]})
    if len(runs) > 1:
        raise UserError(f"ranks see different runs: {', '.join(map(repr, runs))}", where="run_id", remedy="say run_id=")


def _nodes(nodes: str | Sequence[str] | None) -> str | Sequence[str]:
    if nodes is None:
        nodes = os.environ.get(NODES, "")
    if not nodes:
        raise UserError("no node is named", where="nodes",
                        remedy=f"HOST:PORT of a node's api.listen, as an argument or in {NODES}")
    return nodes


def _own(rank: int | None) -> int | None:
    """Whose own state is wanted; None: nobody's."""
    if rank is not None and (type(rank) is not int or rank < 0):
        raise UserError(f"{rank!r} is not a rank", where="rank", remedy="a whole number, 0 or more")
    return dist.get_rank() if rank is None and dist.is_available() and dist.is_initialized() else rank


def _wanted(offer: Offer, own: int | None) -> list[int]:
    return [own] if own is not None and offer.has_user(own) else []


def _user(fetched: Fetched, own: int | None, as_many: bool) -> tuple[dict[str, Any], str]:
    """This rank's own state, or why it is not taken."""
    found = fetched.users.get(own) if own is not None else None
    if found is None:
        return {}, ""
    if as_many and found.ranks != dist.get_world_size():
        return {}, (f"states of ranks are those of a job of {found.ranks} ranks, this one has {dist.get_world_size()}:"
                    " none is taken; rank= takes one")
    state = found.state
    parts = [state.get(name, {}) for name in ("rng", "user", "scheduler", "scaler")] if isinstance(state, dict) else []
    groups = state.get("groups") if parts else None
    if not isinstance(groups, list) or not all(isinstance(part, dict) for part in [*parts, *groups]):
        return {}, f"the state of rank {own} is not one of this version of flowcheck"
    return state, ""


def _now(optimizer: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """The groups' options as they were when the next iteration began: a scheduler may have changed them since the step
    that made the version, and has what it needs there."""
    there = optimizer.get("param_groups", [])
    if len(groups) == len(there):
        for group, options in zip(there, groups, strict=True):
            group |= {key: value for key, value in options.items() if key != "params"}


def _recovered(
    fetched: Fetched, optimizer: dict[str, Any], passed: Sequence[str], own: int | None, as_many: bool
) -> Recovered:
    version = fetched.version
    state, why = _user(fetched, own, as_many)
    _now(optimizer, state.get("groups", []))
    parts = {name: state.get(name, {}) for name in ("user", "scheduler", "scaler", "rng")}
    done = Recovered(
        version.step, version.epoch + 1, version.run_id, version.shard, fetched.model, optimizer, **parts,
        status=version.status,
        unproven=version.unproven, source=fetched.source, nbytes=fetched.nbytes, seconds=fetched.seconds,
        passed=(*passed, *fetched.passed, *([why] if why else [])),
    )
    _log.info("flowcheck: %s", done)
    return done


def _fresh(
    found: Found, said: Sequence[Mapping[str, Any]], held: Sequence[Mapping[Key, str]], step: int | None,
    passed: Sequence[str], fresh: bool,
) -> Recovered:
    """Nothing can be had: a fresh start, if there was nothing and everybody said so."""
    absent = sorted({why for one in said for why in one["absent"]})
    withheld = sorted({why for one in said for why in one.get("withheld", [])})
    other = sorted({one["other"] for one in said if one["lacks"]})
    if step is not None or passed or any(held):
        have = "; ".join(f"rank {rank}: {_steps(one)}" for rank, one in enumerate(held))
        what = f"step {step} is not there for every rank" if step is not None else "no version is there for every rank"
        what = "none of the versions that were found is good" if passed else what
        why = "; ".join([*passed, *absent, *withheld, *other])
        raise EnvironmentProblem(f"{what} ({have}){f': {why}' if why else ''}", where="recover",
                                 remedy="see the nodes' lines; another step, or a checkpoint directory")
    if absent and not fresh:
        raise EnvironmentProblem(
            f"no version was found, and who may have one did not answer: {'; '.join(absent)}", where="recover",
            remedy="start the node, or fresh=True to begin at step 0 all the same",
        )
    if any(one["lacks"] == "shard" for one in said) and not fresh:
        raise EnvironmentProblem(f"no version was found: {'; '.join(other)}", where="recover",
                                 remedy="shard= as `group` of the trainers; fresh=True to begin at step 0 all the same")
    done = Recovered(0, 0, found.run_id, found.shard, passed=(*absent, *withheld, *other))
    _log.warning("flowcheck: %s", done)
    return done


def _steps(held: Mapping[Key, str]) -> str:
    newest = sorted(held)[-8:]
    return ", ".join(f"step {step} of epoch {epoch}" for epoch, step in newest) or "nothing"


# -- with other ranks --------------------------------------------------------------------------------------


class Ranks(Protocol):
    def exchange(self, mine: dict[str, Any]) -> list[Any]:
        """What each rank says, by rank."""
        ...


class _Alone:
    def exchange(self, mine: dict[str, Any]) -> list[Any]:
        return [mine]


class _Together:
    """Ranks that tell each other JSON through the store of torch.distributed. All make the same exchanges.

    The store may be older than these processes, and have what those before them said: torchrun's agent keeps it when it
    starts ranks anew. So rank 0 begins a session of a new name, and another rank goes on in it only when rank 0 has
    shown there the number that this rank has just made up.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._session = ""
        self._round = 0

    def exchange(self, mine: dict[str, Any]) -> list[Any]:
        deadline = time.monotonic() + TOGETHER_SECONDS
        if not self._session:
            self._session = self._begin(deadline) if self._rank == 0 else self._join(deadline)
        self._round += 1
        names = [f"{self._session}/{self._round}/{rank}" for rank in range(self._ranks)]
        self._store.set(names[self._rank], json.dumps(mine))
        return [json.loads(self._get(name, rank, deadline)) for rank, name in enumerate(names)]

    def _begin(self, deadline: float) -> str:
        session = f"{PREFIX}/{secrets.token_hex(8)}"
        self._store.set(f"{PREFIX}/session", session)
        numbers = [self._get(f"{session}/here/{rank}", rank, deadline).decode() for rank in range(1, self._ranks)]
        self._store.set(f"{session}/all", json.dumps(["", *numbers]))
        return session

    def _join(self, deadline: float) -> str:
        number, told = secrets.token_hex(8), ""
        while time.monotonic() < deadline:
            session = self._get(f"{PREFIX}/session", 0, deadline).decode()
            if session != told:
                self._store.set(f"{session}/here/{self._rank}", number)
                told = session
            if self._store.check([f"{session}/all"]):
                shown = json.loads(self._get(f"{session}/all", 0, deadline))
                if len(shown) == self._ranks and shown[self._rank] == number:
                    return session
            time.sleep(POLL_SECONDS)
        raise _silent(0, "it has not begun")

    def _get(self, name: str, rank: int, deadline: float) -> bytes:
        """What that rank has to say."""
        try:
            self._store.wait([name], timedelta(seconds=max(1.0, deadline - time.monotonic())))
            said: bytes = self._store.get(name)
            return said
        except (RuntimeError, ValueError) as error:  # torch's DistStoreError is a RuntimeError
            raise _silent(rank, str(error).splitlines()[0]) from None


def _silent(rank: int, why: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"rank {rank} has not said what it can have: {why}", where="recover",
        remedy="every rank calls recover once; together=False for a rank that is alone",
    )


def _ranks(together: bool) -> Ranks:
    if not together or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return _Alone()
    return _Together(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
