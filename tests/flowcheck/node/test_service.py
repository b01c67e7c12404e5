"""The node between jobs and in trouble: attacks on its port, lost iterations, withheld records, kill -9, two groups."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.counters import read_counters
from flowcheck.checkpoint.directory import tensor_sha256
from flowcheck.control.protocol import (
    Challenge,
    Flows,
    Hello,
    Joined,
    Notice,
    Progress,
    Record,
    RecordsError,
    Refused,
    State,
    Wanted,
)
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import Job
from lab.synth import example_job
from updater.reader import Reader

from .conftest import LONGEST

pytestmark = pytest.mark.root


def _job(seed: int = 3, **options: Any) -> Job:
    job = example_job(**{"ranks": 2, "count": [700, 300], "optimizer": "adamw", "options": {"lr": 0.01}, "seed": seed,
                         **options})
    job.step_values = ["lr"]
    return job


def _run(truth: Any, job: Job, steps: int) -> Any:
    run = truth(job)
    for t in range(steps):
        run.advance(run.traffic(t))
    return run


def _join(trainer: Any, run: Any) -> None:
    trainer.manifest()
    trainer.expect(Wanted, what=["state"])
    trainer.state(run.step, run.tensors(), run.state())
    trainer.expect(Joined, iteration=run.step)


def _iteration(run: Any, lan: Any, trainer: Any, **faults: Any) -> int:
    """Traffic, update and record of the next iteration; its number."""
    t: int = run.step
    made = run.traffic(t, **faults)
    lan.send([frame for _, frame in made.packets])
    run.advance(made)
    trainer.record(t, groups=[{}])
    return t


# -- the process -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_is_interrupted_is_taken_down(lan: Any, tmp_path: Path, number: signal.Signals) -> None:
    """With the capture open, the start waits for somebody to read the hashes, which nobody does."""
    os.mkfifo(tmp_path / "hashes")
    (tmp_path / "token").write_text("a token that only tests have")
    (tmp_path / "node.toml").write_text(
        f'''[control]\nlisten = "127.0.0.1:0"\ntoken_file = "{tmp_path}/token"\n[capture]\nhuge = false\n'''
        f'''device = "af_packet:{lan.near}"\n[replica]\ndirectory = "{tmp_path}"\n'''
        f'''[output]\nkeep_hashes = "{tmp_path}/hashes"\n'''
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "flowcheck.node", "--config", str(tmp_path / "node.toml")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    try:
        end = time.monotonic() + LONGEST
        while not (mine := [Path(one.path) for one in read_counters() if one.pid == process.pid]):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(number)
        said, _ = process.communicate(timeout=LONGEST)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and "Traceback" not in said, said
    assert not mine[0].exists()


# -- the control port ------------------------------------------------------------------------------------------


def _raw(node: Any, sent: bytes) -> None:
    """Send bytes that are no protocol; returns when the node has closed."""
    with socket.create_connection(node.address, timeout=LONGEST) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(sent)
        while sock.recv(4096):
            pass


def test_attacks_on_the_port_end_the_connection_and_nothing_else(start_node, attach, truth, lan) -> None:
    job = _job()
    node, run = start_node(extra="connections = 6"), _run(truth, job, 2)
    good = attach(node, job)
    _join(good, run)
    text = json.dumps({"type": "hello"}).encode()
    head = struct.Struct(">4sIQ").pack
    for sent in (
        b"GET / HTTP/1.1\r\nHost: node.example\r\n\r\n",
        head(b"FCR1", 0xFFFFFFFF, 0) + b"x" * 100,  # a huge text
        head(b"FCR1", len(text), 1 << 62) + text,  # a huge payload
        head(b"FCR1", len(text), 0) + text,  # fields missing
        head(b"FCR1", 4096, 0) + b"[" * 4096,  # nested too deeply
        head(b"FCR1", 7, 0) + b"\xff\xfe\xfd{}[]",
        head(b"FCR1", 15, 0) + b'{"type": ["x"]}',
    ):
        _raw(node, sent)
    with pytest.raises(RecordsError, match="token"):
        attach(node, job, 1, token=b"sixteen letters and more")
    for fields, what in (
        ({"rank": 0}, "rank 0 is attached already"),
        ({"run_id": "another", "rank": 1}, "is attached here"),
        ({"ranks": 5, "rank": 1}, "is attached here"),
        ({"rank": 7}, "rank 7 of 2"),
        ({"group": "../../etc"}, "name of a group"),
        ({"group": "second"}, "no more"),
    ):
        said = {"run_id": job.run_id, "epoch": 0, "ranks": 2} | fields
        group, rank = said.pop("group", ""), said.pop("rank", 1)
        with pytest.raises(RecordsError) as refused:
            other = attach(node, job, rank, patient=False, group=group, **said)
            other.expect(Wanted)
            raise AssertionError("it was let in")
        assert what in refused.value.what or "closed" in refused.value.what
        while what not in node.wait("connection")["why"]:
            pass  # of those before
    _iteration(run, lan, good)
    assert node.wait("iteration", iteration=2)["published"]  # and the good one was not disturbed


def test_slow_and_half_messages_have_a_deadline(start_node, attach, truth, lan) -> None:
    """Slow-loris: six connections that drip do not fill the node for ever."""
    job = _job()
    node = start_node(extra="connections = 6")
    end = time.monotonic() + LONGEST
    drips = [socket.create_connection(node.address, timeout=LONGEST) for _ in range(6)]
    try:
        ended = 0
        while ended < len(drips):
            assert time.monotonic() < end, "they still fill the node"
            ended = 0
            for sock in drips:
                try:
                    sock.send(b"F")
                except OSError:
                    ended += 1
            time.sleep(0.2)
    finally:
        for sock in drips:
            sock.close()
    run = _run(truth, job, 2)
    good = attach(node, job)
    _join(good, run)
    _iteration(run, lan, good)
    assert node.wait("iteration", iteration=2)["published"]


def test_messages_that_do_not_fit_the_job_are_refused(start_node, attach, truth, lan) -> None:
    job = _job()
    node, run = start_node(), _run(truth, job, 2)

    def refused(send: Any, rank: int = 1) -> str:
        """What the node says of the one who sends this."""
        trainer = attach(node, job, rank)
        trainer.expect(Wanted)
        before = len(node.lines)
        with pytest.raises(RecordsError):  # it is out, perhaps before all of it was sent
            send(trainer)
            while True:
                trainer.link.receive(wait=LONGEST)
        trainer.close()
        end = time.monotonic() + LONGEST
        while True:  # the one before may still be spoken of: its connection has ended
            for line in node.lines[before:]:
                if {"refused": line.get("rank") == rank, "connection": line.get("peer") == trainer.name}.get(
                    line["event"], False
                ):
                    return str(line["why"])
            assert time.monotonic() < end, node.lines[before:]
            time.sleep(0.01)

    assert "rank 0" in refused(lambda t: t.manifest())
    other = job_from_dict(job.to_dict() | {"run_id": "another"})
    assert "another" in refused(lambda t: (setattr(t, "job", other), t.manifest()), 0)
    tree = job_from_dict(job.to_dict() | {"optimizer": None})
    assert "no optimizer" in refused(lambda t: (setattr(t, "job", tree), t.manifest()), 0)
    assert "without tensors" in refused(lambda t: t.link.send(State(0)), 0)
    good = attach(node, job)
    _join(good, run)
    assert "Hello from a trainer" in refused(lambda t: t.link.send(Hello("", 0, 0, 2, "", "", "")))
    assert "Challenge from a trainer" in refused(lambda t: t.link.send(Challenge("00")))
    assert "payload" in refused(lambda t: t.send(Record(2), {"buffer.x": torch.zeros(1)}))
    good.record(2, groups=[{"lr": 0.5}])
    good.record(400)
    assert "iteration 400" in node.wait("waiting")["why"]  # so the record before it has been read
    assert "checksum" in refused(lambda t: t.record(3, checksums={"no such tensor": "0" * 16}))
    other_flows = attach(node, job, 1)
    other_flows.link.send(Flows([{"src": 0, "dst": 1, "channel": 0}] * 3))  # its manifest has its own: not looked at
    other_flows.record(2, groups=[{"lr": 0.25}])
    assert node.wait("job_refused")["why"]  # two ranks disagree, and who is right?
    assert good.expect(Refused).final


# -- what is lost, withheld, killed -----------------------------------------------------------------------------


def test_a_lost_iteration_is_not_built_upon_until_a_state_comes(start_node, attach, truth, lan, tmp_path) -> None:
    job = _job(count=[70_000], mtu=1024)
    node, run = start_node(), _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    _iteration(run, lan, trainer)
    assert node.wait("iteration", iteration=2)["published"]
    _iteration(run, lan, trainer, loss=0.2)  # 3: the mirror loses a fifth of it
    for _ in range(4):  # its gaps stay open for late packets while there are arenas
        _iteration(run, lan, trainer)
    line = node.wait("iteration", iteration=3)
    assert not line["published"] and "covered" in line["failed"] and sum(line["missing"].values()) > 0
    assert "iteration 3 is not published" in trainer.expect(Wanted).why
    assert node.said("lost")[-1]["serves"] == 2
    line = node.wait("iteration", iteration=5)
    assert not line["published"] and line["missing"] == {} and line["failed"] == ["previous"]
    (path,) = tmp_path.glob("*.replica")
    with Reader(path).pinned() as version:
        assert version.step == 3  # the last good one is still there
    trainer.state(run.step, run.tensors(), run.state())
    trainer.expect(Joined, iteration=run.step)
    t = _iteration(run, lan, trainer)
    assert node.wait("iteration", iteration=t)["published"]
    trainer.expect(Progress, iteration=t)
    (path,) = tmp_path.glob("*.replica")
    with Reader(path).pinned() as version:
        assert version.step == run.step
        for name, tensor in run.tensors().items():
            assert torch.equal(version.parameters[name], tensor)


def test_a_withheld_record_makes_the_node_wait_and_say_so(start_node, attach, truth, lan) -> None:
    job = _job()
    node, run = start_node(), _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    made = [run.traffic(t) for t in (2, 3)]
    for one in made:
        lan.send([frame for _, frame in one.packets])
        run.advance(one, lr=0.125)
    assert node.wait("waiting")["iteration"] == 2
    trainer.record(3, groups=[{"lr": 0.125}])
    time.sleep(1.0)
    assert not node.said("iteration")  # nothing was applied, and nothing was given up
    sums = run.sums()
    trainer.record(2, groups=[{"lr": 0.125}])
    assert node.wait("iteration", iteration=2)["published"] and node.wait("iteration", iteration=3)["published"]
    lan.send([frame for _, frame in run.traffic(4).packets])
    run.advance(run.traffic(4), lr=0.125)
    trainer.record(4, groups=[{"lr": 0.125}], checksums=sums)  # those of the version before: wrong
    line = node.wait("iteration", iteration=4)
    assert not line["published"] and line["failed"] == ["checksum"] and line["status"] == "diverged"
    assert "differs from the trainer's" in node.said("lost")[-1]["why"]
    with pytest.raises(StopIteration):
        next(node.folder.glob("*.replica"))  # what diverged is served no more


def test_a_record_is_waited_for_from_when_the_traffic_is_complete(start_node, attach, truth, lan) -> None:
    """An iteration may take longer than a record is waited for: gradients come while the backward pass goes on."""
    job = _job()
    node, run = start_node(record_seconds=3.0), _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    made = run.traffic(2)
    run.advance(made)
    frames = [frame for _, frame in made.packets]
    lan.send(frames[: len(frames) // 2])
    time.sleep(3.5)  # the first half is there, and nothing waits for a record yet
    assert not node.said("waiting")
    lan.send(frames[len(frames) // 2 :])
    assert node.wait("waiting")["iteration"] == 2
    trainer.record(2, groups=[{}])
    assert node.wait("iteration", iteration=2)["published"]
    lan.send([frame for _, frame in run.traffic(3).packets])  # and without one it is given up
    assert node.wait("iteration", iteration=3)["failed"] == ["step_record"]


def test_a_mirror_that_delivers_nothing_is_said_to_node_and_trainer_and_is_the_reason_later(
    start_node, attach, truth, lan
) -> None:
    job = _job()
    node, run = start_node(), _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    for t in range(2, 5):
        trainer.record(t, groups=[{}])
    line = node.wait("silent")
    assert f"no packet has come to af_packet:{lan.near} for 3 s, and iteration " in line["why"]
    assert trainer.expect(Notice).why == line["why"]
    for _ in range(2, 5):
        run.advance(run.traffic(run.step))
    _iteration(run, lan, trainer)  # it is back, and what it did not deliver is why there is no version
    assert node.wait("lost")["why"].startswith("iterations 2 to 4 passed while no packet came")
    assert "iterations 2 to 4 passed" in trainer.expect(Wanted, what=["state"]).why
    node.wait("mirror_back")
    assert trainer.expect(Notice).why == ""


def test_records_far_ahead_of_a_silent_mirror_end_no_connection(start_node, attach, truth, lan) -> None:
    job = _job()
    node, run = start_node(), _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    for t in range(2, 400):
        trainer.record(t, groups=[{}])
    line = node.wait("waiting")
    assert line["iteration"] == 2 and "ahead" in line["why"]
    for t in range(2, 5):  # the mirror is back, with what its buffers had kept
        made = run.traffic(t)
        lan.send([frame for _, frame in made.packets])
        run.advance(made)
        assert node.wait("iteration", iteration=t)["published"]
    run.step = 403  # then it is down for longer than records are kept
    _iteration(run, lan, trainer)
    lost = trainer.expect(Wanted, what=["state"])  # at once, or as soon as it is worth what it costs the trainer
    assert "iteration 5 is not published" in lost.why
    trainer.state(run.step, run.tensors(), run.state())
    trainer.expect(Joined, iteration=run.step)
    later = [_iteration(run, lan, trainer) for _ in range(5)]  # records come before all missed ones have been judged
    assert node.wait("iteration", iteration=later[0])["published"]
    assert not node.said("refused") and not node.said("connection")


def test_a_job_started_again_as_the_same_run_takes_over_nothing(start_node, attach, truth, lan, tmp_path) -> None:
    """Same run id, epoch, queue pairs: what the first start left (records, half an iteration) is not the second's."""
    job = _job()
    node, run = start_node(), _run(truth, job, 2)
    first, other = (attach(node, job, rank, instance="first") for rank in (0, 1))
    _join(first, run)
    half = run.traffic(2).packets
    lan.send([frame for _, frame in half[: len(half) // 2]])
    other.record(2, groups=[{"lr": 0.5}])
    other.record(3, groups=[{"lr": 0.5}])
    first.close()  # killed; its other rank is still connected
    second = attach(node, job, instance="second")
    assert second.expect(Wanted).what == ["manifest", "flows"]
    with pytest.raises(RecordsError, match=r"started again|connection"):
        other.expect(State)
    again = truth(job, seed=9)  # from other weights, with other gradients
    for t in range(2):
        again.advance(again.traffic(t))
    _join(second, again)
    for _ in range(2):
        t = _iteration(again, lan, second)
        assert node.wait("iteration", iteration=t)["published"]
    lines = [json.loads(text) for text in (tmp_path / "hashes.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [2, 3]
    assert lines[-1]["tensors"] == {key: tensor_sha256(tensor) for key, tensor in again.tensors().items()}


def test_versions_count_as_the_trainer_does(start_node, attach, truth, lan, tmp_path) -> None:
    """The manifest begins at the trainer's iteration 5: events, reasons and the steps of versions say so."""
    job = _job()
    node, run = start_node(), _run(truth, job, 2)
    trainer = attach(node, job)
    trainer.manifest(first=5)
    trainer.expect(Wanted, what=["state"])
    trainer.state(7, run.tensors(), run.state())
    trainer.expect(Joined, iteration=7)
    for t in (2, 3):
        made = run.traffic(t)
        lan.send([frame for _, frame in made.packets])
        run.advance(made)
        sums = dict.fromkeys(run.tensors(), "0" * 16) if t == 3 else {}
        trainer.record(5 + t, groups=[{}], checksums=sums)
        assert node.wait("iteration", iteration=5 + t)["published"] == (t == 2)
        if t == 2:
            (path,) = tmp_path.glob("*.replica")
            with Reader(path).pinned() as version:
                assert version.step == 8  # behind iteration 7, so eight have passed
    assert "of iteration 8 differs" in node.said("lost")[-1]["why"] and node.said("lost")[-1]["serves"] == -1


def test_killed_and_started_again(start_node, attach, truth, lan, tmp_path) -> None:
    """kill -9: the last version stays in shared memory; the next process says so, and what it needs. When that one is
    ended, what had been sent until then is judged, and what cannot be is said."""
    job = _job()
    node, run = start_node(), _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    t = _iteration(run, lan, trainer)
    assert node.wait("iteration", iteration=t)["published"]
    node.end(9)
    (path,) = tmp_path.glob("*.replica")
    again = start_node(replica="keep = false")
    (kept,) = again.said("kept")
    assert (kept["run_id"], kept["step"], kept["path"]) == (job.run_id, run.step, str(path))
    assert "state" in kept["needs"]
    with Reader(path).pinned() as version:
        assert {n: tensor_sha256(x) for n, x in version.parameters.items()} == {
            n: tensor_sha256(x) for n, x in run.tensors().items()
        }
    trainer = attach(again, job)
    assert trainer.expect(Wanted).what == ["manifest", "flows"]
    _join(trainer, run)
    (numbered,) = again.said("numbered")  # another start, which makes steps that are here again
    assert numbered["epoch"] == job.epoch + 1
    t = _iteration(run, lan, trainer)
    assert again.wait("iteration", iteration=t)["published"]
    again.process.send_signal(signal.SIGSTOP)  # it gets no time before it is told to end
    last = _iteration(run, lan, trainer)
    trainer.record(last + 1, groups=[{}])  # its packets were never mirrored
    again.process.send_signal(signal.SIGTERM)
    assert again.end(signal.SIGCONT) == 0 and list(tmp_path.glob("*.replica")) == [path]  # its successor is unverified
    judged = {line["iteration"]: line["published"] for line in again.said("iteration")}
    assert judged[last] and [(one["first"], one["last"]) for one in again.said("unjudged")] == [(last + 1, last + 1)]


def test_one_node_holds_two_groups(start_node, attach, truth, lan, tmp_path) -> None:
    """Two jobs on one mirror port, interleaved; one waits for a record, the other goes on."""
    node = start_node(groups=2)
    jobs = {"a": _job(3), "b": _job(4, protocol="simple", ranks=3)}
    runs = {name: _run(truth, job, 2) for name, job in jobs.items()}
    trainers = {name: attach(node, job, group=name) for name, job in jobs.items()}
    for name, run in runs.items():
        _join(trainers[name], run)
    frames = []
    for t in (2, 3, 4):
        for run in runs.values():
            made = run.traffic(t)
            frames += made.packets
            run.advance(made)
    lan.send([frame for _, frame in sorted(frames, key=lambda packet: packet[0])])
    for t in (2, 3, 4):
        trainers["a"].record(t, groups=[{}])
        assert node.wait("iteration", iteration=t, name="a")["published"]
    for t in (2, 3, 4):
        trainers["b"].record(t, groups=[{}])
        assert node.wait("iteration", iteration=t, name="b")["published"]
    lines = [json.loads(text) for text in (tmp_path / "hashes.jsonl").read_text().splitlines()]
    for name, run in runs.items():
        last = [line for line in lines if line["name"] == name][-1]
        assert last["iteration"] == 4
        assert last["tensors"] == {key: tensor_sha256(tensor) for key, tensor in run.tensors().items()}
