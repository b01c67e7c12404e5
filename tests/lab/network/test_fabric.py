"""The lab's network: what is cabled, what is mirrored, and that nothing of it stays, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from flowcheck.errors import EnvironmentProblem, UserError
from lab.network import netns
from lab.network.fabric import Fabric, clear, leftovers
from lab.network.ovs import OpenVSwitch
from lab.shape import SHARED, STATE, FabricConfig

from ..conftest import Tap, psn_of, roce_frame

pytestmark = pytest.mark.root

OWNER = """
import json, sys
from lab.network.fabric import Fabric
from lab.shape import FabricConfig
fabric = Fabric(FabricConfig(name=sys.argv[1], ranks=2, mirrored=((0,),)))
fabric.up()
child = fabric.spawn("r0", ["sleep", "1000"])
print(json.dumps(child.pid), flush=True)
sys.stdin.read()
fabric.down()
"""


def roles(name: str) -> list[str]:
    return [role for lab in leftovers() if lab.name == name for role in lab.roles]


def send(fabric: Fabric, source: int, target: int, count: int = 20) -> tuple[list[int], list[int]]:
    """PSNs that arrived at the target and at the node."""
    with (
        Tap(fabric.config.namespace(f"r{target}"), "fab0") as there,
        Tap(fabric.config.namespace("node"), "mir0") as copies,
        Tap(fabric.config.namespace(f"r{source}"), "fab0") as here,
    ):
        for psn in range(count):
            here.send(roce_frame(source, target, psn))
        arrived = there.roce(count, quiet=20)  # a switch copies before it forwards: no copy comes much later
        assert {len(frame) for frame in arrived} <= {4158}
        return [psn_of(frame) for frame in arrived], [psn_of(frame) for frame in copies.roce(2 * count)]


@pytest.mark.parametrize("switch", ["tc", "ovs"])
def test_cables_and_mirror(fabric, switch: str) -> None:
    lab = fabric(ranks=3, switch=switch, mirrored=((0, 1),))
    assert send(lab, 0, 1) == (list(range(20)), [])
    lab.start_mirror()
    arrived, copies = send(lab, 0, 1)
    # tc copies what enters port 0 and what leaves port 1; Open vSwitch each packet once
    assert arrived == list(range(20)) and copies == sorted(list(range(20)) * (2 if switch == "tc" else 1))
    assert send(lab, 1, 2) == (list(range(20)), list(range(20)))
    lab.stop_mirror()
    assert send(lab, 0, 1) == (list(range(20)), [])


def test_nothing_is_left_and_nothing_is_in_our_own_network(fabric, lab_name: str) -> None:
    before = sorted(os.listdir("/sys/class/net"))
    lab = fabric(ranks=2, mirrored=((0,),))
    assert sorted(os.listdir("/sys/class/net")) == before
    assert roles(lab_name) == ["leaf", "node", "r0", "r1"]
    child = lab.spawn("r1", ["sleep", "1000"])
    lab.down()
    assert child.returncode is not None and roles(lab_name) == []
    assert not (STATE / lab_name).exists() and not (SHARED / lab_name).exists()
    lab.down()  # again is fine


def test_two_labs_do_not_meet(fabric, lab_name: str) -> None:
    one = fabric(ranks=2, mirrored=((0,),))
    with Fabric(FabricConfig(name=f"{lab_name}b", ranks=2, mirrored=((0,),))) as other:
        one.start_mirror()
        other.start_mirror()
        assert send(one, 0, 1) == (list(range(20)), list(range(20)))
        assert send(other, 1, 0) == (list(range(20)), list(range(20)))
    assert roles(f"{lab_name}b") == [] and roles(lab_name) != []
    assert send(one, 1, 0) == (list(range(20)), list(range(20)))


def test_a_living_lab_is_refused_and_a_killed_one_is_cleared(lab_name: str) -> None:
    owner = subprocess.Popen([sys.executable, "-P", "-c", OWNER, lab_name], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    assert owner.stdin is not None and owner.stdout is not None
    inside = json.loads(owner.stdout.readline())
    config = FabricConfig(name=lab_name, ranks=2, mirrored=((0,),))
    with pytest.raises(EnvironmentProblem, match=rf"belongs to process {owner.pid}"):
        Fabric(config).up()
    assert roles(lab_name) == ["leaf", "node", "r0", "r1"]
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    end = time.monotonic() + 120
    while os.path.exists(f"/proc/{inside}"):  # its children die with it
        assert time.monotonic() < end
        time.sleep(0.01)
    assert [lab.owner for lab in leftovers() if lab.name == lab_name] == [None]
    with Fabric(config):
        pass
    assert roles(lab_name) == []


def test_clear_ends_what_runs_inside(fabric, lab_name: str) -> None:
    fabric(ranks=2, switch="ovs", mirrored=((0,),))
    stubborn = subprocess.Popen(
        [*netns.prefix(f"flowcheck-{lab_name}-r1"), "sh", "-c", "trap '' TERM; echo on; while :; do sleep 0.1; done"],
        stdout=subprocess.PIPE,
    )
    assert stubborn.stdout is not None and stubborn.stdout.readline() == b"on\n"
    assert clear(lab_name)
    assert stubborn.wait(10) == -signal.SIGKILL and roles(lab_name) == []
    stubborn.stdout.close()
    assert not clear(lab_name)


def test_a_fabric_that_cannot_be_finished_is_removed(lab_name: str) -> None:
    config = FabricConfig(name=lab_name, ranks=2, mirrored=((0,),), rate_mbit={"mirror0": 1e-9})  # tc refuses
    with pytest.raises(EnvironmentProblem, match="tc"):
        Fabric(config).up()
    assert roles(lab_name) == [] and not (STATE / lab_name).exists()


def test_rate_limit_of_a_port(fabric) -> None:
    lab = fabric(ranks=2, mirrored=((0,),), rate_mbit={"r1": 20})
    with Tap(lab.config.namespace("r1"), "fab0") as there, Tap(lab.config.namespace("r0"), "fab0") as here:
        begin = time.monotonic()
        for psn in range(200):  # 832 kB; 64 kB pass at once
            here.send(roce_frame(0, 1, psn))
        arrived = [psn_of(frame) for frame in there.roce(200)]
        seconds = time.monotonic() - begin
    assert arrived == sorted(arrived) and len(arrived) > 30
    assert seconds > (len(arrived) * 4158 - 65536) * 8 / 20e6


@pytest.mark.parametrize("wrong", [
    {"name": "Not A Name"}, {"ranks": 1}, {"mirrored": ((0, 0),)}, {"mirrored": ((7,),)}, {"rate_mbit": {"r9": 1}},
    {"rate_mbit": {"r1": 0}},
])
def test_what_cannot_be_built_is_refused_before_anything_is(wrong: dict) -> None:
    with pytest.raises(UserError):
        FabricConfig(**{"name": "x", "ranks": 4, **wrong})


def test_a_mirror_that_can_never_be_complete_is_refused(fabric) -> None:
    with pytest.raises(UserError, match=r"never|complete|missing"):
        fabric(ranks=4, mirrored=((0,),), direction="ingress").start_mirror()


def test_root_is_asked_for_plainly() -> None:
    code = "from lab.network import netns\nnetns.require()"
    done = subprocess.run(["setpriv", "--reuid", "65534", "--clear-groups", sys.executable, "-P", "-c", code],
                          capture_output=True, text=True, check=False)
    if "EnvironmentProblem" not in done.stderr:
        pytest.skip(f"another user cannot run this Python: {done.stderr[-200:]}")
    assert "needs root" in done.stderr and "remedy" in done.stderr


def test_files_that_a_switch_closes_meanwhile_are_passed_over(tmp_path) -> None:
    """Its threads open and close files while its packet sockets are looked for; this process stands for it."""
    ended = threading.Event()

    def churn() -> None:
        while not ended.is_set():
            for end in socket.socketpair():
                end.close()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(300):
            OpenVSwitch(tmp_path, "", None, keep=False)._deepen(os.getpid(), 0)
    finally:
        ended.set()
        thread.join()


def test_a_command_to_open_vswitch_does_not_outlive_its_daemons(tmp_path) -> None:
    """ovs-vsctl waits for a daemon without end; one that is gone is said at once, and not as a bug."""
    switch = OpenVSwitch(tmp_path, "", None, keep=False)
    begin = time.monotonic()
    with subprocess.Popen(["false"]) as gone:
        gone.wait()
        switch._started.append(gone)
        with pytest.raises(EnvironmentProblem, match="daemon has ended with status 1"):
            switch._control("sleep", "60")
    assert time.monotonic() - begin < 20
