"""Four readers take versions over and over while training goes on: nothing is lost, every version is the trainers'.

What is read again and again stays pinned, so they may get one version all the time; each hash of it is checked."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from lab.jobs import Training
from lab.run import LabRun

from .conftest import lab_of

pytestmark = [pytest.mark.root, pytest.mark.slow]
READERS, EACH, MOST = 4, 5, 600  # versions that each reads at least, within so many iterations
READ = """
import sys, flowcheck
nodes, token = sys.argv[1:]
while True:
    found = flowcheck.recover(nodes, token=token, together=False, prefer_verified=0)
    print(found.step, round(found.seconds, 3), *found.passed, flush=True)
"""


def test_readers_cost_the_capture_nothing(tmp_path: Path) -> None:
    settings = {"replica": {"slots": 4}, "capture": {"ring_size": 1 << 16}}
    said = [tmp_path / f"reader{number}.txt" for number in range(READERS)]

    def lines() -> list[list[str]]:
        return [path.read_text().splitlines() for path in said]

    with (
        lab_of(ranks=2, mirrored=((0,),)) as fabric,
        LabRun(fabric, tmp_path, api=True, checksums=3, node_settings=settings) as run,
        contextlib.ExitStack() as files,
    ):
        job = Training(model="gpt", ranks=2, softroce={"protocol": "LL128", "mtu": 4096})
        run.start_nodes(job)
        first = run.attach(job)
        run.wait_for_nodes(first)
        command = [sys.executable, "-P", "-c", READ, "10.78.0.2:7071", run._token]
        readers = [
            fabric.spawn("r1", command, stdout=files.enter_context(path.open("w")), stderr=subprocess.STDOUT,
                         env={"OMP_NUM_THREADS": "1"}) for path in said
        ]
        while min(map(len, lines())) < EACH + 1 and len(run.iterations) < MOST:
            assert all(reader.poll() is None for reader in readers), lines()
            run.train(10)
        for reader in readers:
            reader.kill()
            reader.wait()
        last = len(run.iterations) - 1
        run.end()
        run.wait_for_nodes(last)
        assert set(run.finish_nodes()) == {0}
        summary = run.ledger.summary()
        assert summary.all_equal and summary.published >= last - first, summary
        slack = [one["slack"] for _, one in run.events if one["event"] == "times" and one["slack"] is not None]
    read = [one[:-1] for one in lines()]  # the last line may have been cut
    for one in read:
        assert len(one) >= EACH and all(first <= int(line.split()[0]) <= last + 1 for line in one), one
    seconds = [float(line.split()[1]) for one in read for line in one]
    print(f"{summary.equal} versions equal; {len(seconds)} read by {READERS}, {statistics.median(seconds):.2f} s each;"
          f" slack in ms: least {min(slack):.0f}, median {statistics.median(slack):.0f}")
