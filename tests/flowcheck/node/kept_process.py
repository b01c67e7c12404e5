"""A group that keeps a journal, in a process of its own (kept_scene.py): python -m tests.flowcheck.node.kept_process

    FOLDER killed          12 iterations, then SIGKILL. FOLDER/truth.json has the hashes of every version
    FOLDER hung HOLD       10 iterations, 6 of them while the file HOLD lets no call to the disk return, then 10
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from .kept_scene import kept


def main(folder: Path, what: str, hold: Path | None = None) -> None:
    with pytest.MonkeyPatch.context() as patch, kept(patch, folder, keep=8) as at:
        if hold is None:
            at.run(12)
            at.until(lambda: bool(at.events("base")))
        else:
            at.run(10)
            hold.touch()
            began = time.monotonic()
            for _ in range(6):
                at.iteration()
            seconds = time.monotonic() - began
            hold.unlink()
            at.until(lambda: len(at.events("journaled")) + len(at.events("hole")) == len(at.closed))
            at.run(10)
            print(json.dumps({"published": [one.published for one in at.closed], "seconds": seconds,
                              "holes": [(one["iteration"], one["cause"]) for one in at.events("hole")]}))
        (folder / "truth.json").write_text(json.dumps(at.truth))
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:]))

