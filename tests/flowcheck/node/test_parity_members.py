"""A group with parity of real processes: two nodes with data (a replica, the process of their API, the one that
copies) and two holders. Members are killed with all that they hold, in every set of up to three, and others take their
places."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.control.ask import reader_key
from flowcheck.control.protocol import token_bytes
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.config import NodeConfig
from flowcheck.node.copying import Copying
from flowcheck.node.serving import Serving
from flowcheck.trainer.recovery import recover
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from ..hand_node import until
from .conftest import LONGEST, TOKEN, NodeProcess

DATA, MEMBERS, STEP = 2, 4, 7


def weights(shard: int) -> torch.Tensor:
    return torch.arange(400_000 * (shard + 1), dtype=torch.float32) / 7 + shard


def free_addresses(count: int) -> list[str]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
    for one in held:
        one.close()
    return found


class Node:
    """A member with data, without a mirror port: its replica is written here."""

    def __init__(self, number: int, shm: Path, group: list[str], events: list[dict[str, Any]]) -> None:
        self.directory = shm / f"member{number}"
        self.directory.mkdir()
        (shm / "token").write_bytes(TOKEN)
        spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 0.5})])
        path = self.directory / f"flowcheck-n-stage{number}-1.replica"
        self._replica = Replica({"w": weights(number)}, spec, path=path, run_id="run", step=STEP, slots=4)
        config = NodeConfig.model_validate({
            "name": "n", "control": {"listen": "127.0.0.1:0", "token_file": str(shm / "token")},
            "capture": {"device": "x"}, "api": {"listen": group[number]},
            "replica": {"directory": str(self.directory), "slots": 4},
            "output": {"directory": str(self.directory / "out")},
            "protect": {"parity": "2+2", "group": group, "every": STEP, "seconds": 0.1},
        })

        def say(event: str, **fields: Any) -> None:
            self.events.append({"event": event, **fields})

        self.events = events
        self._serving = Serving(config, TOKEN, say)
        self._copying = Copying(config, reader_key(token_bytes(TOKEN.decode())), group[number], say)

    def whole(self) -> bool:
        self._copying.look()
        return any(self.directory.glob("*.copies/*/*/epoch-0/step-000007"))

    def lose(self) -> None:
        """kill -9 of what it started, and its memory with it."""
        for process in (self._serving._process, self._copying._process):
            assert process is not None
            process.kill()
            process.wait(LONGEST)
        self.close()

    def close(self) -> None:
        self._serving.close()
        self._copying.close()
        self._replica.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class Holder:
    def __init__(self, number: int, shm: Path, group: list[str]) -> None:
        self.directory = shm / f"member{number}"
        self.directory.mkdir()
        self._process = NodeProcess(self.directory, f'''name = "h"
[tokens]
reader = "{self.directory}/token"
[api]
listen = "{group[number]}"
[protect]
parity = "2+2"
group = {json.dumps(group)}
every = {STEP}
directory = "{self.directory}"
seconds = 0.1
''', began="holding")

    def whole(self) -> bool:
        return any(self.directory.glob("*.parity/run/epoch-0/step-000007.parity"))

    def lose(self) -> None:
        self._process.process.kill()
        self._process.process.wait(LONGEST)
        until(lambda: not answers(self._process.said("holding")[0]["api"]))  # what it started ends with it
        self.close()

    def close(self) -> None:
        self._process.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError:
        return False
    return True


@pytest.fixture
def members(shm: Path) -> Iterator[dict[int, Node | Holder]]:
    made: dict[int, Node | Holder] = {}
    yield made
    for one in made.values():
        one.close()


@pytest.mark.slow
def test_every_set_of_members_is_lost_and_replaced(members: dict[int, Node | Holder], shm: Path) -> None:
    group, events = free_addresses(MEMBERS), list[dict[str, Any]]()

    def begin(number: int) -> None:
        members[number] = Node(number, shm, group, events) if number < DATA else Holder(number, shm, group)

    for number in range(MEMBERS):
        begin(number)
    for lost in [some for count in range(MEMBERS) for some in itertools.combinations(range(MEMBERS), count)]:
        until(lambda: all(one.whole() for one in members.values()))
        for number in lost:
            members.pop(number).lose()
        began = time.monotonic()
        for shard in range(DATA):
            if shard not in lost or MEMBERS - len(lost) >= DATA:
                found = recover(group, token=TOKEN.decode(), shard=f"stage{shard}", together=False, seconds=LONGEST)
                assert (found.step, found.source.rpartition(", ")[2]) == (STEP, "parity" if shard in lost else "memory")
                assert torch.equal(found.model["w"], weights(shard)), lost
            else:
                with pytest.raises(EnvironmentProblem, match="did not answer"):
                    recover(group, token=TOKEN.decode(), shard=f"stage{shard}", together=False, seconds=LONGEST)
        back = time.monotonic() - began
        for number in lost:
            begin(number)
        until(lambda: all(one.whole() for one in members.values()))
        print(f"lost {lost}: {back:.2f} s until both shards were asked for, {time.monotonic() - began:.2f} s until all"
              " members had their pieces again")
    assert not [said for said in events if said["event"] == "problem" and "ended with status" not in said["why"]]
