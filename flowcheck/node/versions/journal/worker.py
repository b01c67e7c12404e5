"""The process that makes a step again: python -P -m flowcheck.node.versions.journal.worker, started by shelf.py.

stdin: one line of JSON, its settings. It ends when the step is there, when it cannot be made, or when stdin does.
Nothing of the node's capture or follower is in it, and it gives way to their threads.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from flowcheck.errors import FlowcheckError
from flowcheck.node.process.child import begun, guarded
from flowcheck.node.versions.journal.border import RemakeSettings, Said
from flowcheck.node.versions.journal.folders import Folder, Place
from flowcheck.node.versions.journal.remaking import remake

__all__ = ["main"]


def main() -> int:
    """The process itself."""
    said = begun(RemakeSettings)
    if said is None:
        return 0
    began = time.monotonic()
    threading.Thread(target=_watch, daemon=True).start()
    base = Place(said.line, said.base, said.path)
    try:
        path = remake(Folder(said.folder), base, said.step, said.threads, lambda steps: _say(Said(steps=steps)))
    except FlowcheckError as error:
        _say(Said(why=error.message()))
        return 0
    _say(Said(steps=said.step - said.base, path=path, seconds=time.monotonic() - began))
    return 0


def _say(one: Said) -> None:
    sys.stdout.buffer.write(one.encoded())
    sys.stdout.buffer.flush()


def _watch() -> None:
    """Whoever wanted it has ended."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(guarded(main))
