"""The profiler plugin as each NCCL loads and calls it, and what its reader makes of it."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.job.manifest import load_job
from flowcheck.job.model import Job
from flowcheck.trainer import plugin as installed
from flowcheck.trainer.describe.description import Watch, entries
from flowcheck.trainer.nccl.profiler import (
    RECORDS,
    Call,
    Communicator,
    Finalized,
    Plugin,
    ProxyOperation,
    Record,
)
from flowcheck.trainer.nccl.profiler_calls import History, compare, with_choices
from flowcheck.trainer.plugin import plugin_path
from lab.synth import example_job
from tests.flowcheck.trainer.described import net
from tests.flowcheck.trainer.nccl_driver import HERE, MINORS, Driver, call, calls_of, compile_c

EVENTS = 1 << 1 | 1 << 2 | 1 << 3  # ncclProfileColl, P2p, ProxyOp
ROOT = HERE.parents[2]


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(HERE / "nccl_driver.c", tmp_path_factory.mktemp("driver") / "nccl_driver.so")


@pytest.fixture
def nccl(driver_library: Path, tmp_path: Path) -> Callable[[int], tuple[Driver, Plugin]]:
    """A copy of driver and plugin for each test: both keep their state in the process."""

    def make(minor: int) -> tuple[Driver, Plugin]:
        path = shutil.copy(plugin_path(), tmp_path / f"plugin{minor}.so")
        plugin = Plugin(path)
        return Driver(Path(shutil.copy(driver_library, tmp_path / f"driver{minor}.so")), path, minor), plugin

    return make


Make = Callable[[int], tuple[Driver, Plugin]]


@pytest.mark.parametrize("minor", MINORS)
def test_each_nccl_finds_its_interface(nccl: Make, minor: int) -> None:
    driver, plugin = nccl(minor)
    assert not plugin.counts().process
    driver.init(ranks=4, rank=2, hash=0xFEED, name=b"my mesh", nodes=3)
    assert driver.interface == MINORS[minor] and driver.mask == EVENTS
    (made,) = plugin.read()
    told = driver.interface > 3
    assert made == Communicator(
        1, 1, driver.interface, *((0xFEED, 2, 4, 3, "my mesh") if told else (0, -1, -1, -1, ""))
    )
    counts = plugin.counts()
    assert (counts.communicators, counts.process, counts.recording) == (1, os.getpid(), True)


@pytest.mark.parametrize("minor", MINORS)
def test_a_call_and_its_proxy_operations(nccl: Make, minor: int) -> None:
    driver, plugin = nccl(minor)
    one = driver.init()
    driver.call(one, call("AllReduce", 5000, "ncclBfloat16", root=0, channels=2, warps=16, steps=6, chunk=4096))
    driver.call(one, call("Reduce", 7, "ncclInt64", root=3, channels=1, algorithm="TREE", protocol="SIMPLE"))
    driver.call(one, call("AllReduce", 1, "ncclUint32", channels=1, algorithm="NVLS_TREE", protocol="LL"))
    _, *records = plugin.read()
    calls = [record for record in records if isinstance(record, Call)]
    sum_of = 4 if minor == 23 else None
    interface = driver.interface
    assert calls == [
        Call(2, 1, interface, 0xFEED, 2, "AllReduce", 5000, "ncclBfloat16", 0, "RING", "LL128", 2, 16, 0, sum_of, True),
        Call(7, 1, interface, 0xFEED, 2, "Reduce", 7, "ncclInt64", 3, "TREE", "SIMPLE", 1, 16, 0, sum_of, True),
        Call(10, 1, interface, 0xFEED, 2, "AllReduce", 1, "ncclUint32", 0, "NVLS_TREE", "LL", 1, 16, 1, sum_of, True),
    ]
    proxies = [record for record in records if isinstance(record, ProxyOperation) and record.call == 2]
    assert proxies == [
        ProxyOperation(3 + 2 * channel + sends, 1, interface, 2, 2, channel, 1 if sends else 3, 6, 4096, bool(sends),
                       os.getpid())
        for channel in range(2) for sends in range(2)
    ]
    assert len(records) == 3 + 4 + 2 + 2
    assert driver.kept == 0


@pytest.mark.parametrize("minor", MINORS)
def test_point_to_point_and_another_process(nccl: Make, minor: int) -> None:
    """PXN: a proxy operation of another process, whose call's number is none of ours."""
    driver, plugin = nccl(minor)
    one = driver.init()
    driver.call(one, call("Send", 9, "ncclInt8", root=3, channels=1, foreign=1))
    driver.call(one, call("Recv", 8, "ncclFloat64", root=1, channels=0))
    _, send, received, sent, receive = plugin.read()
    assert isinstance(send, Call) and isinstance(receive, Call)
    for seen, said in ((send, ("Send", 9, "ncclInt8", 3)), (receive, ("Recv", 8, "ncclFloat64", 1))):
        assert (seen.function, seen.count, seen.type, seen.root) == said and not seen.collective
        assert (seen.hash, seen.rank, seen.algorithm, seen.protocol) == (0xFEED, 2, "", "")
    for proxy, sends in ((received, False), (sent, True)):
        assert isinstance(proxy, ProxyOperation) and (proxy.call, proxy.process, proxy.sends) == (0, 1, sends)


@pytest.mark.parametrize("minor", MINORS)
def test_no_events_once_it_is_quiet(nccl: Make, minor: int) -> None:
    driver, plugin = nccl(minor)
    one = driver.init()
    driver.call(one, call())
    plugin.record(False)
    assert driver.mask == 0 and not plugin.counts().recording
    told = driver.events
    driver.call(one, call())
    other = driver.init(hash=5)
    driver.call(other, call())
    assert driver.events == told and driver.mask == 0
    plugin.record(True)
    assert driver.mask == EVENTS and plugin.counts().recording
    driver.call(one, call())
    seen = [record for record in plugin.read() if isinstance(record, Call)]
    assert [record.sequence for record in seen] == ([0, 1] if minor <= 25 else [0, 2])  # 2.23 to 2.25: of those told


@pytest.mark.parametrize("minor", MINORS)
def test_what_was_seen_outlives_the_communicators(nccl: Make, minor: int) -> None:
    """NCCL unloads the plugin with the last one, and loads it again with the next."""
    driver, plugin = nccl(minor)
    first, second = driver.init(), driver.init()
    driver.finalize(first)
    driver.finalize(second)
    assert plugin.counts().communicators == 0
    plugin.record(False)  # there is no mask to write to
    assert driver.mask == EVENTS
    plugin.record(True)
    driver.init()
    kinds = [(type(record), record.number) for record in plugin.read()]
    assert kinds == [(Communicator, 1), (Communicator, 2), (Finalized, 1), (Finalized, 2), (Communicator, 3)]


def jobs() -> list[tuple[str, Job]]:
    captured = [(path.name, load_job(path)) for path in sorted((ROOT / "pcaps").glob("*.job.json"))]
    return [
        *captured,
        ("tree", example_job(ranks=4, channels=2, algorithm="tree", protocol="ll128", count=[900, 5000, 70])),
        ("bf16", example_job(ranks=3, channels=4, protocol="simple", dtype="bfloat16", count=[8, 8, 8, 9])),
        ("rings", example_job(ranks=4, rings=[[0, 2, 1, 3]], channels=1)),
    ]


@pytest.mark.parametrize("minor", [23, 25, 26, 27, 28, 30])
def test_a_jobs_calls_are_those_of_its_manifest(nccl: Make, minor: int) -> None:
    """Every shared capture's job and three more: each iteration's calls and choices, the steady ones found, and the
    peers, steps and chunks of each channel."""
    driver, plugin = nccl(minor)
    history = History(plugin)
    listed = jobs()
    assert len(listed) >= 6
    for number, (name, job) in enumerate(listed):
        rank, ranks = 1, job.communicator.ranks
        own = driver.init(ranks=ranks, rank=rank, hash=number + 1)
        other = driver.init(ranks=ranks, rank=0, hash=1000)  # of a second group: never mixed up
        native, said, boundaries = calls_of(job, rank)
        driver.call(own, native[0])
        ours = history.communicator(ranks=ranks, rank=rank, hash=number + 1)
        last: list[dict[str, Any]] | None = None
        for begin, end in itertools.pairwise([0, *boundaries]):
            for sent in native[max(begin, 1):end]:
                driver.call(own, sent)
                driver.call(other, call("AllReduce", 77))
            assert ours.iteration() == said[begin:end], name
            assert ours.steady() == (said[begin:end] if said[begin:end] == last else None), name
            last = said[begin:end]
        assert ours.steady() == last
        seen = ours.calls()
        compare(said, seen)
        assert with_choices([{"op": one["op"], "count": one["count"], "dtype": one["dtype"], "root": one["root"]}
                             for one in said], seen) == said
        for sent, one in zip(native, seen, strict=True):
            assert [
                (proxy.channel, proxy.sends, proxy.peer, proxy.steps, proxy.chunk_bytes)
                for proxy in ours.operations(one)
            ] == [
                (channel, sends, sent.next if sends else sent.previous, sent.steps, sent.chunk)
                for channel in range(sent.channels) for sends in (False, True)
            ]
        assert ours.collectives(0) == said and ours.collectives(len(said)) == []
        driver.finalize(own)
        driver.finalize(other)
        assert history.communicators() == []


@pytest.mark.parametrize("minor", [23, 30])
def test_an_attachment_takes_its_calls_from_the_plugin(nccl: Make, minor: int, wrapped: Any) -> None:
    """As `collectives=` of attach: the job with NCCL's choices for each call, and the refusal of an odd one."""
    driver, plugin = nccl(minor)
    own = driver.init(ranks=2, rank=0)
    driver.call(own, call("Broadcast", 48, "ncclInt8", root=1, channels=1, protocol="LL"))
    ours = History(plugin).communicator(ranks=2, rank=0)
    model = wrapped(net())  # one bucket of 12
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    watch = Watch(model, optimizer, entries(model, optimizer), ours.collectives,
                  lambda: {"ranks": 2, "nccl_version": "2.27.7", "channels": 2}, "a run", 7)
    looks = []
    for _ in range(3):
        driver.call(own, call("AllReduce", 12, channels=2, algorithm="TREE", protocol="SIMPLE"))
        looks.append(watch.look())
    assert looks[:2] == [None, None] and looks[2] is not None
    (steady,), (sent, *_) = looks[2].collectives.steady, looks[2].collectives.startup
    assert (steady.op, steady.count, steady.algorithm, steady.protocol, steady.channels, steady.bucket) == (
        "AllReduce", 12, "tree", "simple", 2, 0)
    assert (sent.op, sent.count, sent.dtype, sent.root, sent.protocol) == ("Broadcast", 48, "int8", 1, "ll")
    driver.call(own, call("AllReduce", 12, channels=2, algorithm="TREE", protocol="SIMPLE"))
    assert watch.again(3) == ""
    driver.call(own, call("AllReduce", 12, channels=2, algorithm="TREE", protocol="LL128"))
    assert "number 0 is AllReduce of 12 float32" in watch.again(4)


def test_many_threads_lose_nothing(nccl: Make) -> None:
    """Eight threads of NCCL at once: each one's calls in its order, each proxy operation with its call."""
    driver, plugin = nccl(30)
    first = driver.init()
    for _ in range(7):
        driver.init()
    plugin.read()
    count = 1500
    driver.burst(first, 8, count, call())
    records = plugin.read()
    assert plugin.counts().dropped == 0 and len(records) == 8 * 2 * count
    calls = {record.serial: record for record in records if isinstance(record, Call)}
    for number in range(1, 9):
        assert [one.count for one in calls.values() if one.number == number] == list(range(1, count + 1))
    for record in records:
        if isinstance(record, ProxyOperation):
            parent = calls[record.call]
            assert (parent.number, parent.sequence) == (record.number, record.steps)
            assert record.chunk_bytes == record.channel == first + record.number - 1


def test_reading_while_nccl_writes(nccl: Make) -> None:
    """What comes is whole and in order, and what does not was counted as dropped."""
    driver, plugin = nccl(30)
    first = driver.init()
    driver.init()
    writer = threading.Thread(target=driver.burst, args=(first, 2, 20000, call()))
    writer.start()
    records: list[Record] = []
    while writer.is_alive():
        records += plugin.read()
    writer.join()
    while new := plugin.read():
        records += new
    counts = plugin.counts()
    assert [record.serial for record in records] == list(range(1, counts.written + 1))
    assert counts.written + counts.dropped == 2 + 2 * 2 * 20000 and counts.taken == counts.written


def test_nothing_of_an_older_record_shows(nccl: Make) -> None:
    """The ring's second lap, with less in each record than the first."""
    driver, plugin = nccl(30)
    one = driver.init(name=b"n" * 60)
    driver.burst(one, 1, RECORDS // 2, call("ReduceScatter", type="ncclFloat8e4m3", algorithm="COLLNET_DIRECT",
                                            protocol="SIMPLE", root=7))
    assert len(plugin.read()) == RECORDS and plugin.counts().dropped == 1
    driver.call(one, call("Send", 3, "ncclInt8", root=1, channels=1))
    two = driver.init(name=b"m")
    sent, *proxies, made = plugin.read()
    assert sent == Call(RECORDS + 1, 1, 6, 0xFEED, 2, "Send", 3, "ncclInt8", 1, "", "", 0, 0, 0, None, False)
    assert all(isinstance(record, ProxyOperation) and record.call == sent.serial for record in proxies)
    assert isinstance(made, Communicator) and (made.name, made.number) == ("m", two + 1)


def test_a_full_ring_drops_and_counts(nccl: Make) -> None:
    driver, plugin = nccl(27)
    one = driver.init()
    driver.burst(one, 1, RECORDS, call())  # two events each, behind the communicator's
    counts = plugin.counts()
    assert (counts.written, counts.dropped) == (RECORDS, RECORDS + 1)
    records = plugin.read()
    assert [record.serial for record in records] == list(range(1, RECORDS + 1))
    driver.call(one, call())  # there is room again
    assert len(plugin.read()) == 5
    with pytest.raises(UserError, match=rf"{RECORDS + 1} events were dropped"):
        History(plugin).update()


def test_more_communicators_than_there_is_room_for(nccl: Make) -> None:
    driver, plugin = nccl(24)
    made = [driver.init() for _ in range(257)]
    assert plugin.counts().strangers == 1 and plugin.counts().communicators == 256
    driver.call(made[-1], call())
    assert plugin.counts().strangers > 1 and not [one for one in plugin.read() if isinstance(one, Call)]
    driver.finalize(made[3])
    again = driver.init()
    driver.call(again, call())
    seen = [(type(record), record.number) for record in plugin.read()]
    assert seen == [(Finalized, 4), (Communicator, 257), (Call, 257), *[(ProxyOperation, 257)] * 4]


def test_a_forked_process_has_its_own(nccl: Make) -> None:
    """What the child does never comes to the parent, and the parent's reader is refused in the child."""
    driver, plugin = nccl(30)
    one = driver.init()
    driver.call(one, call())
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                plugin.read()
            except UserError:
                status = 2
            inside = driver.init(hash=9)
            driver.call(inside, call(count=9))
            mine = Plugin(plugin.path).read()
            if status == 2 and [type(record) for record in mine[:2]] == [Communicator, Call]:
                status = 0 if mine[0].number == 1 and mine[1].count == 9 else 3  # type: ignore[union-attr]
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [type(record) for record in plugin.read()] == [Communicator, Call, *[ProxyOperation] * 4]


def test_an_installation_without_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(installed.PLUGIN, built=tmp_path / "absent.so", source=tmp_path / "absent.c")
    monkeypatch.setattr(installed, "PLUGIN", absent)
    with pytest.raises(EnvironmentProblem, match="was not built with this installation") as refused:
        Plugin()
    assert "topology=" in refused.value.remedy


def test_a_plugin_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="is not FlowCheck's profiler plugin"):
        Plugin(tmp_path / "none.so")
