"""Two node processes mirror the same ranks. One comes late, or was killed: it goes on from what the other has, and of
the trainers it asks nothing. Versions are compared with torch's."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.ask.offer import Offer
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.node import NodeConfig
from updater.optimizers import OptimizerSpec
from updater.replica import Replica
from updater.rounding_modes import RoundingMode

from .conftest import TOKEN
from .test_live_ranges import SECONDS, Training, all_equal, small_job

pytestmark = [pytest.mark.root, pytest.mark.slow]
API = '[api]\nlisten = "127.0.0.1:0"'


@pytest.fixture
def peer(start_node: Any, attach: Any, truth: Any, lan: Any) -> Any:
    """A job, and a node that follows it."""
    at = Training(small_job(), truth, lan)
    at.train()
    first = start_node(API, resync="ranges", name="first", replica="slots = 4")  # two of its versions may be read
    at.attach(first, attach, instance="x")
    at.until_patched(first)
    return at, first, list(at.trainers)


def newest(node: Any) -> Offer:
    host, _, port = node.seen("listening")["api"].rpartition(":")
    with contextlib.closing(NodeClient((host, int(port)), reader_key(TOKEN), SECONDS)) as asked:
        return asked.offers()[0]


def beside(at: Training, node: Any, attach: Any, trainers: list[Any]) -> list[Any]:
    """The trainers attach to this node as well."""
    at.attach(node, attach, instance="x")
    mine, at.trainers = at.trainers, [*trainers, *at.trainers]
    return mine


def published(node: Any, at: Training, **fields: Any) -> dict[str, Any]:
    line: dict[str, Any] = node.wait("iteration", SECONDS, iteration=at.train(**fields))
    return line


def until_caught_up(at: Training, first: Any, node: Any) -> dict[str, Any]:
    """An iteration goes by, and when the first node has its version the other one has it, too."""
    assert published(first, at)["published"]
    line: dict[str, Any] = node.wait("caught_up", SECONDS)
    return line


def test_a_node_that_comes_late_takes_what_its_peer_has(
    peer: Any, start_node: Any, attach: Any, tmp_path: Path
) -> None:
    at, first, trainers = peer
    api = first.seen("listening")["api"]
    late = start_node(API, resync="ranges", name="late", replica=f'peer_versions = ["{api}"]')
    beside(at, late, attach, trainers)
    caught = until_caught_up(at, first, late)
    assert caught["source"] == api and caught["step"] == caught["iteration"] and caught["bytes"] > 0
    line = published(late, at, sums=True)
    assert (line["published"], line["status"], line["unproven"]) == (True, "verified", [])
    assert late.said("ranges") == [] and late.said("not_caught_up") == []
    assert newest(late).step == at.run.step
    assert late.end() == 0 and first.end() == 0
    assert all_equal(tmp_path, at.known)[-1] == at.run.step - 1


def test_a_node_that_was_killed_catches_up(peer: Any, start_node: Any, attach: Any, tmp_path: Path) -> None:
    at, first, trainers = peer
    api = first.seen("listening")["api"]
    given: dict[str, Any] = {"resync": "ranges", "name": "late", "replica": f'peer_versions = ["{api}"]'}
    late = start_node(API, **given)
    beside(at, late, attach, trainers)
    until_caught_up(at, first, late)
    left = published(late, at)["iteration"] + 1
    late.process.kill()
    late.process.wait(SECONDS)
    at.trainers = trainers
    for _ in range(3):
        published(first, at)
    again = start_node(API, **given)
    assert newest(again).step == left, "it serves what it left"
    beside(at, again, attach, trainers)
    caught = until_caught_up(at, first, again)
    assert again.seen("resumed")["step"] == left and caught["step"] > left + 3
    assert published(again, at, sums=True)["status"] == "verified"
    assert again.said("ranges") == [] and again.said("not_caught_up") == []
    assert again.end() == 0 and first.end() == 0
    assert all_equal(tmp_path, at.known)[-1] == at.run.step - 1


def test_a_peer_that_lies_is_found_by_the_next_checksum(
    peer: Any, start_node: Any, attach: Any, shm: Path, tmp_path: Path
) -> None:
    """It has the right job, step, shapes and hashes, and bytes that no trainer has ever had. They are marked from the
    first moment on. Then they go, nobody asks that peer again, and everything comes from the trainers."""
    at, first, trainers = peer
    offer, wrong = newest(first), {name: tensor + 1.0 for name, tensor in at.run.tensors().items()}
    spec = OptimizerSpec.check("adamw", [(list(wrong), {"lr": 0.01})])
    with contextlib.ExitStack() as stack:
        mode = RoundingMode("torch-cpu", at.job.optimizer.torch_version, threads=at.job.optimizer.threads)
        replica = Replica(wrong, spec, path=shm / "flowcheck-liar--1.replica", run_id=offer.run_id, epoch=offer.epoch,
                          step=at.run.step + 1, optimizer_state=at.run.state(), slots=3, start=offer.start,
                          rounding=mode)
        stack.callback(replica.close)
        config = NodeConfig.model_validate({
            "name": "liar", "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "capture": {"device": "x"},
            "api": {"listen": "127.0.0.1:0"}, "replica": {"directory": str(shm)}, "output": {"directory": str(shm)},
        })
        liar = stack.enter_context(contextlib.closing(Serving(config, TOKEN, lambda *_, **__: None)))
        late = start_node(API, resync="ranges", name="late", replica=f'peer_versions = ["{liar.address}"]')
        mine = beside(at, late, attach, trainers)
        caught = until_caught_up(at, first, late)
        assert (caught["source"], caught["step"]) == (liar.address, at.run.step)
        line = published(late, at)
        assert line["published"] and line["unproven"] == [
            f"the version of step {caught['step']} came from {liar.address}, and no checksum of the trainer has matched"
            " since"]
        checked = published(late, at, sums=True)
        assert checked["status"] == "diverged" and f"of iteration {checked['iteration']}" in late.seen("lost")["why"]
        at.trainers = mine
        at.until_patched(late)
        assert published(late, at, sums=True)["status"] == "verified"
        assert len(late.said("caught_up")) == 1
