"""A node as its own process on a veth pair, traffic of lab.synth, and a small trainer that speaks records.
And replicas in files, with a shelf that looks at them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.control.checksum import checksums
from flowcheck.control.protocol import Flows, Link, Manifest, Patch, Ranges, Record, Refused, State, Wanted, greet
from flowcheck.control.tensors import header, packed_bytes, pieces
from flowcheck.job.model import Job
from flowcheck.node.versions.holdings import MemoryShelf
from lab.synth import Synthesis, generate
from updater.replica import Replica

from ...links import wait_for_links
from ..hand_node import until
from .holdings_scene import Clock, replicas

TOKEN = b"a token that only tests have"
CLONE_NEWNET = 0x40000000
LONGEST = 240.0  # seconds that anything may take: it bounds what hangs, not what a busy machine does slowly


class Lan:
    """A network namespace of this thread, and of the processes that it starts: a veth pair and the loopback; a second
    pair on demand."""

    near, far = "flowcheck0", "flowcheck1"
    near2, far2 = "flowcheck2", "flowcheck3"

    def __init__(self) -> None:
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
        self._ip("link", "set", "lo", "up")
        self.sockets: list[socket.socket] = []
        self.socket = self._pair(self.near, self.far)

    def second(self) -> socket.socket:
        """What is sent there comes to `near2`."""
        return self._pair(self.near2, self.far2)

    def _pair(self, near: str, far: str) -> socket.socket:
        self._ip("link", "add", near, "mtu", "9000", "type", "veth", "peer", "name", far, "mtu", "9000")
        for end in (near, far):
            self._ip("link", "set", end, "up")
        wait_for_links(self._ip, near, far)
        self.sockets.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
        self.sockets[-1].bind((far, 0))
        return self.sockets[-1]

    def _ip(self, *words: str) -> str:
        return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout

    def send(self, frames: Sequence[bytes], to: socket.socket | None = None) -> None:
        for number, frame in enumerate(frames):
            (to or self.socket).send(frame)
            if number % 512 == 511:
                time.sleep(0.01)  # a mirror port has the pace of a wire, this socket has none


@pytest.fixture
def lan() -> Iterator[Lan]:
    if os.geteuid() != 0:
        pytest.skip("needs root for a network namespace")
    pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    made: list[Lan] = []
    try:
        if libc.unshare(CLONE_NEWNET) != 0:
            pytest.skip(f"no network namespaces here: {os.strerror(ctypes.get_errno())}")
        try:
            made.append(Lan())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no veth pairs here: {error}")
        yield made[0]
    finally:
        for one in (each for lan in made for each in lan.sockets):
            one.close()
        assert libc.setns(home, CLONE_NEWNET) == 0
        os.close(home)


class NodeProcess:
    """`flowcheck-node` and what it says. began: the event that says that it can be reached."""

    def __init__(self, folder: Path, settings: str, began: str = "listening") -> None:
        self.folder = folder
        (folder / "token").write_bytes(TOKEN)
        (folder / "token").chmod(0o600)  # otherwise the node says that others may read it
        (folder / "node.toml").write_text(settings)
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-P", "-m", "flowcheck.node",
             "--config", str(folder / "node.toml"), "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        self.lines: list[dict[str, Any]] = []
        self._new: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            listening = self.wait(began)
        except BaseException:
            self.close()
            raise
        host, _, port = listening.get("control", ":0").rpartition(":")
        self.address = (host, int(port))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith("{"):
                line = json.loads(text)
                self.lines.append(line)
                self._new.put(line)
        self._new.put({"event": "gone"})

    def wait(self, event: str, seconds: float = LONGEST, **fields: Any) -> dict[str, Any]:
        """The next line with these fields, of an event or of one of several ("a or b"); earlier ones that were waited
        past are not looked at again."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._new.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                raise AssertionError(f"no {event} {fields} in {seconds} s; said: {self.lines[-5:]}") from None
            if line["event"] == "gone":
                error = self.process.stderr.read() if self.process.stderr else ""
                raise AssertionError(f"the node has ended while {event} {fields} was awaited: {error[-3000:]}")
            if line["event"] in event.split(" or ") and all(line.get(key) == value for key, value in fields.items()):
                return line

    def said(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    def seen(self, event: str, **fields: Any) -> dict[str, Any]:
        """The first line with these fields, that has come already or comes; `wait` looks at it all the same. What a
        thread beside a group's says of a version may come before what the group says of it, and what a socket says
        before what the pipe does."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.lines if line["event"] in event.split(" or ")
                    and all(line.get(key) == fields[key] for key in fields)]

        until(lambda: found() or not self._reader.is_alive())
        assert found(), f"the node has ended while {event} {fields} was awaited"
        return found()[0]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        try:
            code = self.process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # its threads' stacks
            _, error = self.process.communicate()
            raise AssertionError(f"the node did not end: {error[-6000:]}") from None
        self._reader.join()
        return code

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def start_node(lan: Lan, tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """start_node(extra="", **settings of NodeConfig) -> a running node on the near end of the pair. captures: tables
    in place of the one of that capture. resync: most tests are about what follows a whole state."""
    started: list[NodeProcess] = []

    def start(
        extra: str = "", replica: str = "", captures: str = "", output: str = "", resync: str = "state", **settings: Any
    ) -> NodeProcess:
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        one = f'[capture]\ndevice = "af_packet:{lan.near}"\nring_size = 8192\nhuge = false'
        text += f"""
[control]
listen = "127.0.0.1:0"
token_file = "{tmp_path / 'token'}"
{extra}
{captures or one}
[replica]
directory = "{tmp_path}"
resync = "{resync}"
{replica}
[output]
directory = "{tmp_path / 'out'}"
keep_hashes = "{tmp_path / 'hashes.jsonl'}"
status_file = "{tmp_path / 'status.json'}"
{output}
"""
        started.append(NodeProcess(tmp_path, text))
        return started[-1]

    yield start
    for node in started:
        node.close()


class Trainer:
    """One rank of a job at the control port."""

    def __init__(self, address: tuple[str, int], job: Job, rank: int = 0, *, token: bytes = TOKEN, group: str = "",
                 **other: Any) -> None:
        self.job, self.rank = job, rank
        sock = socket.create_connection(address, timeout=LONGEST)
        self.name = "{}:{}".format(*sock.getsockname())  # as the node calls this peer
        self.link = Link(sock)
        self.unread: list[Any] = []  # has come, and nobody has asked for it yet
        said = {"run_id": job.run_id, "epoch": job.epoch, "rank": rank, "ranks": job.communicator.ranks} | other
        try:
            greet(self.link, token, group=group, **said)
        except BaseException:
            self.link.close()
            raise

    def expect(self, kind: type, **fields: Any) -> Any:
        """The next message of a kind, others passed over."""
        deadline = time.monotonic() + LONGEST
        while True:
            if self.unread:
                message = self.unread.pop(0)
            else:
                message, _ = self.link.receive(wait=max(deadline - time.monotonic(), 0.001))
            if isinstance(message, kind) and all(getattr(message, key) == value for key, value in fields.items()):
                return message

    def manifest(self, first: int = 0) -> None:
        self.link.send(Manifest(self.job.to_dict(), first))

    def flows(self) -> None:
        mine = [f for f in self.job.to_dict()["flows"] if self.rank in (f["src"], f["dst"])]
        self.link.send(Flows(mine))

    def state(self, iteration: int, parameters: Mapping[str, torch.Tensor],
              state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        tensors = {f"model.{name}": tensor for name, tensor in parameters.items()}
        tensors |= {f"optimizer.{n}.{k}": t for n, states in state.items() for k, t in states.items()}
        self.send(State(iteration), tensors)

    def send(self, message: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        if not tensors:
            self.link.send(message)
            return
        head, order = header(tensors)
        parts = [head, *(piece for name in order for piece in pieces(tensors[name]))]
        self.link.send(message, parts, packed_bytes(tensors))

    def record(self, iteration: int, **fields: Any) -> None:
        self.link.send(Record(iteration, **fields))

    def patch(self, iteration: int, parameters: Mapping[str, torch.Tensor],
              state: Mapping[str, Mapping[str, torch.Tensor]]) -> int:
        """Answer the next question, with the state after an iteration; how many elements that were."""
        asked = self.expect(Ranges)
        runs: dict[str, list[slice]] = {}
        for name, start, length in asked.ranges:
            runs.setdefault(name, []).append(slice(start, start + length))
        tensors = {}
        for name, parts in runs.items():
            held = {f"model.{name}": parameters[name]} | {f"optimizer.{name}.{k}": t for k, t in state[name].items()}
            for key, tensor in held.items():
                flat = tensor.detach().reshape(-1)
                tensors[key] = torch.cat([flat[part] for part in parts]) if tensor.dim() else tensor.detach().clone()
        self.send(Patch(asked.request, iteration, asked.ranges), tensors)
        return sum(length for _, _, length in asked.ranges)

    def close(self) -> None:
        self.link.close()


@pytest.fixture
def attach() -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def connect(node: NodeProcess, job: Job, rank: int = 0, *, patient: bool = True, **options: Any) -> Trainer:
        """The node sees the end of a connection when it sees it. Until then it welcomes the next one of that rank, or
        of another run, and says that one is attached. patient: come again until it does not say so."""
        deadline = time.monotonic() + LONGEST
        while True:
            made.append(trainer := Trainer(node.address, job, rank, **options))
            wish, _ = trainer.link.receive(wait=LONGEST)
            assert wish == Wanted(["user", "userhead", "notice"], ""), "all are told so, before they are let in"
            first, _ = trainer.link.receive(wait=LONGEST)
            attached = isinstance(first, Refused) and "is attached" in first.why
            if not (patient and attached and time.monotonic() < deadline):
                trainer.unread.append(first)
                return trainer
            trainer.close()

    yield connect
    for one in made:
        one.close()


class Truth:
    """A training run that never was: the job's model under torch, fed with the reduced gradients of synth."""

    def __init__(self, job: Job, seed: int = 1, lr: Sequence[float] = ()) -> None:
        self.job, self.seed = job, seed
        start = generate(job, iterations=1, seed=seed)
        shapes = {e.name: e.shape for e in job.model}
        self.parameters = {
            name: torch.nn.Parameter(torch.from_numpy(values.copy()).reshape(shapes[name]))
            for name, values in start.parameters.items()
        }
        assert job.optimizer is not None
        self.options = dict(job.optimizer.groups[0].options)
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[job.optimizer.name]
        self.optimizer = kind(self.parameters.values(), **self.options)
        self.step = 0

    def traffic(self, iteration: int, **faults: Any) -> Synthesis:
        return generate(self.job, iterations=1, first_iteration=iteration, seed=self.seed, **faults)

    def advance(self, made: Synthesis, **options: Any) -> None:
        """One optimizer step with the gradients of the next iteration; options: of this step (lr)."""
        for group in self.optimizer.param_groups:
            group.update(options)
        for bucket, layout in enumerate(self.job.bucket_layout(self.step)):
            data = torch.from_numpy(made.reduced[self.step, bucket].copy())
            for piece in layout.slices:
                parameter = self.parameters[piece.name]
                parameter.grad = data[piece.offset : piece.offset + piece.length].reshape(parameter.shape).clone()
        self.optimizer.step()
        self.step += 1

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {
            name: {key: value for key, value in self.optimizer.state[p].items() if isinstance(value, torch.Tensor)}
            for name, p in self.parameters.items() if self.optimizer.state[p]
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.parameters[name].detach().clone() for name in (e.name for e in self.job.model)}

    def sums(self) -> dict[str, str]:
        """As a record has them: of the model and of the optimizer's state."""
        kept = {f"optimizer.{name}.{key}": one for name, of in self.state().items() for key, one in of.items()}
        return {name: f"{value:016x}" for name, value in checksums(self.tensors() | kept).items()}


@pytest.fixture
def truth() -> type[Truth]:
    return Truth


# -- for tests of what a node has to recover from (test_holdings*.py) --


@pytest.fixture
def make(shm: Path) -> Iterator[Callable[..., Replica]]:
    with replicas(shm) as made:
        yield made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(shm: Path, clock: Clock) -> Iterator[MemoryShelf]:
    with contextlib.closing(MemoryShelf(shm, "n", clock)) as shelf:
        yield shelf
