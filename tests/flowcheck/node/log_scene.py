"""A job that is kept as a log, without a wire: real torch steps, and of the product all that comes after an iteration
has been judged. What the trainer had after each step is kept here, to be held against what a redo makes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowcheck.ask.client import reader_key
from flowcheck.control.checksum import checksums
from flowcheck.control.protocol import Base
from flowcheck.job.clock import Clock
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import LOG, Bucket, Buckets, BucketSlice, Job, ModelEntry
from flowcheck.journal.ring import Hole, RingWriter
from flowcheck.node.api.routes import make_app
from flowcheck.node.api.worker import serve, server_of
from flowcheck.node.doors.http_door import Limits
from flowcheck.node.peers.peer_set import digest_of
from flowcheck.node.versions.journal.entries import Heads
from flowcheck.node.versions.journal.folders import folder_of
from flowcheck.node.versions.journal.log_bases import Bases, WholeBase
from flowcheck.node.versions.journal.log_folder import About, log_folder, write_about
from flowcheck.node.versions.journal.log_shelf import LogShelf
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.records import StepRecord
from flowcheck.trainer.connection.bulk_queue import BulkQueue
from flowcheck.trainer.connection.node_state import NodeState
from flowcheck.trainer.log.codec import record_tree
from flowcheck.trainer.log.record import StepRecord as Stepped
from flowcheck.trainer.log.upload import BaseUpload
from lab.synth import example_job

TOKEN = "a token that only tests have"
CLIP = 0.7


def net() -> torch.nn.Sequential:
    """With buffers, and a parameter that nobody steps."""
    found = torch.nn.Sequential(
        torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4), torch.nn.Linear(4, 3, bias=False))
    found[2].weight.requires_grad_(False)
    return found


class Sender:
    """In place of a connection: what is put goes to the node's bases."""

    def __init__(self, bases: Bases) -> None:
        self.node, self.base = NodeState(), BulkQueue()
        self.bases, self.whole = bases, list[WholeBase]()

    def begin_base(self) -> str:
        return "link"

    def put_bulk(self, bulk: BulkQueue, pieces: Iterator[tuple[Base, bytearray]], nbytes: int, on: str) -> bool:
        for message, data in pieces:
            base = self.bases.take(message, bytes(data))
            self.whole += [base] if base is not None else []
        return True


class LoggedJob:
    """after: step -> (entries of the model, state of the optimizer) as the trainer had them."""

    def __init__(
        self, root: Path, make: Callable[[Any], torch.optim.Optimizer], places: int = 60,
        model: Callable[[], torch.nn.Module] = net,
    ) -> None:
        torch.manual_seed(0)
        self.root, self.make, self._net, self.model = root, make, model, model()
        self.named = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        self.optimizer = make(self.named.values())
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 30)
        self.job = self._job()
        self._inputs = next(one.shape[1] for one in self.model.parameters() if one.dim() == 2)
        self._keep(places, {name: one for name, one in self.model.named_parameters() if not one.requires_grad})

    def _keep(self, places: int, constants: dict[str, torch.Tensor]) -> None:
        """What a node has of it, and what sends a base. places: entries of its journal."""
        root = self.root
        plan = self.plan = plan_job(self.job, streams=1, arenas=2)
        run = self.job.run_id, 0, 2
        self.digest = digest_of(self.job.to_dict(), plan, run, Clock(0))
        self.heads, self.folder = Heads(plan, self.digest), folder_of(root, "", self.job.run_id, 0)
        self.folder.ring.mkdir(parents=True)
        self.writer = RingWriter(self.folder.ring, places * (self.heads.most + 8192), self.heads.most)
        write_about(self.folder.path, About(self.job.run_id, 0, "", "", 0, self.digest, self.job.to_dict()))
        self.bases = Bases(log_folder(self.folder.path))
        self.sender, self.number = Sender(self.bases), 0
        self.regions: dict[int, bytes] = {}
        self.upload = BaseUpload(self.optimizer, lambda: self.named, lambda: constants)
        self.after: dict[int, tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]] = {}

    def _job(self) -> Job:
        slices, total = [], 0
        for name, one in reversed(self.named.items()):
            slices.append(BucketSlice(name, total, one.numel()))
            total += one.numel()
        job = example_job(ranks=2, count=[total + total % 2], startup=False, rebuild=False)
        first = {id(one): name for name, one in self.model.named_parameters()}
        held = self.model.state_dict(keep_vars=True)
        job.model = [ModelEntry(name, list(one.shape), str(one.dtype).removeprefix("torch."), _kind(one),
                                first[id(one)] if first.get(id(one), name) != name else "")
                     for name, one in held.items()]
        job.optimizer, job.kind, job.step_values = None, LOG, ["lr", "buffers"]
        job.buckets = Buckets([], [Bucket(slices)])
        return job_from_dict(job.to_dict())

    def train(self, steps: int, *, lose: tuple[int, ...] = (), sums: int = 4, alter: tuple[int, ...] = ()) -> None:
        """lose: iterations that the journal does not get. sums: every so many have checksums. alter: iterations of
        which it gets other gradients than the trainer had."""
        for _ in range(steps):
            number = self.number
            self.optimizer.zero_grad()
            self.model(torch.randn(11, self._inputs)).square().mean().backward()
            region = self._region(number)
            region[-8] ^= 64 if number in alter else 0
            self.regions[number] = region.tobytes()
            with torch.no_grad():
                for one in self.named.values():
                    assert one.grad is not None
                    one.grad.mul_(torch.tensor(CLIP))
            tree = record_tree(Stepped.of(self.optimizer))
            self.optimizer.step()
            state = {name: dict(self.optimizer.state.get(one, {})) for name, one in self.named.items()}
            buffers = {name: one.clone() for name, one in self.model.named_buffers()}
            record = StepRecord([tree], CLIP, None, False, self._sums(state) if number % sums == sums - 1 else {},
                                buffers)
            self.schedule.step()
            self._over(record, None if number in lose else region)
            self.after[self.number] = (
                {name: one.clone() for name, one in self.model.state_dict().items()},
                {name: {key: value.clone() if isinstance(value, torch.Tensor) else value
                        for key, value in self.optimizer.state.get(one, {}).items()}
                 for name, one in self.named.items()})

    def _over(self, record: StepRecord, region: np.ndarray | None) -> None:
        """An iteration is over. region: its gradients; None: the journal does not get them."""
        number = self.number
        if region is not None:
            head = self.heads.head(number, number, "line", record, (), 0)
            while not self.writer.offer(number, head, region, self.heads.spans(number)):
                time.sleep(0.001)
            while self.writer.reads(number):
                time.sleep(0.0001)
        self.number += 1
        self.upload.over([self.sender], self.number)  # type: ignore[list-item]

    def _region(self, number: int) -> np.ndarray:
        place = self.plan.iteration_buckets(number)[0]
        region = np.zeros(place.offset + place.nbytes, np.uint8)
        flat = torch.cat([self.named[one.name].grad.flatten() for one in self.job.buckets.steady[0].slices])  # type: ignore[union-attr]
        region[place.offset : place.offset + flat.nbytes] = flat.numpy().view(np.uint8)
        return region

    def _sums(self, state: dict[str, dict[str, Any]]) -> dict[str, str]:
        held = {f"optimizer.{name}.{key}": value.float() if key == "step" else value
                for name, values in state.items() for key, value in values.items() if isinstance(value, torch.Tensor)}
        return {name: f"{one:016x}" for name, one in checksums(self.named | held).items()}

    def base(self, steps: int = 4) -> None:
        """One is asked for, from the next boundary on, spread over so many."""
        self.sender.node.base_steps = steps

    def settle(self) -> None:
        """What was given is on the disk."""
        while self.writer.entries[-1:] != [self.number - 1]:
            assert not [one for one in self.writer.taken() if isinstance(one, Hole) and one.cause != "busy"]
            time.sleep(0.001)
        self.bases.close()

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """HOST:PORT of its API."""
        app = make_app({"log": LogShelf(self.root)}, reader_key(TOKEN.encode()))
        with socket.create_server(("127.0.0.1", 0)) as sock:
            server = server_of(app)
            thread = threading.Thread(target=serve, args=(server, sock, Limits()))
            thread.start()
            try:
                yield "{}:{}".format(*sock.getsockname())
            finally:
                server.should_exit = True
                thread.join(60)

    def fresh(self) -> tuple[Any, torch.optim.Optimizer]:
        """As a script makes them that has never trained."""
        torch.manual_seed(7)
        model = self._net()
        return model, self.make([one for one in model.parameters() if one.requires_grad])

    def differ(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
        """What is not the trainer's, bit for bit."""
        tensors, states = self.after[step]
        named = dict(model.named_parameters())
        pairs: list[tuple[str, Any, Any]] = [(name, one, tensors[name]) for name, one in model.state_dict().items()]
        for name, values in states.items():
            here = optimizer.state.get(named[name], {})
            pairs += [(f"{name}.{key}", here.get(key), values.get(key)) for key in here.keys() | values.keys()]
        return [name for name, one, other in pairs if not _same(one, other)]


def _kind(value: torch.Tensor) -> str:
    return "buffer" if not isinstance(value, torch.nn.Parameter) else "optimized" if value.requires_grad else "constant"


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    return one.dtype == other.dtype and one.shape == other.shape and one.contiguous().view(-1).view(torch.uint8).equal(
        other.contiguous().view(-1).view(torch.uint8)) if one.dim() else bool(one.dtype == other.dtype and one == other)
