"""What lab.synth made through `replay`, by files, and its report held against the truth."""

import hashlib
from pathlib import Path

import numpy as np
from rich.console import Console

from flowcheck.job.model import Job
from flowcheck.offline.replay import ReplayOptions, replay
from lab.synth import Synthesis


def replayed(job: Job, made: Synthesis, where: Path, *, together: bool = False, **options: object) -> tuple[dict, str]:
    """The report and why it failed, "": it did not. together: all ports in one capture; else one for each."""
    (where / "job.json").write_text(job.to_json())
    if together:
        paths = [where / "all.pcap"]
        made.write(paths[0])
    else:
        ports = {port: where / f"port{port}.pcap" for port in made.ports}
        made.write_ports(ports)
        paths = list(ports.values())
    report, failure = replay(
        ReplayOptions(paths, where / "job.json", where / "out", **options), Console(quiet=True)  # type: ignore[arg-type]
    )
    return report.to_dict(), failure


def mask_of(size: int, ranges: list[list[int]]) -> np.ndarray:
    """Bool of `size` elements: those of the ranges, [first, behind the last] each."""
    mask = np.zeros(size, bool)
    for start, end in ranges:
        mask[start:end] = True
    return mask


def check_buckets(made: Synthesis, report: dict) -> None:
    """Every bucket of the iterations reported is the truth's, whole."""
    for iteration in report["iterations"]:
        for bucket in iteration["buckets"]:
            truth = made.reduced[iteration["iteration"], bucket["index"]]
            assert bucket["sha256"] == hashlib.sha256(truth.tobytes()).hexdigest()
