"""A rank of the scenarios: loads torch once, and is forked for each start of a script.

    python -P -m tests.flowcheck.scenarios.rank RANK RANKS DIR          in the rank's namespace

    stdin     one JSON object per line: {"script": NAME, "start": 0, "run_id": ..., "settings": {...}, ...}
    stdout    {"event": "ready"}, then for each {"event": "over", "status": of the process}
    DIR/RUN/rankR.jsonl    a line for each boundary (run.py)
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .run import Run
from .table import SCENARIOS

LONGEST = 100  # seconds that a script may take


def play(rank: int, ranks: int, out: Path, order: dict[str, Any]) -> None:
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    folder = out / order["run_id"]
    meet = folder / f"store{order['start']}"
    dist.init_process_group("softroce", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    with (folder / f"rank{rank}.jsonl").open("a") as lines:
        run = Run(rank, order["start"], order["iterations"], order["at"], order["settings"], folder, lines)
        try:
            SCENARIOS[order["script"]].script(run)
        finally:
            for attachment in run.attachments:
                attachment.close()


def main() -> None:
    rank, ranks, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    for name in ("torch._dynamo", "lab.softroce", "tests.flowcheck.scenarios.scripts"):
        importlib.import_module(name)
    print(json.dumps({"event": "ready"}), flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                play(rank, ranks, out, json.loads(line))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)  # torch's threads may abort a process that ends in order
        print(json.dumps({"event": "over", "status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}), flush=True)


if __name__ == "__main__":
    main()
