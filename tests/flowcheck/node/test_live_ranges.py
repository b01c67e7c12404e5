"""A node process that is never given a state: synth's traffic over a veth pair, ranges answered over TCP, versions
compared with torch's. And killed, at any instant of that."""

from __future__ import annotations

import json
import random
import signal
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.ask.offer import Offer
from flowcheck.ask.receiving import AskError
from flowcheck.checkpoint.directory import tensor_sha256
from flowcheck.control.protocol import Bye, Joined, Patch, Ranges, Wanted
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import Job
from lab.synth import example_job
from updater.reader import Reader

from .conftest import TOKEN

pytestmark = pytest.mark.root
MIB = 1 << 20
SECONDS = 60.0  # until something must have happened
ADAM = 12  # bytes of state of an fp32 element


def small_job(**options: Any) -> Job:
    job = example_job(
        **{"ranks": 2, "count": [700, 300], "optimizer": "adamw", "options": {"lr": 0.01}, "seed": 3, **options}
    )
    job.step_values = ["lr"]
    return job


class Training:
    """Ranks that train, a mirror that brings it all, and a node. ports: that are mirrored. change: what the mirrors
    make of a frame. known: hashes of tensors after each step."""

    def __init__(self, job: Job, truth: Any, lan: Any, ports: tuple[int, ...] = (0,)) -> None:
        self.job, self.run, self.lan, self.ports = job, truth(job), lan, ports
        self.change: Callable[[bytes], bytes] = bytes
        self.known: dict[int, dict[str, dict[str, str]]] = {}
        self.trainers: list[Any] = []
        self._seen = 0  # questions of this node

    def attach(self, node: Any, attach: Any, instance: str = "") -> None:
        ranks = range(self.job.communicator.ranks)
        self.trainers = [attach(node, self.job, rank, instance=instance) for rank in ranks]
        for trainer in self.trainers:
            trainer.flows()
        whole, self.trainers[0].job = self.job, job_from_dict(self.job.to_dict() | {"flows": []})
        self.trainers[0].manifest()
        self.trainers[0].job = whole
        for trainer in self.trainers:
            trainer.expect(Joined)
        self._seen = 0

    def questions(self, node: Any, more: bool) -> list[int]:
        """The ranks that have been asked since this was called last. more: there is a question."""
        deadline = time.monotonic() + SECONDS
        while more and len(node.said("ranges")) == self._seen:
            assert time.monotonic() < deadline, node.lines[-3:]
            time.sleep(0.005)
        new = node.said("ranges")[self._seen :]
        self._seen += len(new)
        return [rank for one in new for rank in one["ranks"]]

    def train(self, asked: Sequence[int] = (), *, sums: bool = False) -> int:
        """One iteration; asked: ranks, once for each question that they answer. Its number."""
        number: int = self.run.step
        made = self.run.traffic(number, ports=self.ports)
        self.lan.send([self.change(frame) for _, frame in made.packets])
        lr = 0.01 / (number + 1)
        self.run.advance(made, lr=lr)
        self.known[self.run.step] = hashes(self.run.tensors(), self.run.state())
        said = self.run.sums() if sums else {}
        for trainer in self.trainers:
            for _ in range(list(asked).count(trainer.rank)):
                trainer.patch(number, self.run.tensors(), self.run.state())
            trainer.record(number, groups=[{"lr": lr}], checksums=said)
        return number

    def until_patched(self, node: Any) -> int:
        """The first iteration whose version is published."""
        asked: list[int] = []
        while True:
            number = self.train(asked)
            line = node.wait("iteration", SECONDS, iteration=number)
            if line["published"]:
                return number
            asked = self.questions(node, line["stale"] > 0)


def hashes(tensors: Any, state: Any) -> dict[str, dict[str, str]]:
    flat = {f"{n}.{k}": tensor_sha256(v) for n, states in state.items() for k, v in states.items() if k != "step"}
    return {"tensors": {n: tensor_sha256(t) for n, t in tensors.items()}, "optimizer": flat}


def all_equal(folder: Path, known: dict[int, dict[str, dict[str, str]]]) -> list[int]:
    """Every version that the node said was published is torch's, bit for bit. Their iterations."""
    found = [json.loads(text) for text in (folder / "hashes.jsonl").read_text().splitlines()]
    for line in found:
        assert {key: line[key] for key in ("tensors", "optimizer")} == known[line["iteration"] + 1], line["iteration"]
    return [line["iteration"] for line in found]


@pytest.mark.parametrize("options", [
    {"protocol": "ll"},
    {"protocol": "ll128", "ranks": 3, "channels": 2, "count": [9000, 4001]},
    {"protocol": "simple", "ranks": 3, "count": [50_000, 301], "mtu": 1024},
    {"protocol": "ll", "algorithm": "tree", "ranks": 4},
])
def test_a_job_is_followed_without_a_state(start_node, attach, truth, lan, tmp_path: Path, options) -> None:
    """From its sixth iteration on, or a later one, if that has closed before its record came. Each element is sent
    once, whatever it takes; nobody is told to give a state."""
    at = Training(small_job(**options), truth, lan)
    for _ in range(5):
        at.train()
    node = start_node(resync="ranges")
    at.attach(node, attach)
    first = at.until_patched(node)
    begun = node.seen("begun")
    assert begun["iteration"] >= 5 and begun["elements"] == sum(entry.elements for entry in at.job.model)
    assert node.seen("attached")["resync"] == "ranges" and begun["kernels"]
    later = [at.train(sums=bool(t % 2)) for t in range(4)]
    for t in later:
        assert node.wait("iteration", SECONDS, iteration=t)["published"]
    assert node.said("iteration")[-1]["status"] == "verified"
    at.trainers[0].link.send(Bye())
    node.wait("end", SECONDS, serves=later[-1])
    assert node.end() == 0
    assert all_equal(tmp_path, at.known) == [first, *later]
    assert sum(one["bytes"] for one in node.said("ranges")) == ADAM * begun["elements"]
    assert node.said("state") == node.said("lost") == []


def test_it_comes_in_slices_of_all_ranks(start_node, attach, truth, lan, tmp_path: Path) -> None:
    """A state of 3.4 MiB, one MiB per iteration."""
    at = Training(small_job(count=[200_000, 100_001], protocol="simple", mtu=4096), truth, lan)
    at.train(), at.train()
    node = start_node(resync="ranges", replica="resync_mb = 1")
    at.attach(node, attach)
    first = at.until_patched(node)
    patched, asked = node.wait("patched", SECONDS), node.said("ranges")
    elements = node.seen("begun")["elements"]
    assert first >= 2 + 4 and len(asked) >= 4 and all(one["bytes"] <= MIB for one in asked)
    ranks = [rank for one in asked for rank in one["ranks"]]
    assert abs(ranks.count(0) - ranks.count(1)) <= 1, "in turn"
    assert sum(one["elements"] for one in asked) == elements == patched["elements"]
    assert patched["bytes"] == ADAM * elements and patched["since"] == node.seen("begun")["iteration"]
    assert node.end() == 0 and all_equal(tmp_path, at.known) == [first]


def test_a_job_that_does_not_qualify_is_named_and_gives_a_state(start_node, attach, truth, lan, tmp_path: Path) -> None:
    at = Training(small_job(), truth, lan)
    at.train()
    node = start_node(resync="ranges", replica="slots = 2")
    trainer = attach(node, at.job)
    trainer.manifest()
    trainer.expect(Wanted, what=["state"])
    assert node.wait("attached", SECONDS)["resync"].startswith("state: replica.slots is 2")
    trainer.state(1, at.run.tensors(), at.run.state())
    trainer.expect(Joined, iteration=1)
    at.trainers = [trainer]
    assert node.wait("iteration", SECONDS, iteration=at.train())["published"]
    assert node.end() == 0 and all_equal(tmp_path, at.known) == [1]


def test_a_trainer_that_refuses_gives_a_state(start_node, attach, truth, lan, tmp_path: Path) -> None:
    at = Training(small_job(), truth, lan)
    at.train()
    node = start_node(resync="ranges")
    at.attach(node, attach)
    at.train()
    [rank] = set(node.wait("ranges", SECONDS)["ranks"][:1])
    asked = at.trainers[rank].expect(Ranges)
    at.trainers[rank].send(Patch(asked.request, 0, refused="no exp_avg of it"))
    at.trainers[0].expect(Wanted, what=["state"])
    assert "no exp_avg of it" in node.wait("lost", SECONDS)["why"] and list(tmp_path.glob("*.replica")) == []
    at.trainers[0].state(2, at.run.tensors(), at.run.state())
    at.trainers[0].expect(Joined, iteration=2)
    assert node.wait("iteration", SECONDS, iteration=at.train())["published"]
    assert node.end() == 0 and all_equal(tmp_path, at.known) == [2]


def flipped(frame: bytes) -> bytes:
    """The sign of the first value that a gradient's packet carries, and its ICRC put right (reference/icrc.md)."""
    opcode, body = frame[42], bytearray(frame)
    data = 54 + 16 * (opcode in (6, 10, 11)) + 4 * (opcode in (9, 11))  # behind RETH and immediate
    if opcode not in range(6, 12) or len(frame) < data + 200:
        return frame
    body[data + 3] ^= 0x80
    ip, udp, bth = body[14:34], body[34:42], body[42:54]
    ip[1] = ip[8] = ip[10] = ip[11] = udp[6] = udp[7] = bth[4] = 0xFF
    crc = zlib.crc32(bytes(8 * [0xFF]) + ip + udp + bth + body[54:-4])
    return bytes(body[:-4]) + crc.to_bytes(4, "little")


def test_what_is_flipped_in_both_mirrors_alike_is_found_by_the_next_sum_and_comes_again_by_ranges(
    start_node, attach, truth, lan, tmp_path: Path
) -> None:
    """No copy disagrees with another, and each has a right ICRC. What was served is withdrawn, because nobody knows for
    how long it was wrong."""
    at = Training(small_job(protocol="ll"), truth, lan, ports=(0, 1))
    at.train(), at.train()
    node = start_node(resync="ranges")
    at.attach(node, attach)
    first = at.until_patched(node)
    at.change = flipped
    wrong = at.train()
    line = node.wait("iteration", SECONDS, iteration=wrong)
    assert line["published"] and line["missing"] == {} and line["duplicates"], line
    at.change = bytes
    [served] = tmp_path.glob("*.replica")
    checked = at.train(sums=True)
    assert f"of iteration {checked} differs from the trainer's" in node.wait("lost", SECONDS)["why"]
    assert node.wait("iteration", SECONDS, iteration=checked)["status"] == "diverged" and not served.exists()
    again = at.until_patched(node)
    last = at.train(sums=True)
    assert node.wait("iteration", SECONDS, iteration=last)["status"] == "verified"
    asked = sum(one["elements"] for one in node.said("ranges"))
    assert asked == 2 * node.seen("begun")["elements"] and len(node.said("begun")) == 2
    assert node.said("state") == [] and node.end() == 0
    lines = [json.loads(text) for text in (tmp_path / "hashes.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [first, wrong, again, last]
    equal = [line["iteration"] for line in lines if line["tensors"] == at.known[line["iteration"] + 1]["tensors"]]
    assert equal == [first, again, last]


# -- killed -------------------------------------------------------------------------------------------------------


def kill_while_begun(start_node, attach, truth, lan, folder: Path, times: int, seed: int) -> None:
    """Processes of a node that follow each other on one job, each killed while it, or soon after it, has nothing but a
    partial version. What is found afterwards is a version that was published, and torch's own. The first is killed
    while its three iterations cannot have brought all four slices of 1 MB, however fast the machine is."""
    rng, partial, complete = random.Random(seed), 0, 0
    at = Training(small_job(count=[200_000, 100_001], protocol="simple", mtu=4096), truth, lan)
    at.train(), at.train()
    for kill in range(times):
        node = start_node(resync="ranges", replica="resync_mb = 1")
        kept = [one["step"] for one in node.said("kept")]
        assert all(step in at.known for step in kept)
        at.attach(node, attach, "the same one")
        asked: list[int] = []
        for _ in range(rng.randrange(1, 9) if kill else 2):
            line = node.wait("iteration", SECONDS, iteration=at.train(asked))
            asked = at.questions(node, line["stale"] > 0)
        at.train(asked)
        time.sleep(rng.uniform(0, 0.05))
        node.process.send_signal(signal.SIGKILL)
        node.process.wait()
        node.close()
        for trainer in at.trainers:
            trainer.close()
        at.trainers = []
        published = {line["iteration"] + 1 for line in node.said("iteration") if line["published"]}
        said = {line["iteration"] + 1 for line in node.said("iteration")}
        new = 0
        for path in folder.glob("*.replica"):
            with closing(Reader(path)) as reader:
                for step in reader.steps:
                    with reader.pinned(step) as version:
                        found = hashes(version.parameters, version.optimizer_state)
                    assert found == at.known[step], f"kill {kill}: step {step} is not torch's"
                    assert step not in said or step in published, f"kill {kill}: step {step} was partial"
                    new += step in published
        partial, complete = partial + (not published), complete + bool(new)
    assert partial and (complete or times < 10), "always killed at the same stage"


def killed(node: Any, at: Training) -> None:
    node.process.send_signal(signal.SIGKILL)
    node.process.wait()
    for trainer in at.trainers:
        trainer.close()
    at.trainers = []


def offered(node: Any, step: int, older: int = 0) -> Offer:
    """A version in memory, as the node's HTTP API says it, as soon as it is so many steps old."""
    host, _, port = node.seen("listening")["api"].rpartition(":")
    asked = NodeClient((host, int(port)), reader_key(TOKEN))
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            [found] = [one for one in asked.offers() if one.step == step]
            if found.age_steps == older:
                return found
        except AskError:
            found = None  # its process has not begun yet
        finally:
            asked.close()
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_killed_and_started_again_it_goes_on_with_what_it_left(start_node, attach, truth, lan, tmp_path: Path) -> None:
    """First within the iteration that its version waits for: nothing is asked of the trainers. Then three iterations
    are missed: all of it is, and meanwhile the old version is served, and says how old it is. Then the job itself is
    started anew under the same name: the new one takes nothing of it."""
    job = small_job()
    job.run_id = ""
    at = Training(job, truth, lan)
    at.train(), at.train()
    api = '[api]\nlisten = "127.0.0.1:0"'
    node = start_node(api, resync="ranges")
    at.attach(node, attach, "one")
    at.until_patched(node)
    run_id = node.seen("attached")["run_id"]
    [left] = tmp_path.glob("*.replica")
    inode = left.stat().st_ino
    killed(node, at)

    node = start_node(api, resync="ranges")
    at.attach(node, attach, "one")
    resumed = node.seen("resumed")
    assert (resumed["run_id"], resumed["step"], resumed["path"]) == (run_id, at.run.step, str(left))
    for _ in range(2):
        line = node.wait("iteration", SECONDS, iteration=at.train(sums=True))
        assert line["published"] and line["status"] == "verified", node.lines[-2:]
    assert node.seen("begun")["elements"] == 0 and node.said("ranges") == [] and node.said("state") == []
    last = at.run.step
    killed(node, at)

    for _ in range(3):
        at.train()
    node = start_node(api, resync="ranges")
    before = offered(node, last)
    assert before.age_seconds is not None and before.age_seconds > 0 and before.status == "verified"
    at.attach(node, attach, "one")
    number = at.train()
    assert not node.wait("iteration", SECONDS, iteration=number)["published"]
    assert node.seen("stale")["elements"] == sum(entry.elements for entry in job.model)
    age = offered(node, last, number + 1 - last)
    assert age.run_id == run_id and age.age_seconds is not None and age.age_seconds > before.age_seconds
    with closing(Reader(left)) as reader, reader.pinned(last) as version:
        assert hashes(version.parameters, version.optimizer_state) == at.known[last], "it is served until there is more"
    asked = at.questions(node, True)
    while not (line := node.wait("iteration", SECONDS, iteration=at.train(asked, sums=True)))["published"]:
        asked = at.questions(node, line["stale"] > 0)
    assert line["status"] == "verified" and list(tmp_path.glob("*.replica")) == [left]
    assert left.stat().st_ino == inode and offered(node, at.run.step).status == "verified"
    last = at.run.step
    killed(node, at)

    node = start_node(api, resync="ranges")
    at.attach(node, attach, "two")
    assert node.said("resumed") == [] and node.seen("attached")["run_id"] != run_id
    at.until_patched(node)
    assert len(list(tmp_path.glob("*.replica"))) == 2, "what was verified stays until there is something as good"
    assert node.end() == 0 and all_equal(tmp_path, at.known)


def test_killed_while_it_has_nothing_but_a_partial_version(start_node, attach, truth, lan, tmp_path: Path) -> None:
    kill_while_begun(start_node, attach, truth, lan, tmp_path, 3, 5)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a node is started a hundred times
def test_killed_a_hundred_times(start_node, attach, truth, lan, tmp_path: Path) -> None:
    kill_while_begun(start_node, attach, truth, lan, tmp_path, 100, 6)
