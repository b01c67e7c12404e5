"""What `flowcheck-node --check` says, word for word; what it asks a machine of two NUMA nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")

from dataplane.live import live_memory
from flowcheck.errors import EnvironmentProblem, FlowcheckError, UserError
from flowcheck.node.check.budget import ask, budget, pause_ms
from flowcheck.node.ports.captures import plan_captures

from .budget_scene import GB, ROOMY, config, made

UNSET = ("replica.memory_mb is not set: a job may take 65536 MB, and {} MB are left. A smaller bound refuses such a job"
         " before it begins")
SLOW = "packet memory without huge pages: too slow for line rate"


def only(problems: tuple[FlowcheckError, ...]) -> tuple[type, str, str, str]:
    (problem,) = problems
    return type(problem), problem.what, problem.where, problem.remedy


# -- notes ---------------------------------------------------------------------------------------------------------


def test_nothing_is_said_of_what_is_as_it_should_be() -> None:
    facts = replace(ROOMY, huge_free=8 * GB, huge_by_node={1: 8 * GB}, node_cpus={1: frozenset({2, 3})},
                    engine_nodes={"dma_skeleton": -1})
    found = made(facts, {"device": "ring", "cores": [2], "place_cores": [3], "dump": "dma",
                         "engines": ["dma_skeleton"]}, at=(1,))
    assert (found.notes, found.problems, found.huge) == ((), (), True)


def test_all_notes_at_once_in_their_order() -> None:
    facts = replace(ROOMY, available=9 * GB, cpus=frozenset({0, 1, 2, 3}), node_cpus={1: frozenset({3})})
    found = made(facts, {"device": "ring", "queues": 2, "cores": [0, 1], "place_cores": [2, 3]}, at=(1,),
                 replica={"slots": 2})
    left = (9 * GB - found.ordinary) >> 20
    assert found.notes == (
        SLOW, UNSET.format(left),
        "replica.slots: with 2 all state is asked for at once, and all ranks wait for it. Ranges, for which nobody"
        " waits, take 3",
        "a thread is pinned to each core: groups, updates and the kernel have none for themselves",
        "capture.cores: 0, 1 on another NUMA node than ring (node 1)",
        "capture.place_cores: 2 on another NUMA node than ring (node 1)",
    )


def test_what_is_far_is_named_with_its_capture() -> None:
    """Of a device whose node is not known, and of an engine that has none, nothing is far."""
    settings = config({"device": "null"}, {"device": "ring", "dump": "dma", "queues": 2, "cores": [1, 2],
                                           "engines": ["dma_skeleton", "dma_skeleton"]})
    planned = plan_captures(settings, Path("/none such"))
    engines = ("0000:80:01.0", "0000:80:01.1")
    facts = replace(ROOMY, huge_free=8 * GB, huge_by_node={0: 8 * GB}, node_cpus={0: frozenset({7})},
                    engine_nodes=dict.fromkeys(engines, 1))
    for node, nodes, far in ((0, (1, 1), True), (-1, (1, 1), False), (0, (-1, -1), False), (0, (0, 0), False)):
        there = [planned[0], replace(planned[1], live=replace(planned[1].live, engines=engines), node=node)]
        notes = budget(settings, there, replace(facts, engine_nodes=dict(zip(engines, nodes, strict=True)))).notes
        cores = ("capture[1].cores: 1, 2 on another NUMA node than ring (node 0)",) if node == 0 else ()
        assert notes == cores + (
            ("capture[1].engines: 0000:80:01.0, 0000:80:01.1 on another NUMA node than ring (node 0)",) if far else ())


def test_an_engine_of_which_the_machine_says_nothing_is_not_far() -> None:
    found = made(replace(ROOMY, huge_free=8 * GB, huge_by_node={0: 8 * GB}),
                 {"device": "ring", "dump": "dma", "engines": ["dma_skeleton"]}, at=(0,))
    assert found.notes == ()


# -- problems ------------------------------------------------------------------------------------------------------


def test_a_bound_that_does_not_fit_is_a_problem_or_a_note_and_never_both() -> None:
    """To the megabyte; of several groups together."""
    table, facts = {"device": "ring", "huge": False}, replace(ROOMY, available=9 * GB)
    for groups in (2, 1):
        left = (9 * GB - made(facts, table, groups=groups).ordinary) >> 20
        said = {1: f"a job may take {left + 1} MB",
                2: f"2 groups of {left // 2 + 1} MB may take {2 * (left // 2 + 1)} MB"}[groups]
        found = made(facts, table, groups=groups, replica={"memory_mb": left // groups + 1})
        assert only(found.problems) == (UserError, f"{said}, and {left} MB are left beside the captures",
                                        "replica.memory_mb", f"at most {left // groups}")
        assert found.notes == (SLOW,)
        fits = made(facts, table, groups=groups, replica={"memory_mb": left // groups})
        assert (fits.problems, fits.notes) == ((), (SLOW,))
    assert made(facts, table).notes == (SLOW, UNSET.format(left)) and made(facts, table).problems == ()


@pytest.mark.parametrize(("protect", "shares"), [
    ({"copies": ["10.0.0.3:7071"]}, 1), ({"parity": "2+1", "group": ["127.0.0.1:4", "h:5", "h:6"]}, 1),
    ({"parity": "2+1", "group": ["127.0.0.1:4", "h:5", "h:6"], "copies": ["h:5"]}, 2),
])
def test_copies_and_parity_of_a_node_with_captures_are_counted(protect: dict[str, Any], shares: int) -> None:
    """Beside replicas that have a bound; more than there is is refused, or noted where no bound is given."""
    table, facts = {"device": "ring", "huge": False}, replace(ROOMY, available=9 * GB)
    others = {"api": {"listen": "127.0.0.1:4"}, "replica": {"memory_mb": 1024}}
    left = ((9 * GB - made(facts, table).ordinary) >> 20) - 1024
    fits = made(facts, table, protect=protect | {"memory_mb": left // shares}, **others)
    assert fits.problems == () and fits.copies == (left // shares * shares) << 20
    whose = {"protect.copies": protect["copies"]} if "copies" in protect else {"protect.group": protect["group"]}
    assert whose.items() <= dict(fits.switches).items()
    found = made(facts, table, protect=protect | {"memory_mb": left // shares + 1}, **others)
    _, _, where, remedy = only(found.problems)
    assert where == "protect.memory_mb" and str(left // shares) in remedy
    unset = made(facts, table, protect=protect, **others)
    assert unset.problems == () and any("protect.memory_mb" in note for note in unset.notes)


def test_memory_that_captures_lack_is_said_alone() -> None:
    """Whatever replicas would take."""
    table = {"device": "ring", "path_mtu": 4096, "ring_size": 1 << 20, "huge": False}
    need = made(ROOMY, table).ordinary
    assert made(replace(ROOMY, available=need), table).problems == ()
    found = made(replace(ROOMY, available=need - (1 << 20)), table, replica={"memory_mb": 1 << 20})
    assert only(found.problems) == (
        EnvironmentProblem, f"captures and inboxes take {need >> 20} MB of ordinary memory, {(need >> 20) - 1} MB are"
        " available",
        "capture", "smaller rings, fewer queues or less as control.inbox_mb, or more memory")


def test_huge_pages_that_are_missing_are_counted() -> None:
    table = {"device": "ring", "path_mtu": 1024, "huge": True}
    need = live_memory(one.live for one in plan_captures(config(table))).huge_mb
    found = made(replace(ROOMY, huge_free=3 << 20), table)
    pages = f"{(need + 1) // 2} pages of 2 MB (flowcheck doctor says how), or smaller rings"
    assert only(found.problems) == (
        EnvironmentProblem, f"{need} MB of huge pages are needed, 3 MB are free", "capture", pages)
    there = replace(ROOMY, huge_free=8 * GB, huge_by_node={0: 8 * GB, 1: need - 1 << 20})
    assert only(made(there, table, at=(1,)).problems) == (
        EnvironmentProblem, f"{need} MB of huge pages are needed on NUMA node 1, {need - 1} MB are free", "capture",
        pages)
    assert made(replace(there, huge_by_node={1: need << 20}), table, at=(1,)).problems == ()
    unknown = only(made(replace(there, huge_by_node={}), table, at=(1,)).problems)
    assert unknown[1] == f"{need} MB of huge pages are needed on NUMA node 1, 0 MB are free"


def test_what_cores_queues_and_engines_lack() -> None:
    facts = replace(ROOMY, rx_queues={"ring": 1})
    found = made(facts, {"device": "ring", "queues": 2, "cores": [8, 9]})
    assert [(one.what, one.where, one.remedy) for one in found.problems] == [
        ("this machine has no core 8, 9", "capture.cores", "cores that `lscpu -e` lists as online"),
        ("2 queues, ring has 1", "capture.queues", "fewer queues")]
    assert made(replace(ROOMY, rx_queues={"ring": -1}), {"device": "ring", "queues": 2}).problems == ()
    settings = config({"device": "ring", "dump": "dma", "engines": ["dma_skeleton"]})
    (planned,) = plan_captures(settings, Path("/none such"))
    blind = replace(planned, live=replace(planned.live, engines=("dma_skeleton", "0000:80:01.0")))
    assert only(budget(settings, [blind], ROOMY).problems) == (
        EnvironmentProblem,
        "DMA engine 0000:80:01.0 reaches huge pages only, and packet memory would lie in ordinary memory",
        "capture.engines", 'huge pages (flowcheck doctor), or dump = "copy"')


# -- figures -------------------------------------------------------------------------------------------------------


def test_the_slowest_link_is_one_that_is_known() -> None:
    for mbps, speed in ((1, 1), (2, 2), (0, 100_000), (-1, 100_000), (None, 100_000)):
        facts = replace(ROOMY, speeds={} if mbps is None else {"ring": mbps})
        (one,) = made(facts, {"device": "ring", "path_mtu": 1024}).captures
        assert one.pause_ms == pause_ms(one.ring_packets, 1024, speed)


def test_cores_of_placing_are_pinned_too() -> None:
    found = made(ROOMY, {"device": "ring", "cores": [6], "place_cores": [1]}, {"device": "null", "place_cores": [3]})
    assert found.left == (0, 2, 4, 5, 7)


# -- the machine ---------------------------------------------------------------------------------------------------


def test_both_numa_nodes_are_asked_and_each_device(tmp_path: Path) -> None:
    """Also node 0; a device whose node is not known asks none."""
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    for node, pages, cpus in ((0, 1, "0-3"), (1, 2, "4,6"), (2, 4, "7")):
        folder = f"sys/devices/system/node/node{node}"
        write(f"{folder}/cpulist", f"{cpus}\n")
        for kb in (2048, 1048576):
            write(f"{folder}/hugepages/hugepages-{kb}kB/free_hugepages", f"{pages}\n")
    for queue in range(3):
        write(f"sys/class/net/eth9/queues/rx-{queue}/x", "")
    write("sys/class/net/eth9/speed", "25000")
    for name, node in (("0000:80:01.0", 1), ("0000:00:01.0", 0)):
        for file, text in (("numa_node", str(node)), ("device", "0x0b00"), ("vendor", "0x8086")):
            write(f"sys/bus/pci/devices/{name}/{file}", text)
    planned: list[Any] = [SimpleNamespace(node=node, device=device) for node, device in
                          ((0, "af_xdp:eth9"), (1, "af_packet:eth8"), (-1, "null"))]
    facts = ask(config({"device": "null"}), planned, tmp_path)
    assert facts.huge_by_node == {0: (2048 + 1048576) << 10, 1: 2 * (2048 + 1048576) << 10}
    assert facts.node_cpus == {0: frozenset({0, 1, 2, 3}), 1: frozenset({4, 6})}
    assert facts.rx_queues == {"af_xdp:eth9": 3, "af_packet:eth8": -1, "null": -1}
    assert facts.speeds == {"af_xdp:eth9": 25000, "af_packet:eth8": -1, "null": -1}
    assert facts.engine_nodes == {"0000:80:01.0": 1, "0000:00:01.0": 0}
    assert (facts.cpus, facts.available, facts.huge_free) == (frozenset({0}), 0, 0), "what is not there is least"
