"""Changed records and HTTP requests through a node's own readers, in this process: ten million of them, where a real
node (tests/flowcheck/node/test_fuzz_records.py) takes hundreds in a second.

    python fuzz/ports.py [--inputs N] [--seed S] [--kind KIND]... [--minutes M]

records    frames of streams.py through Link.receive, Link.payload and what groups/connection.py does with a payload,
           while the connection lives; a manifest becomes a job. Nothing but a refusal leaves the reader; what was read
           is one of the protocol's messages.
requests   HTTP through the connection that api/worker.py gives uvicorn, on one end of a socket pair, to the API's
           application with a version in memory, one on disk, and a board. Each is followed by a sound request, so
           that what a reader takes for the body of another shows. Nobody gets anything but /healthz without a key;
           no answer is a fault of the node (5xx but for 503), no task of the event loop ends by an exception.

An input is a frame or a request, each in a stream with others. Both: memory is flat, by regression after the first
fifth. Exit status 1: something was found; the stream is in build/fuzz/finds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "fuzz")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from streams import Streams, messages  # noqa: E402
from targets.records import Wire  # noqa: E402

from flowcheck.checkpoint.directory import Meta, write_step  # noqa: E402
from flowcheck.control.protocol import MESSAGES, Limits, Link, Manifest, Patch, RecordsError, User  # noqa: E402
from flowcheck.control.tensors import unpack  # noqa: E402
from flowcheck.control.user_state import USER_BYTES, seal_of  # noqa: E402
from flowcheck.errors import FlowcheckError  # noqa: E402
from flowcheck.job.manifest import job_from_dict  # noqa: E402
from flowcheck.node.allocator import keep_little  # noqa: E402
from flowcheck.node.api.guard import OPEN  # noqa: E402
from flowcheck.node.api.routes import make_app  # noqa: E402
from flowcheck.node.api.worker import server_of  # noqa: E402
from flowcheck.node.groups.connection import TEXT, payload_specs  # noqa: E402
from flowcheck.node.status.board import Board, Glance  # noqa: E402
from flowcheck.node.versions.holdings import DiskShelf, MemoryShelf  # noqa: E402
from flowcheck.rebuild.plan import plan_job  # noqa: E402
from lab.synth import example_job  # noqa: E402
from updater.optimizers import OptimizerSpec  # noqa: E402
from updater.replica import Replica  # noqa: E402

__all__ = ["SHARE", "Outcome", "fuzz"]

#: Part of the inputs that each kind gets: an HTTP request takes some ten times as long as a frame.
SHARE = {"records": 0.8, "requests": 0.2}
FINDS = ROOT / "build" / "fuzz" / "finds"
LEAK = 8 << 20  # bytes that a run may add, by regression
SAMPLES = 200
AT_ONCE = 64  # connections
PATIENCE = 0.3  # seconds without an answer after which a client says that nothing more comes
HANG = 60.0  # seconds until a connection must be over: the longest of api/worker.py's limits, and a busy machine
KEY = "k" * 64
SOUND = f"GET {OPEN} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


class Find(AssertionError):
    """stream: what was sent."""

    def __init__(self, why: str, stream: bytes) -> None:
        super().__init__(why)
        self.stream = stream


@dataclass
class Outcome:
    """told: what became of inputs. grown: bytes by regression, None: too few samples."""

    kind: str
    seed: int
    inputs: int = 0
    seconds: float = 0.0
    told: Counter[str] = field(default_factory=Counter)
    grown: float | None = None
    memory: list[int] = field(default_factory=list)

    def line(self) -> str:
        rate = self.inputs / self.seconds if self.seconds else 0.0
        grown = "too short for memory" if self.grown is None else (
            f"memory {self.memory[-1] / 1e6:.1f} MB, {self.grown / 1e6:+.2f} MB by regression")
        told = ", ".join(f"{name} {count}" for name, count in sorted(self.told.items()))
        return f"{self.kind:8} {self.inputs:>10} inputs  {rate:>7.0f}/s  {grown}  ({told})"


def fuzz(kind: str, inputs: int, seed: int, seconds: float = 0.0) -> Outcome:
    """Raises Find. seconds: at most, 0: no limit."""
    out = Outcome(kind, seed)
    began = time.monotonic()
    step, due = max(inputs // SAMPLES, 1), 0

    def more() -> bool:
        """Go on? Looks at memory now and then."""
        nonlocal due
        out.seconds = time.monotonic() - began
        if out.inputs >= due:
            out.memory.append(_own())
            due = out.inputs + step
        return out.inputs < inputs and not (seconds and out.seconds >= seconds)

    {"records": _records, "requests": _requests}[kind](out, more)
    rest = np.array(out.memory[len(out.memory) // 5 :], float)
    if len(rest) >= SAMPLES // 10:
        out.grown = float(np.polyfit(np.arange(len(rest)), rest, 1)[0]) * len(rest)
        if out.grown > LEAK:
            raise Find(f"memory grows: {out.line()}", b"")
    return out


def _own() -> int:
    """Resident bytes that are this process's own."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10


# -- records --------------------------------------------------------------------------------------------------------


def _records(out: Outcome, more: Callable[[], bool]) -> None:
    job = example_job(ranks=2, count=[700, 300], optimizer="adamw", options={"lr": 0.01}, seed=4)
    plan = plan_job(job)
    streams = Streams(messages(job), out.seed)
    most = Limits(TEXT, {"state": 1 << 20, "record": 1 << 20, "patch": 1 << 20, "user": USER_BYTES}, 60.0)
    while more():
        stream = streams.frames()
        out.inputs += max(stream.count(b"FCR1"), 1)
        link = Link(Wire(stream))  # type: ignore[arg-type]
        link.limits = lambda: most
        try:
            while True:
                message, size = link.receive(wait=60.0)
                if type(message) not in MESSAGES.values():
                    raise Find(f"{message!r} is not a message", stream)
                out.told[type(message).__name__] += 1
                if isinstance(message, User):
                    seal_of(bytes(link.payload(size)), "fuzz")
                elif size:
                    unpack(link.payload(size), payload_specs(plan, message), "fuzz")
                elif isinstance(message, Manifest):
                    job_from_dict(dict(message.job), where="fuzz")
                elif isinstance(message, Patch):
                    payload_specs(plan, message)
        except RecordsError as error:
            out.told["closed" if error.what == "connection closed" else "refused"] += 1
        except FlowcheckError:
            out.told["refused by content"] += 1
        except Find:
            raise
        except Exception as error:
            raise Find(f"{type(error).__name__}: {error}", stream) from error


# -- requests -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _application() -> Iterator[Any]:
    """The API over a version in memory and one on disk."""
    state = {"exp_avg": torch.tensor([0.1, 0.2, 0.3]), "exp_avg_sq": torch.tensor([0.4, 0.5, 0.6]), "step": 2.0}
    spec = OptimizerSpec.check("adam", [(["w"], {"lr": 0.5})])
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch, contextlib.ExitStack() as undo:
        folder = Path(scratch)
        replica = Replica({"w": torch.tensor([1.0, 2.0, 3.0])}, spec, path=folder / "flowcheck-n--1.replica",
                          run_id="run", step=7, optimizer_state={"w": state}, slots=3)
        undo.enter_context(contextlib.closing(replica))
        meta = Meta("run", 0, "unverified", (), replica.current.optimizer, "torch-cpu")
        write_step(folder / "run" / "epoch-0", 6, {"w": torch.tensor([1.5])}, {"w": {}}, meta)
        board = undo.enter_context(contextlib.closing(Board()))
        glance = undo.enter_context(contextlib.closing(Glance(board.fd)))
        shelves = {"memory": MemoryShelf(folder, "n"), "disk": DiskShelf(folder)}
        ids = [one.offer.id for shelf in shelves.values() for one in shelf.look()]
        yield make_app(shelves, KEY, glance), ids


def _requests(out: Outcome, more: Callable[[], bool]) -> None:
    with _application() as (app, ids), asyncio.Runner() as runner:
        runner.run(_serve(app, Streams([], out.seed, ids), out, more))


class Anybody:
    """A connection that came through no door."""

    abort: Any = None
    busy: Any = None

    def offer(self, scope: Any) -> None: ...

    def answered(self) -> None: ...

    def gone(self) -> None: ...


async def _serve(app: Any, streams: Streams, out: Outcome, more: Callable[[], bool]) -> None:
    draw = random.Random(out.seed)
    loop, failed = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: failed.append(context))
    server = server_of(app)
    config = server.config
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.lifespan.startup()

    kind: Any = config.http_protocol_class

    def connection() -> Any:
        made = kind(config=config, server_state=server.server_state, app_state=server.lifespan.state, _loop=loop)
        made.visitor = Anybody()
        return made

    async def client() -> None:
        while more():
            shown = draw.random() < 0.7
            stream = streams.request(KEY if shown else "") + SOUND
            out.inputs += 1
            ours, theirs = socket.socketpair()
            with ours:
                ours.setblocking(False)
                theirs.setblocking(False)
                await loop.connect_accepted_socket(connection, theirs)
                try:
                    said = await asyncio.wait_for(_exchange(loop, ours, stream), HANG)
                except TimeoutError:
                    raise Find(f"the connection is open after {HANG:g} s", stream) from None
            statuses = [int(one) for one in re.findall(rb"HTTP/1\.1 (\d{3}) ", said)]
            out.told.update(map(str, statuses) if statuses else ["no answer"])
            if any(one >= 500 and one != 503 for one in statuses):
                raise Find(f"answered with {statuses}", stream)
            served = sum(200 <= one < 300 for one in statuses)
            if not shown and served > said.count(b'{"ok":true,') + stream.count(b"HEAD"):
                raise Find(f"served without a key: {said[:400]!r}", stream)
            if failed:
                raise Find(f"in the event loop: {failed[0]}", stream)

    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(AT_ONCE):
                clients.create_task(client())
    finally:
        await server.lifespan.shutdown()


async def _exchange(loop: asyncio.AbstractEventLoop, ours: socket.socket, stream: bytes) -> bytes:
    """What is answered until the other side closes. It is told that nothing more comes once it has been silent."""
    said, ended = b"", False
    try:
        await loop.sock_sendall(ours, stream)
        while True:
            try:
                piece = await asyncio.wait_for(loop.sock_recv(ours, 65536), PATIENCE)
            except TimeoutError:
                if not ended:
                    ended = True
                    ours.shutdown(socket.SHUT_WR)
                continue
            if not piece:
                return said
            said += piece
    except ConnectionError:
        return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000_000, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", action="append", choices=list(SHARE))
    parser.add_argument("--minutes", type=float, default=0.0, help="per kind at most; 0: no limit")
    options = parser.parse_args()
    keep_little()
    torch.set_num_threads(1)
    kinds = options.kind or list(SHARE)
    whole = sum(SHARE[kind] for kind in kinds)
    found_any = False
    for kind in kinds:
        try:
            out = fuzz(kind, int(options.inputs * SHARE[kind] / whole), options.seed, 60 * options.minutes)
            print(out.line(), flush=True)
        except* Find as found:
            find: BaseException = found
            while isinstance(find, BaseExceptionGroup):
                find = find.exceptions[0]
            assert isinstance(find, Find)
            FINDS.mkdir(parents=True, exist_ok=True)
            (path := FINDS / f"{kind}-{options.seed}").write_bytes(find.stream)
            print(f"{kind}: FOUND {find}: {path}", flush=True)
            found_any = True
    return int(found_any)


if __name__ == "__main__":
    sys.exit(main())
