"""The figures of `flowcheck-node --check`: memory, cores, pauses; what is refused and what is only unwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")

from dataplane.live import live_memory
from dataplane.memory import EAL_TABLES_MB
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.check.budget import Budget, ask, budget, pause_ms
from flowcheck.node.ports.captures import PlannedCapture, plan_captures
from flowcheck.node.versions.shadow import OPEN

from .budget_scene import GB, ROOMY, config, made

# -- pauses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("packets", "path_mtu", "mbps", "ms"), [
    (16384, 4096, 100_000, 5.476), (16384, 1024, 100_000, 1.450), (16384, 0, 100_000, 1.450),
    (1 << 20, 4096, 400_000, 87.6), (64, 1024, 10, 56.6),
])
def test_a_ring_bears_what_it_has_room_for(packets: int, path_mtu: int, mbps: int, ms: float) -> None:
    """(path MTU + 82 bytes of headers, checksums and gap) x 8 bits."""
    assert pause_ms(packets, path_mtu, mbps) == pytest.approx(ms, rel=2e-3)


def test_the_speed_of_each_link_counts_and_one_that_nobody_says_is_an_example() -> None:
    facts = replace(ROOMY, speeds={"ring": 10_000, "null": -1})
    fast, unknown = made(facts, {"device": "ring", "path_mtu": 4096}, {"device": "null", "path_mtu": 4096}).captures
    assert (fast.mbps, unknown.mbps) == (10_000, -1)
    assert fast.pause_ms == pytest.approx(54.8, rel=1e-2) and unknown.pause_ms == pytest.approx(5.48, rel=1e-2)


def test_a_speed_that_is_not_one_is_not_known() -> None:
    """As of an interface that is down."""
    for speed, shown in ((0, -1), (-1, -1), (1, 1)):
        (one,) = made(replace(ROOMY, speeds={"ring": speed}), {"device": "ring"}).captures
        assert one.mbps == shown


def test_the_figures_of_a_capture_are_its_own() -> None:
    """Buffers in huge pages take what whole pages take; of each queue."""
    engines = ["dma_skeleton", "dma_skeleton1"]
    table = {"device": "ring", "path_mtu": 4096, "queues": 2, "dump": "dma", "engines": engines}
    plan = plan_captures(config(table), Path("/none such"))[0].live.queue_plan()
    assert plan.huge_pool_bytes != plan.pool_bytes
    for huge, buffers in ((False, plan.pool_bytes), (True, plan.huge_pool_bytes)):
        (one,) = made(replace(ROOMY, huge_free=90 * GB, huge_by_node={1: 90 * GB}), {**table, "huge": huge}, at=(1,),
                      ).captures
        assert (one.device, one.node, one.dump, one.engines) == ("ring", 1, "dma", ("dma_skeleton", "dma_skeleton1"))
        assert (one.queues, one.ring_packets) == (2, 16384)
        assert (one.buffers, one.rings, one.kernel) == (2 * buffers, 2 * plan.ring_bytes, 2 * plan.kernel_bytes)


def test_what_is_left_is_ordinary_memory_and_huge_pages_that_captures_do_not_take() -> None:
    """Said to the megabyte, where a bound that was not set is larger than that."""
    def left(huge: bool, available: int, free: int) -> tuple[int, Budget]:
        facts = replace(ROOMY, available=available, huge_free=free, huge_by_node={0: free})
        found = made(facts, {"device": "ring", "huge": huge}, at=(0,))
        (note,) = [note for note in found.notes if note.startswith("replica.memory_mb is not set")]
        return int(note.split(" MB are left")[0].rsplit(" ", 1)[1]), found

    mb, found = left(huge=False, available=9 * GB, free=GB)
    assert mb == (9 * GB - found.dpdk - found.inboxes + GB) >> 20 and found.dpdk > 0
    mb, found = left(huge=True, available=9 * GB, free=2 * GB)
    assert mb == (9 * GB + 2 * GB - found.dpdk - found.inboxes) >> 20
    mb, found = left(huge=True, available=9 * GB, free=0)
    assert mb == (9 << 10) - (found.inboxes >> 20), "huge pages that are not there take nothing from ordinary memory"


def test_a_bound_that_was_not_set_and_fits_is_no_note() -> None:
    assert not [note for note in made(ROOMY, {"device": "ring"}).notes if "memory_mb" in note]
    notes = made(replace(ROOMY, available=9 * GB), {"device": "ring"}, replica={"memory_mb": 100}).notes
    assert not [note for note in notes if "memory_mb" in note]


# -- memory ----------------------------------------------------------------------------------------------------


def test_memory_is_that_of_all_captures_together() -> None:
    tables = {"device": "ring", "path_mtu": 4096, "queues": 2}, {"device": "null", "path_mtu": 1024, "ring_size": 1024}
    both, first, second = made(ROOMY, *tables), made(ROOMY, tables[0]), made(ROOMY, tables[1])
    assert not both.huge and both.kernel == 0 and both.ordinary == both.dpdk + both.inboxes
    alone = EAL_TABLES_MB << 20
    assert abs(both.dpdk - (first.dpdk + second.dpdk - alone)) <= 1 << 20
    assert [one.rings for one in both.captures] == [first.captures[0].rings, second.captures[0].rings]
    assert both.captures[0].rings >= 2 * 16384 * 4376 and both.captures[1].rings >= 1024 * (1152 + 24)
    assert sum(one.rings + one.buffers for one in both.captures) <= both.dpdk - alone
    assert both.problems == ()


def test_huge_pages_are_taken_if_there_are_enough_and_the_settings_leave_it_open() -> None:
    table = {"device": "ring", "path_mtu": 1024}
    need = live_memory(one.live for one in plan_captures(config(table))).huge_mb << 20
    enough, short = replace(ROOMY, huge_free=need), replace(ROOMY, huge_free=need - 1)
    found = made(enough, table)
    assert found.huge and found.ordinary == found.inboxes and found.dpdk == need
    assert not made(short, table).huge and "too slow for line rate" in made(short, table).notes[0]
    assert not made(enough, table | {"huge": False}).huge
    assert made(enough, table | {"huge": True}).problems == ()
    (problem,) = made(short, table | {"huge": True}).problems
    assert isinstance(problem, EnvironmentProblem) and f"{need >> 20} MB of huge pages are needed" in problem.what


def test_huge_pages_have_to_be_where_the_devices_are() -> None:
    tables = {"device": "ring", "huge": True}, {"device": "null"}
    facts = replace(ROOMY, huge_free=8 * GB, huge_by_node={0: 8 * GB, 1: 0})
    assert made(facts, *tables, at=(0, -1)).problems == ()
    (problem,) = made(facts, *tables, at=(0, 1)).problems
    assert "are needed on NUMA node 1, 0 MB are free" in problem.what


def test_more_memory_than_there_is_is_refused() -> None:
    table = {"device": "ring", "path_mtu": 4096, "ring_size": 1 << 20}
    need = made(ROOMY, table).ordinary
    bound = {"replica": {"memory_mb": 1}}
    assert made(replace(ROOMY, available=need + (1 << 20)), table, **bound).problems == ()
    (problem,) = made(replace(ROOMY, available=need - 1), table, **bound).problems
    assert isinstance(problem, EnvironmentProblem) and problem.where == "capture" and "ordinary memory" in problem.what


def test_a_bound_of_replicas_that_was_set_has_to_fit_and_one_that_was_not_is_a_note() -> None:
    facts, table = replace(ROOMY, available=32 * GB), {"device": "ring", "path_mtu": 1024}
    fits = made(facts, table, groups=2, replica={"memory_mb": 15000})
    assert (fits.replicas, fits.problems) == (30000 << 20, ())
    (problem,) = made(facts, table, groups=2, replica={"memory_mb": 16384}).problems
    assert isinstance(problem, UserError) and problem.where == "replica.memory_mb"
    assert "2 groups of 16384 MB may take 32768 MB" in problem.what
    most = int(problem.remedy.removeprefix("at most "))
    assert made(facts, table, groups=2, replica={"memory_mb": most}).problems == ()
    assert made(facts, table, groups=2, replica={"memory_mb": most + 1}).problems
    unset = made(facts, table)
    assert unset.problems == ()
    assert any("replica.memory_mb is not set: a job may take 65536 MB" in note for note in unset.notes)


def test_answers_of_peers_and_to_them_take_memory() -> None:
    table = {"device": "ring", "path_mtu": 4096, "ring_size": 1 << 20}
    alone, two = made(ROOMY, table), made(ROOMY, table, groups=3, replica={"peers": ["a:1", "b:1"]})
    assert (alone.peers, two.peers) == (0, 2 * 3 * 2 * (64 << 20))
    assert (alone.inboxes, two.inboxes) == (512 << 20, 3 * 512 << 20)
    assert two.ordinary - two.inboxes == alone.ordinary - alone.inboxes + two.peers
    (problem,) = made(replace(ROOMY, available=two.ordinary - 1), table, groups=3,
                      replica={"peers": ["a:1", "b:1"], "memory_mb": 1}).problems
    assert problem.where == "capture" and problem.what.startswith("captures, peers and inboxes take ")
    assert [one.count for one in two.threads if one.name == "ask a peer, of each group"] == [6]
    assert not any("peer" in one.name for one in alone.threads)
    taking = made(ROOMY, table, groups=3, replica={"peer_versions": ["a:1", "b:1"]})
    assert [one.count for one in taking.threads if one.name == "take a peer's version, of each group"] == [3]


def test_ranges_that_slots_do_not_suffice_for_are_said() -> None:
    """All ranks would wait for a whole state, and nobody asked for that."""
    table = {"device": "ring", "path_mtu": 4096}
    for replica, said in (({"slots": 2}, True), ({"slots": 3}, False), ({"slots": 2, "resync": "state"}, False)):
        notes = made(ROOMY, table, replica=replica).notes
        assert any(note.startswith("replica.slots: with 2 all state") for note in notes) == said


# -- cores -----------------------------------------------------------------------------------------------------


def test_which_thread_is_pinned_where_and_what_is_left() -> None:
    found = made(ROOMY, {"device": "ring", "queues": 2, "cores": [5, 2], "place_cores": [6, 1]},
                 {"device": "null"}, groups=3, replica={"threads": 2})
    assert [(one.name, one.count, one.core) for one in found.threads] == [
        ("receive from ring queue 0", 1, 5), ("receive from ring queue 1", 1, 2), ("receive from null", 1, None),
        ("place from ring queue 0, for all groups", 1, 6), ("place from ring queue 1, for all groups", 1, 1),
        ("place from null, for all groups", 1, None), ("follow a group: judge, publish", 3, None),
        ("updater's workers, of each group", 2, None),
        ("main and control", 2, None),
    ]
    assert found.left == (0, 3, 4, 7)
    told = made(ROOMY, {"device": "null"}, common={"nodes": ["a:1", "b:1"]}).threads
    assert [one.count for one in told if one.name == "tell another node of the job"] == [2]


def test_cores_that_do_not_exist_are_refused_with_their_table() -> None:
    (problem,) = made(ROOMY, {"device": "null"}, {"device": "ring", "queues": 3, "cores": [1, 8, 9]}).problems
    assert isinstance(problem, EnvironmentProblem) and problem.where == "capture[1].cores"
    assert problem.what == "this machine has no core 8, 9"
    (problem,) = made(ROOMY, {"device": "ring", "queues": 2, "cores": [0, 1], "place_cores": [7, 8]}).problems
    assert isinstance(problem, EnvironmentProblem) and problem.where == "capture.place_cores"
    assert problem.what == "this machine has no core 8"


def test_a_core_for_everybody_and_a_near_one() -> None:
    facts = replace(ROOMY, cpus=frozenset({0, 1}), node_cpus={0: frozenset({0}), 1: frozenset({1})})
    found = made(facts, {"device": "ring", "queues": 2, "cores": [0, 1]}, at=(1,))
    assert found.left == () and any("have none for themselves" in note for note in found.notes)
    assert "capture.cores: 0 on another NUMA node than ring (node 1)" in found.notes
    found = made(facts, {"device": "ring", "cores": [1], "place_cores": [0]}, at=(1,))
    assert found.left == () and "capture.place_cores: 0 on another NUMA node than ring (node 1)" in found.notes


# -- engines and queues ----------------------------------------------------------------------------------------


def test_an_engine_that_cannot_reach_ordinary_memory_is_refused() -> None:
    """Whether it exists was asked before: a virtual one takes its place until then."""
    settings = config({"device": "ring", "dump": "dma", "engines": ["dma_skeleton"]})
    (planned,) = plan_captures(settings, Path("/none such"))
    hardware = replace(planned, live=replace(planned.live, engines=("0000:80:01.0",)), node=0)
    (problem,) = budget(settings, [hardware], ROOMY).problems
    assert problem.where == "capture.engines" and "reaches huge pages only" in problem.what
    huge = replace(ROOMY, huge_free=8 * GB, huge_by_node={0: 8 * GB}, engine_nodes={"0000:80:01.0": 1})
    found = budget(settings, [hardware], huge)
    assert found.problems == ()
    assert "capture.engines: 0000:80:01.0 on another NUMA node than ring (node 0)" in found.notes
    assert budget(settings, [planned], ROOMY).problems == ()  # a thread that copies reaches everything


def test_more_queues_than_the_interface_has() -> None:
    table = {"device": "ring", "queues": 3}
    assert made(replace(ROOMY, rx_queues={"ring": 3}), table).problems == ()
    (problem,) = made(replace(ROOMY, rx_queues={"ring": 2}), table).problems
    assert (problem.where, problem.what) == ("capture.queues", "3 queues, ring has 2")


def test_a_ring_that_holds_no_iteration_is_a_note() -> None:
    settings = config({"device": "ring", "dump": "hold", "path_mtu": 1024})
    (planned,) = plan_captures(settings)
    short = replace(planned, live=replace(planned.live, ring_size=64, iteration_bytes=1 << 20))
    assert any("the ring holds 64" in note for note in budget(settings, [short], ROOMY).notes)


# -- the machine -----------------------------------------------------------------------------------------------


def test_a_machine_is_asked_by_its_files(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    write("sys/devices/system/cpu/online", "0-2,8\n")
    write("sys/bus/pci/devices/0000:81:00.0/numa_node", "1\n")
    write("sys/bus/pci/devices/0000:81:00.0/net/eth9/speed", "100000\n")
    write("sys/devices/system/node/node1/cpulist", "8\n")
    for folder, pages in (("sys/kernel/mm", 5), ("sys/devices/system/node/node1", 3)):
        write(f"{folder}/hugepages/hugepages-2048kB/free_hugepages", f"{pages}\n")
    settings = config({"device": "0000:81:00.0"}, {"device": "ring"})
    facts = ask(settings, plan_captures(settings, tmp_path), tmp_path)
    assert (facts.available, facts.huge_free, facts.huge_by_node) == (4 << 20, 10 << 20, {1: 6 << 20})
    assert facts.cpus == {0, 1, 2, 8} and facts.node_cpus == {1: frozenset({8})}
    assert facts.speeds == {"0000:81:00.0": 100_000, "ring": -1} and set(facts.rx_queues.values()) == {-1}


def test_this_machine_is_asked() -> None:
    settings = config({"device": "af_packet:lo"})
    planned: list[PlannedCapture] = plan_captures(settings)
    facts = ask(settings, planned)
    assert 0 < facts.available < 1 << 50 and facts.cpus
    assert facts.speeds == {"af_packet:lo": -1}  # its kernel says nothing
    assert budget(settings, planned, facts).kernel > 0


@pytest.mark.parametrize(("directory", "noted"), [("/dev/shm", False), ("/proc", True)])  # no memory of ours
def test_replicas_that_would_not_lie_in_memory_are_a_note(directory: str, noted: bool) -> None:
    settings = config({"device": "ring"}, replica={"directory": directory})
    planned = plan_captures(settings)
    assert any(directory in note for note in budget(settings, planned, ask(settings, planned)).notes) == noted


@pytest.mark.parametrize(("api", "noted"), [({}, False), ({"shadow": 0}, True), ({"insecure": True}, True),
                                           ({"shadow": 1}, False)])
def test_no_shadow_mode_is_named_as_what_it_is(api: dict[str, Any], noted: bool) -> None:
    tables = {"api": {"listen": "127.0.0.1:0"} | api} if api else {}
    assert (OPEN in made(ROOMY, {"device": "ring"}, **tables).notes) == noted


def test_secrets_that_other_users_may_read_are_named(tmp_path: Path) -> None:
    for name, mode in (("all", 0o644), ("group", 0o640), ("own", 0o600), ("key", 0o604)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    tokens = {"trainer": str(tmp_path / "all"), "peer": str(tmp_path / "all"), "reader": str(tmp_path / "group"),
              "operator": str(tmp_path / "own")}
    notes = made(ROOMY, {"device": "ring"}, tokens=tokens,
                 tls={"cert": str(tmp_path / "all"), "key": str(tmp_path / "key")}).notes
    named = [note.partition(":")[0] for note in notes if "may read this secret" in note]
    assert named == [str(tmp_path / name) for name in ("all", "group", "key")]
