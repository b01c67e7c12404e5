"""What a node gives to each of its parts: the parts are noted here, and what they do has tests of its own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")

from dataplane.pydpdk.errors import DpdkError
from flowcheck.control.proof import node_key
from flowcheck.errors import EnvironmentProblem
from flowcheck.node import children, service
from flowcheck.node.check import check, files
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.config.nodes import Nodes
from flowcheck.node.groups import groups
from flowcheck.node.ports import open_captures

from .node_scene import World, put_in

Make = Callable[..., service.Node]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return put_in(World(), monkeypatch)


def settings(folder: Path, **parts: Any) -> NodeConfig:
    (folder / "token").write_text("a token that only tests have")
    return NodeConfig.model_validate({
        "control": {"listen": "127.0.0.1:0", "token_file": str(folder / "token")},
        "capture": {"device": "af_packet:lo", "huge": False}, "replica": {"directory": str(folder)}, **parts,
    })


@pytest.fixture
def make(world: World, tmp_path: Path) -> Iterator[Make]:
    made: list[service.Node] = []

    def begin(also: dict[str, Any] | None = None, **parts: Any) -> service.Node:
        own = {"name": f"node{len(made)}"} if made else {}  # one node of a name in a directory
        config = settings(tmp_path, **own | parts).model_copy(update=also or {})
        made.append(service.Node(config, world.say))
        return made[-1]

    yield begin
    for node in made:
        node.close()


class Noted:
    """In the place of a part. given: what each one was made with."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []
        self.done: list[str] = []

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.given.append((*given, *named.values()))
        do = self.done.append
        return SimpleNamespace(
            start=lambda: do("start"), close=lambda: do("close"), stop=lambda: do("stop"), look=lambda: do("look"),
            address="there", failure=None, name="f", members=(), plan=None, capture=lambda: None,
        )


def noted(monkeypatch: pytest.MonkeyPatch, name: str, where: Any = service) -> Noted:
    part = Noted()
    monkeypatch.setattr(where, name, part)
    return part


def test_the_store_has_its_settings_and_says_what_it_does(
    make: Make, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    storing = noted(monkeypatch, "storing", children)
    make()
    assert storing.given == []
    node = make(store={"url": str(tmp_path / "store"), "every": 1})
    assert storing.given == [(node.config, world.say)]
    node.close()
    assert storing.done == ["close"]


def test_copies_are_made_by_its_settings_and_key_and_said(
    make: Make, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying = noted(monkeypatch, "copying", children)
    access = SimpleNamespace(of=lambda role: [b"token"], keys=(), vouch=None, tls=None)
    monkeypatch.setattr(service, "check_files", lambda *_: access)
    make()
    assert copying.given == []
    node = make(also={"protect": "as it is"})
    ((config, key, api, say),) = copying.given
    assert (config, api, say, key) == (node.config, "", world.say, node_key(b"token").hex())
    node.close()
    assert copying.done == ["close"]


def test_a_job_without_trainers_has_the_port(make: Make, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    unattended = noted(monkeypatch, "unattended", groups)
    monkeypatch.setattr(service, "unattended_jobs", lambda config: [("its settings", "its plan")])
    node = make()
    assert unattended.given == [("its settings", "its plan", node.config, node._captures.port, world.say, None)]
    assert unattended.done == ["start"] and "start capture" in world.done


def test_common_versions_know_how_many_slots_a_replica_has(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[tuple[Any, ...]] = []
    real = service.Common

    def common(*arguments: Any) -> Any:
        given.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(service, "Common", common)
    node = make(replica={"directory": str(tmp_path), "slots": 4})
    assert given[0][:3] == (node.config.name, node.config.common.seconds, 4)


def test_neighbours_are_told_over_tls_where_there_is_somebody_to_tell(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbours = noted(monkeypatch, "Neighbours")
    monkeypatch.setattr(service, "client_context", lambda ca: ("context of", ca))
    monkeypatch.setattr(service, "check_files", lambda *_: SimpleNamespace(of={}, keys=(), vouch=None, tls=None))
    for nodes in ([], ["h:1", "[::1]:2"]):
        make(also={"tls": SimpleNamespace(ca="our.pem")}, common={"nodes": nodes}).close()
    assert [(addresses, tls) for addresses, _, _, _, tls in neighbours.given] == [
        ([], None), ([("h", 1), ("::1", 2)], ("context of", "our.pem"))]
    assert neighbours.done == ["start", "close"] * 2


def test_the_control_port_has_the_groups_their_shelves_and_what_other_nodes_say(
    make: Make, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = noted(monkeypatch, "ControlServer")
    access = SimpleNamespace(of={}, keys=(), vouch=None, tls=None)
    monkeypatch.setattr(service, "check_files", lambda *_: access)
    node = make(replica={"directory": str(make().config.replica.directory), "resync": "state"})
    (_, (address, of, connections, group, say, shelf, wanted, _, hear, *strangers)) = control.given
    assert (address, of, connections) == (("127.0.0.1", 0), access.of, 256)
    assert (group, say, shelf) == (node.groups.intake_of, world.say, node.groups.shelf_of)
    assert (wanted, hear) == ("state", node._common.hear)
    assert strangers == [1024, 256]
    assert control.given[0][6] == "ranges" and control.done == ["start", "start"]
    node.close()
    assert control.done == ["start", "start", "close"]


def test_drops_are_those_of_each_capture_and_checkpoints_as_often_as_it_says(
    make: Make, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drops, writer = noted(monkeypatch, "Drops", open_captures), noted(monkeypatch, "Writer")
    node = make(capture=[{"device": device, "huge": False} for device in ("af_packet:lo", "ring")],
                output={"every": 7, "directory": str(tmp_path)})
    assert [(one, say) for one, _, say in drops.given] == [(one, world.say) for one in node._captures.planned]
    assert [of.args for _, of, _ in drops.given] == [(0,), (1,)]
    assert [(say, every) for say, every, _ in writer.given] == [(world.say, 7)]


def test_of_three_captures_each_is_started_once(make: Make, world: World) -> None:
    """However often a later one has not come up."""
    node = make(capture=[{"device": device, "huge": False} for device in ("af_packet:lo", "ring", "null")])
    last = node._captures.sources[2]
    start = last.start

    def refuse() -> None:
        raise DpdkError(11, "no thread", "fewer of them")

    last.start = refuse  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(EnvironmentProblem, match="no thread"):
            node.groups.intake_of("a")
    last.start = start  # type: ignore[method-assign]
    node.groups.intake_of("a")
    assert [one for one in world.done if one.startswith("start capture")] == [
        "start capture af_packet:lo", "start capture ring", "start capture null"]


def test_trainers_are_answered_with_the_certificate_of_the_moment(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    control = noted(monkeypatch, "ControlServer")
    access = SimpleNamespace(of={}, keys=(), vouch=None, tls="before")
    monkeypatch.setattr(service, "check_files", lambda *_: access)
    make()
    tls = control.given[0][7]
    assert tls() == "before"
    access.tls = "after"
    assert tls() == "after"


def test_placing_is_calibrated_for_the_longest_packets(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(open_captures, "settle", lambda *given: asked.append(given))
    make()
    make(capture={"device": "af_packet:lo", "huge": False, "path_mtu": 4096})
    assert [mtu for mtu, _ in asked] == [1024, 4096]


def test_devices_on_the_bus_are_opened_by_who_holds_the_rights(
    make: Make, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def call(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        asked.append(function)
        return function(*given, **named)

    rights = SimpleNamespace(opens_with_dpdk=True, call=call, give_back=bool)
    monkeypatch.setattr(open_captures, "Rights", lambda drivers: rights)
    make().close()
    assert asked[:2] == [open_captures.start_eal, open_captures.LiveSource] and asked[-1].__name__ == "close"
    assert world.done[-2:] == ["close capture", "close eal"]
    rights.opens_with_dpdk = False
    asked.clear()
    make()
    assert asked[0] is open_captures.LiveSource


def test_what_is_told_of_a_node_has_all_its_parts(
    make: Make, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its port, what is common, and after how many checksums it offers anything; what it says afterwards is counted."""
    board_writer: list[tuple[Any, ...]] = []
    counted = Noted()
    serving = noted(monkeypatch, "Serving", children)

    def beside(*given: Any, **named: Any) -> Any:
        board_writer.append((*given, named))
        return SimpleNamespace(tally=SimpleNamespace(counting=lambda say: counted), look=bool, close=bool,
                               board=SimpleNamespace(fd="a board"))

    monkeypatch.setattr(service, "BoardWriter", beside)
    noted(monkeypatch, "Drops", open_captures)
    for name in ("Writer", "ControlServer", "Neighbours"):
        noted(monkeypatch, name)
    node = make(name="mine", api={"listen": "127.0.0.1:0", "shadow": 5})
    ((name, planned, captures, port, connected, named),) = board_writer
    parts = node._captures
    assert (name, planned, captures, port) == ("mine", parts.planned, parts.sources, parts.port)
    assert connected() == {} and named == {"common": node._common.document, "shadow": 5, "doors": node._doors}
    assert serving.given == [(node.config, node._access.keys, counted, "a board")]


def test_neighbours_are_shown_the_key_of_a_peer_and_said(
    make: Make, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    neighbours = noted(monkeypatch, "Neighbours")
    (tmp_path / "peer").write_text("a token of peers alone")
    (tmp_path / "trainer").write_text("a token of trainers alone")
    tokens = {name: str(tmp_path / name) for name in ("peer", "trainer")}
    node = make(control={"listen": "127.0.0.1:0"}, tokens=tokens, common={"nodes": ["n:1"]})
    ((addresses, token, common, say, tls),) = neighbours.given
    assert (addresses, common, tls) == ([("n", 1)], node._common, None) and say == world.say
    assert token() == b"a token of peers alone" and neighbours.done == ["start"]


def test_a_certificate_of_nobody_is_found_before_anything_starts(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(files, "client_context", asked.append)
    monkeypatch.setattr(files, "Access", lambda *_: "access")
    config = settings(tmp_path).model_copy(update={"tls": SimpleNamespace(ca="whose")})
    assert files.check_files(config, world.say) == "access" and asked == ["whose"]  # type: ignore[comparison-overlap]


def test_a_core_that_a_check_refuses_is_said_with_its_device(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cores: Any) -> None:
        raise DpdkError(1, "no core 1", "another core")

    monkeypatch.setattr(check, "check_cores", refuse)
    with pytest.raises(DpdkError) as refused:
        check.check(settings(tmp_path, capture={"device": "ring", "huge": False}), True)
    assert (refused.value.what, refused.value.remedy) == ("ring: no core 1", "another core")


def test_where_it_listens_is_said(world: World) -> None:
    config = SimpleNamespace(groups=2, token_files={}, tls=None, nodes=Nodes())
    node = SimpleNamespace(control=SimpleNamespace(address="c:1"), config=config,
                           api="a:2")
    service.Node.announce(node, world.say)  # type: ignore[arg-type]
    assert world.said == [("listening", {"control": "c:1", "groups": 2, "api": "a:2"})]


@pytest.mark.parametrize("setting", ["control.listen", "api.listen"])
def test_a_check_names_the_address_that_is_not_of_this_machine(world: World, tmp_path: Path, setting: str) -> None:
    part = setting.partition(".")[0]
    files = {"token_file": str(tmp_path / "token")} if part == "control" else {}
    with pytest.raises(EnvironmentProblem) as found:
        check.check(settings(tmp_path, **{part: {"listen": "192.0.2.1:7070", "insecure": True, **files}}), True)
    assert found.value.where == "192.0.2.1:7070" and re.search(rf"\b{setting}\b", found.value.remedy)


def test_a_check_tries_every_core(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, ...]] = []
    monkeypatch.setattr(check, "check_cores", tried.append)
    capture = {"device": "ring", "huge": False, "cores": [1], "place_cores": [0]}
    check.check(settings(tmp_path, capture=capture), True)
    assert tried == [(1, 0)]


# -- while it runs -------------------------------------------------------------------------------------------------


class Told:
    """A part that notes what it is asked."""

    def __init__(self, name: str, done: list[Any]) -> None:
        self.name, self.done = name, done

    def __getattr__(self, what: str) -> Callable[..., None]:
        return lambda *given: self.done.append((self.name, what, *given))


@pytest.mark.parametrize("api", [True, False])
def test_what_is_looked_at_in_each_turn(api: bool) -> None:
    """Whoever watches the node hears that it is well last: not if a group's thread has died."""
    done: list[Any] = []
    parts = {f"_{name}": Told(name, done) for name in ("captures", "children", "common", "notify")}
    access = SimpleNamespace(look=lambda at_once: at_once)
    node: Any = SimpleNamespace(
        **parts, _board_writer=Told("board_writer", done) if api else None, groups=Told("groups", done), _access=access,
        _reload=True)
    everything = [("captures", "look"), *[("board_writer", "look")] * api, ("children", "look"), ("common", "look"),
                  ("groups", "check"), ("children", "renew"), ("notify", "alive")]
    service.Node.turn(node)
    assert done == everything and node._reload is False
    done.clear()
    service.Node.turn(node)
    assert done == [one for one in everything if one != ("children", "renew")]


def test_a_thread_that_has_died_is_found(make: Make, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group, or of a job without trainers."""
    monkeypatch.setattr(service, "unattended_jobs", lambda config: [("its settings", "its plan")])
    other = SimpleNamespace(failure=None, start=bool, stop=bool)
    monkeypatch.setattr(groups, "unattended", lambda *_: other)
    node = make()
    node.groups.intake_of("a")
    node.groups.check()
    for group in (world.groups[0], other):
        group.failure = RuntimeError("a fault of ours")
        with pytest.raises(RuntimeError, match="a fault of ours"):
            node.groups.check()
        group.failure = None


def test_tokens_that_have_changed_are_told_to_its_processes(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[Any] = []
    for name, part in (("Serving", "api"), ("storing", "store"), ("copying", "copier")):
        made = Told(part, done)
        made.address = "there"  # type: ignore[attr-defined]
        monkeypatch.setattr(children, name, lambda *_, made=made: made)
    monkeypatch.setattr(children, "other_tokens", lambda config, key: key)
    keys = [b"token"]
    access: Any = SimpleNamespace(of=lambda role: keys, keys="keys")
    config: Any = SimpleNamespace(api=True, store=True, protect=True)
    all_of_them = children.Children(config, access, print)
    all_of_them.look()
    keys[0] = b"another"
    all_of_them.renew()
    assert done == [("api", "look"), ("store", "look"), ("copier", "look"), ("api", "renew", "keys"),
                    ("copier", "order", node_key(b"another").hex())]
    done.clear()
    all_of_them.close()
    all_of_them.close()
    assert done == [("copier", "close"), ("store", "close"), ("api", "close")]
    done.clear()
    none: Any = SimpleNamespace(api=None, store=None, protect=None)
    with contextlib.closing(children.Children(none, access, print)) as alone:
        alone.look()
        alone.renew()
    assert done == [] and alone.api is None and alone.connected == {}


def test_a_group_that_made_room_has_not_ended_when_it_comes_back(make: Make, world: World) -> None:
    """Its next job may not be pushed out for the end of the one before."""
    node = make()
    for name, other in (("a", "b"), ("b", "a")):
        node.groups.intake_of(name)
        world.groups[-1].plan = "a job"
        node.groups._hear(name, "end", name=name, run_id="run", serves=True)
        assert getattr(node.groups.intake_of(other), "name", "") == other
    world.groups[-1].plan = "a job"
    assert node.groups.intake_of("b") == "1 groups are attached, this node has room for no more"


def test_how_many_ranks_of_each_group_are_connected(make: Make, world: World) -> None:
    node = make(groups=2)
    for name in ("a", "b"):
        node.groups.intake_of(name)
    world.groups[1].members.update({0: "one", 3: "another"})
    assert node.groups.connected == {"a": 0, "b": 2}


def test_a_group_of_a_job_without_trainers_is_no_trainers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "unattended_jobs", lambda config: [])
    node = make(also={"follow": (SimpleNamespace(group="fsdp"),)})
    assert node.groups.intake_of("fsdp") == (
        "group 'fsdp' is of [[follow]] in this node's settings, without trainers; attach with another")
    assert getattr(node.groups.intake_of("ddp"), "name", "") == "ddp"
