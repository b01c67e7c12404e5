"""Nodes are killed: alone, with a rank, and two of them whose steps differ, by one or by many. What the job then
computes is what it would have computed. All that a rank has of its own is on: dropout, a shuffled loader, schedule,
clipping, loss scale."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.jobs import Training
from lab.run import LabRun
from lab.trainer import INSTANTS

from .conftest import lab_of

pytestmark = [pytest.mark.root, pytest.mark.slow]

AFTER = 5  # iterations that the job trains on after the fault
OWN: dict[str, Any] = {"model": "mlp", "dropout": 0.2, "noise": True, "schedule": "cosine"}
SHAPES: list[dict[str, Any]] = [
    {**OWN, "optimizer": {"name": "adamw", "lr": 1e-2}, "clip": 0.1},
    {**OWN, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "loss_scale": 1024.0, "overflow_at": (6,)},
    {**OWN, "optimizer": {"name": "adam", "lr": 1e-3}, "loss_scale": 512.0, "clip": 0.5, "accumulate": 2},
]
Results = dict[int, tuple[float, list[Any]]]


def results(run: LabRun, job: Training) -> Results:
    """iteration -> the loss of the last stage, and every rank's hashes of all its state."""
    return {
        line["iteration"]: (line["loss"], [
            {part: one[part] for part in ("tensors", "optimizer")}
            for stage in range(job.stages) for one in run.ledger.ranks(stage, line["iteration"])
        ])
        for line in run.iterations if line["stage"] == job.stages - 1
    }


def train_on(run: LabRun, job: Training, last: int) -> Results:
    """The job goes on from what the nodes have, until this iteration; then the nodes end."""
    run.start_trainers_again()
    run.begin(job, attach=True, recover=True)
    (step,) = {one["step"] for one in run.recovered}
    assert len(run.recovered) == job.ranks and step > 0, run.recovered
    assert all(one["source"].endswith("memory") for one in run.recovered), run.recovered
    run.train(last - step)
    again = results(run, job)
    run.end()
    assert set(run.finish_nodes()) == {0}
    return {number: one for number, one in again.items() if number >= step}


def equal_to_undisturbed(run: LabRun, job: Training, last: int, again: Results) -> None:
    run.begin(job)
    run.train(last)
    undisturbed = results(run, job)
    run.end()
    assert sorted(undisturbed) == list(range(last)) and all(len(one[1]) == job.ranks for one in undisturbed.values())
    assert sorted(again) == list(range(min(again), last))
    assert again == {number: undisturbed[number] for number in again}


def published(run: LabRun, name: str = "") -> int:
    """The step of the newest version that the nodes have said they published."""
    return max(said["iteration"] + 1 for _, said in run.events
               if said["event"] == "iteration" and said["published"] and name in ("", said["name"]))


def die_with_the_nodes(run: LabRun, draw: random.Random, dies: int) -> Callable[[str, dict[str, Any]], object]:
    """Kills all nodes from another thread, at an instant round the end of a rank in that iteration."""
    seen = threading.Event()

    def heard(name: str, event: dict[str, Any]) -> None:
        if not seen.is_set() and event.get("event") == "iteration" and name.startswith("rank") and (
                event["iteration"] == dies - 1):
            seen.set()
            time.sleep(draw.uniform(0, 0.15))
            run.kill_nodes()

    return heard


@pytest.mark.parametrize("seed", range(5))
def test_the_node_is_killed_and_then_a_rank(tmp_path: Path, seed: int) -> None:
    """The job trains on without it. It comes back with what it left, catches up by ranges, and gives that back."""
    draw = random.Random(seed)
    job = Training(**SHAPES[seed % len(SHAPES)], ranks=4, softroce={"seed": seed}, seed=seed)
    with lab_of(ranks=4, mirrored=((0,),)) as fabric, LabRun(fabric, tmp_path, api=True, checksums=3) as run:
        run.start_nodes(job)
        run.wait_for_nodes(run.attach(job))
        run.train(draw.randrange(1, 4))
        time.sleep(draw.uniform(0, 0.1))
        left = published(run)
        run.kill_nodes()
        run.train(draw.randrange(1, 6))
        run.start_nodes(job)
        run.catch_up()
        (resumed,) = [said for _, said in run.events if said["event"] == "resumed"]
        (begun,) = [said for _, said in run.events if said["event"] == "begun"]
        assert left <= resumed["step"] <= left + 4 and begun["iteration"] >= resumed["step"]
        dies = len({line["iteration"] for line in run.iterations}) + draw.randrange(1, 4)
        last = dies + AFTER
        run.train_and_die(last, rank=draw.randrange(4), iteration=dies, at=INSTANTS[seed % len(INSTANTS)])
        run.wait_for_nodes(dies - 1)
        missed = min(said["iteration"] for _, said in run.events if said["event"] == "iteration" and said["published"])
        again = train_on(run, job, last)
        assert dies - 1 <= min(again) <= dies + 1, "at most one iteration that was done is repeated"
        equal_to_undisturbed(run, job, last, again)
        print(f"seed {seed}: left step {resumed['step']}, published again {missed + 1}, died in {dies}, repeated"
              f" {max(0, dies - min(again))}, went on from {min(again)}")


@pytest.mark.parametrize("seed", range(5))
def test_the_node_and_a_rank_are_killed_at_once(tmp_path: Path, seed: int) -> None:
    """What the node left in shared memory is served by its next process, before anybody has attached to that."""
    draw = random.Random(100 + seed)
    job = Training(**SHAPES[seed % len(SHAPES)], ranks=4, softroce={"seed": seed}, seed=seed)
    with lab_of(ranks=4, mirrored=((0,),)) as fabric, LabRun(fabric, tmp_path, api=True, checksums=3) as run:
        run.start_nodes(job)
        run.wait_for_nodes(run.attach(job))
        dies = len(run.iterations) + draw.randrange(2, 5)
        last = dies + AFTER
        run.train(dies - 1 - len(run.iterations))
        run.wait_for_nodes(dies - 2)
        before = published(run)
        run.train_and_die(last, rank=draw.randrange(4), iteration=dies, at=INSTANTS[seed % len(INSTANTS)],
                          heard=die_with_the_nodes(run, draw, dies))
        run.kill_nodes()  # where the rank was the first
        newest = published(run)
        run.start_nodes(job)
        again = train_on(run, job, last)
        assert before - 1 <= min(again) <= dies + 1 and min(again) >= newest - 2, (before, newest, min(again), dies)
        equal_to_undisturbed(run, job, last, again)
        print(f"seed {seed}: died in {dies}, newest said {newest}, repeated {max(0, dies - min(again))}, went on from"
              f" {min(again)}")


PIPELINE: dict[str, Any] = {**SHAPES[2], "accumulate": 1, "ranks": 4, "stages": 2}
GROUPS = ((0, 1), (2, 3))
AHEAD = 7  # steps that a node makes while another one stands still: more than there are slots


def both_published(run: LabRun, fabric: Any) -> int:
    """Train until nodes of both stages have the newest version, and what its ranks gave, which comes by a thread. A
    busy machine may lose an iteration on one of them."""
    while True:
        step = max(line["iteration"] for line in run.iterations) + 1
        run.wait_for_nodes(step - 1)
        if all(published(run, f"stage{stage}") == step for stage in range(2)):
            break
        run.train(1)
    for stage in range(2):
        while len(list(fabric.shared.glob(f"*-stage{stage}-*.user/step-{step:06d}/rank-*.safetensors"))) < 2:
            time.sleep(0.01)
    return step


@pytest.mark.parametrize("seed", range(5))
def test_two_nodes_whose_steps_differ_are_killed_with_a_rank(tmp_path: Path, seed: int) -> None:
    """A node for each of two stages. One is held up, so the other is one step ahead when everything dies: the job goes
    on from the newest step that both have."""
    draw = random.Random(200 + seed)
    job = Training(**{**PIPELINE, "clip": [0.5, None][seed % 2]}, softroce={"seed": seed}, seed=seed)
    behind = seed % 2
    with lab_of(ranks=4, mirrored=GROUPS, groups=GROUPS) as fabric, \
            LabRun(fabric, tmp_path, api=True, checksums=3) as run:
        run.start_nodes(job)
        run.wait_for_nodes(run.attach(job))
        run.train(draw.randrange(1, 4))
        common = both_published(run, fabric)
        done = common - 1
        run.stop_node(behind)
        run.train(1)
        run.wait_for_event("iteration", iteration=done + 1, name=f"stage{1 - behind}", published=True)
        assert published(run, f"stage{1 - behind}") == common + 1
        dies, last = done + 2, done + 2 + AFTER
        run.train_and_die(last, rank=draw.randrange(4), iteration=dies, at=INSTANTS[seed % len(INSTANTS)])
        run.kill_nodes()
        run.start_nodes(job)
        again = train_on(run, job, last)
        assert min(again) == common, "the newest step that both have"
        equal_to_undisturbed(run, job, last, again)
        print(f"seed {seed}: stage {behind} had step {common}, the other {common + 1} or later; died in {dies},"
              f" repeated {dies - min(again)}")


@pytest.mark.parametrize("seed", range(2))
def test_a_node_stands_still_for_many_steps_and_its_last_one_is_kept_by_the_other(tmp_path: Path, seed: int) -> None:
    """Two stages with a node each. One node gets no time while the job goes on, for more steps than the other has
    slots; then everything dies. What both have is the last step before that, and the job goes on from there."""
    draw = random.Random(300 + seed)
    job = Training(**{**PIPELINE, "clip": [0.5, None][seed % 2]}, softroce={"seed": seed}, seed=seed)
    behind = seed % 2
    settings = {"replica": {"slots": 3 + seed % 2}}
    with lab_of(ranks=4, mirrored=GROUPS, groups=GROUPS) as fabric, \
            LabRun(fabric, tmp_path, api=True, checksums=3, node_settings=settings) as run:
        run.start_nodes(job)
        run.wait_for_nodes(run.attach(job))
        run.train(draw.randrange(1, 4))
        common = both_published(run, fabric)
        done = common - 1
        run.stop_node(behind)
        run.train(AHEAD)
        ahead = f"stage{1 - behind}"
        run.wait_for_event("iteration", iteration=done + AHEAD, name=ahead, published=True)
        apart = run.wait_for_event("group_behind", name=ahead)
        kept = apart["step"]  # what it had told before it stood still; its last one may have been on the way
        assert apart["shard"] == f"stage{behind}" and kept in (common - 1, common) and len(apart["nodes"]) == 1
        published_all = {said["iteration"] for _, said in run.events
                         if said["event"] == "iteration" and said["name"] == ahead and said["published"]}
        assert published_all >= set(range(done + 1, done + AHEAD + 1)), "it waits for nobody"
        dies, last = done + AHEAD + 1, done + AHEAD + 1 + AFTER
        run.train_and_die(last, rank=draw.randrange(4), iteration=dies, at=INSTANTS[seed % len(INSTANTS)])
        run.kill_nodes()
        run.start_nodes(job)
        again = train_on(run, job, last)
        # A step that was not told any more is kept, too, while a slot is left: the node may still come to it.
        assert kept <= min(again) <= common, "the newest step that both have"
        equal_to_undisturbed(run, job, last, again)
        print(f"seed {seed}: stage {behind} had step {kept} and stood still, the other went on to {done + AHEAD + 1}"
              f" or later; died in {dies}, repeated {dies - min(again)}")
