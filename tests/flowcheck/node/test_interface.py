"""What a node does when its capture cannot go on."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from flowcheck.control.protocol import Wanted
from lab.synth import example_job

pytestmark = pytest.mark.root


def test_interface_that_vanishes_ends_the_node(start_node: Any, attach: Any, lan: Any) -> None:
    """With what is missing in words, and not by waiting for packets for ever."""
    node = start_node()
    attach(node, example_job(ranks=2, count=[700, 300]), 0).expect(Wanted)  # its group is there: the capture runs
    subprocess.run(["ip", "link", "delete", lan.near], check=True)
    assert node.process.wait(120) == 3
    error = node.process.stderr.read()
    assert f"af_packet:{lan.near}: gone" in error and "a new capture" in error
    assert [line["event"] for line in node.lines][-1:] == ["capture"]
