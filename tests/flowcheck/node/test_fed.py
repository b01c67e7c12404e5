"""Jobs whose gradients are sent to a node, without a mirror: killed at any instant, they go on bit for bit."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.flowcheck.hand_node import until

from .conftest import NodeProcess
from .registry_scene import free_ports

WORKER = Path(__file__).with_name("fed_worker.py")
LONGEST = 120.0
TOKEN = "a token that only tests have"
REPLICA: dict[str, Any] = {"kind": "replica", "optimizer": "adamw"}
INSTANTS = ("forward", "backward", "step", "boundary")
SEEDS = 20
Trained = list[dict[str, Any]]


class Ranks:
    """Processes of fed_worker.py."""

    def __init__(self, folder: Path, ranks: int = 2, **given: Any) -> None:
        folder.mkdir(exist_ok=True)
        store = folder / f"store{len(list(folder.glob('*.0')))}"
        self._dies = bool(given.get("die"))
        given |= {"ranks": ranks, "store": str(store)}
        self._said = [store.with_suffix(f".{rank}") for rank in range(ranks)]  # a pipe would fill up
        self.processes = []
        for rank, path in enumerate(self._said):
            more = {"rank": rank} | ({"die": None} if rank else {})
            with path.open("w") as out:
                self.processes.append(subprocess.Popen(
                    [sys.executable, "-P", str(WORKER), json.dumps(given | more)], stdout=out, stderr=subprocess.PIPE,
                    text=True))

    @property
    def said(self) -> Path:
        """By rank 0."""
        return self._said[0]

    def finish(self) -> Trained:
        """What rank 0 has said."""
        first, *others = self.processes
        errors = [first.communicate(timeout=LONGEST)[1]]
        for other in others:
            if self._dies:
                other.kill()
            errors.append(other.communicate(timeout=LONGEST)[1])
        assert self._dies or not any(one.returncode for one in self.processes), "".join(errors)[-4000:]
        return [json.loads(line) for line in self._said[0].read_text().splitlines() if line.endswith("}")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[int, str]]:
    """undisturbed(sharded, optimizer, ranks, ...) -> what the state is after each step."""

    @cache
    def hashes(sharded: bool = False, optimizer: str = "nadam", ranks: int = 2, instances: int | None = None,
               optimizers: tuple[str, ...] = (), experts: bool = False, chunks: int = 1,
               mixed: bool = False) -> dict[int, str]:
        alone = Ranks(tmp_path_factory.mktemp("alone"), ranks, until=50, sharded=sharded, optimizer=optimizer,
                      instances=instances, optimizers=optimizers, experts=experts, chunks=chunks, mixed=mixed)
        return {one["step"]: one["hash"] for one in alone.finish()}

    return hashes


HOLDER = """
name = "holder"
[tokens]
reader = "{0}"
peer = "{0}"
[api]
listen = "127.0.0.1:0"
"""


def settings(folder: Path, port: int = 0, name: str = "node") -> str:
    """Of a node without a mirror port."""
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    return f"""
name = "{name}"
groups = 4
[feed]
[control]
listen = "127.0.0.1:{port}"
token_file = "{folder / 'token'}"
[api]
listen = "127.0.0.1:0"
[replica]
directory = "{folder}"
slots = 4
[output]
directory = "{folder / 'out'}"
[journal]
directory = "{folder / 'journal'}"
megabytes = 64
"""


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """start_node(port=0)"""
    started: list[NodeProcess] = []

    def start(port: int = 0) -> NodeProcess:
        started.append(NodeProcess(tmp_path, settings(tmp_path, port)))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def start_holder(tmp_path: Path) -> Iterator[Callable[[str], NodeProcess]]:
    """start_holder(address of an API whose versions it copies)"""
    with contextlib.ExitStack() as ends:
        def start(source: str) -> NodeProcess:
            folder = tmp_path / "holder"
            folder.mkdir()
            token = tmp_path / "token"
            return ends.enter_context(contextlib.closing(NodeProcess(folder, HOLDER.format(token) + f'''
[protect]
copies = ["{source}"]
every = 5
directory = "{folder}"
seconds = 0.05
''', began="holder_ready")))

        yield start


def asked(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """What --check says of settings."""
    (folder / "node.toml").write_text(text)
    return subprocess.run([sys.executable, "-P", "-m", "flowcheck.node", "--config", str(folder / "node.toml"),
                           "--check", "--json"], capture_output=True, text=True, timeout=LONGEST)


def test_what_a_node_would_take(tmp_path: Path) -> None:
    done = asked(tmp_path, settings(tmp_path))
    said = json.loads(done.stdout)
    assert said["journal"]["example"] and said["gradients"] == 4 * 4 * said["journal"]["entry"]
    assert (done.returncode, done.stderr) == (0, "")
    bare = asked(tmp_path, settings(tmp_path).partition("[journal]")[0])
    assert (bare.returncode, bare.stderr) == (0, "")
    assert json.loads(bare.stdout) == said | {"journal": None}


@pytest.mark.parametrize(("was", "now"), [
    ("[feed]", "[feed]\nkey = 1"), ("[feed]", ""), ('listen = "127.0.0.1:0"', ""),
])
def test_settings_that_cannot_be(tmp_path: Path, was: str, now: str) -> None:
    done = asked(tmp_path, settings(tmp_path).replace(was, now, 1))
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stdout == ""


def goes_on(
    node: NodeProcess, folder: Path, undisturbed: Callable[..., dict[int, str]], die: tuple[int, str],
    sharded: bool = False, **more: Any,
) -> None:
    """A rank is killed: all of them go on from a step right before."""
    address, api = f"127.0.0.1:{node.address[1]}", node.seen("listening")["api"]
    Ranks(folder, node=address, until=die[0] + 5, sharded=sharded, die=die, hold=8, **more).finish()
    again = Ranks(folder, node=address, api=api, recover=True, until=50, sharded=sharded, **more).finish()
    assert die[0] - 3 <= again[0]["step"] <= die[0] + 1
    wanted = undisturbed(sharded, more.get("optimizer", "nadam"), more.get("ranks", 2), more.get("instances"),
                         more.get("optimizers", ()), more.get("experts", False), more.get("chunks", 1),
                         more.get("mixed", False))
    assert [one["step"] for one in again if one["hash"] != wanted[one["step"]]] == []


@pytest.mark.parametrize(("how", "instant"), [
    pytest.param({"source": "auto"}, "backward", id="ddp"), pytest.param({"sharded": True}, "step", id="fsdp2"),
    pytest.param({"instances": 1, "kind": "replica", "experts": True, "chunks": 2}, "step", id="megatron-replica"),
    pytest.param({"optimizers": ("muon", "adamw")}, "step", id="muon-adamw"),
    *(pytest.param(how, instant, id=name, marks=pytest.mark.slow) for name, how, instant in [
        ("fsdp2-mixed", REPLICA | {"sharded": True, "ranks": 4, "mixed": True}, "step"),
        ("nesterov", {"optimizer": "nesterov"}, "step"), ("megatron", {"instances": 1}, "forward"),
        ("megatron-one-chunk", {"instances": 1, "kind": "replica"}, "step"),
        ("megatron-experts", {"instances": 1, "experts": True, "chunks": 2}, "boundary"),
        ("two", {"kind": "replica", "optimizers": ("adamw", "adamw"), "sharded": True}, "backward"),
        ("muon-adamw-fsdp2", {"optimizers": ("muon", "adamw"), "sharded": True, "chunks": 2}, "boundary"),
        ("instances-experts", {"instances": 2, "ranks": 4, "kind": "replica", "experts": True}, "forward"),
        ("whole-experts", {"instances": 0, "kind": "replica", "experts": True}, "step"),
        ("hsdp-replica", REPLICA | {"sharded": True, "ranks": 4}, "boundary"),
        ("whole", {"instances": 0, "kind": "replica"}, "backward"),
        ("instances", {"instances": 2, "ranks": 4, "kind": "replica"}, "boundary"),
        ("views", {"views": True}, "boundary"), ("old", {"optimizer": "old"}, "forward"),
        ("hsdp", {"sharded": True, "ranks": 4}, "backward"), ("ddp-replica", REPLICA, "step"),
        ("fsdp2-replica", REPLICA | {"sharded": True}, "backward"),
    ]),
])
def test_a_job_that_was_killed_goes_on_bit_for_bit(
    start_node: Any, tmp_path: Path, undisturbed: Any, how: dict[str, Any], instant: str
) -> None:
    node = start_node()
    assert "librte" not in Path(f"/proc/{node.process.pid}/maps").read_text()
    goes_on(node, tmp_path / "job", undisturbed, (30, instant), **how)
    assert node.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_whenever_it_is_killed(start_node: Any, tmp_path: Path, undisturbed: Any, seed: int) -> None:
    chance = random.Random(seed)
    how: dict[str, Any] = chance.choice([{}, {"sharded": True}, {"views": True}, {"optimizer": "old"},
                                         {"optimizer": "nesterov"}, REPLICA, REPLICA | {"sharded": True},
                                         {"optimizers": ("muon", "adamw"), "sharded": True},
                                         {"instances": 1, "kind": "replica", "experts": True, "chunks": 2}])
    goes_on(start_node(), tmp_path / "job", undisturbed, (chance.randrange(12, 40), chance.choice(INSTANTS)), **how)


def test_a_host_that_is_lost_comes_back_from_what_another_has_copied(
    start_node: Any, start_holder: Any, tmp_path: Path, undisturbed: Any
) -> None:
    """Its node with it, and all that both have kept."""
    node = start_node()
    address, api = f"127.0.0.1:{node.address[1]}", node.seen("listening")["api"]
    holder = start_holder(api)
    Ranks(tmp_path / "job", node=address, until=25, die=(20, "step"), hold=8, sharded=True, **REPLICA).finish()
    for shard in ("rank0", "rank1"):
        holder.seen("copied", name=shard, step=20)
    node.end(signal.SIGKILL)
    for path in (*tmp_path.glob("flowcheck-*"), tmp_path / "journal"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = Ranks(tmp_path / "job", api=holder.seen("holder_ready")["api"], recover=True, until=30, sharded=True,
                  **REPLICA).finish()
    wanted = undisturbed(True, "adamw")
    assert again[0]["step"] == 20
    assert [one["step"] for one in again if one["hash"] != wanted[one["step"]]] == []


@pytest.fixture
def start_group(tmp_path: Path) -> Iterator[Callable[[], list[NodeProcess]]]:
    """Two hosts with a rank and a node each, and one that has parity of both."""
    with contextlib.ExitStack() as ends:
        def start() -> list[NodeProcess]:
            ports, started = free_ports(3), []
            members = ", ".join(f'{{ api = "127.0.0.1:{port}" }}' for port in ports)
            for number, port in enumerate(ports):
                folder = tmp_path / f"host{number}"
                folder.mkdir()
                text = settings(folder, name=f"host{number}") if number < 2 else HOLDER.format(folder / "token")
                text = text.replace('[api]\nlisten = "127.0.0.1:0"', f'[api]\nlisten = "127.0.0.1:{port}"')
                text += f"""
[nodes]
addresses = [{members}]
[protect]
parity = "2+1"
every = 5
directory = "{folder}"
seconds = 0.05
"""
                began = "listening" if number < 2 else "holder_ready"
                started.append(ends.enter_context(contextlib.closing(NodeProcess(folder, text, began=began))))
            return started

        yield start


@pytest.mark.slow
def test_a_host_that_is_lost_comes_back_from_parity(start_group: Any, tmp_path: Path, undisturbed: Any) -> None:
    """The other host has its own shard still."""
    first, second, holder = nodes = start_group()
    Ranks(tmp_path / "job", nodes=[f"127.0.0.1:{one.address[1]}" for one in nodes[:2]], until=25, die=(20, "step"),
          hold=8, sharded=True, **REPLICA).finish()
    holder.seen("protected", step=20)
    first.end(signal.SIGKILL)
    shutil.rmtree(first.folder)
    api = ",".join(one.seen("listening" if one is second else "holder_ready")["api"] for one in (second, holder))
    again = Ranks(tmp_path / "job", api=api, recover=True, until=30, sharded=True, **REPLICA).finish()
    wanted = undisturbed(True, "adamw")
    assert again[0]["step"] == 20 and "parity" in again[0]["whence"]
    assert [one["step"] for one in again if one["hash"] != wanted[one["step"]]] == []


def resident(process: int) -> int:
    """Bytes of memory that is this process's own."""
    said = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(said.split("RssAnon:")[1].split()[0])


@pytest.mark.slow
@pytest.mark.parametrize("how", [REPLICA | {"sharded": True}, {"optimizers": ("muon", "adamw")}], ids=["fsdp2", "log"])
def test_memory_stays_what_it_was_for_a_thousand_steps(start_node: Any, tmp_path: Path, how: dict[str, Any]) -> None:
    node = start_node()
    ranks = Ranks(tmp_path / "job", node=f"127.0.0.1:{node.address[1]}", until=1000, hold=900, **how)
    processes = [node.process.pid, *(one.pid for one in ranks.processes)]

    def reach(step: int) -> None:
        while ranks.processes[0].poll() is None and ranks.said.read_text().count("\n") < step:
            time.sleep(0.05)

    reach(250)
    before = [resident(one) for one in processes]
    reach(950)
    grown = [resident(one) - was for one, was in zip(processes, before, strict=True)]
    assert ranks.finish()[-1]["published"] > 950
    assert max(grown) < 8 << 20, grown


def has_a_log(node: NodeProcess, name: str) -> bool:
    """A base, and what comes after it without a gap."""
    kept = {line["iteration"] for line in node.said("journaled") if line["name"] == name}
    return any(kept.issuperset(range(line["first"], line["iteration"] + 3))
               for line in node.said("log") if line["name"] == name)


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ddp", "fsdp2"])
def test_a_node_that_was_killed_begins_again_with_a_newer_base(
    start_node: Any, tmp_path: Path, undisturbed: Any, sharded: bool
) -> None:
    """And training never waits for it."""
    first = start_node()
    port = first.address[1]
    stop = tmp_path / "stop"
    ranks = Ranks(tmp_path / "job", node=f"127.0.0.1:{port}", until=100_000, sharded=sharded, stop=str(stop))
    first.wait("iteration", published=True)
    first.end(signal.SIGKILL)
    second = start_node(port)
    for name in ("rank0", "rank1") if sharded else ("",):
        until(partial(has_a_log, second, name))
    stop.touch()
    said = ranks.finish()
    api = second.seen("listening")["api"]
    again = Ranks(tmp_path / "job", node=f"127.0.0.1:{port}", api=api, recover=True, until=said[-1]["step"] + 3,
                  sharded=sharded).finish()
    here = {one["step"]: one["hash"] for one in said}
    assert again[0]["step"] > 20
    assert [one["step"] for one in again if one["hash"] != here.get(one["step"], one["hash"])] == []

