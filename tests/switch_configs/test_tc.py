"""tc mirred on a real Linux bridge in a network namespace: what apply does to live traffic, and what show names."""

from __future__ import annotations

import contextlib

import pytest

from switch_configs.errors import DeviceError, PlanError
from switch_configs.local import mirrored
from switch_configs.manage import Manager
from switch_configs.planning.planner import make_plan
from switch_configs.schema import MirrorPlan, MirrorSession, Source, Topology
from switch_configs.transport import LocalTransport

pytestmark = pytest.mark.root


def manager(bed, direction="both", ports=("va", "vb"), **changes) -> Manager:
    session = MirrorSession(
        leaf="bridge", vendor="tc", direction=direction, netns=bed.netns, destination="vm", destination_gbps=100,
        sources=[Source(port=port, rank=n, speed_gbps=10) for n, port in enumerate(ports)], **changes,
    )
    return Manager(session, lambda: LocalTransport(session))


def apply(m: Manager):
    return m.apply(m.difference())


def test_live_traffic_is_mirrored_changed_and_left_alone(bridged) -> None:
    assert bridged.send() == []
    m = manager(bridged)
    difference = m.difference()
    assert difference.lines[0] == "+ source va both" and bridged.send() == []  # a difference changes nothing
    state = m.apply(difference)
    assert state.active and state.ours
    assert {(s.port, s.direction) for s in state.sources} == {("va", "both"), ("vb", "both")}
    frames = bridged.send()
    # hardware-like duplicates: rx of A and tx of B, whole frames
    assert [int.from_bytes(f[14:18], "big") for f in frames] == [n for n in range(10) for _ in range(2)]
    assert {len(f) for f in frames} == {4168}
    assert m.difference().commands == ()  # idempotent
    assert m.show().mine.copies == 20

    change = manager(bridged, "ingress", ("va",))
    assert "- source vb both" in change.difference().lines
    apply(change)
    assert len(bridged.send()) == 10
    assert len(bridged.send(source="vb0", target="va0")) == 0
    assert change.remove() and not change.remove()
    assert bridged.send() == [] and not change.show().mine.exists


def test_each_direction_alone(bridged) -> None:
    for direction, there, back in (("ingress", 10, 0), ("egress", 0, 10)):
        m = manager(bridged, direction, ("va",))
        assert apply(m).sources[0].direction == direction
        assert (len(bridged.send()), len(bridged.send(source="vb0", target="va0"))) == (there, back)
        m.remove()


def two_ends(bed, vendor="tc", **leaf) -> MirrorPlan:
    """va has as fast a NIC as both monitor ports: its directions go to vm and vn."""
    return make_plan(Topology.model_validate(
        {"path_mtu": 1024, "groups": [{"name": "dp", "ranks": [0, 1], "mirror": [0]}], "leaves": [
            {"name": "bridge", "vendor": vendor,
             "ports": [{"port": p, "rank": r, "host": f"h{r}", "speed_gbps": 400} for r, p in enumerate(("va", "vb"))],
             "monitor_ports": [{"port": p, "node": "ck", "speed_gbps": 400, "mtu": 9000} for p in ("vm", "vn")],
             **leaf}]}
    ), direction="both")


def at_both_ends(bed) -> tuple[list[int], list[int]]:
    """Numbers of the frames that came to vm0 and to vn0 while ten went each way."""
    ends = {end: [] for end in ("vm0", "vn0")}
    for source, target, base in (("va0", "vb0", 0), ("vb0", "va0", 100)):
        for end in ends:
            bed.ours(end)
        ends["vm0"] += [base + int.from_bytes(f[14:18], "big") for f in bed.send(source=source, target=target)]
        ends["vn0"] += [base + int.from_bytes(f[14:18], "big") for f in bed.ours("vn0")]
    return ends["vm0"], ends["vn0"]


def test_ingress_and_egress_of_a_port_end_at_two_monitor_ports(bridged) -> None:
    """Together the two captures have each frame of both directions, once. Either session may be removed first, and the
    qdisc that apply added goes with the last."""
    bridged.cable("vn")
    plan = two_ends(bridged, netns=bridged.netns)
    sent, received = list(range(10)), list(range(100, 110))
    for order in (1, -1):
        with mirrored(plan) as states:
            assert [state.active for state in states] == [True, True]
            assert at_both_ends(bridged) == (sent, received)
            managers = [Manager(s, lambda s=s: LocalTransport(s)) for s in plan.sessions]
            assert all(m.difference().commands == () for m in managers)
            for m in managers[::order]:
                assert m.remove()
            assert at_both_ends(bridged) == ([], [])
            assert "clsact" not in bridged.tc("qdisc", "show")


def test_destination_mtu_too_small(bridged) -> None:
    m = manager(bridged)
    apply(m)
    for end in ("vm", "vm0"):
        bridged.ip("link", "set", end, "mtu", "1500")
    assert bridged.send() == []
    mine = m.show().mine
    assert mine.exists and not mine.active and "MTU 1500" in mine.reason and mine.lost["overlimits"] == 20
    with pytest.raises(DeviceError, match=r"MTU 1500.*taken back"):
        apply(m)


def test_destination_down_and_deleted(bridged) -> None:
    m = manager(bridged)
    apply(m)
    bridged.ip("link", "set", "vm", "down")
    bridged.send()
    mine = m.show().mine
    assert not mine.active and "vm is down" in mine.reason and mine.lost["overlimits"] == 20
    bridged.sockets.pop("vm0").close()
    bridged.ip("link", "del", "vm")
    mine = m.show().mine
    assert mine.exists and not mine.active and "deleted" in mine.reason and mine.destination is None
    with pytest.raises(DeviceError, match="refused"):
        apply(m)
    bridged.cable("vm")
    assert apply(m).active
    assert len(bridged.send()) == 20


def test_source_gone(bridged) -> None:
    m = manager(bridged)
    apply(m)
    bridged.ip("link", "del", "vb")
    mine = m.show().mine
    assert not mine.active and "2 of 4 filters are missing: vb ingress, vb egress" in mine.reason
    assert m.remove() and not m.show().mine.exists


def test_somebody_elses_mirror_is_seen_and_survives(bridged) -> None:
    bridged.cable("vo")
    bridged.tc("qdisc", "add", "dev", "va", "clsact")
    other = ("filter", "add", "dev", "va", "ingress", "protocol", "all", "prio", "5", "u32", "match", "u32", "0", "0",
             "action", "mirred", "egress", "mirror", "dev", "vo")
    bridged.tc(*other)
    m = manager(bridged)
    assert apply(m).active
    seen = m.show().others
    assert len(seen) == 1 and seen[0].destination == "vo" and seen[0].ours is False
    m.remove()
    assert "to device vo" in bridged.tc("filter", "show", "dev", "va", "ingress")
    clash = manager(bridged, ports=("vb",))
    clash.session = clash.session.model_copy(update={"destination": "vo"})
    with pytest.raises(PlanError, match="destination vo is used by"):
        clash.difference()


def test_our_place_is_taken(bridged) -> None:
    bridged.tc("qdisc", "add", "dev", "va", "clsact")
    bridged.tc("filter", "add", "dev", "va", "ingress", "protocol", "all", "prio", "7791", "u32", "match", "u32", "0",
               "0", "action", "mirred", "egress", "mirror", "dev", "vb")
    m = manager(bridged)
    with pytest.raises(PlanError, match="somebody else"):
        m.difference()
    with pytest.raises(PlanError, match="not ours"):
        m.remove()


def test_failure_in_the_middle_restores_what_was(bridged) -> None:
    old = manager(bridged, "ingress", ("va",))
    apply(old)
    with pytest.raises(DeviceError, match=r"refused: tc .*vx.*taken back"):
        apply(manager(bridged, "both", ("va", "vx")))
    state = old.show().mine
    assert state.active and [(s.port, s.direction) for s in state.sources] == [("va", "ingress")]
    assert len(bridged.send()) == 10


def test_filters_on_ports_of_an_earlier_plan_are_found(bridged) -> None:
    apply(manager(bridged, ports=("vb",)))
    m = manager(bridged, ports=("va",))
    assert "- source vb both" in m.difference().lines
    apply(m)
    assert [s.port for s in m.show().mine.sources] == ["va"]


FOREIGN = ("protocol", "all", "prio", "5", "u32", "match", "u32", "0", "0", "action", "mirred", "egress", "mirror")


class Killed(BaseException):
    """flowcheck is gone: nothing cleans up."""


def killed_at(m: Manager, number: int) -> Manager:
    """The manager's process dies before the line of that number is run."""
    run, count = m._run, iter(range(10**6))

    def dying(line: str, check: bool = True) -> str:
        if ("add" in line or "del" in line) and next(count) == number:
            raise Killed
        return run(line, check)

    m._run = dying  # type: ignore[method-assign]
    return m


def test_killed_at_every_step_the_next_apply_and_remove_clear_up(bridged) -> None:
    """Even where ports are left with different directions; and no qdisc of ours stays."""
    number = 0
    while True:
        apply(manager(bridged, "ingress", ("va",), classifier="u32"))  # an earlier plan of ours, replaced
        m = manager(bridged, classifier="u32")
        difference = m.difference()
        try:
            killed_at(m, number).apply(difference)
        except Killed:
            after = manager(bridged, classifier="u32")
            assert apply(after).active and after.show().mine.same_as(after.session), number
            for left in (0, 1):  # remove dies too
                with contextlib.suppress(Killed):
                    killed_at(manager(bridged, classifier="u32"), left).remove()
            manager(bridged, classifier="u32").remove()
            assert not after.show().mine.exists
            # between `qdisc add` and the first filter, which carries the mark, nothing says that it is ours
            bare = difference.commands[number - 1].startswith("tc qdisc add")
            assert bridged.tc("qdisc", "show").count("clsact") == bare, difference.commands[number]
            bridged.tc("qdisc", "del", "dev", difference.commands[number - 1].split()[4], "clsact", check=False)
            number += 1
            continue
        break
    assert number >= 7  # a port given up, two qdiscs and four filters added


def test_interrupted_at_every_step_the_session_before_is_back(bridged) -> None:
    """Ctrl-C is heard when a command has been run; the apply takes back what it has typed, qdiscs too."""
    apply(manager(bridged, "ingress", ("va",), classifier="u32"))  # an earlier plan of ours
    before, qdiscs = manager(bridged).show().mine, bridged.tc("qdisc", "show").count("clsact")
    number = 0
    while True:
        m = manager(bridged, classifier="u32")
        difference = m.difference()
        run, left = m._run, iter(range(number, -1, -1))

        def interrupted(line: str, check: bool = True, run=run, left=left) -> str:
            answer = run(line, check)
            if ("add" in line or "del" in line) and next(left, -1) == 0:
                raise KeyboardInterrupt
            return answer

        m._run = interrupted  # type: ignore[method-assign]
        try:
            m.apply(difference)
        except KeyboardInterrupt:
            now = manager(bridged).show().mine
            assert (now.sources, now.destination) == (before.sources, before.destination), number
            assert bridged.tc("qdisc", "show").count("clsact") == qdiscs, number
            number += 1
            continue
        break
    assert number >= 6 and m.show().mine.same_as(m.session)


def test_the_qdisc_goes_if_we_added_it_and_stays_if_not(bridged) -> None:
    bridged.tc("qdisc", "add", "dev", "vb", "clsact")
    m = manager(bridged)
    apply(m)
    change = manager(bridged, "ingress", ("vb",))
    apply(change)
    assert "dev va" not in bridged.tc("qdisc", "show").split("clsact", 1)[1]  # no port of this plan any more
    apply(m)
    assert sorted(m.show().mine.added) == ["va"]
    bridged.tc("filter", "add", "dev", "va", "ingress", *FOREIGN, "dev", "lo")
    m.remove()
    assert bridged.tc("qdisc", "show").count("clsact") == 2  # va's has somebody else's filter now
    bridged.tc("filter", "del", "dev", "va", "ingress")
    bridged.tc("qdisc", "del", "dev", "va", "clsact")
    with pytest.raises(DeviceError, match="taken back"):
        apply(manager(bridged, "both", ("va", "vx")))
    assert bridged.tc("qdisc", "show").count("clsact") == 1


def test_somebodys_ingress_qdisc_is_named_and_survives(bridged) -> None:
    bridged.tc("qdisc", "add", "dev", "va", "ingress")
    with pytest.raises(PlanError, match="va has somebody's ingress qdisc"):
        manager(bridged).difference()
    m = manager(bridged, "ingress", ("va",))  # which holds ingress filters as well
    assert apply(m).active and len(bridged.send()) == 10
    m.remove()
    assert "ingress" in bridged.tc("qdisc", "show", "dev", "va")


def test_interfaces_with_names_that_a_shell_would_run(bridged) -> None:
    """Somebody else's devices are listed too, whatever they are called."""
    for name in ("it's", "x;reboot", "$(id)", "a-b$HOME"):
        bridged.ip("link", "add", "dev", name, "type", "veth")
        bridged.tc("qdisc", "add", "dev", name, "clsact", check=False)
    bridged.tc("filter", "add", "dev", "it's", "ingress", *FOREIGN, "dev", "$(id)")
    m = manager(bridged)
    assert apply(m).active
    assert [(o.sources[0].port, o.destination) for o in m.show().others] == [("it's", "$(id)")]
    assert m.remove()


def test_a_failed_change_puts_a_broken_session_back(bridged) -> None:
    old = manager(bridged)
    apply(old)
    bridged.tc("filter", "del", "dev", "va", "egress", "prio", "7791")  # one filter of four is missing
    before = old.show().mine
    assert not before.active and {(s.port, s.direction) for s in before.sources} == {("va", "ingress"), ("vb", "both")}
    with pytest.raises(DeviceError, match=r"refused: tc .*vx.*the change was taken back"):
        apply(manager(bridged, "both", ("va", "vx")))
    assert old.show().mine.sources == before.sources


def test_mirrored_applies_a_plan_made_in_memory_while_a_block_runs(bridged) -> None:
    topology = Topology.model_validate(
        {"path_mtu": 1024, "groups": [{"name": "dp", "ranks": [0, 1]}], "leaves": [
            {"name": "bridge", "vendor": "tc", "netns": bridged.netns,
             "ports": [{"port": p, "rank": r, "host": f"h{r}", "speed_gbps": 10} for r, p in enumerate(("va", "vb"))],
             "monitor_ports": [{"port": "vm", "node": "ck", "speed_gbps": 100, "mtu": 9000}]}]}
    )
    with pytest.raises(ZeroDivisionError), mirrored(make_plan(topology)) as states:
        assert [state.active for state in states] == [True] and len(bridged.send()) == 20
        raise ZeroDivisionError
    assert bridged.send() == [] and "clsact" not in bridged.tc("qdisc", "show")
