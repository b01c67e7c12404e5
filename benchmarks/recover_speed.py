"""From a version in a node's memory to a model that can go on, beside torch.load, DCP and a bare socket.

    .venv/bin/python -P benchmarks/recover_speed.py [--gigabytes 1] [--rounds 11] [--folder /dev/shm]

A replica of 200 tensors with Adam's state lies in /dev/shm, and the process that answers api.listen serves it on the
loopback. In each round, in turns, the same state comes back by
    recover      flowcheck.recover into the model's tensors, hashes checked, and load_state_dict of model and optimizer
    unhashed     the same, and nothing is hashed on the receiving side
    transfer     the state's bytes alone, as recover receives them, into memory that is there; nothing is hashed
    torch.load   torch.load of one file, and load_state_dict
    dcp          torch.distributed.checkpoint.load of a directory, and load_state_dict
    socket       the same bytes through a TCP connection from another process that has them in memory, recv_into
    sha256       SHA-256 of the same bytes, once
The files of torch.load and DCP lie in --folder and were just written: they come from memory, not from a disk. The node
hashes a version once, when it is first asked for it; that is before the first round, and printed. Target: `transfer` at
least 0.8 of `socket`'s speed. What recover takes beyond that: hashes, memory that is new, and loading.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from flowcheck.ask import client, receiving
from flowcheck.control.tensors import memory
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.node import NodeConfig
from flowcheck.trainer.recover.recovery import recover
from lab.bench.rows import alternate, quantile
from updater.choosing import processor
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

TENSORS = 200
TOKEN = "0123456789abcdef"
PIECE = 1 << 20


class Model(torch.nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(elements)) for _ in range(TENSORS))


def send(listening: socket.socket, tensors: list[torch.Tensor]) -> None:
    """Every connection gets all of them."""
    while True:
        connection, _ = listening.accept()
        with connection:
            for tensor in tensors:
                connection.sendall(memory(tensor))


def receive(address: tuple[str, int], tensors: list[torch.Tensor]) -> None:
    with socket.create_connection(address) as connection:
        for tensor in tensors:
            view = memory(tensor)
            while view:
                view = view[connection.recv_into(view, min(len(view), PIECE)):]


@contextlib.contextmanager
def unhashed():  # type: ignore[no-untyped-def]
    """Bytes of tensors are taken as they come, and called what they should be."""

    class Whatever(str):
        def __ne__(self, other: object) -> bool:
            return False

    kept = receiving._sha256
    receiving._sha256 = lambda tensor: Whatever()
    try:
        yield
    finally:
        receiving._sha256 = kept


def main() -> None:
    parser = argparse.ArgumentParser(description="From a version to a model that can go on.")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    elements = int(options.gigabytes * 1e9 / 12 / TENSORS)
    model = Model(elements)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    names = [name for name, _ in model.named_parameters()]
    state = {name: {**optimizer.state[parameter], "step": 1.0} for name, parameter in model.named_parameters()}
    everything = [tensor for name in names for tensor in (
        model.get_parameter(name).data, state[name]["exp_avg"], state[name]["exp_avg_sq"])]
    total = sum(tensor.nbytes for tensor in everything)
    folder = Path(tempfile.mkdtemp(prefix="flowcheck-recover-", dir=options.folder))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        spec = OptimizerSpec.check("adam", [(names, {"lr": 1e-3})])
        stack.enter_context(contextlib.closing(Replica(
            dict(model.state_dict()), spec, path=folder / "flowcheck-n--1.replica", run_id="run", step=7,
            optimizer_state=state, slots=2,
        )))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "all.pt")
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder / "dcp",
                 no_dist=True)
        config = NodeConfig.model_validate({
            "name": "n", "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "capture": {"device": "x"},
            "api": {"listen": "127.0.0.1:0"}, "replica": {"directory": str(folder)},
            "output": {"directory": str(folder / "out")},
        })
        serving = stack.enter_context(contextlib.closing(Serving(config, TOKEN.encode(), print)))
        host, _, port = serving.address.rpartition(":")
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        process = multiprocessing.get_context("fork").Process(target=send, args=(listening, everything), daemon=True)
        process.start()
        stack.callback(process.kill)
        target, other = Model(elements), torch.optim.Adam
        buffers = [torch.empty_like(tensor) for tensor in everything]

        def load(found: dict[str, Any]) -> None:
            target.load_state_dict(found["model"])
            fresh = other(target.parameters(), lr=1e-3)
            fresh.load_state_dict(found["optimizer"])

        def timed(work: Callable[[], None]) -> Callable[[], float]:
            def run() -> float:
                begin = time.perf_counter()
                work()
                return time.perf_counter() - begin
            return run

        def by_recover() -> None:
            into = {name: tensor.data for name, tensor in target.named_parameters()}
            found = recover(serving.address, token=TOKEN, into=into, together=False)
            load({"model": found.model, "optimizer": found.optimizer})

        def by_recover_unhashed() -> None:
            with unhashed():
                by_recover()

        def by_transfer() -> None:
            with unhashed():
                for file, into in given.items():
                    node.tensors(offer, version, file, into)

        def by_dcp() -> None:
            found = {"model": target.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.load(found, checkpoint_id=folder / "dcp", no_dist=True)
            load(found)

        def by_sha256() -> None:
            digest = hashlib.sha256()
            for tensor in everything:
                digest.update(memory(tensor))

        begin = time.perf_counter()
        by_recover()
        print(f"{processor()}; {total / 1e9:.2f} GB in {3 * TENSORS} tensors; the first time, while the node hashes:"
              f" {time.perf_counter() - begin:.2f} s")
        for name, tensor in target.named_parameters():
            assert torch.equal(tensor, model.get_parameter(name))
        node = client.NodeClient((host, int(port)), client.reader_key(TOKEN.encode()))
        offer = node.offers()[0]
        version = node.version(offer)
        given = {
            file: {name: torch.zeros(digest.spec.shape) for name, digest in tensors.items()}
            for file, tensors in version.files.items()
        }
        taken = alternate({
            "recover": timed(by_recover), "unhashed": timed(by_recover_unhashed), "transfer": timed(by_transfer),
            "torch.load": timed(lambda: load(torch.load(folder / "all.pt", weights_only=True))),
            "dcp": timed(by_dcp), "socket": timed(lambda: receive(listening.getsockname(), buffers)),
            "sha256": timed(by_sha256),
        }, options.rounds)
    for name, seconds in taken.items():
        ratios = sorted(s / limit for s, limit in zip(seconds, taken["socket"], strict=True))
        middle = statistics.median(seconds)
        low, high = (1 / quantile(ratios, q) for q in (0.9, 0.1))
        print(f"{name:<11} {middle:6.2f} s   {total / 1e9 / middle:5.2f} GB/s   speed"
              f" {1 / statistics.median(ratios):.2f} of socket's [{low:.2f}..{high:.2f}]")


if __name__ == "__main__":
    main()
