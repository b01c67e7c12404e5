"""A node without a port: it starts where there is no DPDK, and what it copied survives the node that it came from."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.ask.client import NodeClient, reader_key
from flowcheck.ask.offer import COPY
from flowcheck.checkpoint.coding.holders import Site
from flowcheck.checkpoint.directory import tensor_sha256
from flowcheck.control.protocol import token_bytes
from flowcheck.errors import EnvironmentProblem
from flowcheck.node import cli
from flowcheck.node import holder as holder_module
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.holder import Holder, check
from flowcheck.node.protect.journal import Journal
from flowcheck.node.protect.placement import Member
from flowcheck.trainer.recover.recovery import recover
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from ..hand_api import TOKEN, HandApi, HandVersion
from ..hand_node import until
from .conftest import LONGEST, NodeProcess
from .registry_scene import etcd_server, signed
from .test_service import _iteration, _job, _join, _run
from .test_serving import ask

WITHOUT = "import sys\nsys.modules['dataplane'] = None\n"  # importing it, or anything of it, is an error


def settings(folder: Path, shm: Path, *sources: str, **protect: Any) -> str:
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    more = "".join(f"{key} = {json.dumps(value).replace(': ', ' = ')}\n" for key, value in protect.items())
    return (f'name = "h"\n[tokens]\nreader = "{folder}/token"\npeer = "{folder}/token"\n'
            '[api]\nlisten = "127.0.0.1:0"\n[protect]\n'
            f'copies = {json.dumps(list(sources))}\ndirectory = "{shm}"\nseconds = 0.05\n{more}')


@pytest.fixture
def start(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NodeProcess]]:
    """start(address of a source, ...) -> a holder, as a process that cannot import dataplane, nor can its children."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(WITHOUT)
    paths = [str(blocked), *filter(None, [os.environ.get("PYTHONPATH")])]
    made: list[NodeProcess] = []

    def one(*sources: str, **protect: Any) -> NodeProcess:
        folder = tmp_path / f"holder{len(made)}"
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(paths))
            made.append(NodeProcess(folder, settings(folder, shm, *sources, **protect), began="holder_ready"))
        return made[-1]

    yield one
    for holder in made:
        holder.close()


def source_of(shm: Path) -> tuple[Replica, NodeConfig]:
    spec = OptimizerSpec.check("adam", [(["w"], {"lr": 0.5})])
    state = {"exp_avg": torch.tensor([0.1, 0.2]), "exp_avg_sq": torch.tensor([0.4, 0.5]), "step": 2.0}
    replica = Replica({"w": torch.tensor([1.0, 2.0])}, spec, path=shm / "flowcheck-s--1.replica", run_id="run",
                      step=7, optimizer_state={"w": state}, slots=3)
    return replica, NodeConfig.model_validate({
        "name": "s", "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "capture": {"device": "x"},
        "api": {"listen": "127.0.0.1:0"}, "replica": {"directory": str(shm)}, "output": {"directory": str(shm / "out")},
    })


def test_it_holds_what_the_source_had(start: Callable[..., NodeProcess], shm: Path) -> None:
    """Without DPDK. The source's memory is lost; the holder is killed with everything that it started, and begins again
    where nobody is left to copy from: equal each time."""
    replica, config = source_of(shm)
    with contextlib.closing(replica), contextlib.closing(
        Serving(config, TOKEN.encode(), lambda *_, **__: None)
    ) as serving:
        holder = start(serving.address)
        copied = holder.wait("copied")
        assert (copied["step"], copied["source"]) == (7, serving.address) and copied["bytes"] >= 28
    (shm / "flowcheck-s--1.replica").unlink()

    def back(holder: NodeProcess, *others: str) -> None:
        api = holder.seen("holder_ready")["api"]
        got = recover([*others, api], token=TOKEN, seconds=LONGEST)
        assert (got.step, got.source, got.status) == (7, f"{api}, copy", "unverified")
        assert got.model["w"].tolist() == [1.0, 2.0]
        weights = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.Adam([weights])
        optimizer.load_state_dict(got.optimizer)
        assert optimizer.state[weights]["exp_avg"].tolist() == torch.tensor([0.1, 0.2]).tolist()
        assert optimizer.state[weights]["step"].item() == 2.0 and optimizer.param_groups[0]["lr"] == 0.5

    back(holder, serving.address)
    assert holder.wait("uncopied", source=serving.address)["why"]
    holder.process.kill()
    holder.process.wait(LONGEST)
    back(start(serving.address))


def test_a_pull_is_no_faster_than_it_may_be(start: Callable[..., NodeProcess]) -> None:
    """In the holder's own process. A busy machine only takes longer."""
    with HandApi(HandVersion(3, {"w": [0.5] * 3_000_000})) as api:
        copied = start(api.name, mb_per_second=8).wait("copied")
        assert copied["bytes"] > 12_000_000 and copied["seconds"] >= 1.2


def test_its_metrics_are_there_although_it_has_no_port(tmp_path: Path) -> None:
    """What is made of captures is empty for it, and has to have their form."""
    given = NodeConfig.model_validate({
        "tokens": dict.fromkeys(("reader", "peer"), str(tmp_path / "token")), "api": {"listen": "127.0.0.1:0"},
        "protect": {"copies": ["127.0.0.1:9"], "directory": str(tmp_path)},
    })
    (tmp_path / "token").write_text(TOKEN)
    with Holder(given, lambda *_, **__: None) as holder:
        status, text = ask(holder.api, "/metrics")
    assert (status, b"flowcheck_node_info{" in text) == (200, True), text


@pytest.mark.slow
def test_it_ends_in_order(start: Callable[..., NodeProcess]) -> None:
    with HandApi(HandVersion(3)) as api:
        holder = start(api.name, every=3)
        assert holder.wait("copied")["step"] == 3
        begun = holder.seen("holder_ready")
        assert (begun["copies"], begun["every"]) == ([api.name], 3)
        key = reader_key(token_bytes(TOKEN))
        host, _, port = begun["api"].rpartition(":")
        with contextlib.closing(NodeClient((host, int(port)), key, LONGEST)) as node:
            (offer,) = node.offers()
            assert (offer.tier, offer.step, offer.run_id) == (COPY, 3, "run")
        assert holder.end(signal.SIGINT) == 0
        assert [line["event"] for line in holder.lines[-2:]] == ["stopping", "stopped"]


@pytest.mark.root
@pytest.mark.slow
def test_a_node_that_is_killed(
    start: Callable[..., NodeProcess], start_node: Any, attach: Any, truth: Any, lan: Any, shm: Path, tmp_path: Path
) -> None:
    """Real traffic makes a real node's versions. kill -9, and its memory goes with its machine: the copy is equal to
    what torch trained."""
    job = _job()
    node = start_node('[api]\nlisten = "127.0.0.1:0"')
    (tmp_path / "token").write_text(TOKEN)
    run = _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    held = start(node.seen("listening")["api"], every=4)
    for _ in range(2):
        assert node.wait("iteration", iteration=_iteration(run, lan, trainer))["published"]
    wanted = {name: tensor_sha256(one) for name, one in run.tensors().items()}
    state = {f"{name}.{key}": tensor_sha256(one) for name, keys in run.state().items() for key, one in keys.items()}
    assert held.wait("copied", step=4)["source"] == node.seen("listening")["api"]
    node.process.kill()
    node.process.wait(LONGEST)
    for path in tmp_path.glob("*.replica"):
        path.unlink()
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    got = recover(held.seen("holder_ready")["api"], token=TOKEN, seconds=LONGEST)
    assert (got.step, got.source.rpartition(", ")[2]) == (4, COPY)
    assert {name: tensor_sha256(one) for name, one in got.model.items()} == wanted
    names = list(wanted)
    found = {
        f"{names[number]}.{key}": tensor_sha256(one) for number, keys in got.optimizer["state"].items()
        for key, one in keys.items()
    }
    assert found == state


@pytest.mark.root
@pytest.mark.slow
def test_a_node_that_is_killed_with_a_journal(
    start: Callable[..., NodeProcess], start_node: Any, attach: Any, truth: Any, lan: Any, shm: Path, tmp_path: Path
) -> None:
    """Real traffic; a copy of step 4 and the gradients since then make the newest step: equal to what torch trained."""
    job = _job()
    node = start_node('[api]\nlisten = "127.0.0.1:0"', replica="journal = true\npeer_iterations = 4")
    (tmp_path / "token").write_text(TOKEN)
    run = _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    listening = node.seen("listening")
    held = start(listening["api"], every=4, journal={listening["api"]: "{}:{}".format(*node.address)})
    (folder,) = shm.glob("*.copies")

    def journal() -> tuple[list[int], list[int]]:
        kept = [Journal(path) for path in folder.glob("*/*/epoch-*/journal")]
        return (kept[0].entries, kept[0].steps) if kept else ([], [])

    for _ in range(5):
        number = _iteration(run, lan, trainer)
        assert node.wait("iteration", iteration=number)["published"]
        if number == 3:
            held.wait("copied", step=4)
        until(lambda number=number: number < 4 or (number in journal()[0] and number + 1 in journal()[1]))
    wanted = {name: tensor_sha256(one) for name, one in run.tensors().items()}
    state = {f"{name}.{key}": tensor_sha256(one) for name, keys in run.state().items() for key, one in keys.items()}
    node.process.kill()
    node.process.wait(LONGEST)
    for path in tmp_path.glob("*.replica"):
        path.unlink()
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    made = held.wait("redone")
    assert (made["base"], made["step"], made["why"]) == (4, 7, "")
    got = recover(held.seen("holder_ready")["api"], token=TOKEN, seconds=LONGEST)
    assert (got.step, got.source.rpartition(", ")[2]) == (7, COPY)
    assert {name: tensor_sha256(one) for name, one in got.model.items()} == wanted
    names = list(wanted)
    assert state == {
        f"{names[number]}.{key}": tensor_sha256(one) for number, keys in got.optimizer["state"].items()
        for key, one in keys.items()
    }


@pytest.mark.slow
def test_holders_that_find_each_other(start: Callable[..., NodeProcess], tmp_path: Path) -> None:
    """Two holders and a node, in a real etcd, which is killed: copies go on, and it is said once."""
    with etcd_server(tmp_path / "etcd") as server, HandApi(HandVersion(3)) as api:
        registry = {"registry": server.endpoints, "grace": 2.0}
        source = signed(server.endpoints, "default")
        member = Member(Site("source", leaf="l1"), api.name)
        source.renew({"members/source": member.text()})
        holder = start(**registry, leaf="l2")
        until(lambda: source.renew({"members/source": member.text()}) or holder.said("copied"))
        placed = holder.said("placed")[-1]
        assert (placed["copies"], placed["holders"], placed["together"]) == (["source"], ["source"], [])
        assert holder.seen("holder_ready")["registry"] == server.endpoints
        server.kill()
        holder.wait("unregistered")
        api.versions[:] = [HandVersion(4)]
        assert holder.wait("copied", step=4)["source"] == api.name
        assert len(holder.said("unregistered")) == 1 and holder.end() == 0


# -- what is refused, and what is checked ---------------------------------------------------------------------------


def config_of(tmp_path: Path, text: str) -> Path:
    (tmp_path / "node.toml").write_text(text)
    return tmp_path / "node.toml"


@pytest.mark.parametrize(
    ("was", "now", "where", "said"),
    [
        ('[api]\nlisten = "127.0.0.1:0"\n', "", "api", "nobody could have the copies"),
        ('\npeer = "{}/token"', "", "tokens.peer", "nodes that keep copies prove to each other"),
        ('copies = ["127.0.0.1:5"]', "copies = []", "protect.copies", "names nobody"),
        ('copies = ["127.0.0.1:5"]', 'registry = ["http://h"]', "protect.registry", "is not an endpoint of etcd"),
        ('copies = ["127.0.0.1:5"]', 'advertise = "h:"\nregistry = ["http://h:1"]', "protect.advertise", "HOST:PORT"),
        ('copies = ["127.0.0.1:5"]', 'parity = "2+1"', "protect.group", "is missing: the 3 nodes of 2+1, or"),
        ("[protect]", '[protect]\nparity = "2+1"\ngroup = ["h:1"]', "protect.group", "names 1 nodes, and 2+1 are 3"),
        ('copies = ["127.0.0.1:5"]', 'group = ["h:1"]', "protect.parity", "is missing: how many of the group"),
        ("[protect]", '[protect]\nparity = "1+1"\ngroup = ["h:1", "h:2"]', "protect.parity", "two nodes with data"),
        ("[protect]", '[protect]\nparity = "2+0"\ngroup = ["h:1", "h:2"]', "protect.parity", "one holder of parity"),
        ("[protect]", '[protect]\nparity = "2"', "protect.parity", "pattern"),
        ("[protect]", '[protect]\nparity = "2+1"\ngroup = ["h:1", "h:2", "h:3"]', "protect.group", "none of them"),
        ("[protect]", '[protect]\nadvertise = "h:2"\nparity = "2+1"\ngroup = ["h:1", "h:2", "h:3"]',
         "protect.group", "among those with data"),
        ('copies = ["127.0.0.1:5"]', 'copies = ["127.0.0.1:0"]', "protect.copies", "nobody listens at port 0"),
        ('copies = ["127.0.0.1:5"]', 'copies = ["h:5", "h:5"]', "protect.copies", "is given twice"),
        ("[protect]", '[control]\nlisten = "127.0.0.1:7"\n[protect]', "control", "this one has no [capture]"),
        ("[protect]", '[replica]\nslots = 4\n[protect]', "replica", "this one has no [capture]"),
        ("seconds = 0.05", "second = 1", "protect.second", "did you mean seconds"),
        ("seconds = 0.05", "mb_per_second = 7", "protect.mb_per_second", "greater than or equal to 8"),
        ('copies = ["127.0.0.1:5"]', 'copies = ["127.0.0.1:5", "h:6"]\nmb_per_second = 15', "protect.mb_per_second",
         "15 for 2 versions that may be pulled at once: 8 for each"),
        ("seconds = 0.05", "standby = true", "protect.standby", "nodes.registry is missing"),
        ("seconds = 0.05", 'replace = ["a"]', "protect.replace", "nodes.registry is missing"),
        ("seconds = 0.05", 'journal = {"127.0.0.1:6" = "127.0.0.1:7"}', "protect.journal", "is none of protect.copies"),
        ('copies = ["127.0.0.1:5"]', 'registry = ["https://me:hidden@h:1"]', "protect.registry", "user or a password"),
        ('copies = ["127.0.0.1:5"]', 'registry = ["https://h:1"]\nregistry_user = "me"', "protect.registry_user",
         "needs nodes.registry_password_file"),
        ('copies = ["127.0.0.1:5"]', 'registry = ["https://h:1"]\nregistry_key = "k"', "protect.registry_key",
         "needs nodes.registry_cert"),
        ('copies = ["127.0.0.1:5"]', 'registry = ["http://h:1"]\nregistry_cert = "c"\nregistry_key = "k"',
         "protect.registry", "is not encrypted"),
        ('copies = ["127.0.0.1:5"]', 'registry = ["http://h:1"]\nregistry_user = "me"\nregistry_password_file = "p"',
         "protect.registry", "is not encrypted"),
        ("seconds = 0.05", 'registry_user = "me"\nregistry_password_file = "p"', "protect.registry_user",
         "nodes.registry is missing"),
        ('copies = ["127.0.0.1:5"]', 'replace = [""]\nregistry = ["http://h:1"]', "protect.replace",
         "names no program"),
    ],
)
def test_settings_that_fit_no_holder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, was: str, now: str, where: str,
    said: str,
) -> None:
    text = settings(tmp_path, tmp_path, "127.0.0.1:5")
    assert was.format(tmp_path) in text
    path = config_of(tmp_path, text.replace(was.format(tmp_path), now))
    monkeypatch.setattr(sys, "argv", ["flowcheck-node", "--config", str(path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and where in error


def made(tmp_path: Path, *sources: str, **protect: Any) -> NodeConfig:
    (tmp_path / "token").write_text(TOKEN)
    return NodeConfig.model_validate({
        "tokens": dict.fromkeys(("reader", "peer"), str(tmp_path / "token")), "api": {"listen": "127.0.0.1:4"},
        "protect": {"copies": sources, "directory": str(tmp_path), **protect},
    })


def test_check_says_what_it_would_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(made(tmp_path, "127.0.0.1:5", memory_mb=1), as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["copies"] == ["127.0.0.1:5"] and said["memory_mb"] == 1 and said["free_mb"] > 1
    assert said["directory"] == str(tmp_path / "flowcheck-node.copies")
    with pytest.raises(EnvironmentProblem, match="MiB are free"):
        check(made(tmp_path, "127.0.0.1:5", memory_mb=1 << 40), as_json=False)
    assert "at most" in capsys.readouterr().out


def test_a_place_that_cannot_be_written_to_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem) as refused:
        Holder(made(tmp_path, "127.0.0.1:5", directory=str(tmp_path / "file")), lambda *_, **__: None)
    assert "protect.directory" in (refused.value.remedy or "")


@pytest.mark.slow
def test_another_token_is_shown_at_once(tmp_path: Path) -> None:
    """Its file has changed: sources and readers are shown the new one."""
    events: list[tuple[str, dict[str, Any]]] = []
    with HandApi(HandVersion(3)) as api:
        (tmp_path / "token").write_text("a token that nobody takes")
        given = NodeConfig.model_validate({
            "tokens": dict.fromkeys(("reader", "peer"), str(tmp_path / "token")), "api": {"listen": "127.0.0.1:0"},
            "protect": {"copies": [api.name], "directory": str(tmp_path), "seconds": 0.05},
        })
        with Holder(given, lambda event, **fields: events.append((event, fields))) as holder:
            def looked(event: str) -> bool:
                holder._children.look()
                return any(name == event for name, _ in events)

            until(lambda: looked("uncopied"))
            (tmp_path / "token").write_text(TOKEN)
            holder.reload()

            def turned() -> bool:
                holder.turn()
                return any(name == "copied" for name, _ in events)

            until(turned)
            got = recover(holder.api, token=TOKEN, seconds=LONGEST)
            assert got.step == 3


def test_check_counts_what_an_earlier_holder_left_as_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is within the bound already: --check before an upgrade refuses nothing that the start takes."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(holder_module.shutil, "disk_usage", lambda _: usage._replace(free=3 << 20))
    given = made(tmp_path, "127.0.0.1:5", memory_mb=5)
    with pytest.raises(EnvironmentProblem, match="3 MiB are free"):
        check(given, as_json=True)
    lane = tmp_path / "flowcheck-node.copies" / "source" / "run"
    lane.mkdir(parents=True)
    (lane / "model.safetensors").write_bytes(bytes(2 << 20))
    check(given, as_json=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["free_mb"] == 5


def test_what_a_holder_removes_meanwhile_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--check may be asked beside one that runs."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"12345")
    look, looked = os.lstat, list[str]()

    def removing(path: Any, **more: Any) -> os.stat_result:
        if str(path).endswith("/file"):
            looked.append(str(path))
            if len(looked) == 1:
                shutil.rmtree(tmp_path / next(one for one in "abc" if f"/{one}/" not in str(path)))
                os.unlink(path)
        return look(path, **more)

    monkeypatch.setattr(os, "lstat", removing)
    assert holder_module._taken(tmp_path) == 5
