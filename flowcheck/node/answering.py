"""The process that answers a node's HTTP API: python -P -m flowcheck.node.answering, started by serving.py.

stdin: one line of JSON, its settings; it ends when stdin does. No DPDK, nothing of the capture: files alone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path

import uvicorn

from flowcheck.control.ask import DISK, MEMORY
from flowcheck.node.api import make_app
from flowcheck.node.holdings import DiskShelf, MemoryShelf, Shelf

__all__ = ["main"]

CONNECTIONS = 256
NICE = 5


def main() -> int:
    """The process itself."""
    settings = json.loads(sys.stdin.buffer.readline() or b"{}")
    if not settings:
        return 0  # the node ended before it could say anything
    os.nice(NICE)
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"])
    shelves: dict[str, Shelf] = {
        MEMORY: MemoryShelf(Path(settings["replicas"]), settings["node"]),
        DISK: DiskShelf(Path(settings["checkpoints"])),
    }
    server = uvicorn.Server(uvicorn.Config(
        make_app(shelves, settings["key"]), log_level="error", access_log=False, limit_concurrency=CONNECTIONS,
        lifespan="on", http="h11", ws="none", loop="asyncio", timeout_keep_alive=5, timeout_graceful_shutdown=1,
        server_header=False, date_header=False,
    ))
    threading.Thread(target=_end_with_stdin, args=(server,), daemon=True).start()
    server.run(sockets=[socket.socket(fileno=settings["socket"])])
    return 0


def _end_with_stdin(server: uvicorn.Server) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    server.should_exit = True


if __name__ == "__main__":
    sys.exit(main())
