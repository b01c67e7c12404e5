"""Ranks that tell each other JSON through the store of torch.distributed: nothing of it is on the training network.

    ranks = ranks_of(together)
    said = ranks.exchange({"versions": ...})      what each rank says, by rank

    with ranks.busy():                            what takes long: the others see that this rank lives
        ...

Every rank makes the same exchanges in the same order. One that does not come, and does not show that it lives, is named
after TOGETHER_SECONDS.
"""

from __future__ import annotations

import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from flowcheck.errors import EnvironmentProblem

__all__ = ["TOGETHER_SECONDS", "Ranks", "ranks_of"]

PREFIX = "flowcheck/recover"  # of names in torch.distributed's store
POLL_SECONDS = 0.02
MOST_PAUSE_SECONDS = 0.5
TOGETHER_SECONDS = 600.0  # that ranks wait for each other without a sign of life
STEP_SECONDS = 10.0  # between two looks at that
BEAT_SECONDS = 5.0
_Given = TypeVar("_Given")


class Ranks(Protocol):
    def exchange(self, mine: dict[str, Any]) -> list[Any]:
        """What each rank says, by rank. Raises EnvironmentProblem that names a rank which says nothing."""
        ...

    def busy(self) -> AbstractContextManager[object]: ...


def ranks_of(together: bool) -> Ranks:
    """Those of this job, or this rank alone."""
    if not together or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return _Alone()
    return _Together(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())


class _Alone:
    def exchange(self, mine: dict[str, Any]) -> list[Any]:
        return [mine]

    def busy(self) -> AbstractContextManager[object]:
        return nullcontext()


class _Together:
    """The store may be older than these processes, and have what those before them said: torchrun's agent keeps it when
    it starts ranks again. So rank 0 begins a session of a new name, and another rank goes on in it only when rank 0 has
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
        self._set(names[self._rank], json.dumps(mine))
        return [json.loads(self._get(name, rank, deadline)) for rank, name in enumerate(names)]

    def _begin(self, deadline: float) -> str:
        session = f"{PREFIX}/{secrets.token_hex(8)}"
        self._set(f"{PREFIX}/session", session)
        numbers = [self._get(f"{session}/here/{rank}", rank, deadline).decode() for rank in range(1, self._ranks)]
        self._set(f"{session}/all", json.dumps(["", *numbers]))
        return session

    def _join(self, deadline: float) -> str:
        number, told = secrets.token_hex(8), ""
        while time.monotonic() < deadline:
            session = self._get(f"{PREFIX}/session", 0, deadline).decode()
            if session != told:
                self._set(f"{session}/here/{self._rank}", number)
                told = session
            if _asked(0, self._store.check, [f"{session}/all"]):
                shown = json.loads(self._get(f"{session}/all", 0, deadline))
                if len(shown) == self._ranks and shown[self._rank] == number:
                    return session
            time.sleep(POLL_SECONDS)
        raise _silent(0, "it has not begun")

    def _set(self, name: str, value: str) -> None:
        _asked(0, self._store.set, name, value)  # rank 0 has the store, or whoever started all of them

    def _get(self, name: str, rank: int, deadline: float) -> bytes:
        """What that rank has to say."""
        beat, pause, look = "", POLL_SECONDS, time.monotonic() + STEP_SECONDS
        while not _asked(rank, self._store.check, [name]):  # its own `wait` prints a stack each time that it is in vain
            now = time.monotonic()
            if now >= min(look, deadline):  # it may be over already: others were waited for
                look, lives = now + STEP_SECONDS, self._beat(rank)
                if lives != beat:
                    beat, deadline = lives, max(deadline, now + TOGETHER_SECONDS)
            if now >= deadline:
                raise _silent(rank, f"nothing came of it in {TOGETHER_SECONDS:g} s")
            time.sleep(pause)
            pause = min(1.2 * pause, MOST_PAUSE_SECONDS)
        said: bytes = _asked(rank, self._store.get, name)
        return said

    def _beat(self, rank: int) -> str:
        """How often that rank has shown that it lives, in this session."""
        name = f"{self._session}/lives/{rank}"
        if not self._session or not _asked(rank, self._store.check, [name]):
            return ""
        said: bytes = _asked(rank, self._store.get, name)
        return said.decode()

    @contextmanager
    def busy(self) -> Iterator[None]:
        over, number = threading.Event(), itertools.count(1)

        def lives() -> None:
            while not over.wait(BEAT_SECONDS):
                try:
                    if self._session:  # else nobody looks
                        self._store.set(f"{self._session}/lives/{self._rank}", f"{self._round} {next(number)}")
                except (RuntimeError, ValueError):
                    return  # the next exchange says what is wrong

        thread = threading.Thread(target=lives, name="flowcheck recover", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _asked(rank: int, call: Callable[..., _Given], *given: Any) -> _Given:
    try:
        return call(*given)
    except (RuntimeError, ValueError) as error:  # torch's DistStoreError and DistNetworkError are RuntimeErrors
        raise _silent(rank, str(error).splitlines()[0]) from None


def _silent(rank: int, why: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"rank {rank} has not said what it can have: {why}", where="recover",
        remedy="every rank calls recover once; together=False for a rank that is alone",
    )
