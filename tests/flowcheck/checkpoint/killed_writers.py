"""Writers of versions, each killed before its first, second, third, ... system call that changes a file. Run as a
process of its own, which forks after torch is loaded.

    python -m tests.flowcheck.checkpoint.killed_writers WRITER FOLDER [HOST:PORT of a node's API]       -> JSON
"""

from __future__ import annotations

import json
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load

from flowcheck.ask.client import NodeClient
from flowcheck.ask.sources import addresses
from flowcheck.checkpoint.copies import take_copy
from flowcheck.checkpoint.directory import Meta, load_step, write_step
from flowcheck.checkpoint.fetch import fetch
from flowcheck.checkpoint.objects import open_store
from flowcheck.checkpoint.store import Lane, Rules
from flowcheck.durable import write_atomic
from flowcheck.node.versions.user_states import UserStates, rank_file, user_folder, users_in
from tests.killed import killed_before
from updater.optimizers import OptimizerSpec
from updater.reader import Reader
from updater.replica import Replica

from ..hand_api import KEY, TOKEN

META = Meta("run", 2, "verified", (), {"name": "sgd", "groups": []}, "torch-cpu")
STEP = 7  # of the version that the node has: hand_api.HandVersion(7)
OLD = 1.0


class Writer:
    """Of one folder. prepare: what is there before. work: what is killed. found: what a reader gets then: None, or its
    value; raises where that is half of something. node: whose API is asked."""

    def __init__(self, out: Path, node: str) -> None:
        self.out, self.node = out, node
        out.mkdir()

    def prepare(self) -> None:
        pass

    def work(self) -> object:
        raise NotImplementedError

    def found(self) -> Any:
        raise NotImplementedError


class Copy(Writer):
    path = "step-000007"

    def work(self) -> object:
        node = NodeClient(addresses(self.node)[0], KEY, 60.0)
        return take_copy(node, node.offers()[0], self.out)

    def found(self) -> Any:
        path = self.out / self.path
        visible = {one.name for one in self.out.iterdir() if not one.name.startswith(".")}
        assert visible <= {self.path}, visible
        return self.loaded(path) if path.exists() else None

    def loaded(self, path: Path) -> Any:
        return load_step(path).parameters["w"].tolist()


class Fetch(Copy):
    format = "safetensors"

    def work(self) -> object:
        return fetch(self.node, self.out, token=TOKEN, format=self.format, seconds=60.0)


class TorchFile(Fetch):
    format, path = "torch", "step-000007.pt"

    def loaded(self, path: Path) -> Any:
        return torch.load(path, weights_only=True)["model"]["w"].tolist()


class Dcp(Fetch):
    format, path = "dcp", "step-000007.dcp"

    def loaded(self, path: Path) -> Any:
        found = {"model": {"w": torch.zeros(2), "b": torch.zeros(1)}}
        load(found, checkpoint_id=path, no_dist=True)
        return found["model"]["w"].tolist()


class Transformers(Fetch):
    format, path = "hf", "step-000007.hf"

    def loaded(self, path: Path) -> Any:
        from safetensors.torch import load_file

        return load_file(path / "model.safetensors")["w"].tolist()


class Step(Writer):
    """Of one that is there."""

    def prepare(self) -> None:
        self.write(OLD)

    def write(self, value: float) -> object:
        return write_step(self.out, STEP, {"w": torch.full((3,), value)}, {"w": {"step": value}}, META)

    def work(self) -> object:
        return self.write(2.0)

    def found(self) -> Any:
        return load_step(self.out / "step-000007").parameters["w"][0].item()


class Store(Step):
    def write(self, value: float) -> object:
        lane = Lane(open_store(str(self.out), {}), "n/-/run", clock=lambda: value)
        files = {"model.safetensors": {"w": torch.full((3,), value)}, "optimizer.safetensors": {}}
        entry = lane.write(int(value), files, META, lambda: {0: b"x"})
        lane.tidy(Rules(keep=1))
        return entry

    def found(self) -> Any:
        lane = Lane(open_store(str(self.out), {}), "n/-/run", clock=lambda: 0.0)
        whole, _ = lane.entries()
        held = {entry.folder: load_step(self.out / entry.folder).parameters["w"][0].item() for entry in whole}
        return held[lane.latest()]


class User(Step):
    """What a rank gave, beside a replica."""

    def write(self, value: float) -> None:
        UserStates(print)._write(self.out / "x.replica", STEP, 3, str(value).encode() * 1000)

    def found(self) -> Any:
        found = users_in(user_folder(self.out / "x.replica", STEP))
        assert list(found) == [3] and rank_file(user_folder(self.out / "x.replica", STEP), 3).exists()
        return {str(value).encode() * 1000: value for value in (OLD, 2.0)}[found[3]]


class Atomic(Step):
    """Status file, placement of holders, pointer."""

    def write(self, value: float) -> None:
        write_atomic(self.out / "status.json", json.dumps([value] * 1000).encode())

    def found(self) -> Any:
        found = json.loads((self.out / "status.json").read_bytes())
        assert found == [found[0]] * 1000
        return found[0]


class Memory(Writer):
    """A replica's file, which has a name from its first version on."""

    def work(self) -> object:
        spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 0.5})])
        return Replica({"w": torch.full((3,), 2.0)}, spec, path=self.out / "x.replica", run_id="run")

    def found(self) -> Any:
        path = self.out / "x.replica"
        assert {one.name for one in self.out.iterdir()} <= {path.name}
        if not path.exists():
            return None
        with Reader(path).pinned() as version:
            return version.parameters["w"].tolist()


WRITERS = {one.__name__.lower(): one for one in (Copy, Fetch, TorchFile, Dcp, Transformers, Step, Store, User, Atomic,
                                                 Memory)}


def main() -> None:
    name, folder, *node = sys.argv[1:]
    warnings.simplefilter("ignore")
    assert platform.machine() == "x86_64"
    n, found, killed = 0, [], True
    while killed:
        n += 1
        writer = WRITERS[name](Path(folder) / str(n), node[0] if node else "")
        writer.prepare()
        before = writer.found()
        killed = killed_before(n, writer.work)
        found.append(writer.found() != before)
        if not isinstance(writer, Memory) or not found[-1]:  # whoever writes next: nothing that was left is in its way
            writer.work()
            assert writer.found() != before
    print(json.dumps({"kills": n - 1, "landed": found}))


if __name__ == "__main__":
    main()
