"""Attachments of a real DDP job (gloo): what goes up, and nodes that are gone, slow, or speak nonsense."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import flowcheck
from flowcheck.checkpoint.directory import tensor_sha256
from flowcheck.control.protocol import (
    Flows,
    Joined,
    Limits,
    Link,
    Manifest,
    Record,
    RecordsError,
    State,
    Wanted,
    accept,
)
from lab.synth import example_job
from updater.reader import Reader

from .conftest import LONGEST

WORKER = Path(__file__).with_name("ddp_worker.py")
TOKEN = "a token that only tests have"


class Ranks:
    """Two processes of ddp_worker.py."""

    def __init__(self, folder: Path, node: str, steps: int, wait: float, odd: Sequence[str] = ()) -> None:
        job = folder / "gloo.json"
        job.write_text(example_job(ranks=2, count=1000, seed=8).to_json())
        self._outputs = [(folder / f"rank{rank}.out").open("w+") for rank in range(2)]  # a pipe would fill up
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(rank), "2", str(folder / "store"), node, TOKEN, str(job),
                 str(steps), str(wait), *odd],
                stdout=self._outputs[rank], stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]

    def finish(self) -> list[list[dict[str, Any]]]:
        """Lines of both ranks; the exit of each must be 0."""
        out = []
        for process, output in zip(self.processes, self._outputs, strict=True):
            _, error = process.communicate(timeout=LONGEST)
            assert process.returncode == 0, error[-3000:]
            output.seek(0)
            out.append([json.loads(line) for line in output])
        return out

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
        for output in self._outputs:
            output.close()


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Any]:
    made: list[Ranks] = []

    def start(node: str, steps: int, *, wait: float = 120.0, odd: Sequence[str] = ()) -> Ranks:
        made.append(Ranks(tmp_path, node, steps, wait, odd))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.root
@pytest.mark.parametrize("odd", [(), ("0=bf16",)], ids=["float32", "bfloat16"])
def test_manifest_and_state_of_live_objects(start_node, train, tmp_path: Path, odd: Sequence[str]) -> None:
    """Tied, frozen, buffers, two groups, a schedule, rebuilt buckets: accepted by the node, and the state that it
    holds is the model's and the optimizer's of that very iteration, bit for bit."""
    node = start_node(replica="keep = true")
    ranks = train(f"127.0.0.1:{node.address[1]}", 6, odd=odd)
    attached = node.wait("attached")
    assert attached["run_id"] == "gloo" and attached["flows"] == 2
    assert node.wait("state")["iteration"] == 3
    first, second = ranks.finish()
    assert [line.get("state") for line in first] == ["watching", "watching", *["attached"] * 4, None]
    assert [line.get("state") for line in second][3:] == [*["attached"] * 3, None]  # it has no state to send
    assert first[-1]["closed"] == second[-1]["closed"] == "closed"
    node.wait("end", serves=2)  # no iteration came over any wire
    assert node.end() == 0
    (path,) = tmp_path.glob("*.replica")
    with Reader(path).pinned() as version:
        held = {name: tensor_sha256(tensor) for name, tensor in version.parameters.items()}
        for name, states in version.optimizer_state.items():
            held |= {f"{name}.{key}": tensor_sha256(value) for key, value in states.items() if key != "step"}
    assert held == first[2]["hashes"] != first[3]["hashes"]
    assert held["head.weight"] == held["embed.weight"] and "norm.num_batches_tracked" in held
    assert any(name.endswith(".exp_avg") for name in held)


@pytest.fixture
def port() -> Iterator[Callable[[Callable[[socket.socket, Link], Any]], str]]:
    """port(serve) -> address of a node that is whatever `serve` makes of each connection."""
    ended = threading.Event()
    opened: list[Any] = []
    threads: list[threading.Thread] = []

    def open_(serve: Callable[[socket.socket, Link], Any]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        opened.append(listener)

        def listen() -> None:
            while not ended.is_set():
                try:
                    sock = listener.accept()[0]
                except OSError:
                    return
                link = Link(sock)
                opened.append(link)
                thread = threading.Thread(target=one, args=(sock, link))
                threads.append(thread)
                thread.start()

        def one(sock: socket.socket, link: Link) -> None:
            try:
                serve(sock, link)
                ended.wait()
            except (OSError, RecordsError):
                link.close()

        threads.append(threading.Thread(target=listen))
        threads[-1].start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield open_
    ended.set()
    for one in opened:
        if isinstance(one, socket.socket):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
    for thread in threads:
        thread.join()


def _hangs(sock: socket.socket, link: Link) -> None:
    accept(link, TOKEN.encode())


def _stops_reading(sock: socket.socket, link: Link) -> None:
    """It asks for a state and does not take it."""
    accept(link, TOKEN.encode())
    link.send(Wanted(["state"], "give me all you have"))


NODES: dict[str, tuple[Callable[[socket.socket, Link], Any], str]] = {
    "is silent": (lambda sock, link: None, "not connected yet"),
    "speaks HTTP": (lambda sock, link: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "not speak this protocol"),
    "sends a huge length": (lambda sock, link: sock.sendall(b"FCR1" + b"\xff" * 12), "at most"),
    "has another token": (lambda sock, link: accept(link, b"quite another token"), "connection closed"),
    "hangs": (_hangs, "the node has not joined yet"),
    "stops reading": (_stops_reading, "give me all you have"),
}


def test_no_node_blocks_or_fails_training(train, port) -> None:
    """`wait`, two seconds here, is what any of them can cost, once; what is wrong is said."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        wrong = {f"127.0.0.1:{closed.getsockname()[1]}": ("is gone", "no connection")}
    wrong |= {port(serve): (kind, why) for kind, (serve, why) in NODES.items()}
    for lines in train(",".join(wrong), 6, wait=2.0).finish():
        for address, (kind, why) in wrong.items():
            mine = [line for line in lines if line["node"] == address]
            assert mine.pop()["closed"] == "closed"
            took = sorted(line["took"] for line in mine)
            assert len(took) == 6 and took[-2] < 2.0, (kind, took)  # one boundary may wait, and no other
            assert "attached" not in {line["state"] for line in mine}, kind
            assert kind != "is gone" or mine[-1]["state"] == "lost"
            assert any(why in line["why"] for line in mine), (kind, [line["why"] for line in mine])


def wait_for(true: Callable[[], Any]) -> None:
    end = time.monotonic() + LONGEST
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def _keeps(records: dict[int, list[Record]]) -> Callable[[socket.socket, Link], None]:
    """A node that takes everything and keeps records by rank."""

    def serve(sock: socket.socket, link: Link) -> None:
        hello = accept(link, TOKEN.encode())
        link.limits = lambda: Limits(1 << 24, {"state": 1 << 24, "record": 1 << 24})
        link.send(Wanted(["manifest", "flows"], "nothing is known of the job yet"))
        while True:
            message, size = link.receive()
            if size:
                link.payload(size)
            if isinstance(message, Manifest):
                link.send(Wanted(["state"], "a state to begin with"))
            elif isinstance(message, State | Flows) and (hello.rank or isinstance(message, State)):
                link.send(Joined(getattr(message, "iteration", 0)))
            elif isinstance(message, Record):
                records[hello.rank].append(message)

    return serve


def test_an_iteration_with_an_unused_parameter_has_no_record(train, port) -> None:
    """A parameter that the optimizer leaves alone has zeros in its bucket. A step that was skipped has a record,
    whatever its norm."""
    records: dict[int, list[Record]] = {0: [], 1: []}
    for rank, lines in enumerate(train(port(_keeps(records)), 7, odd=["4=skipped", "5=unused"]).finish()):
        assert [line["state"] for line in lines[3:-1]] == ["attached", "attached", "refused", "refused"]
        assert "middle.bias has no grad" in lines[5]["why"]
        wait_for(lambda rank=rank: records[rank])
        kept = [(record.iteration, record.skipped, record.clip) for record in records[rank]]
        assert kept in ([(3, False, None)], [(3, False, None), (4, True, 1.0)])  # the last may be on its way


def test_one_more_reduction_of_a_buckets_size(train, port) -> None:
    """On the wire it is the next gradient. Its iteration has no record, and the next one joins anew: on every rank."""
    records: dict[int, list[Record]] = {0: [], 1: []}
    for rank, lines in enumerate(train(port(_keeps(records)), 9, odd=["4=extra"]).finish()):
        assert [line["state"] for line in lines[3:-1]] == ["attached", "watching", *["attached"] * 4], lines
        assert "calls on DDP's communicator" in lines[4]["why"] and lines[-2]["why"] == ""
        wait_for(lambda rank=rank: len(records[rank]) >= 3)
        assert [record.iteration for record in records[rank]][:3] == [3, 6, 7]


def test_what_records_say_and_when_there_is_none(train, port) -> None:
    """Checksums are of every entry, frozen tensors and buffers too, and of the optimizer's state. A step whose clipping
    is no number has no record, and the next one has. A boundary in which nothing was reduced and nothing stepped is
    joined past."""
    records: dict[int, list[Record]] = {0: [], 1: []}
    first, second = train(port(_keeps(records)), 9, odd=["4=nan", "7=twice"]).finish()
    for lines, rank in ((first, 0), (second, 1)):
        wait_for(lambda rank=rank: len(records[rank]) >= 3)
        assert [record.iteration for record in records[rank]] in ([3, 5, 6], [3, 5, 6, 7])  # the last may be on its way
        assert "clip is nan" in lines[4]["why"] and lines[4]["state"] == "attached"
        assert lines[7]["state"] == "watching" and "iteration 8 made 0 calls" in lines[7]["why"]
        states = {name for name in lines[3]["hashes"] if ".exp_avg" in name}
        names = lines[3]["hashes"].keys() - states
        states |= {f"{name.rpartition('.')[0]}.step" for name in states}
        assert records[rank][1].checksums.keys() == names | {f"optimizer.{name}" for name in states}
        assert {"frozen", "norm.running_mean"} < names and all(record.sample for record in records[rank])


def test_a_parameter_that_somebody_else_may_step_is_named(tmp_path: Path) -> None:
    """DDP reduces its gradient; an optimizer that is not told of here would change it unseen."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer = torch.nn.Linear(2, 2)
        for bias, why in ((True, "has no bias"), (False, "the gloo backend does not tell")):
            layer.bias.requires_grad_(bias)
            model = torch.nn.parallel.DistributedDataParallel(layer)
            attachment = flowcheck.attach(model, torch.optim.SGD([layer.weight]), node="127.0.0.1:9", token=TOKEN)
            assert attachment.state == "refused" and why in attachment.why
    finally:
        torch.distributed.destroy_process_group()
