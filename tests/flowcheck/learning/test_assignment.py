"""Connections whose channels are withheld: the truth or a refusal, never another assignment."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from parser.observer import Observer

from flowcheck.errors import UserError
from flowcheck.job.manifest import load_job
from flowcheck.job.model import Collective, Flow, Job
from flowcheck.learning import assignment as module
from flowcheck.learning.assignment import Assignment, assign
from flowcheck.learning.captures import assign_channels
from flowcheck.learning.cli import CHANNELS_FOUND
from flowcheck.learning.connections import Connection, connections
from lab.synth import Synthesis, example_job, generate
from tests.nccl_versions import VERSIONS

ROOT = Path(__file__).resolve().parents[3]
JOBS = ROOT / "tests/data/jobs"


def observed(packets: Sequence[tuple[int, bytes]]) -> list[Connection]:
    seen = Observer(messages=True)
    for timestamp, frame in packets:
        seen.add(frame, timestamp)
    return connections(seen.flow_list(), seen.start_records())


def withheld(job: Job, seed: int = 1) -> list[Flow]:
    flows = [replace(flow, channel=0) for flow in job.flows]
    random.Random(seed).shuffle(flows)
    return flows


def channels(flows: Sequence[Flow]) -> dict[tuple[str, tuple[int, ...]], int]:
    return {(flow.dst_addr, tuple(flow.qpns)): flow.channel for flow in flows}


def is_true(found: Assignment, job: Job) -> bool:
    """Every connection that has a channel has its own; all that carry something have one."""
    true = channels(job.flows)
    return all(true[key] == channel for key, channel in channels(found.flows).items())


def told(**options: Any) -> Job:
    """A job whose channels send messages of different sizes or numbers."""
    return example_job(**{"ranks": 3, "channels": 2, "protocol": "ll", "count": [700, 20_000], "version": "2.19.4"}
                       | options)


# -- against the generator's truth --


def some_job(seed: int) -> tuple[Job, Synthesis, random.Random] | None:
    chance = random.Random(seed)
    job = example_job(
        ranks=chance.randint(2, 4), channels=chance.choice([2, 2, 3, 4]), seed=seed,
        protocol=chance.choice(["ll", "ll128", "simple"]), version=chance.choice(VERSIONS),
        count=[chance.randint(2, 60_000) for _ in range(chance.randint(1, 3))], mtu=chance.choice([1024, 4096]),
        algorithm=chance.choice(["ring", "ring", "tree"]), qps=chance.choice([1, 1, 2]),
    )
    if job.communicator.algorithm == "tree" and job.communicator.channels % 2:
        return None  # an odd number of channels does not say which tree they have: such a job is refused anywhere
    ports = chance.sample(range(job.communicator.ranks), chance.randint(1, job.communicator.ranks))
    return job, generate(job, iterations=chance.randint(1, 3), ports=sorted(ports), seed=seed), chance


def outcome(seed: int) -> str:
    made = some_job(seed)
    if made is None:
        return "no job"
    job, traffic, chance = made
    packets = list(traffic.packets)
    how = chance.choice(["whole", "whole", "late", "lossy", "late and lossy"])
    if "late" in how:
        packets = packets[chance.randrange(len(packets) * 3 // 4):]
    if "lossy" in how:
        packets = [packet for packet in packets if chance.random() > 0.03]
    try:
        found = assign(job, withheld(job, seed), observed(packets))
    except UserError as error:
        assert error.remedy and "more than one assignment fits" in str(error), f"seed {seed}: {error}"
        return "refused"
    assert is_true(found, job), f"seed {seed} has another assignment"
    return "found"


def test_some_jobs() -> None:
    assert Counter(map(outcome, range(12)))["found"] >= 3


@pytest.mark.slow
def test_two_hundred_jobs() -> None:
    """Whole, begun late, with 3 % of the packets lost, or both; rings and trees, one to all ports."""
    counted: Counter[str] = Counter()
    seed = 1000
    while counted["found"] + counted["refused"] < 200:
        counted[outcome(seed)] += 1
        seed += 1
    assert counted["found"] >= 60, counted


@pytest.mark.parametrize("name", sorted(path.stem for path in JOBS.glob("*.json")))
def test_shared_captures(name: str, capture: Callable[[str], Path], eal: Any) -> None:
    folder = "soft-roce/{}.pcap" if name[:2].isdigit() else "nccl-hardware/{}.pcapng"
    job = load_job(JOBS / f"{name}.json")
    true = Job(**{**vars(job), "flows": [replace(flow) for flow in job.flows]})
    job.flows = withheld(job)
    if name == "allreduce_addstep":  # of an NCCL that was changed: it sends more
        with pytest.raises(UserError, match="no assignment to the channels 0, 1 fits"):
            assign_channels([capture(folder.format(name))], job)
        return
    found = assign_channels([capture(folder.format(name))], job)
    assert is_true(found, true) and all(found.seen)
    assert len(found.flows) + len(found.spare) == len(true.flows)


# -- one thing at a time --


def test_two_channels_that_differ() -> None:
    job = told()
    found = assign(job, withheld(job), observed(generate(job, iterations=2, ports=range(3)).packets))
    assert found.flows == sorted(job.flows, key=lambda flow: (flow.channel, flow.src, flow.dst))
    assert found.spare == [] and all(found.seen)


def test_channels_of_the_given_flows_are_not_looked_at() -> None:
    job = told()
    seen = observed(generate(job, iterations=1, ports=[0]).packets)
    wrong = [replace(flow, channel=1 - flow.channel) for flow in job.flows]
    assert assign(job, wrong, seen).flows == assign(job, job.flows, seen).flows


def even() -> Job:
    """Every call sends the same on both channels: LL in 2.19 gives each as many bytes."""
    job = told(count=[12_288], startup=False, rebuild=False)
    return job


def test_channels_that_send_alike_are_refused() -> None:
    job = even()
    with pytest.raises(UserError, match="more than one assignment fits every message") as refused:
        assign(job, withheld(job), observed(generate(job, iterations=2, ports=range(3)).packets))
    assert refused.value.where == "connections from rank 0 to rank 1"
    assert "bootstrap" in refused.value.remedy and "longer" not in refused.value.remedy
    for flow in job.flows:
        if (flow.src, flow.dst) == (0, 1):
            assert f"QP {flow.qpns[0]:#x} of 10.0.0.2 may be channel" in str(refused.value)


def test_what_a_longer_capture_would_tell() -> None:
    job = even()
    job.collectives.steady.append(Collective("AllReduce", 700, carries="other"))
    whole = generate(job, iterations=2, ports=range(3)).packets
    assert is_true(assign(job, withheld(job), observed(whole)), job)
    short = generate(even(), iterations=1, ports=range(3)).packets
    with pytest.raises(UserError, match="more than one assignment") as refused:
        assign(job, withheld(job), observed(short))
    assert "a longer capture" in refused.value.remedy


def test_pairs_of_which_nothing_is_mirrored_are_left_out() -> None:
    job = told(ranks=4)
    seen = observed(generate(job, iterations=2, ports=[0], directions="out").packets)
    found = assign(job, withheld(job), seen)
    assert is_true(found, job) and {(flow.src, flow.dst) for flow in found.flows} == {(0, 1)}
    assert {(flow.src, flow.dst) for flow in found.unseen} == {(1, 2), (2, 3), (3, 0)} and len(found.unseen) == 6


def test_where_there_is_no_choice_nothing_has_to_be_seen() -> None:
    job = told(channels=1)
    found = assign(job, withheld(job), [])
    assert found.flows == sorted(job.flows, key=lambda flow: flow.src) and found.seen == [0, 0, 0]


def test_one_on_another_port_may_be_any() -> None:
    """A connection of hosts of which nothing is mirrored is not silent: it could not be seen."""
    job = told(ranks=2, count=[500], startup=False, rebuild=False)
    seen = observed(generate(job, iterations=2, ports=[0]).packets)
    assert is_true(assign(job, withheld(job), seen), job)  # the second connection is silent, and not used
    idle = [flow for flow in job.flows if flow.channel == 1]
    elsewhere = [replace(flow, src_addr="10.9.0.1", dst_addr="10.9.0.2") for flow in idle]
    with pytest.raises(UserError, match="more than one assignment") as refused:
        assign(job, [flow for flow in job.flows if flow.channel == 0] + elsewhere, seen)
    assert "may be channel 0" in str(refused.value)


def test_one_that_was_not_seen_is_what_the_others_leave() -> None:
    job = told(ranks=2)
    hidden = next(flow for flow in job.flows if (flow.src, flow.channel) == (0, 1))
    seen = [one for one in observed(generate(job, iterations=2, ports=[0]).packets)
            if one.flows[0].qpn != hidden.qpns[0]]
    found = assign(job, withheld(job), seen)
    assert is_true(found, job)
    assert found.seen[[flow.qpns for flow in found.flows].index(hidden.qpns)] == 0


def test_connections_of_something_else_are_spare() -> None:
    """Another communicator's, with calls of its own, between the same hosts; and one that is silent beside them."""
    job = told(ranks=2)
    other = told(ranks=2, count=[300, 9000, 40], seed=7)
    both = [list(generate(one, iterations=2, ports=[0]).packets) for one in (job, other)]
    seen = observed([*both[0], *both[1]])
    silent = replace(job.flows[0], qpns=[0x123456], cts_qpns=[])
    flows = [*withheld(job), *(replace(flow, channel=0) for flow in other.flows)]
    for more in ([], [silent]):
        found = assign(job, [*flows, *more], seen)
        assert is_true(found, job) and len(found.flows) == 4 and len(found.spare) == 4 + len(more)


def test_channels_that_the_calls_do_not_use_have_spare_connections() -> None:
    job = told(ranks=2, channels=4, count=[500], startup=False, rebuild=False)
    found = assign(job, withheld(job), observed(generate(job, iterations=3, ports=[0]).packets))
    used = {flow.channel for flow in found.flows}
    assert is_true(found, job) and 0 < len(used) < 4 and len(found.spare) == 2 * (4 - len(used))


def test_too_few_connections() -> None:
    job = told()
    with pytest.raises(UserError, match="1 connections from rank 0 to rank 1 are named, and the calls use 2 channels"):
        assign(job, job.flows[1:], [])


def test_calls_of_another_job_fit_nothing() -> None:
    job = told()
    seen = observed(generate(job, iterations=2, ports=range(3)).packets)
    with pytest.raises(UserError, match=r"no assignment to the channels 0, 1 fits: QP .* explains .* messages, then"):
        assign(told(count=[900, 20_000]), withheld(job), seen)
    job.collectives.steady = []
    with pytest.raises(UserError, match="messages after the last one that this channel sends"):
        assign(job, withheld(job), seen)


@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_a_start_in_mid_stream(protocol: str) -> None:
    """As a node sees it that joins at a boundary: the calls before are known, and nothing of them was seen."""
    job = told(ranks=2, protocol=protocol, count=[700, 90_000])
    packets = generate(job, iterations=6, ports=[0]).packets
    late = observed(packets[len(packets) // 2:])
    assert not any(one.flows[0].begins for one in late)
    assert is_true(assign(job, withheld(job), late), job)


def test_what_is_announced_counts() -> None:
    """A clear-to-send that names another slot for a message than its step has."""
    job = told(ranks=2, protocol="simple")
    seen = observed(generate(job, iterations=2, ports=[0]).packets)
    one = next(one for one in seen if one.slots)
    one.slots[min(one.slots)] += 524288
    with pytest.raises(UserError, match=r"no assignment to the channels 0, 1 fits: .* in the slot of step"):
        assign(job, withheld(job), seen)


def test_queue_pairs_in_another_order_are_not_taken() -> None:
    job = told(ranks=2, qps=3, split_data_on_qps=True)
    seen = observed(generate(job, iterations=2, ports=[0]).packets)
    assert is_true(assign(job, withheld(job), seen), job)
    turned = [replace(flow, qpns=[*flow.qpns[1:], flow.qpns[0]]) for flow in withheld(job)]
    with pytest.raises(UserError, match="no assignment"):
        assign(job, turned, seen)


def test_a_message_too_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MESSAGES_MAX", 20)
    job = told()
    with pytest.raises(UserError, match="more than 20 messages lie between"):
        assign(job, withheld(job), observed(generate(job, iterations=2, ports=[0]).packets))


def test_a_job_that_cannot_be_planned() -> None:
    with pytest.raises(UserError, match="an odd number does not say"):
        assign(told(algorithm="tree", channels=3), told(channels=3).flows, [])


# -- the command --


def test_the_command(tmp_path: Path) -> None:
    job = told(ranks=2)
    generate(job, iterations=2, ports=[0]).write(tmp_path / "made.pcap")
    swapped = load_job(_written(job, tmp_path / "true.json"))
    for flow in swapped.flows:
        flow.channel = 1 - flow.channel
    _written(swapped, tmp_path / "given.json")
    options = ["learn", "made.pcap", "--channels", "given.json", "--out", "found.json"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "flowcheck", *options, *more], capture_output=True, text=True,
                              cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})

    done = run()
    assert done.returncode == 0, done.stderr
    found = load_job(tmp_path / "found.json")
    assert channels(found.flows) == channels(job.flows)
    assert found.unproven == [CHANNELS_FOUND]
    assert "messages fit, and no other assignment" in " ".join(done.stdout.split())
    done = run("--dtype", "int32")
    assert done.returncode == 2 and "--channels: its manifest says all else" in done.stderr


def _written(job: Job, path: Path) -> Path:
    path.write_text(job.to_json())
    return path
