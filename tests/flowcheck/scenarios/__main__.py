"""The table of what comes of the scenarios, in a lab of its own. Needs root.

    python -P -m tests.flowcheck.scenarios [NAME ...] [--attach '{"checksum_every": 0}'] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from lab.network.fabric import Fabric
from lab.shape import FabricConfig

from . import scripts  # fills the table
from .stage import Stage
from .table import SCENARIOS

__all__ = ["scripts"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of scenarios; none: all")
    parser.add_argument("--attach", type=json.loads, default={}, help="more arguments of attach, JSON")
    parser.add_argument("--out", type=Path, help="where logs and hashes go; they stay")
    options = parser.parse_args()
    logging.getLogger("flowcheck").setLevel(logging.CRITICAL)  # what `recover` finds is in the table
    chosen = [one for name, one in SCENARIOS.items() if not options.names or name in options.names]
    out = options.out or Path(tempfile.mkdtemp(prefix="scenarios-"))
    began, bad = time.monotonic(), 0
    config = FabricConfig(name=f"s{os.getpid():x}", ranks=2, mirrored=((0, 1),))
    with Fabric(config) as fabric, Stage(fabric, out) as stage:
        print(f"ready after {time.monotonic() - began:.1f} s; logs in {out}", flush=True)
        for scenario in chosen:
            played = stage.play(scenario, **options.attach)
            bad += not played.good
            mark = "     " if played.good else "WRONG"
            print(f"{mark} {scenario.expected.name.lower():6} {played}  [{played.seconds:.1f} s]", flush=True)
            kept = {"events": played.events, "offers": [asdict(one) for one in played.offers]}
            (out / f"{scenario.name}.json").write_text(json.dumps(kept))
    print(f"{len(chosen) - bad} of {len(chosen)} as they should be, {time.monotonic() - began:.0f} s")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
