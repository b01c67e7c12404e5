"""One node process: what starts in which order, which group is made or refused, and how it ends.

The capture is a ring in memory and the groups only note what happens to them; control port, placing threads and
settings are real.
test_cli_command.py has the command itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")

from dataplane.pydpdk.errors import DpdkError
from flowcheck.ask.client import reader_key
from flowcheck.control.protocol import Link, RecordsError, Refused, Wanted, greet
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node import children, service
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.ports import open_captures
from flowcheck.node.status.board import Glance

from .node_scene import NotedGroup, World, put_in

TOKEN = "a token that only tests have"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return put_in(World(), monkeypatch)


def settings(folder: Path, **parts: dict[str, Any] | Any) -> dict[str, Any]:
    (folder / "token").write_text(TOKEN)
    data: dict[str, Any] = {
        "control": {"listen": "127.0.0.1:0", "token_file": str(folder / "token")},
        "capture": {"device": "af_packet:lo", "huge": False},
        "replica": {"directory": str(folder)},
    }
    for name, part in parts.items():
        data[name] = data.get(name, {}) | part if isinstance(part, dict) else part
    return data


Begin = Callable[..., service.Node]


@pytest.fixture
def begin(world: World, tmp_path: Path) -> Iterator[Begin]:
    """begin(**settings) -> a node that is open until the test ends."""
    made: list[service.Node] = []

    def start(**parts: Any) -> service.Node:
        made.append(service.Node(NodeConfig.model_validate(settings(tmp_path, **parts)), world.say))  # type: ignore
        return made[-1]

    yield start
    for node in made:
        node.close()


# -- start and end ---------------------------------------------------------------------------------------------


def test_order_of_start_and_end(begin: Begin, world: World, tmp_path: Path) -> None:
    node = begin(output={"keep_hashes": str(tmp_path / "hashes")})
    assert world.done == ["open eal", "open capture"]  # packets that nobody reads would only fill the ring
    assert node.groups.intake_of("a") is world.groups[0]
    assert world.done[2:] == ["start capture", "start group 'a'"]
    host, _, port = node.control.address.rpartition(":")
    world.port = (host, int(port))
    with node as same:
        assert same is node
    assert world.done[4:] == ["stop group 'a'", "stop capture", "say capture", "close capture", "close eal"]
    assert world.said == [("capture", {"text": "3 arrived"})]
    assert world.groups[0].given[-1]._file.closed  # the hashes
    node.close()  # again, to no effect
    assert world.done[-1] == "close eal" and world.done.count("close eal") == 1


def test_a_checkpoint_that_is_being_written_is_waited_for(begin: Begin, world: World, tmp_path: Path) -> None:
    node = begin()
    node.groups.intake_of("a")
    *_, say, writer, _ = world.groups[0].given
    say("end", name="a")
    assert world.said[-1] == ("end", {"name": "a"})
    stopped = threading.Event()
    world.groups[0].stop = stopped.set

    def write(*_: Any, **__: Any) -> Path:
        assert stopped.wait(10)
        return tmp_path / "step-4"

    replica: Any = SimpleNamespace(
        step=4, refused=0, unproven=[], write=write, pinned=lambda: contextlib.nullcontext(SimpleNamespace(step=4))
    )
    writer.write("a", replica, tmp_path, "verified")
    node.close()
    assert ("written", {"name": "a", "step": 4, "path": str(tmp_path / "step-4")}) in world.said


def test_no_hashes_unless_they_are_asked_for(begin: Begin, world: World) -> None:
    begin().groups.intake_of("")
    assert world.groups[0].given[-1] is None


def test_the_capture_is_as_the_settings_say(begin: Begin, world: World) -> None:
    begin(capture={"path_mtu": 4096, "queues": 2, "ring_size": 256, "cores": (0, 1), "huge": True})
    live = world.live
    assert (live.device, live.path_mtu, live.queues) == ("af_packet:lo", 4096, 2)
    assert (live.ring_size, live.cores) == (256, (0, 1))
    assert world.huge is True


def test_the_control_port_is_as_the_settings_say(begin: Begin) -> None:
    node = begin(control={"strangers_per_address": 1})
    host, _, port = node.control.address.rpartition(":")
    assert host == "127.0.0.1"
    address = (host, int(port))
    with socket.create_connection(address, 10) as first, socket.create_connection(address, 10) as second:
        assert second.recv(4) == b"FCR1"
        try:
            while first.recv(4096):
                pass  # to its end: it had to go for the second one
        except ConnectionResetError:
            pass


def test_a_trainer_with_the_settings_token_reaches_the_group_that_it_names(begin: Begin, world: World) -> None:
    host, _, port = begin().control.address.rpartition(":")
    for token, told in (
        (b"a token that only tests have", "('run', 3, 4) has come to group 'main'"),
        (b"another token of the tests", "refused: the token is wrong"),
    ):
        link = Link(socket.create_connection((host, int(port)), 10))
        try:
            greet(link, token, run_id="run", epoch=3, rank=0, ranks=4, group="main")
            takes = Wanted(["user", "userhead", "notice"], "")
            assert [link.receive(wait=10)[0] for _ in range(2)] == [takes, Refused(told)]
        except RecordsError as error:
            assert error.what.startswith(told)
        finally:
            link.close()
    assert [group.name for group in world.groups] == ["main"]
    until(lambda: len(world.said) == 2)  # it is told before it is said
    assert [fields["why"] for event, fields in world.said] == [
        "('run', 3, 4) has come to group 'main'", "the token is wrong",
    ]


@pytest.mark.parametrize("directory", ["none such", "token"])
def test_a_replica_directory_that_is_not_one_is_found_before_dpdk_starts(
    begin: Begin, world: World, tmp_path: Path, directory: str
) -> None:
    with pytest.raises(EnvironmentProblem, match="replica files cannot be made there") as refused:
        begin(replica={"directory": str(tmp_path / directory)})
    assert refused.value.where == f"replica.directory {tmp_path / directory}"
    assert world.done == []


@pytest.mark.parametrize(("key", "value"), [
    ("directory", "file/out"), ("keep_hashes", "file/hashes"), ("status_file", "file/status"),
    ("keep_hashes", "."), ("status_file", "."), ("directory", "/proc/out"), ("status_file", "/proc/none/status"),
])
def test_a_place_that_cannot_be_written_is_found_before_dpdk_starts(
    begin: Begin, world: World, tmp_path: Path, key: str, value: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem) as refused:
        begin(output={"every": 10, key: str(tmp_path / value)})
    assert f"output.{key}" in refused.value.remedy and "--out" not in refused.value.message()
    assert world.done == []


def test_places_that_can_be_written_are_made_and_left_empty(begin: Begin, tmp_path: Path) -> None:
    begin(output={"every": 10, "directory": str(tmp_path / "a" / "out"), "status_file": str(tmp_path / "b" / "s")})
    assert list((tmp_path / "a" / "out").iterdir()) == list((tmp_path / "b").iterdir()) == []


def test_a_directory_for_checkpoints_is_not_made_where_none_are_written(begin: Begin, tmp_path: Path) -> None:
    begin(output={"directory": str(tmp_path / "out")})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", [os.W_OK, os.X_OK])
def test_a_replica_directory_needs_both_rights(
    begin: Begin, world: World, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """For root every directory has both: what the system would say of another user is said here."""
    monkeypatch.setattr(os, "access", lambda path, wanted: wanted & ~mode == 0)
    with pytest.raises(EnvironmentProblem, match="replica files cannot be made there"):
        begin()
    assert world.done == []


def test_a_token_that_is_not_one_is_found_before_dpdk_starts(begin: Begin, world: World, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        begin(control={"token_file": str(tmp_path / "none such")})
    assert world.done == []


def test_a_start_that_fails_takes_down_what_has_started(begin: Begin, world: World, tmp_path: Path) -> None:
    (tmp_path / "flowcheck-node-a-1.replica").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(EnvironmentProblem, match="cannot listen"):
            begin(control={"listen": f"127.0.0.1:{taken.getsockname()[1]}"})
    assert world.done == [
        "open eal", "open capture", "start capture", "start group 'a'",
        "stop group 'a'", "stop capture", "say capture", "close capture", "close eal",
    ]


# -- groups ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a", "A_b.9", "x" * 32])
def test_a_group_is_made_when_it_is_asked_for_and_found_again(begin: Begin, world: World, name: str) -> None:
    node = begin()
    group = node.groups.intake_of(name)
    assert node.groups.intake_of(name) is group and [one.name for one in world.groups] == [name]
    assert world.groups[0].given[0] is node.config
    assert world.done.count("start capture") == 1


def test_what_groups_have_is_told_to_other_nodes_and_theirs_is_heard(begin: Begin, world: World) -> None:
    other = begin()
    host, _, port = other.control.address.rpartition(":")
    node = begin(name="another", common={"nodes": [f"{host}:{port}"], "seconds": 7.0})
    node.groups.intake_of("a"), other.groups.intake_of("b")
    assert (node.groups._groups["a"].common, other.groups._groups["b"].common) == (node._common, other._common)  # type: ignore
    other._common.order("b", ("run", 0), (4, 5))
    node._common.order("a", ("run", 0), (5, 6))
    end = time.monotonic() + 60
    while not (other._common._nodes and node._common.document()) and time.monotonic() < end:
        time.sleep(0.01)
    assert node._common.document() == {"a": {"step": 5, "groups": 2, "apart": []}}
    looked: list[int] = []

    def look() -> None:
        looked.append(1)
        node.stop()

    node._common.look = look  # type: ignore[method-assign]
    node.wait()
    node.close()
    assert looked == [1] and not any(thread.name.startswith("flowcheck to node") for thread in threading.enumerate())


def test_peers_read_the_shelf_of_a_group_that_is_there_and_make_none(
    begin: Begin, world: World, tmp_path: Path,
) -> None:
    alone, among = begin(), begin(name="another", replica={"directory": str(tmp_path), "peers": ["127.0.0.1:1"]})
    assert among.groups.shelf_of("a") is None and world.groups == []
    for node in (alone, among):
        node.groups.intake_of("a").peering = SimpleNamespace(shelf="its shelf")  # type: ignore[union-attr, assignment]
    assert among.groups.shelf_of("a") == "its shelf" and among.groups.shelf_of("b") is None
    assert alone.groups.shelf_of("a") is None, "who names no peers gives nothing"


def test_two_nodes_of_one_name_do_not_share_a_directory(begin: Begin, tmp_path: Path) -> None:
    """Each would take the other one's files for those of jobs that have ended, and remove them."""
    for one in ("a", "b", "kept"):
        (tmp_path / one).mkdir()
    shared = {"journal": {"directory": str(tmp_path / "kept"), "megabytes": 1}, "api": {"listen": "127.0.0.1:0"}}
    first = begin(replica={"directory": str(tmp_path / "a"), "slots": 4}, **shared)
    other = {"directory": str(tmp_path / "b"), "slots": 4}
    for again in ({"replica": {"directory": str(tmp_path / "a")}}, {"replica": other, **shared}):
        with pytest.raises(EnvironmentProblem):
            begin(**again)
    begin(name="another", replica=other, **shared)
    first.close()
    (tmp_path / "a" / "flowcheck-node.lock").touch()  # of one that was killed
    begin(replica={"directory": str(tmp_path / "a")})


@pytest.mark.parametrize("name", ["x" * 33, "a-b", "a/b", "../../etc", "a b", "\u00e9", "a\n"])
def test_names_that_groups_cannot_have(begin: Begin, world: World, name: str) -> None:
    """They become names of files and folders. A hyphen separates the parts of a replica's name."""
    assert begin().groups.intake_of(name) == "the name of a group has letters, digits, _ and ., 32 of them at most"
    assert world.groups == []


def test_groups_that_are_in_use_are_not_replaced(begin: Begin, world: World) -> None:
    node = begin(groups=2)
    node.groups.intake_of("a")
    node.groups.intake_of("b")
    world.groups[0].members[0] = "somebody"  # known, without a job yet
    world.groups[1].plan = "a job"  # nobody connected at the moment: they may come back
    assert node.groups.intake_of("c") == "2 groups are attached, this node has room for no more"
    assert len(world.groups) == 2 and "stop group 'a'" not in world.done
    assert node.groups.intake_of("b") is world.groups[1]


def test_a_group_whose_job_has_ended_makes_room_unless_it_came_back(begin: Begin, world: World) -> None:
    """Its session stays, so that who comes back goes on; another name needs the place more."""
    node = begin()
    node.groups.intake_of("a")
    world.groups[0].plan = "a job"
    full = "1 groups are attached, this node has room for no more"
    assert node.groups.intake_of("b") == full
    node.groups._hear("a", "end", name="a", run_id="run", serves=True)
    node.groups.intake_of("a")
    assert node.groups.intake_of("b") == full  # somebody has come back, and may again
    node.groups._hear("a", "end", name="a", run_id="run", serves=True)
    node.groups._hear("a", "attached", name="a", run_id="run", epoch=0, ranks=2, flows=2, resync="state")
    assert node.groups.intake_of("b") == full  # it came back before its end was said
    node.groups._hear("a", "end", name="a", run_id="run", serves=True)
    world.groups[0].members[1] = "somebody"
    assert node.groups.intake_of("b") == full  # not all have left
    world.groups[0].members.clear()
    assert getattr(node.groups.intake_of("b"), "name", "") == "b"
    assert world.done[-2:] == ["stop group 'a'", "start group 'b'"]
    world.groups[1].plan = "a job"
    assert node.groups.intake_of("a") == full
    node.groups._hear("b", "end", name="b", run_id="run", serves=True)
    assert getattr(node.groups.intake_of("a"), "name", "") == "a"
    world.groups[2].plan = "a job"
    assert node.groups.intake_of("b") == full  # the end of its job was that of an earlier group of its name


@pytest.mark.parametrize("idle", [0, 1])
def test_a_group_that_is_not_in_use_makes_room(begin: Begin, world: World, idle: int) -> None:
    node = begin(groups=2)
    for name in ("a", "b"):
        node.groups.intake_of(name)
    world.groups[1 - idle].members[0] = "somebody"
    group: Any = node.groups.intake_of("c")
    assert world.done[-2:] == [f"stop group {'ab'[idle]!r}", "start group 'c'"]
    assert group.port.queues == world.groups[idle].port.queues
    world.groups[1 - idle].members.clear()
    assert node.groups.intake_of("ab"[1 - idle]) is world.groups[1 - idle]  # the other one was not touched
    assert world.done.count("start capture") == 1


def test_groups_that_an_earlier_process_left_are_there_at_the_start(begin: Begin, world: World, tmp_path: Path) -> None:
    for name in (
        "flowcheck-a.b-two-7.replica", "flowcheck-a.b-one-1.replica", "flowcheck-a.b-one-2.replica",
        "flowcheck-a.b--3.replica",  # of the group without a name
        "flowcheck-axb-other-1.replica",  # of another node
        "flowcheck-a.b-c-four-1.replica",  # of node "a.b-c"
        "flowcheck-a.b-x-.replica", "flowcheck-a.b-y-1.replica.new", "my-flowcheck-a.b-z-1.replica",
    ):
        (tmp_path / name).touch()
    begin(name="a.b", groups=8)
    assert [group.name for group in world.groups] == ["", "one", "two"]
    assert world.done[2:4] == ["start capture", "start group ''"]


def test_no_more_groups_are_taken_over_than_there_is_room(begin: Begin, world: World, tmp_path: Path) -> None:
    for name in "cab":
        (tmp_path / f"flowcheck-node-{name}-1.replica").touch()
    (tmp_path / "flowcheck-node-a-a-1.replica").touch()  # of node "node-a"
    begin(groups=2)
    assert [group.name for group in world.groups] == ["a", "b"]


# -- the capture, shared ---------------------------------------------------------------------------------------


def test_all_groups_have_the_same_threads_which_empty_all_queues(begin: Begin, world: World) -> None:
    node = begin(groups=2, capture={"queues": 2})
    node.groups.intake_of("a")
    node.groups.intake_of("b")
    sources = [one.port.queues for one in world.groups]
    assert [[source.index for source in both] for both in sources] == [[0, 1], [0, 1]]
    assert [source.ring_address for source in sources[0]] == [ring.ring_address for ring in world.rings]
    first, second = (one.port.placers for one in world.groups)
    assert first is second and (first.count, first.n_threads) == (2, 2)
    world.rings[1].put([(1, b"x"), (2, b"y")])
    until(lambda: world.rings[1].waiting == 0)
    assert world.groups[0].port.unclaimed["truncated"] == 2  # without a job nobody claims them
    node.close()
    assert placing_threads() == []
    world.rings[0].put([(1, b"x")])
    assert world.rings[0].waiting == 1  # their memory is gone now


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < end, "the placing thread has not done it"
        time.sleep(0)


def placing_threads() -> list[str]:
    return sorted(one.name for one in threading.enumerate() if one.name.startswith("fc-place"))


def test_threads_place_from_the_first_group_on(begin: Begin, world: World) -> None:
    node = begin(capture={"queues": 2})
    assert placing_threads() == []
    node.groups.intake_of("a")
    assert placing_threads() == ["fc-place 0", "fc-place 1"]


def test_placing_threads_are_pinned_where_the_settings_say(begin: Begin, world: World) -> None:
    core = max(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    begin(capture={"place_cores": [core]}).groups.intake_of("a")
    (number,) = (one.native_id for one in threading.enumerate() if one.name == "fc-place 0")
    assert os.sched_getaffinity(number or 0) == {core} and os.sched_getaffinity(0) == before


def test_a_core_that_no_thread_can_have_is_refused_before_anybody_attaches(begin: Begin, world: World) -> None:
    with pytest.raises(DpdkError, match="af_packet:lo: no thread can be bound to core 1023"):
        begin(capture={"place_cores": [1023]})
    assert world.done == ["open eal", "close eal"]


def test_one_that_is_taken_away_later_is_named(begin: Begin, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_captures, "check_cores", lambda cores: None)
    node = begin(capture={"place_cores": [1023]})
    with pytest.raises(EnvironmentProblem, match="a placing thread cannot be pinned") as refused:
        node.groups.intake_of("a")
    assert refused.value.where == "capture.place_cores" and placing_threads() == []
    assert "start capture" not in world.done


def test_a_failed_capture_is_a_failed_source(begin: Begin, world: World) -> None:
    begin().groups.intake_of("a")
    assert world.groups[0].port.queues[0].error is None
    world.errors["af_packet:lo"] = DpdkError(0, "gone", "")
    assert world.groups[0].port.queues[0].error is world.errors["af_packet:lo"]


# -- several captures ------------------------------------------------------------------------------------------

TWO = ({"device": "af_packet:lo", "queues": 2, "cores": (0, 1)}, {"device": "ring", "path_mtu": 1024, "ring_size": 256})


def test_captures_are_opened_in_the_order_of_the_settings_and_closed_in_the_other(begin: Begin, world: World) -> None:
    node = begin(capture=[*TWO])
    assert world.done == ["open eal", "open capture af_packet:lo", "open capture ring"]
    assert [(live.device, live.queues, live.entries, live.streams) for live in world.lives] == [
        ("af_packet:lo", 2, 16384, (0, 1)), ("ring", 1, 256, (2,)),
    ]
    node.groups.intake_of("a")
    assert world.done[3:] == ["start capture af_packet:lo", "start capture ring", "start group 'a'"]
    node.close()
    assert world.done[6:] == [
        "stop group 'a'", "stop capture af_packet:lo", "stop capture ring", "say capture", "say capture",
        "close capture ring", "close capture af_packet:lo", "close eal",
    ]


def test_a_capture_that_is_refused_is_named_and_those_before_it_are_closed(begin: Begin, world: World) -> None:
    world.refused["ring"] = DpdkError(22, "no thread can be bound to core 7", "another core")
    with pytest.raises(DpdkError) as refused:
        begin(capture=[*TWO])
    assert (refused.value.what, refused.value.remedy) == ("ring: no thread can be bound to core 7", "another core")
    assert world.done == ["open eal", "open capture af_packet:lo", "close capture af_packet:lo", "close eal"]


def test_a_capture_that_does_not_come_up_is_said_and_a_later_trainer_tries_again(begin: Begin, world: World) -> None:
    node = begin(capture=[*TWO])
    _, second = node._captures.sources
    start, begun = second.start, world.done.count

    def refuse() -> None:
        raise DpdkError(11, "no thread", "fewer of them")

    second.start = refuse  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(EnvironmentProblem, match="no thread"):
            node.groups.intake_of("a")
        assert not node.groups._groups and not any(one.name.startswith("fc-place") for one in threading.enumerate())
    second.start = start  # type: ignore[method-assign]
    node.groups.intake_of("a")
    assert (begun("start capture af_packet:lo"), begun("start capture ring")) == (1, 1)


def test_a_group_for_which_there_is_no_thread_is_said_and_takes_no_place(
    begin: Begin, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = begin()

    def refuse(group: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(NotedGroup, "start", refuse)
        with pytest.raises(EnvironmentProblem, match="group 'a' cannot be started: can't start new thread"):
            node.groups.intake_of("a")
    assert not node.groups._groups and world.done[-1] == "stop group 'a'"
    assert node.groups.intake_of("b") is world.groups[1]


def test_every_queue_of_every_capture_is_a_stream_of_every_group(begin: Begin, world: World) -> None:
    node = begin(groups=2, capture=[*TWO])
    node.groups.intake_of("a")
    node.groups.intake_of("b")
    sources = [one.port.queues for one in world.groups]
    assert [[source.index for source in three] for three in sources] == [[0, 1, 2]] * 2
    assert [source.capture for source in sources[0]] == [0, 0, 1]
    world.rings[2].put([(1, b"x"), (2, b"y")])  # of the second capture
    until(lambda: world.rings[2].waiting == 0)
    assert [world.groups[1].port.placers.strangers(i)["truncated"][0] for i in range(3)] == [0, 0, 2]
    port = world.groups[0].port
    assert port.name == "af_packet:lo and ring"
    assert port.stream_names(3) == ["af_packet:lo queue 0", "af_packet:lo queue 1", "ring queue 0"]


def test_counters_are_of_all_captures_and_drops_say_of_which(begin: Begin, world: World) -> None:
    begin(capture=[*TWO]).groups.intake_of("a")
    port = world.groups[0].port
    world.counters = {"af_packet:lo": {"received": 5}, "ring": {"received": 7}}
    assert (port.arrived, port.drops) == (12, {})
    world.counters["ring"] |= {"ring_full": 3, "oversize": 1}
    assert port.drops == {"ring ring_full": 3, "ring oversize": 1}
    said = port.explain({"ring ring_full": 2})
    assert said == (
        "ring ring_full 2: raise capture[1].ring_size (now 256, a power of two), or give the updater replica.threads"
    )
    world.counters["af_packet:lo"]["kernel_ring_full"] = 9
    both = port.explain(port.drops)
    assert "af_packet:lo kernel_ring_full 9: " in both and "more capture[0].queues (now 2)" in both
    assert "ring ring_full 3, oversize 1: " in both and "capture[1].path_mtu (now 1024)" in both


def test_the_capture_that_drops_is_the_one_that_is_named(
    begin: Begin, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = begin(capture=[*TWO])

    def sleep(seconds: float) -> None:
        node._stopping = bool(world.counters)
        world.counters["ring"] = {"no_mbuf": 4}

    monkeypatch.setattr(service, "time", SimpleNamespace(sleep=sleep))
    node.wait()
    ((event, fields),) = world.said
    assert (event, fields["port"], fields["drops"]) == ("dropped", "ring", {"no_mbuf": 4})
    assert "more capture[1].queues (now 1)" in fields["why"]


def test_one_capture_that_cannot_go_on_ends_the_wait_and_is_named(begin: Begin, world: World) -> None:
    node = begin(capture=[*TWO])
    node.groups.intake_of("a")
    world.errors["ring"] = DpdkError(110, "DMA engines x: copies were never completed", "working engines")
    with pytest.raises(DpdkError, match="ring: DMA engines x: copies were never completed") as failed:
        node.wait()
    assert (failed.value.errno, failed.value.remedy) == (110, "working engines")
    assert [source.error is not None for source in world.groups[0].port.queues] == [False, False, True]


# -- waiting ---------------------------------------------------------------------------------------------------


def test_a_node_waits_until_it_is_stopped(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    node = begin()
    node.groups.intake_of("a")
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            node.stop()

    monkeypatch.setattr(service, "time", SimpleNamespace(sleep=sleep))
    node.wait()
    assert naps == [0.1, 0.1, 0.1]


def test_drops_of_the_node_itself_are_named_while_it_runs(
    begin: Begin, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = begin(capture={"ring_size": 64})

    def sleep(seconds: float) -> None:
        node._stopping = bool(world.counters)
        world.counters["af_packet:lo"] = {"ring_full": 3}

    monkeypatch.setattr(service, "time", SimpleNamespace(sleep=sleep))
    node.wait()
    ((event, fields),) = world.said
    assert (event, fields["port"], fields["drops"]) == ("dropped", "af_packet:lo", {"ring_full": 3})
    assert "raise capture.ring_size (now 64" in fields["why"]


def test_a_fault_of_a_groups_thread_ends_the_wait(begin: Begin, world: World) -> None:
    node = begin(groups=2)
    node.groups.intake_of("a")
    node.groups.intake_of("b")
    world.groups[1].failure = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError, match="ours"):
        node.wait()


def test_a_capture_that_cannot_go_on_ends_the_wait(
    begin: Begin, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = begin()
    world.errors["af_packet:lo"] = DpdkError(0, "the interface is gone", "")
    turns: list[float] = []

    def sleep(seconds: float) -> None:
        turns.append(seconds)
        if len(turns) == 2:
            node.stop()

    monkeypatch.setattr(service, "time", SimpleNamespace(sleep=sleep))
    node.wait()  # it has not started yet
    node._stopping = False
    node.groups.intake_of("a")
    with pytest.raises(DpdkError, match="the interface is gone"):
        node.wait()


# -- the HTTP API ----------------------------------------------------------------------------------------------


def test_versions_are_served_where_that_is_asked_for(
    begin: Begin, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Noted:
        address, connected = "127.0.0.1:7071", dict[str, int]()

        def __init__(self, config: NodeConfig, keys: Any, say: Any, board: int) -> None:
            assert config.api is not None
            assert set(keys[reader_key(TOKEN.encode())]) == {"trainer", "reader", "operator"}
            self.glance = Glance(board)
            assert self.told["groups"] == [] and self.told["connected"] == {}
            say("waiting", name="dp0", iteration=3, why="w")
            assert world.said[-1] == ("waiting", {"name": "dp0", "iteration": 3, "why": "w"})
            world.done.append("open api")

        @property
        def told(self) -> Any:
            return json.loads(self.glance.read())

        def look(self) -> None:
            world.done.append("look at api")
            if self.told["connected"]:  # the main loop has put it there
                assert self.told["connected"] == {"dp0": 0} and self.told["node"] == "node"
                assert self.told["counts"]["waiting"] == {"dp0": 1} and self.told["counts"]["access"] == {"": 1}
                assert [one["device"] for one in self.told["captures"]] == ["af_packet:lo"]
                node.stop()

        def renew(self, keys: Any) -> None:
            world.done.append(f"tell api {reader_key(b'another token of all') in keys}")

        def close(self) -> None:
            world.done.append("close api")

    monkeypatch.setattr(children, "Serving", Noted)
    with begin() as without:
        assert without.api is None and "open api" not in world.done
    node = begin(api={"listen": "127.0.0.1:0"})
    assert node.api == "127.0.0.1:7071" and world.done[-1] == "open api"
    node.groups.intake_of("dp0")
    (tmp_path / "token").write_text("another token of all")
    node.reload()
    node.wait()
    looked = world.done[world.done.index("look at api") :]
    assert looked[:3] == ["look at api", "say access", "tell api True"]
    node.close()
    assert world.done.count("close api") == 1
