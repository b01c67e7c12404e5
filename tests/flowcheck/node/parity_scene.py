"""Members of a group with parity, as real processes: nodes with data (a replica, the process of their API, the one that
copies) and holders. Each can be killed with all that it holds."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import torch

from flowcheck.control.proof import node_key
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.protect.supervisor import copying
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from ..hand_node import until
from .conftest import LONGEST, TOKEN, NodeProcess

STEP = 7


def weights(shard: int) -> torch.Tensor:
    return torch.arange(400_000 * (shard + 1), dtype=torch.float32) / 7 + shard


def free_addresses(count: int) -> list[str]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
    for one in held:
        one.close()
    return found


class Node:
    """A member with data, without a mirror port: its replica is written here. protect: its settings of that."""

    def __init__(self, number: int, shm: Path, address: str, protect: dict[str, Any], events: list[dict[str, Any]]
                 ) -> None:
        self.directory = shm / f"member{number}"
        self.directory.mkdir()
        (shm / "token").write_bytes(TOKEN)
        (shm / "token").chmod(0o600)
        spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 0.5})])
        path = self.directory / f"flowcheck-n{number}-stage{number}-1.replica"
        self._replica = Replica({"w": weights(number)}, spec, path=path, run_id="run", step=STEP, slots=4)
        config = NodeConfig.model_validate({
            "name": f"n{number}", "control": {"listen": "127.0.0.1:0", "token_file": str(shm / "token")},
            "capture": {"device": "x"}, "api": {"listen": address},
            "replica": {"directory": str(self.directory), "slots": 4},
            "output": {"directory": str(self.directory / "out")},
            "protect": {"parity": "2+2", "every": STEP, "seconds": 0.1, **protect},
        })

        def say(event: str, **fields: Any) -> None:
            self.events.append({"event": event, **fields})

        self.events = events
        self._serving = Serving(config, TOKEN, say)
        self._copying = copying(config, node_key(TOKEN).hex(), address, say)

    def whole(self) -> bool:
        self._copying.look()
        return any(self.directory.glob("*.copies/*/*/epoch-0/step-000007"))

    def lose(self) -> None:
        """kill -9 of what it started, and its memory with it."""
        for process in (self._serving.child.process, self._copying.process):
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
    def __init__(self, number: int, shm: Path, address: str, protect: dict[str, Any]) -> None:
        self.directory = shm / f"member{number}"
        self.directory.mkdir()
        more = "".join(f"{key} = {json.dumps(value)}\n" for key, value in protect.items())
        self.process = NodeProcess(self.directory, f'''name = "h{number}"
[tokens]
reader = "{self.directory}/token"
peer = "{self.directory}/token"
[api]
listen = "{address}"
[protect]
parity = "2+2"
every = {STEP}
directory = "{self.directory}"
seconds = 0.1
{more}''', began="holder_ready")

    def whole(self) -> bool:
        return any(self.directory.glob("*.parity/run/epoch-0/step-000007.parity"))

    def lose(self) -> None:
        self.process.process.kill()
        self.process.process.wait(LONGEST)
        until(lambda: not answers(self.process.seen("holder_ready")["api"]))  # what it started ends with it
        self.close()

    def close(self) -> None:
        self.process.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError:
        return False
    return True
