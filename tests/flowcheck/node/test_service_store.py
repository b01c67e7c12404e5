"""The whole node with a store: what it publishes gets there, and one that hangs holds up nothing, not even its end."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from flowcheck.checkpoint.directory import load_step, tensor_sha256

from .test_service import _iteration, _job, _join, _run

pytestmark = [pytest.mark.root, pytest.mark.slow]


def test_versions_come_into_the_store(start_node: Any, attach: Any, truth: Any, lan: Any, tmp_path: Any) -> None:
    job = _job()
    node = start_node(f'[store]\nurl = "{tmp_path}/store"\nevery = 4\nkeep = 1')
    run = _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    for _ in range(2):
        assert node.wait("iteration", iteration=_iteration(run, lan, trainer))["published"]
    path = node.seen("stored", step=4)["path"]
    found = load_step(path)
    assert {name: tensor_sha256(one) for name, one in found.parameters.items()} == {
        name: tensor_sha256(one) for name, one in run.tensors().items()
    }
    assert node.end() == 0


def test_a_store_that_hangs_holds_up_nothing(start_node: Any, attach: Any, truth: Any, lan: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        job = _job()
        node = start_node(f'[store]\nurl = "ftp://127.0.0.1:{silent.getsockname()[1]}/x"\nevery = 1\nseconds = 1.0')
        run = _run(truth, job, 2)
        trainer = attach(node, job)
        _join(trainer, run)
        said = None
        while said is None:
            assert node.wait("iteration", iteration=_iteration(run, lan, trainer))["published"]
            said = next(iter(node.said("unstored")), None)
        assert "no answer within 1 s" in said["why"]
        assert "it is started anew" in node.wait("problem")["why"]
        for _ in range(3):
            assert node.wait("iteration", iteration=_iteration(run, lan, trainer))["published"]
        assert not node.said("dropped") and not node.said("lost")
        began = time.monotonic()
        assert node.end() == 0 and time.monotonic() - began < 90.0
