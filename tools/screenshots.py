"""`make screenshots`: the status page of a node in a headless browser, on a desk in light and on a phone in dark.

    python tools/screenshots.py [OUT]        OUT: a folder, docs/use if it is left out

The page is the real one, served by the process that serves a node's. What it shows is made up: a job of four ranks that
lost gradients, had a late version, was restarted once, and has a port that brings nothing. Its versions are there, and
small.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from browser import Browser, find

from flowcheck import __version__
from flowcheck.ask.client import reader_key
from flowcheck.checkpoint.directory import Meta, write_step
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.status.board import Board
from flowcheck.node.status.board_writer import LOST
from flowcheck.node.status.counters import Tally
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

__all__ = ["FIRST", "LAST", "example", "main", "served"]

FIRST, LAST = 4102, 4141
LATE, HOLES, RETRANSMITTED, FROM_PEER = 4127, (4113, 4131), 4125, 4120
NODE, GROUP, RUN, EPOCH = "leaf-3", "dp0", "gpt-13b-0412", 2
TOKEN = b"a token for pictures alone"
SIZES = (("desk", 1200, 900, False), ("phone", 390, 844, True))


def example(now: float) -> dict[str, Any]:
    """A document as a node puts it on its board. now: seconds since 1970."""
    clock = [now - 7000.0]
    tally = Tally(NODE, lambda: clock[0])
    draw = random.Random(7)

    def happens(event: str, at: float, **fields: Any) -> None:
        clock[0] = at
        tally.hear(event, {"name": GROUP} | fields)

    tally.hear("listening", {"control": "10.0.0.2:7070", "groups": 1, "api": "10.0.0.2:7071"})
    happens("attached", now - 6990, run_id=RUN, epoch=EPOCH, ranks=4, flows=8, resync="ranges")
    happens("job_recovered", now - 6980, iteration=3520, detected=now - 7045, restored=now - 6990, resumed=now - 6980,
            seconds=65.0, repeated=1)
    for number in range(FIRST, LAST + 1):
        at = now - 0.3 * (LAST - number) - 0.2
        lost, more = number in HOLES, {}
        if number == FROM_PEER:
            more = {"peer": 152}
        elif number == RETRANSMITTED:
            more = {"retransmission": 3}
        elif number - 1 in HOLES:
            more = {"trainer": 153}
        receive = 140.0 + 20 * draw.random()
        update = receive + 12 + 60 * draw.random() if number != LATE else 330.0
        following = 295.0 + 10 * draw.random()
        if lost:
            happens("stale", at, iteration=number, elements=306, why="gradients were lost; its version is built without"
                    " them, and none is published until the trainers have sent their own state of these elements")
        happens("iteration", at, iteration=number, published=not lost, status="unverified" if lost else "verified",
                packets=4000, placed=3900, missing={"lost": 306} if lost else {}, healed=0, duplicates=100,
                filled={"stream": 180_000} | more, patched=306 if "trainer" in more else 0, stale=306 * lost, lag=0,
                matches=(number - FIRST) // 10,
                failed=["covered"] if lost else [], why=[["covered", "bucket 3 lacks 306 elements: lost"]] * lost)
        happens("times", at, iteration=number, first=at, last=receive, measured=None, covered=receive + 4,
                record=receive + 7, applied=None if lost else update, published=None if lost else update + 3,
                next=following,
                slack=None if lost else following - update - 3, rings=[310, 16384], arenas=[2, 4])
        if "trainer" in more:
            happens("patched", at, iteration=number, since=number - 1, elements=306, bytes=3672, source="trainer")
    clock[0] = now
    brought = (("0000:81:00.0", int(1e5 * (now % 1e4)), now), ("0000:c1:00.0", 912, now - 95))
    ports = [{"device": device, "received": received, "bytes": 4100 * received, "last": last,
              "claimed": received, "last_claimed": last, "streams": [received],
              "lost": dict.fromkeys(LOST, 0), "last_lost": 0.0} for device, received, last in brought]
    return tally.document() | {
        "version": __version__, "captures": ports, "unclaimed": {"unknown": 12}, "connected": {GROUP: 4}, "shadow": 3,
    }


@contextlib.contextmanager
def served(document: Callable[[], dict[str, Any]], folder: Path) -> Iterator[tuple[str, str, Serving]]:
    """Address, key and process of a node's HTTP API that says this document again and again. folder: of its versions.
    """
    config = NodeConfig.model_validate({
        "name": NODE,
        "control": {"listen": "127.0.0.1:0", "token_file": "none"}, "capture": {"device": "none"},
        "api": {"listen": "127.0.0.1:0"}, "replica": {"directory": folder}, "output": {"directory": folder},
    })
    ended = threading.Event()

    def put() -> None:
        while not ended.wait(0.1):
            board.write(json.dumps(document()).encode())

    with contextlib.closing(Board()) as board:
        with contextlib.closing(Serving(config, TOKEN, lambda *_, **__: None, board.fd)) as serving:
            thread = threading.Thread(target=put)
            thread.start()
            try:
                yield serving.address, reader_key(TOKEN), serving
            finally:
                ended.set()
                thread.join()


@contextlib.contextmanager
def versions(folder: Path) -> Iterator[None]:
    """The newest in memory, and two checkpoints on disk."""
    parameters = {"weight": torch.zeros(1 << 18)}
    state: dict[str, dict[str, torch.Tensor | float]]
    state = {"weight": {"exp_avg": parameters["weight"], "exp_avg_sq": parameters["weight"], "step": float(LAST)}}
    spec = OptimizerSpec.check("adam", [(["weight"], {"lr": 1e-4})])
    replica = Replica(parameters, spec, path=folder / f"flowcheck-{NODE}-{GROUP}-1.replica", run_id=RUN, epoch=EPOCH,
                      step=LAST + 1, optimizer_state=state, slots=3)
    with contextlib.closing(replica):
        replica.mark_verified()
        meta = Meta(RUN, EPOCH, "verified", (), replica.current.optimizer, "torch-cpu", GROUP, 3)
        for step in (3000, 4000):
            write_step(folder / GROUP / RUN / f"epoch-{EPOCH}", step, parameters, state, meta)
        yield


def main(out: Path) -> int:
    """The exit status."""
    if find() is None:
        print("screenshots: no Chromium here: install Debian's chromium", file=sys.stderr)
        return 3
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flowcheck-pictures-")))
        stack.enter_context(versions(folder))
        address, key, _ = stack.enter_context(served(lambda: example(time.time()), folder))
        browser = stack.enter_context(Browser())
        for name, width, height, dark in SIZES:
            page = browser.page(width, height, dark=dark)
            page.open(f"http://{address}/", "reader", key)
            page.wait(f"document.querySelector('[data-iteration=\"{LAST}\"]')")
            page.wait("versions.versions.length === 3 && before.captures && document.getElementById('fresh')"
                      ".textContent.startsWith('live')")
            path = out / f"status-{name}.webp"
            path.write_bytes(page.picture())
            page.close()
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/use")))
