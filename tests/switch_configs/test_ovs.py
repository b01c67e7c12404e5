"""Open vSwitch (userspace datapath) in a network namespace: live flows, purge, name clash, silent losses."""

from __future__ import annotations

import time

import pytest

from switch_configs.errors import DeviceError, PlanError
from switch_configs.local import mirrored
from switch_configs.manage import Manager
from switch_configs.schema import MirrorSession, Source
from switch_configs.transport import LocalTransport

from .test_tc import at_both_ends, two_ends

pytestmark = pytest.mark.root


def manager(ovs, direction="both", ports=("va", "vb"), **changes) -> Manager:
    session = MirrorSession(
        leaf="ovs", vendor="ovs", direction=direction, bridge="br0", destination="vm", destination_gbps=100,
        sources=[Source(port=port, rank=n, speed_gbps=10) for n, port in enumerate(ports)],
        ovs_rundir=str(ovs.rundir), **changes,
    )
    return Manager(session, lambda: LocalTransport(session))


def apply(m: Manager):
    return m.apply(m.difference())


def test_live_flows_are_mirrored_at_once_changed_and_released(ovs) -> None:
    bed = ovs.bed
    bed.send(3)  # learn the addresses, and have flows in the cache
    bed.send(3, source="vb0", target="va0")
    assert bed.send() == []
    m = manager(ovs)
    assert apply(m).active
    frames = bed.send()
    assert [int.from_bytes(f[14:18], "big") for f in frames] == list(range(10))  # once, unlike tc
    assert {len(f) for f in frames} == {4168}
    assert m.difference().commands == ()

    change = manager(ovs, "egress", ("va",))
    assert "- source vb both" in change.difference().lines
    apply(change)
    assert (len(bed.send()), len(bed.send(source="vb0", target="va0"))) == (0, 10)
    assert change.remove() and not change.remove()
    assert bed.send(source="vb0", target="va0") == []


def test_ingress_and_egress_of_a_port_end_at_two_monitor_ports(ovs) -> None:
    """Two mirrors, one by select_src_port and one by select_dst_port; together each frame of both directions, once."""
    bed = ovs.bed
    bed.cable("vn")
    ovs("ovs-vsctl", "add-port", "br0", "vn")
    bed.send(3)
    bed.send(3, source="vb0", target="va0")
    plan = two_ends(bed, "ovs", bridge="br0", ovs_rundir=str(ovs.rundir))
    with mirrored(plan) as states:
        assert [state.active for state in states] == [True, True]
        assert at_both_ends(bed) == (list(range(10)), list(range(100, 110)))
        managers = [Manager(s, lambda s=s: LocalTransport(s)) for s in plan.sessions]
        assert all(m.difference().commands == () for m in managers)
    assert at_both_ends(bed) == ([], [])


def test_flows_that_ignore_the_mirror_are_seen(ovs) -> None:
    bed = ovs.bed
    bed.send(3)
    bed.send(3, source="vb0", target="va0")
    bed.send()
    m = manager(ovs)
    m._run(next(line for line in m.difference().commands if line.startswith("ovs-vsctl")))  # no purge
    assert bed.send() == []
    mine = m.show().mine
    assert mine.exists and not mine.active and "revalidator/purge" in mine.reason
    assert apply(m).active and len(bed.send()) == 10


def test_destination_mtu_too_small_and_down(ovs) -> None:
    bed = ovs.bed
    m = manager(ovs)
    apply(m)
    ovs("ovs-vsctl", "set", "interface", "vm", "mtu_request=1500")
    bed.send(3)
    assert bed.send() == []
    mine = m.show().mine
    assert not mine.active and "MTU 1500" in mine.reason
    ovs("ovs-vsctl", "set", "interface", "vm", "mtu_request=9000")
    bed.ip("link", "set", "vm", "down")
    mine = wait_for(m, lambda state: not state.active)
    assert "vm is down" in mine.reason and bed.send() == []
    with pytest.raises(DeviceError, match=r"vm is down.*taken back"):
        apply(m)


def wait_for(m: Manager, condition):
    """ovs-vswitchd writes link states to its database a moment after they change."""
    end = time.monotonic() + 10
    while not condition(state := m.show().mine):
        assert time.monotonic() < end, state
        time.sleep(0.05)
    return state


def test_destination_deleted(ovs) -> None:
    m = manager(ovs)
    apply(m)
    ovs("ovs-vsctl", "del-port", "br0", "vm")
    mine = m.show().mine
    assert mine.exists and not mine.active and "gone" in mine.reason
    with pytest.raises(DeviceError, match="refused"):
        apply(m)
    assert m.show().mine.same_as(m.session) is False and m.show().mine == mine  # one transaction: all or nothing
    ovs("ovs-vsctl", "add-port", "br0", "vm")
    assert apply(m).active and len(ovs.bed.send()) == 10


def test_truncation_by_somebody_is_named_and_mended(ovs) -> None:
    m = manager(ovs)
    apply(m)
    ovs("ovs-vsctl", "set", "mirror", "flowcheck", "snaplen=200")
    assert m.show().mine.truncation == "snaplen 200"
    assert "- snaplen 200" in m.difference().lines
    apply(m)
    ovs.bed.send(2)
    assert {len(f) for f in ovs.bed.send()} == {4168}


def foreign(ovs, name: str, output: str) -> None:
    ovs("ovs-vsctl", "--", "--id=@p", "get", "port", "vb", "--", "--id=@o", "get", "port", output, "--", "--id=@m",
        "create", "mirror", f"name={name}", "select-src-port=@p", "output-port=@o", "--", "add", "bridge", "br0",
        "mirrors", "@m")


def test_somebody_elses_mirror_is_seen_and_survives(ovs) -> None:
    ovs.bed.cable("vo")
    ovs("ovs-vsctl", "add-port", "br0", "vo")
    foreign(ovs, "other", "vo")
    m = manager(ovs)
    apply(m)
    assert [(o.name, o.destination, o.ours) for o in m.show().others] == [("other", "vo", False)]
    m.remove()
    assert [o.name for o in m.show().others] == ["other"]
    foreign(ovs, "busy", "vm")
    with pytest.raises(PlanError, match="destination vm is used by session busy"):
        m.difference()


def test_name_clash(ovs) -> None:
    ovs.bed.cable("vo")
    ovs("ovs-vsctl", "add-port", "br0", "vo")
    foreign(ovs, "flowcheck", "vo")
    m = manager(ovs)
    with pytest.raises(PlanError, match="somebody else's"):
        m.difference()
    with pytest.raises(PlanError, match="not ours"):
        m.remove()
    ovs("ovs-vsctl", "clear", "bridge", "br0", "mirrors")
    apply(m)
    foreign(ovs, "flowcheck", "vo")  # Open vSwitch accepts two of one name
    assert "2 mirrors have this name" in m.show().mine.reason
    with pytest.raises(PlanError, match="also used by somebody else"):
        m.difference()
    assert m.remove()
    assert [(o.destination, o.ours) for o in [m.show().mine, *m.show().others]] == [("vo", False)]


def test_failure_in_the_middle_restores_what_was(ovs) -> None:
    old = manager(ovs, "ingress", ("va",))
    apply(old)
    with pytest.raises(DeviceError, match=r"refused: ovs-vsctl .*vx.*taken back"):
        apply(manager(ovs, "both", ("va", "vx")))
    assert old.show().mine.active and [s.port for s in old.show().mine.sources] == ["va"]
    assert len(ovs.bed.send()) == 10


def test_killed_at_every_step_and_a_broken_mirror_put_back(ovs) -> None:
    """One transaction makes or swaps it; dying before the purge is what show calls flows that are not copied."""
    ovs.bed.send(3)
    ovs.bed.send(3, source="vb0", target="va0")
    m = manager(ovs)
    m._run(m.difference().commands[0])  # dies here
    again = manager(ovs)
    assert apply(again).active and len(ovs.bed.send()) == 10
    ovs("ovs-vsctl", "set", "mirror", "flowcheck", "snaplen=200")
    ovs("ovs-vsctl", "clear", "mirror", "flowcheck", "select_dst_port")
    before = again.show().mine
    assert before.truncation and {s.direction for s in before.sources} == {"ingress"}
    ovs.bed.ip("link", "set", "vm", "down")
    wait_for(again, lambda state: "down" in state.reason)
    with pytest.raises(DeviceError, match=r"vm is down.*the change was taken back"):
        apply(manager(ovs))
    now = again.show().mine
    assert (now.sources, now.destination, now.truncation) == (before.sources, before.destination, before.truncation)
    assert again.remove()
