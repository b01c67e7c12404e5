"""The process that writes versions to a store: started, watched and ended by the node, and never waited for.

    storing = Storing(config, say)      in the node
    storing.look()                      again and again: says what it did, starts it anew if it has ended
    storing.close()                     a few seconds at most, whatever the store does
    check_store(config)                 for --check: may be waited for

It shares files with the node and nothing else, has the cores that no capture is pinned to, at a lower priority, and
gets its settings over stdin, because those may have a key in them. The process itself: persisting.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from flowcheck.checkpoint.objects import check_url
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.config import NodeConfig

__all__ = ["Storing", "check_store"]

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # seconds between two starts
END_SECONDS = 6.0
START_SECONDS = 60.0  # that a process takes to begin, on a machine with much else to do
MOST_LINE = 1 << 16


class Storing:
    """config: with a `store`. say: events. Belongs to the node's main thread. Raises UserError for its URL."""

    def __init__(self, config: NodeConfig, say: Callable[..., None]) -> None:
        assert config.store is not None
        check_url(config.store.url)
        self._say, self._settings = say, _settings(config, probe=False)
        self._pause, self._began, self._text = FIRST_PAUSE, time.monotonic(), b""
        self._process: subprocess.Popen[bytes] | None = _start(self._settings)
        self._left: list[subprocess.Popen[bytes]] = []  # killed, and not gone: the kernel waits for a file system

    def look(self) -> None:
        """Never waits."""
        self._left = [one for one in self._left if one.poll() is None]
        process = self._process
        if process is None:
            if time.monotonic() - self._began >= self._pause:
                self._process, self._pause = _start(self._settings), min(2 * self._pause, LONGEST_PAUSE)
            return
        self._read(process)
        if (status := process.poll()) is not None:
            self._read(process)
            _let_go(process)
            self._process, self._text = None, b""
            self._say("problem", why=f"the process that writes to the store ended with status {status}; it is started"
                      f" anew in {self._pause:g} s")
            self._began = time.monotonic()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        while True:
            try:
                piece = os.read(process.stdout.fileno(), MOST_LINE)
            except BlockingIOError:
                return
            if not piece:
                return
            *lines, self._text = (self._text + piece).split(b"\n")
            for line in lines:
                self._tell(line)

    def _tell(self, line: bytes) -> None:
        try:
            said = json.loads(line)
            event, name = said["event"], said["name"]
        except (ValueError, KeyError, TypeError):
            return  # of a library that prints
        match event:
            case "stored":
                self._pause = FIRST_PAUSE
                self._say("stored", name=name, step=said["step"], bytes=said["bytes"], seconds=said["seconds"],
                          path=said["path"])
            case "unstored":
                self._say("unstored", name=name, step=said["step"], why=said["why"], again=said["again"])
            case "expired":
                self._say("expired", name=name, versions=said["versions"], path=said["path"])
            case "skipped":
                self._say("skipped", name=name, step=said["step"], why=said["why"])
            case "problem":
                self._say("problem", name=name, why=said["why"])

    def close(self) -> None:
        """An upload that is nearly done is waited for; one that hangs is not. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
        end = time.monotonic() + END_SECONDS
        while process.poll() is None and time.monotonic() < end:
            self._read(process)
            time.sleep(0.02)
        self._read(process)
        if process.poll() is None:
            process.kill()
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._left.append(process)  # in the kernel, for a file system that hangs: it ends when that answers
        _let_go(process)


def check_store(config: NodeConfig) -> None:
    """Write, read and remove an object, in a process that is ended if it hangs. Raises FlowcheckError."""
    assert config.store is not None
    check_url(config.store.url)
    seconds = config.store.seconds
    process = _start(_settings(config, probe=True), blocking=True)
    try:
        out, _ = process.communicate(timeout=seconds + START_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out = b""
    why = f"no answer within {seconds:g} s" if process.returncode != 0 else ""
    for line in out.splitlines():
        if line.startswith(b'{"event": "unstored"'):
            why = str(json.loads(line)["why"])
    if why:
        raise EnvironmentProblem(why, where="store.url", remedy="a place that this node may write to, read and remove"
                                 " from; credentials as its library takes them, or in store.options")


def _settings(config: NodeConfig, probe: bool) -> dict[str, Any]:
    assert config.store is not None
    pinned = {core for one in config.capture for core in (*one.cores, *one.place_cores)}
    return {
        "node": config.name, "replicas": str(config.replica.directory), "probe": probe,
        "cores": sorted(os.sched_getaffinity(0) - pinned), "store": config.store.model_dump(),
    }


def _start(settings: dict[str, Any], blocking: bool = False) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(  # a session of its own: Ctrl-C is for the node, which ends it
        [sys.executable, "-P", "-m", "flowcheck.node.persisting"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    os.set_blocking(process.stdout.fileno(), blocking)
    try:
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended, which `look` will see
    return process


def _let_go(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:
            pass
