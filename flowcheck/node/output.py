"""What people and programs see of a node: one line per event, hashes of every version, checkpoints on disk.

Lines go to standard output, as text or as JSON; a reader that has gone ends nothing. Hashes are written on the thread
that publishes (they are a harness for the lab), checkpoints by a thread of their own: while one is being written the
next ones that are due are skipped and said so. Files are appended or written aside; nothing is half.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowcheck.checkpoint import tensor_sha256
from flowcheck.durable import reporting, write_atomic
from flowcheck.errors import FlowcheckError
from flowcheck.replica import JobReplica

__all__ = ["Events", "Hashes", "Writer"]


class Events:
    """Lines for standard output. Any thread."""

    def __init__(self, as_json: bool, status_file: Path | None) -> None:
        self._json, self._file = as_json, status_file
        self._lock = threading.Lock()
        self._last: dict[str, dict[str, Any]] = {}

    def __call__(self, event: str, **fields: Any) -> None:
        line = {"event": event, "time": round(time.time(), 3), **fields}
        with self._lock:
            try:
                print(json.dumps(line) if self._json else _text(line), flush=True)
            except (BrokenPipeError, ValueError):
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # nobody reads; the node goes on
            self._last[f"{event} {fields.get('name', '')}".strip()] = line
            if self._file is not None:
                write_atomic(self._file, (json.dumps(self._last, indent=1) + "\n").encode())


def _text(line: dict[str, Any]) -> str:
    fields = {key: value for key, value in line.items() if key not in ("event", "time") and value not in ("", [], {})}
    if line["event"] != "iteration":
        said = ", ".join(str(value) if key == "text" else f"{key} {value}" for key, value in fields.items())
        return f"{line['event']}: {said}" if said else line["event"]
    missing = " ".join(f"{cause} {count}" for cause, count in line["missing"].items())
    dropped = " ".join(f"{cause} {count}" for cause, count in line["dropped"].items())
    name = f"{line['name']} " if line["name"] else ""
    failed = f", {'; '.join(f'{clause}: {reason}' for clause, reason in line['why'])}" if line["why"] else ""
    return (
        f"{name}iteration {line['iteration']}: {'published' if line['published'] else 'NOT published'}"
        f" {line['status']}, {line['packets']} packets, {line['placed']} placed, missing {missing or 0},"
        f" healed {line['healed']}, duplicates {line['duplicates']}"
        f"{f', the node itself dropped {dropped}' if dropped else ''}, lag {line['lag']}{failed}"
    )


class Hashes:
    """SHA-256 of all tensors of a version, one JSON line each."""

    def __init__(self, path: Path) -> None:
        with reporting(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def add(self, iteration: int, name: str, replica: JobReplica) -> None:
        with replica.pinned() as slot:
            tensors = {key: tensor_sha256(tensor) for key, tensor in slot.parameters.items()}
            state = {
                f"{key}.{what}": tensor_sha256(tensor)
                for key, states in slot.optimizer_state.items() for what, tensor in states.items() if what != "step"
            }
        line = {"iteration": iteration, "name": name, "tensors": tensors, "optimizer": state}
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class Writer:
    """One checkpoint at a time to disk, on its own thread. `close` waits for the one under way."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._thread: threading.Thread | None = None

    def write(self, name: str, replica: JobReplica, out: Path, status: str) -> None:
        """Begin to write the current version, unless an older one is still being written."""
        if self._thread is not None and self._thread.is_alive():
            self._say("skipped", name=name, step=replica.step, why="an older checkpoint is still being written")
            return
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(name, replica, out, status, ready), name="flowcheck writer"
        )
        self._thread.start()
        ready.wait()  # until the version is pinned

    def _work(self, name: str, replica: JobReplica, out: Path, status: str, ready: threading.Event) -> None:
        try:
            with replica.pinned() as version:
                ready.set()  # from here on the replica may go on: this version stays
                path = replica.write(out, replica.unproven, version, status)
                step = version.step
            self._say("written", name=name, step=step, path=str(path))
        except FlowcheckError as error:
            self._say("problem", name=name, why=error.message())
        finally:
            ready.set()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()
