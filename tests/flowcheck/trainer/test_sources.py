"""Who says what a communicator is: the caller, the group, or what prepare() has set up; node and token."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flowcheck
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.trainer.nccl import sources as module
from flowcheck.trainer.nccl.flight_recorder import Flights, parse_flights
from flowcheck.trainer.nccl.prepare import Prepared
from flowcheck.trainer.nccl.profiler import Call, Communicator
from flowcheck.trainer.nccl.rdma import KernelQueuePair
from flowcheck.trainer.nccl.sources import HELD, PATIENCE, Sources, sources_of
from flowcheck.trainer.settings import nodes_of, token_of

from ..hand_node import TOKEN, HandNode, until
from ..job.nccl_text import Shape, text
from .test_flight_recorder import entry, of
from .test_profiler_calls import FakePlugin, history

MADE = Communicator(1, 1, 6, 0xA, 0, 4, 4, "")
CALL = Call(2, 1, 6, 0xA, 0, "AllReduce", 5, "ncclFloat32", 0, "RING", "LL128", 2, 16, 0, None, True)
FOUND = {"op": "AllReduce", "count": 5, "dtype": "float32", "root": 0, "algorithm": "ring", "protocol": "ll128",
         "channels": 2}


class Recording:
    """Torch's flight recorder, which needs a torch with NCCL: `flights` as a dump of it has them."""

    dump = of()
    reads = 0

    def read(self) -> Flights:
        Recording.reads += 1
        return parse_flights(self.dump)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    monkeypatch.setattr(module, "Recorder", Recording)
    monkeypatch.setattr(Recording, "reads", 0)
    monkeypatch.setattr(Recording, "dump", of())
    return Recording


def made(log: str = "", *records: Any) -> tuple[Sources, FakePlugin]:
    known, plugin = history(MADE, *(records or (CALL,)))
    return Sources(Prepared(history=known, log=log), ranks=4, rank=0, group="0"), plugin


def test_calls_of_the_plugin(recording: type[Recording]) -> None:
    sources, plugin = made()
    assert sources.collectives(0) == [FOUND] and sources.collectives(1) == []
    plugin.next = [replace(CALL, serial=3, count=7)]
    assert sources.collectives(1) == [{**FOUND, "count": 7}]


def test_a_torch_without_a_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise EnvironmentProblem("none")

    monkeypatch.setattr(module, "Recorder", absent)
    sources, _ = made()
    assert sources.collectives(0) == [FOUND] and sources.collectives(1) == []


def test_torch_agrees_or_is_refused(recording: type[Recording]) -> None:
    recording.dump = of(entry(0), entry(1, process_group=["7", "other"], collective_seq_id=1))
    assert made()[0].collectives(0) == [FOUND]
    recording.dump = of(entry(0, input_sizes=[[6]]))
    with pytest.raises(UserError, match="torch's flight recorder and NCCL's profiler events: NCCL's call 0"):
        made()[0].collectives(0)


def test_a_recorder_that_has_let_calls_go_is_not_asked(recording: type[Recording]) -> None:
    recording.dump = of(entry(9, collective_seq_id=10))
    assert made()[0].collectives(0) == [FOUND]


def test_torch_is_asked_in_the_first_iterations_alone(recording: type[Recording]) -> None:
    sources, plugin = made()
    for number in range(HELD + 5):
        assert sources.collectives(number) == [FOUND]
        plugin.next = [replace(CALL, serial=3 + number)]
    assert recording.reads == HELD


def test_the_log_is_held_against_the_plugin(recording: type[Recording], tmp_path: Path) -> None:
    log = tmp_path / "1.log"
    log.write_bytes(text(Shape(hash=0xA, nodes=2), "2.29.7"))
    with pytest.raises(UserError, match="the log says nodes 2, and the plugin 4"):
        made(str(log))[0].topology()
    log.write_bytes(text(Shape(hash=0xB), "2.29.7"))
    with pytest.raises(UserError, match="no communicator could be rank 0 of 4, hash 0xa"):
        made(str(log))[0].topology()
    with pytest.raises(UserError, match="the connections are not; NCCL's log is not read"):
        made()[0].topology()


def test_connections_come_from_the_log_and_the_kernel(
    recording: type[Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "1.log"
    log.write_bytes(text(Shape(hash=0xA), "2.29.7"))
    asked: list[int] = []

    def queue_pairs(pid: int) -> list[KernelQueuePair]:
        asked.append(pid)
        return [KernelQueuePair("mlx5_0", 1, 1107, 7, "RC", "RTS", pid)]

    monkeypatch.setattr(module, "queue_pairs", queue_pairs)
    monkeypatch.setattr(module, "addresses", list)
    monkeypatch.setattr(module, "_version", lambda: "2.29.7")
    found = made(str(log))[0].topology()
    assert asked == [os.getpid()] and found["communicator"]["nccl_version"] == "2.29.7"
    assert {(one["src"], one["dst"], *one["qpns"], *one["cts_qpns"]) for one in found["flows"]} == {
        (0, peer, 7, 1107) for peer in (1, 2)}  # the next one in the ring, and a neighbour in a tree

    def absent(pid: int) -> Any:
        raise EnvironmentProblem("there is no rdma", where="rdma", remedy="install iproute2")

    monkeypatch.setattr(module, "queue_pairs", absent)
    with pytest.raises(UserError, match=r"queue pairs are not known: there is no rdma[\s\S]*topology="):
        made(str(log))[0].topology()


# -- which communicator of several that are alike: HSDP 2 x 2, where a rank is rank 0 of two in both of its groups --

SHARD, REPLICA = Communicator(1, 1, 6, 0xA, 0, 2, 2, ""), Communicator(2, 2, 6, 0xB, 0, 2, 2, "")
GATHER = replace(CALL, serial=3, number=1, function="AllGather", count=96, type="ncclInt8", algorithm="NVLS")
SCATTER = replace(CALL, serial=4, number=1, function="ReduceScatter", count=12, algorithm="PAT")
REDUCE = replace(CALL, serial=5, number=2, hash=0xB, count=12)
REDUCED = {**FOUND, "count": 12}
FLIGHTS = [
    entry(0, process_group=["1", "mesh_shard"], profiling_name="nccl:_all_gather_base", input_sizes=[[24]],
          output_sizes=[[48]], collective_seq_id=1),
    entry(1, process_group=["1", "mesh_shard"], profiling_name="nccl:_reduce_scatter_base", input_sizes=[[24]],
          output_sizes=[[12]], collective_seq_id=2),
    entry(2, process_group=["2", "mesh_replicate"], input_sizes=[[12]], collective_seq_id=1),
]


def pair(log: str = "", pointer: int = 0, group: str = "2") -> tuple[Sources, FakePlugin]:
    """Of the group that AllReduces across replicas, unless it is the other one."""
    known, plugin = history()
    return Sources(Prepared(history=known, log=log), ranks=2, rank=0, group=group, pointer=lambda: pointer,
                   others=lambda: 1), plugin


def logs(folder: Path, *communicators: tuple[int, int], ranks: int = 2) -> str:
    """(pointer, hash) of each; hash 0: it was split off another one, and none is printed."""
    out = b""
    for pointer, hashed in communicators:
        ring = tuple(range(ranks))
        said = text(Shape(rings=(ring,), trees=((-1, -1, -1, -1),), pointer=pointer, hash=hashed), "2.29.7")
        out += said if hashed else said.replace(b"commId 0x0 - Init", b"parent 0x1 childCount 1 color 0 key 0- Init")
    path = folder / "2.log"
    path.write_bytes(out)
    return str(path)


def test_told_apart_by_what_torch_recorded(recording: type[Recording]) -> None:
    sources, plugin = pair()
    assert sources.collectives(0) == [], "NCCL makes them with their first calls"
    plugin.next = [SHARD, GATHER, SCATTER]
    recording.dump = of(*FLIGHTS[:2])
    assert sources.collectives(0) == [], "there is one, and torch has recorded no call of this group"
    plugin.next = [REPLICA, REDUCE]
    recording.dump = of(*FLIGHTS)
    assert sources.collectives(0) == [REDUCED]
    plugin.next = [replace(REDUCE, serial=6, count=7)]
    more = entry(3, process_group=["2", "mesh_replicate"], input_sizes=[[7]], collective_seq_id=2)
    recording.dump = of(*FLIGHTS, more)
    assert sources.collectives(1) == [{**FOUND, "count": 7}]


def test_told_apart_by_interfaces_that_name_hash_and_rank_with_calls_only(recording: type[Recording]) -> None:
    """NCCL 2.23 to 2.26."""
    sources, plugin = pair()
    unsaid = {"interface": 3, "rank": -1, "ranks": -1, "nodes": -1, "hash": 0}
    plugin.next = [replace(SHARD, **unsaid), replace(REPLICA, **unsaid), replace(GATHER, interface=3),
                   replace(SCATTER, interface=3), replace(REDUCE, interface=3)]
    recording.dump = of(*FLIGHTS)
    assert sources.collectives(0) == [REDUCED]


def test_told_apart_by_the_pointer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch names it, NCCL's log has its hash, and the plugin has that. No recorder is needed, and no calls."""
    def absent() -> Any:
        raise EnvironmentProblem("none")

    monkeypatch.setattr(module, "Recorder", absent)
    log = logs(tmp_path, (0x100, 0xA), (0x200, 0xB))
    sources, plugin = pair(log, 0x200)
    plugin.next = [SHARD, REPLICA, REDUCE]
    assert sources.collectives(0) == [REDUCED]
    sources, plugin = pair(log, 0x100)
    plugin.next = [SHARD, REPLICA, REDUCE]
    assert sources.collectives(0) == []
    sources, plugin = pair(logs(tmp_path, (0x200, 0xB), ranks=4), 0x200)
    plugin.next = [SHARD, REPLICA]
    with pytest.raises(UserError, match=r"'2' has rank 0 of 2, and its communicator 200 rank 0 of 4"):
        sources.collectives(0)


def test_one_that_was_split_off_is_told_by_its_calls(recording: type[Recording], tmp_path: Path) -> None:
    """The log has no hash of it."""
    sources, plugin = pair(logs(tmp_path, (0x100, 0), (0x200, 0)), 0x200)
    plugin.next = [SHARD, REPLICA, GATHER, SCATTER, REDUCE]
    recording.dump = of(*FLIGHTS)
    assert sources.collectives(0) == [REDUCED]


def refused_after(sources: Sources, plugin: FakePlugin, *records: Any) -> str:
    plugin.next = list(records)
    for _ in range(PATIENCE):
        assert sources.collectives(0) == []
    with pytest.raises(UserError) as refused:
        sources.collectives(0)
    assert refused.value.remedy
    return f"{refused.value.what}; {refused.value.remedy}"


def test_equal_calls_tell_nobody_apart(recording: type[Recording]) -> None:
    recording.dump = of(*(entry(i, process_group=[name, ""], collective_seq_id=1) for i, name in enumerate("12")))
    why = refused_after(*pair(), SHARD, REPLICA, replace(CALL, serial=3, number=1), replace(CALL, serial=4, number=2))
    assert why.startswith("process group '2', rank 0 of 2: several communicators have had the same calls")
    assert "0xa rank 0 of 2; 0xb rank 0 of 2" in why and "torch 2.9" in why


def test_what_nobody_called_is_refused(recording: type[Recording], tmp_path: Path) -> None:
    recording.dump = of(*FLIGHTS)
    why = refused_after(*pair(), SHARD, REPLICA, GATHER, SCATTER, replace(REDUCE, count=13))
    assert "no communicator has had the calls that torch has recorded of it" in why
    why = refused_after(*pair(logs(tmp_path, (0x100, 0xA), (0x200, 0xC)), 0x200), SHARD, REPLICA, REDUCE)
    assert "or the hash that NCCL's log says" in why


def test_without_any_source_nothing_is_taken(recording: type[Recording]) -> None:
    """Not even the only one there is: torch has another group like it."""
    why = refused_after(*pair(), SHARD, REPLICA, REDUCE)
    assert "nothing says which communicator it is" in why and "TORCH_FR_BUFFER_SIZE" in why
    assert "nothing says which" in refused_after(*pair(), REPLICA, REDUCE)


def test_the_two_sources_contradict(recording: type[Recording], tmp_path: Path) -> None:
    """The pointer says one, torch's calls are the other's."""
    sources, plugin = pair(logs(tmp_path, (0x100, 0xA), (0x200, 0xB)), 0x100)
    plugin.next = [SHARD, REPLICA, replace(GATHER, algorithm="RING"), REDUCE]
    recording.dump = of(FLIGHTS[2] | {"record_id": 0})
    with pytest.raises(UserError, match="flight recorder and NCCL's profiler events: NCCL's call 0 is AllGather"):
        sources.collectives(0)


def test_other_groups_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"a": ("nccl", 2, 0), "b": ("nccl", 2, 0), "c": ("nccl", 2, 1), "d": ("gloo", 2, 0), "e": ("nccl", 4, 0)}
    for place, name in enumerate(("get_backend", "get_world_size", "get_rank")):
        monkeypatch.setattr(module.dist, name, lambda one, place=place: shapes[one][place])
    monkeypatch.setattr(module.dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(shapes)))
    assert module.others_like("a") == 1 and module.others_like("e") == 0  # type: ignore[arg-type]


def test_torchs_pointer() -> None:
    """0 where it has none: before the group's first call, and before torch 2.9."""
    class Backend:
        def _comm_ptr(self) -> int:
            return 0x55D0

    group = SimpleNamespace(_get_backend=lambda device: Backend() if device.type == "cuda" else None)
    assert module.pointer_of(group) == 0x55D0  # type: ignore[arg-type]
    assert module.pointer_of(SimpleNamespace(_get_backend=lambda device: object())) == 0  # type: ignore[arg-type]

    def none(device: Any) -> Any:
        raise RuntimeError("No backend type associated with device type cuda")

    assert module.pointer_of(SimpleNamespace(_get_backend=none)) == 0  # type: ignore[arg-type]


def test_without_the_plugin() -> None:
    with pytest.raises(UserError, match="NCCL's calls are not seen: another plugin is in use"):
        Sources(Prepared(problems=("another plugin is in use",)), ranks=4, rank=0, group="0")


# -- which of them --


class Group:
    group_name = "0"


@pytest.fixture
def on_nccl(monkeypatch: pytest.MonkeyPatch) -> Group:
    """A group of NCCL's, as far as it is asked: this torch may have no NCCL."""
    monkeypatch.setattr(module.dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(module.dist, "get_world_size", lambda _: 4)
    monkeypatch.setattr(module.dist, "get_rank", lambda _: 0)
    return Group()


def test_what_is_given_comes_first(on_nccl: Any, recording: type[Recording], monkeypatch: pytest.MonkeyPatch) -> None:
    known, _ = history(MADE, CALL)
    monkeypatch.setattr(module, "prepared", lambda: Prepared(history=known))
    topology, collectives = dict, list
    assert sources_of(on_nccl, topology, collectives) == (topology, collectives)  # type: ignore[arg-type]
    mine, calls = sources_of(on_nccl, topology, None)
    assert mine is topology and calls(0) == [FOUND]
    on_nccl.flowcheck_collectives = collectives
    _, calls = sources_of(on_nccl, topology, None)
    assert calls is collectives


def test_nobody_says_it(on_nccl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "prepared", lambda: None)
    with pytest.raises(UserError, match=r"the nccl backend does not tell torch[\s\S]*flowcheck\.prepare\(\)"):
        sources_of(on_nccl, None, None)
    monkeypatch.setattr(module, "prepared", Prepared)
    with pytest.raises(UserError, match="NCCL's calls are not seen: without a plugin"):
        sources_of(on_nccl, None, None)
    monkeypatch.setattr(module.dist, "get_backend", lambda _: "gloo")
    with pytest.raises(UserError, match="the gloo backend"):
        sources_of(on_nccl, None, None)


# -- node and token --


def test_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWCHECK_NODE", " 10.0.0.1:7070 ,10.0.0.2:7070,")
    assert nodes_of(None) == ["10.0.0.1:7070", "10.0.0.2:7070"]
    assert nodes_of("here:1") == ["here:1"] and nodes_of(("a:1", "b:1")) == ["a:1", "b:1"] and nodes_of([]) == []
    for nothing in ("", " , "):
        monkeypatch.setenv("FLOWCHECK_NODE", nothing)
        with pytest.raises(UserError, match="no node is named"):
            nodes_of(None)


def test_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a token of the environment\nnot this\n")
    monkeypatch.setenv("FLOWCHECK_TOKEN_FILE", str(tmp_path / "token"))
    assert token_of(None) == b"a token of the environment"
    assert token_of("the given one, no other") == b"the given one, no other"
    monkeypatch.setenv("FLOWCHECK_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"FLOWCHECK_TOKEN_FILE: .*none: cannot be read"):
        token_of(None)
    monkeypatch.delenv("FLOWCHECK_TOKEN_FILE")
    with pytest.raises(UserError, match="token"):
        token_of(None)


def test_attach_takes_both_from_the_environment(
    wrapped: Any, hand_node: HandNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    (tmp_path / "token").write_bytes(TOKEN)
    model = wrapped(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: dict[str, Any] = {"topology": dict, "collectives": lambda since: []}
    with pytest.raises(UserError, match="no node is named"):
        flowcheck.attach(model, optimizer, **said)
    monkeypatch.setenv("FLOWCHECK_NODE", "{}:{}".format(*hand_node.address))
    with pytest.raises(UserError, match="token"):
        flowcheck.attach(model, optimizer, **said)
    monkeypatch.setenv("FLOWCHECK_TOKEN_FILE", str(tmp_path / "token"))
    attachment = flowcheck.attach(model, optimizer, **said)
    hand_node.welcome()  # the token's proof is checked in there
    until(lambda: attachment._senders[0].connected)
    attachment.close(0.0)
