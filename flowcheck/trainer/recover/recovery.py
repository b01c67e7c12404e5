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
shard). They agree outside the training network (together.py). If one rank finds that step bad at every source, or two
ranks of a shard were given different versions of it, it is bad for all, and they take the next one.
Torch and the standard library only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.ask.offer import Offer
from flowcheck.ask.receiving import SECONDS
from flowcheck.ask.sources import (
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
from flowcheck.ask.torch_state import torch_state
from flowcheck.control.start import line_in, order
from flowcheck.errors import EnvironmentProblem, FlowcheckError, UserError
from flowcheck.trainer.recover.logged import Logged, Together
from flowcheck.trainer.recover.own import flags_of, given_of, own_state
from flowcheck.trainer.recover.recovered import Recovered
from flowcheck.trainer.recover.statements import (
    check_no_errors,
    check_same,
    digest_of,
    error_text,
    found_here,
    key_of,
    lacking,
    reasons_of,
)
from flowcheck.trainer.recover.together import Ranks, ranks_of
from flowcheck.trainer.settings import context_of, token_of
from flowcheck.trainer.starts import after

__all__ = ["Recovered", "recover"]

_log = logging.getLogger("flowcheck")
NODES = "FLOWCHECK_NODES"
OLDER_WITH_USER = 10  # steps that a version may be older which has every rank's own state
LONGEST = 1e6  # seconds


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
    step: this one and no other. A node with a journal makes it, where it has none.
    into: tensors that the model's are received into, by name, such as `model.state_dict()`: no second copy in memory.
    prefer_verified: a version that a checksum of the trainer has confirmed is taken although it is so many steps older.
    fresh: start fresh although a node did not answer, which may have had a version. One that refuses the token, or
        whose address or certificate is another one's, has answered.
    seconds: that a node may be silent; one that is silent for longer is absent.
    together: agree with the other ranks, where torch.distributed is up.
    rank: whose own state is wanted, of the job that gave it; None: of this rank, in a job of as many.
    ca: ask over TLS, and trust these certificates: a PEM file, or "system". None: what FLOWCHECK_CA says; "": no TLS.

    Raises EnvironmentProblem: no version was found and a node did not answer; `step` is not there; none of the versions
    found proved good (then `into` holds anything); another rank is gone. UserError for arguments that cannot be.
    """
    ranks = ranks_of(together)
    try:
        _check(run_id, shard, step, into, prefer_verified, seconds)
        for name, value in (("fresh", fresh), ("together", together)):
            if not isinstance(value, bool):  # "no" would be yes
                raise UserError(f"{value!r} is not a bool", where=name, remedy="True or False")
        tls, own = context_of(ca), _own(rank)
        asked = [NodeClient(address, reader_key(token_of(token)), seconds, tls) for address in addresses(_nodes(nodes))]
    except FlowcheckError as error:
        _log.error("flowcheck: %s", error.message())  # now: the others may never come
        with suppress(EnvironmentProblem):  # whoever does not come will not wait, either
            ranks.exchange({"wrong": error.what})
        raise
    wants = {"run_id": run_id, "step": step, "prefer_verified": prefer_verified, "fresh": bool(fresh)}
    agreement = _Agreement(ranks, asked, wants, shard, into or {}, own, rank is None)
    for _ in range(MOST_ROUNDS):
        if (done := agreement.round()) is not None:
            return done
    raise EnvironmentProblem(
        f"none of {MOST_ROUNDS} versions proved good: {'; '.join(agreement.passed)}", where="recover",
        remedy="see the nodes' lines; a checkpoint directory",
    )


def _check(
    run_id: object, shard: object, step: object, into: object, prefer_verified: object, seconds: object
) -> None:
    """Arguments that cannot be are said here, and not where they are used."""
    for name, value in (("run_id", run_id), ("shard", shard)):
        if value is not None and not isinstance(value, str):
            raise UserError(f"{value!r} is not a text", where=name, remedy="a name, or None")
    for name, value, may in (("step", step, None), ("prefer_verified", prefer_verified, 0)):
        if value is not may and (type(value) is not int or value < 0):
            raise UserError(f"{value!r} is not a number of steps", where=name, remedy="a whole number, 0 or more")
    if into is not None and not isinstance(into, Mapping):
        raise UserError(f"a {type(into).__name__} has no tensors by name", where="into", remedy="a state_dict")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST:
        raise UserError(f"{seconds!r} is not a time", where="seconds", remedy=f"a number above 0, at most {LONGEST:g}")


class _Agreement:
    """Rounds in which ranks choose a version, and each looks whether it is good. as_many: states of ranks are taken of
    a job of as many ranks alone. passed: why versions were not taken."""

    def __init__(
        self, ranks: Ranks, asked: Sequence[NodeClient], wants: Mapping[str, Any], shard: str | None,
        into: Mapping[str, torch.Tensor], own: int | None, as_many: bool,
    ) -> None:
        self._ranks, self._asked, self._wants, self._into = ranks, asked, wants, into
        self._own, self._as_many = own, as_many
        self._run_id, self._shard = wants["run_id"], shard
        self._bad: list[Key] = []
        self._stood: set[Key] = set()  # what was there when the last of these proved bad
        self.passed: list[str] = []

    def round(self) -> Recovered | None:
        """None: the version that was chosen is not good. Raises what `recover` raises."""
        found = self._look()
        said = self._ranks.exchange({"wants": self._wants, **found_here(found, self._own)})
        if isinstance(found, Exception):
            raise found
        check_same(said, self._wants)
        users = [set(map(key_of, one["user"])) for one in said]
        held = [{key_of(key): status for *key, status in one["versions"]} for one in said]
        after(line_in(at) for one in held for at in one)
        step, prefer = self._wants["step"], self._wants["prefer_verified"]
        key = choose(held, step=step, prefer_verified=prefer, bad=self._bad, users=users,
                     prefer_user=OLDER_WITH_USER, stood=self._stood)
        epoch = 1 + max(one["newest"] for one in said)
        if key is None:
            return _fresh(found, said, held, step, self.passed, self._wants["fresh"], epoch)
        with self._ranks.busy():
            got = _get(found, key, self._into, self._own, self._as_many)
        said = self._ranks.exchange(got.said(found.shard, self._own))
        if got.wrong is not None:
            raise got.wrong
        check_no_errors(said)
        reasons = reasons_of(said, key)
        if got.fetched is not None and not any(reasons):
            without = lacking(said, self._own, got.state, got.why_no_state)
            together = Together(self._ranks, self._own, self._as_many, got.fetched.version.shard, step is not None)
            return _recovered(got, got.fetched, self.passed, without, epoch, self._own, together)
        self._bad.append(key)
        self._stood = set().union(*held)
        self.passed += [f"rank {rank}: {reason}" if len(reasons) > 1 else reason
                        for rank, reason in enumerate(reasons) if reason]
        return None

    def _look(self) -> Found | Exception:
        """Again each time: what was there may have made room for newer ones."""
        try:
            with self._ranks.busy():
                found = look(self._asked, self._run_id, self._shard, self._wants["step"])
            self._run_id, self._shard = found.chosen(self._run_id, self._shard)
        except Exception as error:  # also one that is no fault of the user's: the others have to hear of it, too
            return error
        return found


@dataclass(frozen=True)
class _Got:
    """What came of one version. fetched: None where nothing good did: why. wrong: what the user has to know. state:
    this rank's own, {}: none, and perhaps why_no_state."""

    fetched: Fetched | None = None
    optimizer: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    wrong: Exception | None = None
    state: dict[str, Any] = field(default_factory=dict)
    why_no_state: str = ""

    def said(self, shard: str, own: int | None) -> dict[str, Any]:
        return {
            "why": self.why, "wrong": error_text(self.wrong), "shard": shard,
            "digest": digest_of(self.fetched.version) if self.fetched is not None else "",
            "own": own, "has": bool(self.state), "missing": dict(self.state.get("missing", {})),
        }


def _get(found: Found, key: Key, into: Mapping[str, torch.Tensor], own: int | None, as_many: bool) -> _Got:
    try:
        fetched = fetch(found, key, into, lambda offer: _wanted(offer, own))
    except NoSource as error:
        return _Got(why=error.what)
    except Exception as error:  # arguments that do not fit; or a fault of ours: the others have to hear of it, too
        return _Got(wrong=error)
    state, why = own_state(fetched.users.get(own) if own is not None else None, own, as_many)
    if fetched.logs:
        return _Got(fetched, state=state, why_no_state=why)
    try:
        optimizer = torch_state(fetched.version.optimizer, fetched.state, fetched.version.rounding, "recover")
    except UserError as error:
        return _Got(why=f"{fetched.source}, step {key[1]}: {error.what}")
    return _Got(fetched, optimizer, state=state, why_no_state=why)


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


def _as_given(optimizer: dict[str, Any], groups: list[dict[str, Any]], options: bool) -> dict[str, Any]:
    """The optimizer's state as the trainer's own would be, by what its rank said of it. options: take those, too.

    The groups' options are those with which the next iteration began: a scheduler may have changed them since the step
    that made the version, and has what it needs there. And torch numbers all parameters, those that are frozen too,
    which no version has."""
    there = optimizer.get("param_groups", [])
    steps = [flags_of(group) for group in groups if isinstance(group.get("params"), list)]
    if len(steps) < len(groups):  # not said: all are, and no group is without
        steps = [[True] * len(group["params"]) for group in there] if len(groups) == len(there) else []
    sizes = [sum(map(bool, one)) for one in steps if any(one)]
    if len(steps) < len(groups) or sizes != [len(group["params"]) for group in there]:
        return optimizer  # of another optimizer, or of a rank that has several shards
    made, left, first = [], list(there), 0
    for group, which in zip(groups, steps, strict=True):
        numbers = range(first, first + len(which))
        base = left.pop(0) if any(which) else group
        made.append({**base, **(group if options else {}), "params": list(numbers)})
        first = numbers.stop
    numbered = [number for number, one in enumerate(one for which in steps for one in which) if one]
    return {"state": {numbered[at]: held for at, held in optimizer["state"].items()}, "param_groups": made}


def _recovered(
    got: _Got, fetched: Fetched, passed: Sequence[str], lacking: Mapping[str, str], epoch: int, own: int | None,
    together: Together,
) -> Recovered:
    version, log = fetched.version, None
    given = given_of(got.state, lacking, version.shard, own)
    if fetched.logs:
        optimizer = {}
        log = Logged(fetched.logs, version.step, given.groups, together)
    else:
        optimizer = _as_given(got.optimizer, got.state.get("groups", []), "groups" not in lacking)
    done = Recovered(
        version.step, epoch, version.run_id, version.shard, fetched.model | given.extra, optimizer, parts=given.parts,
        stepped=[] if log is not None else [
            name for group in version.optimizer.get("groups", ()) for name in group["params"]],
        missing=given.missing, status=version.status,
        unproven=version.unproven, source=fetched.source, nbytes=fetched.nbytes, seconds=fetched.seconds,
        passed=(*passed, *fetched.passed, *given.said), version_epoch=version.epoch, log=log,
    )
    _log.info("flowcheck: %s", done)
    return done


def _fresh(
    found: Found, said: Sequence[Mapping[str, Any]], held: Sequence[Mapping[Key, str]], step: int | None,
    passed: Sequence[str], fresh: bool, epoch: int,
) -> Recovered:
    """Nothing can be had: a fresh start, if there was nothing and everybody said so."""
    absent = sorted({why for one in said for why in one["absent"]})
    withheld = sorted({why for one in said for why in one["withheld"]})
    other = sorted({one["other"] for one in said if one["lacks"]})
    remedies = "; ".join(sorted({remedy for one in said for remedy in one["remedies"]}))
    if step is not None or passed or any(held):
        have = "; ".join(f"rank {rank}: {_steps(one)}" for rank, one in enumerate(held))
        what = f"step {step} is not there for every rank" if step is not None else "no version is there for every rank"
        what = "none of the versions that were found is good" if passed else what
        why = "; ".join([*passed, *absent, *withheld, *other])
        raise EnvironmentProblem(f"{what} ({have}){f': {why}' if why else ''}", where="recover",
                                 remedy=remedies or "see the nodes' lines; another step, or a checkpoint directory")
    if remedies:  # somebody is there, who may have the job's versions: no fresh start, whatever `fresh` says
        raise EnvironmentProblem(
            f"no version was found, and who may have one was asked wrongly: {'; '.join(absent)}", where="recover",
            remedy=remedies,
        )
    if absent and not fresh:
        raise EnvironmentProblem(
            f"no version was found, and who may have one did not answer: {'; '.join(absent)}", where="recover",
            remedy="start the node, or fresh=True to begin at step 0 all the same",
        )
    if any(one["lacks"] == "shard" for one in said) and not fresh:
        raise EnvironmentProblem(f"no version was found: {'; '.join(other)}", where="recover",
                                 remedy="shard= as `group` of the trainers; fresh=True to begin at step 0 all the same")
    done = Recovered(0, epoch, found.run_id, found.shard, passed=(*absent, *withheld, *other))
    _log.warning("flowcheck: %s", done)
    return done


def _steps(held: Mapping[Key, str]) -> str:
    newest = sorted(held, key=order)[-8:]
    return ", ".join(f"step {key[1]} of epoch {key[0]}" for key in newest) or "nothing"
