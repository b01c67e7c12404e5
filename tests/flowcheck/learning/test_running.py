"""Which connection of a running job is which channel: the truth, a refusal, or that nothing is decided yet."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parser.observer import START_DTYPE, Observer

from flowcheck.errors import UserError
from flowcheck.job.model import Collective, Flow, Job
from flowcheck.learning.assignment import iterations_seen
from flowcheck.learning.running import ITERATIONS, answer, settle
from lab.synth import generate

from .test_assignment import is_true, observed, some_job, told, withheld

ROOT = Path(__file__).resolve().parents[3]


def late(job: Job, iterations: int, first: int = 4, **more: Any) -> list[tuple[int, bytes]]:
    """Packets of some iterations of a job that has been running."""
    more = {"ports": range(job.communicator.ranks)} | more
    return list(generate(job, iterations=iterations, first_iteration=first, **more).packets)


# -- against the generator's truth --


def outcome(seed: int) -> str:
    made = some_job(seed)
    if made is None:
        return "no job"
    job, _, chance = made
    ports = sorted(chance.sample(range(job.communicator.ranks), chance.randint(1, job.communicator.ranks)))
    packets = late(job, chance.randint(1, 6), chance.randint(1, 5), ports=ports, seed=seed)
    if chance.random() < 0.5:  # in the middle of an iteration
        packets = packets[chance.randrange(len(packets) // 3):]
    if chance.random() < 0.3:
        packets = [packet for packet in packets if chance.random() > 0.03]
    seen = observed(packets)
    try:
        found = settle(job, withheld(job, seed), seen)
    except UserError as error:
        assert error.remedy and "more than one assignment fits" in str(error), f"seed {seed}: {error}"
        return "refused"
    if isinstance(found, str):
        assert iterations_seen(job, withheld(job, seed), seen) < ITERATIONS
        return "early"
    assert is_true(found, job), f"seed {seed} has another assignment"
    return "found"


def test_some_jobs() -> None:
    counted = Counter(map(outcome, range(10)))
    assert counted["found"] and counted["early"] and counted["found"] + counted["refused"] >= 3, counted


@pytest.mark.slow
def test_two_hundred_jobs() -> None:
    """One to six iterations of a job that was joined late, some with 3 % of the packets lost; rings and trees, three
    protocols, one to all ports."""
    counted: Counter[str] = Counter()
    seed = 5000
    while counted["found"] + counted["refused"] + counted["early"] < 200:
        counted[outcome(seed)] += 1
        seed += 1
    assert counted["found"] >= 40 and counted["refused"] >= 20, counted


# -- one thing at a time --


def test_it_is_decided_after_some_iterations() -> None:
    job = told()
    early = settle(job, withheld(job), observed(late(job, 1)))
    assert isinstance(early, str) and early.startswith(f"1.0 of {ITERATIONS} iterations")
    found = settle(job, withheld(job), observed(late(job, ITERATIONS)))
    assert not isinstance(found, str) and is_true(found, job) and len(found.flows) == len(job.flows)


def test_before_that_nothing_is_refused() -> None:
    """What fits nothing may be a call that the description does not have yet."""
    job = told(ranks=2)
    other = told(ranks=2, count=[900, 20_000])
    assert isinstance(settle(other, withheld(job), observed(late(job, 1))), str)
    with pytest.raises(UserError, match="no assignment to the channels 0, 1 fits"):
        settle(other, withheld(job), observed(late(job, 6)))
    assert isinstance(settle(job, withheld(job), []), str), "nothing was seen at all"


def test_channels_that_iterations_do_not_use_are_nobodys() -> None:
    """DDP's first broadcast goes over all channels, and a small bucket over few."""
    job = told(ranks=2, channels=4, count=[500], startup=False, rebuild=False)
    job.collectives.startup = [Collective("Broadcast", 400_000, carries="other")]
    found = settle(job, withheld(job), observed(late(job, 4)))
    assert not isinstance(found, str) and is_true(found, job)
    used = {flow.channel for flow in found.flows}
    assert 0 < len(used) < 4 and len(found.spare) == 2 * (4 - len(used))


def test_alike_is_refused_with_what_would_decide() -> None:
    job = told(count=[12_288], startup=False, rebuild=False)
    with pytest.raises(UserError, match="more than one assignment fits every message") as refused:
        settle(job, withheld(job), observed(late(job, 4)))
    assert "topology=" in refused.value.remedy and "NCCL_MAX_NCHANNELS=1" in refused.value.remedy


def test_what_others_send_between_the_same_hosts_does_not_count() -> None:
    """Twenty iterations of another communicator, and one of this."""
    job, other = told(ranks=2), told(ranks=2, count=[300, 9000, 40], seed=7)
    seen = observed([*late(job, 1, ports=[0]), *late(other, 20, ports=[0])])
    flows = [*withheld(job), *(replace(flow, channel=0) for flow in other.flows)]
    assert iterations_seen(job, flows, seen) > ITERATIONS
    assert isinstance(settle(job, flows, seen), str)


def test_another_communicator_between_the_same_hosts() -> None:
    job, other = told(ranks=2), told(ranks=2, count=[300, 9000, 40], seed=7)
    seen = observed([*late(job, 4, ports=[0]), *late(other, 9, ports=[0])])
    flows = [*withheld(job), *(replace(flow, channel=0) for flow in other.flows)]
    found = settle(job, flows, seen)
    assert not isinstance(found, str) and is_true(found, job)
    assert len(found.flows) == 4 and len(found.spare) == len(other.flows)


def test_numbers_that_may_have_begun_anew() -> None:
    job = told(ranks=2, mtu=256)
    job.collectives.startup = [Collective("AllReduce", 600_000_000, carries="other")] * 2
    with pytest.raises(UserError, match=r"packets have passed on channel 0 .* 24 bits") as refused:
        settle(job, withheld(job), observed(late(told(ranks=2, mtu=256), 4)))
    assert "at the job's start" in refused.value.remedy


# -- the process --


def given(job: Job, packets: list[tuple[int, bytes]], **flow: Any) -> tuple[dict[str, Any], np.ndarray]:
    seen = Observer(messages=True)
    for timestamp, frame in packets:
        seen.add(frame, timestamp)
    flows = [{key: value for key, value in asdict(one).items() if key != "channel"} | flow for one in withheld(job)]
    listed = [{**one, "src": one["src"].hex(), "dst": one["dst"].hex()} for one in seen.flow_list()]
    settings = {"job": json.loads(job.to_json()), "flows": flows, "observed": listed, "cores": []}
    return settings, seen.start_records()


def test_the_process() -> None:
    job = told(ranks=2)
    settings, starts = given(job, late(job, 4))
    done = subprocess.run([sys.executable, "-m", "flowcheck.learning.running"], cwd=ROOT, capture_output=True,
                          input=json.dumps(settings).encode() + b"\n" + starts.tobytes(), check=True)
    said = json.loads(done.stdout)
    assert sorted(map(repr, (Flow(**flow) for flow in said["flows"]))) == sorted(map(repr, job.flows))
    assert (said["spare"], said["unseen"]) == (0, 0) and "found on the wire" in said["unproven"]


def test_what_it_answers_otherwise() -> None:
    job = told(ranks=2)
    assert "iterations have been seen" in answer(*given(job, late(job, 1)))["early"]
    settings, starts = given(job, late(job, 1))
    settings["observed"][0]["dropped"] = 3
    assert "no more messages are kept" in answer(settings, starts)["refused"]["what"]
    settings, starts = given(job, late(job, 4), qpns=[1 << 24])
    assert answer(settings, starts)["refused"]["where"] == "flows: [0].qpns[0]"
    settings, starts = given(job, late(job, 4), qpns=[7], dst_addr="10.0.0.9")
    assert "is already in flows[0]" in answer(settings, starts)["refused"]["what"]
    settings["job"]["communicator"]["ranks"] = 0
    assert answer(settings, np.empty(0, START_DTYPE))["refused"]["where"].endswith("communicator.ranks")


def test_connections_in_another_order_are_the_same() -> None:
    job, chance = told(ranks=2), random.Random(3)
    flows, seen = withheld(job), observed(late(job, 4))
    found = []
    for _ in range(3):
        chance.shuffle(flows)
        made = settle(job, flows, seen)
        assert not isinstance(made, str)
        found.append(made.flows)
    assert found[0] == found[1] == found[2]
