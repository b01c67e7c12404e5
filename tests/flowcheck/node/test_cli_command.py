"""`flowcheck-node`: signals, options and exit statuses. The parts of the machine are those of node_scene.py."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("dataplane.pydpdk._dpdk", reason="the dataplane is not built: libdpdk was not found")

from dataplane.pydpdk.errors import DpdkError
from flowcheck import __version__
from flowcheck.errors import UserError
from flowcheck.interrupts import handled
from flowcheck.node import cli, holder, service
from flowcheck.node.check.budget import Budget, CaptureFigures, ThreadPlace
from flowcheck.node.check.check import show
from flowcheck.node.ports import open_captures

from .node_scene import World, put_in

TOKEN = "a token that only tests have"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return put_in(World(), monkeypatch)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """command(device=...) -> exit status of `flowcheck-node --config node.toml`."""

    def run(*options: str, device: str = "af_packet:lo", directory: str = "", text: str = "",
            settings: str = "", mode: int = 0o600) -> int:
        path = tmp_path / "node.toml"
        (tmp_path / "token").write_text(TOKEN)
        (tmp_path / "token").chmod(mode)
        path.write_text(text or (
            f'[control]\nlisten = "127.0.0.1:0"\ntoken_file = "{tmp_path}/token"\n[capture]\nhuge = false\n'
            f'device = "{device}"\n[replica]\ndirectory = "{directory or tmp_path}"\n'
            f'{settings}\n[output]\nstatus_file = "{tmp_path}/status.json"\n'
        ))
        config = () if options == ("--json",) or "--config" in options else ("--config", str(path))
        monkeypatch.setattr(sys, "argv", ["flowcheck-node", *config, *options])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    with handled(signal.default_int_handler, signal.SIGINT, signal.SIGTERM):
        yield run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_in_order(
    command: Callable[..., int], world: World, monkeypatch: pytest.MonkeyPatch, capfd: Any, number: signal.Signals
) -> None:
    def kill(seconds: float) -> None:
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            raise AssertionError("the signal has not been taken over") from None

    monkeypatch.setattr(service, "time", SimpleNamespace(sleep=kill))
    assert command() == 0
    out = capfd.readouterr().out
    assert "listening: control 127.0.0.1:" in out and "groups 1" in out
    assert out.rstrip().endswith("stopped") and "capture: 3 arrived" in out
    stopping = f"stopping: why {number.name}: what is in the rings is judged and published first\n"
    assert out.index("listening") < out.index(stopping) < out.index("capture: 3")
    assert world.done[-1] == "close eal"


def test_options_of_the_command(
    command: Callable[..., int], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(service, "time", SimpleNamespace(sleep=lambda _: os.kill(os.getpid(), signal.SIGTERM)))
    assert command("--json", "--keep-hashes", str(tmp_path / "hashes")) == 0
    said = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    events = ["placing", "updating", "listening", "stopping", "capture", "stopped"]
    assert [line["event"] for line in said] == events
    assert set(json.loads((tmp_path / "status.json").read_text())) == set(events)
    assert "ll=t0@4096" in said[0]["text"] and "FLOWCHECK_PLACING=default" in said[0]["text"]
    assert said[1]["text"].endswith(", 8-vectors (FLOWCHECK_UPDATING=default)")
    assert (tmp_path / "hashes").exists()


@pytest.mark.parametrize(("mode", "said"), [(0o600, 0), (0o640, 1), (0o604, 1)])
def test_a_token_that_others_may_read_is_said(
    command: Callable[..., int], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any,
    mode: int, said: int,
) -> None:
    monkeypatch.setattr(service, "time", SimpleNamespace(sleep=lambda _: os.kill(os.getpid(), signal.SIGTERM)))
    assert command("--json", "--keep-hashes", str(tmp_path / "hashes"), mode=mode) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [str(tmp_path / "token") in line["why"] for line in lines if line["event"] == "problem"] == [True] * said


class Kept:
    """Stands for a holder that ends at once."""

    last = "what was copied stays"

    def __init__(self, settings: Any, say: Callable[..., None]) -> None:
        self.stop = self.reload = lambda: None

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None: ...

    def announce(self, say: Callable[..., None]) -> None:
        say("holder_ready", every=5)

    def wait(self) -> None: ...


def test_a_node_without_a_port_holds_copies_and_needs_no_dpdk(
    command: Callable[..., int], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    checked: list[bool] = []
    monkeypatch.setattr(holder, "Holder", Kept)
    monkeypatch.setattr(holder, "check", lambda settings, as_json: checked.append(as_json))
    text = (f'[tokens]\nreader = "{tmp_path}/token"\npeer = "{tmp_path}/token"\n[api]\nlisten = "127.0.0.1:0"\n'
            f'[protect]\ncopies = ["127.0.0.1:9"]\ndirectory = "{tmp_path}"\n[output]\ndirectory = "{tmp_path}"\n')
    assert [command("--check", "--json", text=text), command("--check", text=text)] == [0, 0]
    assert checked == [True, False] and capfd.readouterr().out == ""
    assert command("--json", "--config", str(tmp_path / "node.toml"), text=text) == 0
    said = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["event"] for line in said] == ["holder_ready", "stopping", "stopped"]
    assert said[1]["why"] == "asked to: what was copied stays"
    assert command(text=text) == 0 and "Z holder_ready: was holding, every 5\n" in capfd.readouterr().out
    assert world.done == []


def test_sigterm_while_it_starts_ends_it_as_ctrl_c_does(
    command: Callable[..., int], world: World, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """What has started is taken down, and the shell's status is that of an interrupt."""
    source = world.source

    def interrupted(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return source(*given)

    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the command has not taken the signal over"))
    monkeypatch.setattr(open_captures, "LiveSource", interrupted)
    assert command() == 130
    assert world.done == ["open eal", "close eal"]
    said = "flowcheck-node: interrupted before it was listening; nothing is left behind\n"
    assert capsys.readouterr().err == said


def test_settings_that_are_wrong_end_it_with_2(command: Callable[..., int], world: World, capsys: Any) -> None:
    assert command(text="[control]\n") == 2
    said = capsys.readouterr().err
    assert said.startswith("flowcheck-node: error: ") and "control.listen: is missing" in said
    assert "\n  remedy: " in said and world.done == []


@pytest.mark.parametrize("options", [(), ("--check",)])
def test_a_holder_without_its_table_ends_with_2(
    command: Callable[..., int], world: World, capsys: Any, options: tuple[str, ...]
) -> None:
    text = '[control]\nlisten = "127.0.0.1:0"\ntoken_file = "t"\n[api]\nlisten = "127.0.0.1:0"\n'
    assert command(*options, text=text) == 2
    said = capsys.readouterr().err
    assert ": capture: is missing: " in said and "[protect]" in said and world.done == []


def test_a_device_that_is_not_one_ends_it_with_2(command: Callable[..., int], world: World, capsys: Any) -> None:
    assert command(device="no such kind:0") == 2
    said = capsys.readouterr().err
    assert said.startswith("flowcheck-node: error: capture: ") and "remedy: docs/use/settings.md has every key" in said
    assert world.done == []


def test_a_machine_that_says_no_ends_it_with_3(command: Callable[..., int], world: World, capsys: Any) -> None:
    assert command(directory="/none such") == 3
    said = capsys.readouterr().err
    assert said == (
        "flowcheck-node: error: replica.directory /none such: replica files cannot be made there\n"
        "  remedy: an existing directory on tmpfs or hugetlbfs that the node may write to\n"
    )


def test_a_refusal_of_dpdk_ends_it_with_3(
    command: Callable[..., int], world: World, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise DpdkError(12, "no memory", "more of it")

    monkeypatch.setattr(open_captures, "start_eal", refuse)
    assert command() == 3
    assert "no memory" in (said := capsys.readouterr().err) and said.endswith("  remedy: more of it\n")


def test_what_is_said_of_the_settings_is_not_said_of_the_capture(
    command: Callable[..., int], world: World, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A UserError is a ValueError, too."""

    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("odd", where="somewhere", remedy="another")

    monkeypatch.setattr(open_captures, "start_eal", refuse)
    assert command() == 2
    assert capsys.readouterr().err == "flowcheck-node: error: somewhere: odd\n  remedy: another\n"


def test_a_fault_of_ours_ends_it_with_70_and_its_lines(
    command: Callable[..., int], world: World, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(open_captures, "start_eal", lambda *_, **__: 1 // 0)
    assert command() == 70
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and "flowcheck-node: error: ZeroDivisionError: " in said
    assert "remedy: this is a bug: report the lines above" in said


def test_without_settings_it_says_what_is_missing(command: Callable[..., int], world: World) -> None:
    assert command("--json") == 2 and world.done == []


def test_its_version(command: Callable[..., int], world: World, capsys: Any) -> None:
    assert command("--version") == 0
    assert capsys.readouterr().out == f"flowcheck-node {__version__}\n" and world.done == []


def test_its_help_has_its_own_options_only(command: Callable[..., int], capsys: Any) -> None:
    """It installs nothing into a shell."""
    assert command("--help") == 0
    said = capsys.readouterr().out
    assert "--keep-hashes" in said and "--install-completion" not in said


# -- what it would take ----------------------------------------------------------------------------------------


def test_a_check_prints_the_figures_in_80_columns_and_starts_nothing(
    command: Callable[..., int], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    core = max(os.sched_getaffinity(0))
    monkeypatch.setenv("COLUMNS", "80")
    assert command("--check", text=(
        f'groups = 2\n[control]\nlisten = "127.0.0.1:0"\ntoken_file = "{tmp_path}/token"\n'
        f'[[capture]]\ndevice = "af_packet:lo"\nhuge = false\ncores = [{core}]\nring_size = 1024\n'
        '[[capture]]\ndevice = "ring"\npath_mtu = 4096\ndump = "dma"\nengines = ["dma_skeleton"]\n'
        f'[replica]\ndirectory = "{tmp_path}"\nmemory_mb = 8\n[output]\nstatus_file = "{tmp_path}/s/status.json"\n'
    )) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    lines = [line.split() for line in out.splitlines()]
    assert ["ring", "-", "dma", "1", "16,384"] in [line[:5] for line in lines]
    assert ["af_packet:lo", "-", "copy", "1", "1,024"] in [line[:5] for line in lines]
    assert "unknown; as an example 100" in " ".join(out.split()) and "dma_skeleton" in out
    assert "5.5" in out  # milliseconds of 16,384 packets at 100 Gb/s
    assert ["replicas", "and", "gradients", "of", "all", "groups,", "at", "most", "16"] in lines
    assert ["receive", "from", "af_packet:lo", "queue", "0", "1", str(core)] in lines
    assert "note: packet memory without huge pages: too slow for line rate" in " ".join(out.split())
    assert world.done == [] and not (tmp_path / "s" / "status.json").exists()

WIDE = """\
Captures
device          NUMA node  dump  queues  packets per ring  buffers MB  rings MB  in the kernel MB
─────────────────────────────────────────────────────────────────────────────────────────────────
0000:81:00.1            1  dma        4            16,384       2,049         3                 0
af_packet:eth5          -  copy       1             1,024           5         1                64

A ring bears, if full packets of the whole link come to one queue
device                           link Gb/s  longest pause ms  DMA engines
────────────────────────────────────────────────────────────────────────────────────────
0000:81:00.1                           200               1.2  0000:00:01.0, 0000:00:01.1
af_packet:eth5  unknown; as an example 100               0.5  -

memory                                             MB
─────────────────────────────────────────────────────
captures, in huge pages                         2,057
captures, in the kernel                            64
replicas and gradients of all groups, at most  40,960
answers of peers and to them, at most               7
trainers' messages to all groups, at most         512
free huge pages                                 3,072
available ordinary memory                      92,160

threads                            how many  core
─────────────────────────────────────────────────
receive from 0000:81:00.1 queue 0         1     3
update                                   12   any

cores that no thread is pinned to: 5, 7
note: one [bold]thing[/bold]
note: another
"""
NARROW = """\
Captures
                                  packets                 in the
                 NUMA                 per buffers  rings  kernel
device           node dump queues    ring      MB     MB      MB
────────────────────────────────────────────────────────────────
0000:81:00.1        1 dma       4  16,384   2,049      3       0
af_packet:eth5      - copy      1   1,024       5      1      64

A ring bears, if full packets of the whole link come to one
queue
                                  longest pause
device               link Gb/s               ms  DMA engines
────────────────────────────────────────────────────────────────
0000:81:00.1               200              1.2  0000:00:01.0,
                                                 0000:00:01.1
af_packet:eth5  unknown; as an              0.5  -
                   example 100
"""


@pytest.mark.parametrize(("width", "shown"), [(160, WIDE), (64, NARROW)])
def test_what_a_check_prints(width: int, shown: str) -> None:
    """Columns that may take several lines do on a narrow screen, and others do not. Sizes are rounded up."""
    mib = 1 << 20
    of_node = CaptureFigures(
        "0000:81:00.1", 1, "dma", ("0000:00:01.0", "0000:00:01.1"), 4, 16384, (2 << 30) + 1, 3 * mib, 0, 200_000, 1.25
    )
    of_none = CaptureFigures("af_packet:eth5", -1, "copy", (), 1, 1024, 5 * mib, mib, 64 * mib, -1, 0.5)
    made = Budget(
        huge=True, captures=(of_node, of_none), dpdk=(2 << 30) + 9 * mib, kernel=64 * mib, replicas=40 << 30,
        peers=7 * mib, copies=0, switches={}, inboxes=512 * mib, ordinary=1, available=90 << 30, huge_free=3 << 30,
        threads=(ThreadPlace("receive from 0000:81:00.1 queue 0", 1, 3), ThreadPlace("update", 12)), left=(5, 7),
        notes=("one [bold]thing[/bold]", "another"), problems=(),
    )
    out = io.StringIO()
    show(made, Console(file=out, width=width, highlight=False))
    assert [line.rstrip() for line in out.getvalue().splitlines()][: len(shown.splitlines())] == shown.splitlines()
    out = io.StringIO()
    show(replace(made, huge=False, peers=0, left=()), Console(file=out, width=160))
    said = out.getvalue()
    assert "captures, in ordinary memory" in said and "answers of peers" not in said
    assert "cores that no thread is pinned to: none\n" in said


def test_a_check_for_machines(command: Callable[..., int], world: World, capsys: Any) -> None:
    assert command("--check", "--json", device="ring") == 0
    said = json.loads(capsys.readouterr().out)
    (capture,) = said["captures"]
    assert (capture["device"], capture["ring_packets"], capture["mbps"]) == ("ring", 16384, -1)
    assert said["problems"] == [] and said["huge"] is False and said["inboxes"] == 512 << 20
    assert said["ordinary"] - said["inboxes"] == said["dpdk"] > 16384 * 1152


def test_a_check_tells_machines_its_problems(command: Callable[..., int], world: World, capsys: Any) -> None:
    assert command("--check", "--json", device="ring", settings="memory_mb = 1000000000") == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith("replica.memory_mb: a job may take 1000000000 MB")


def test_a_check_refuses_after_it_has_printed(
    command: Callable[..., int], world: World, tmp_path: Path, capsys: Any
) -> None:
    """Every problem is said; the status is that of the first one."""
    base = f'[control]\nlisten = "127.0.0.1:0"\ntoken_file = "{tmp_path}/token"\n'
    tail = f'[replica]\ndirectory = "{tmp_path}"\nmemory_mb = 1000000000\n'
    assert command("--check", text=f'{base}[capture]\ndevice = "ring"\ncores = [1023]\n{tail}') == 3
    said = capsys.readouterr()
    assert "receive from ring queue 0" in said.out
    assert "flowcheck-node: error: capture.cores: this machine has no core 1023\n  remedy: " in said.err
    assert "flowcheck-node: error: replica.memory_mb: a job may take 1000000000 MB" in said.err
    assert command("--check", text=f'{base}[capture]\ndevice = "ring"\n{tail}') == 2
    assert world.done == []


@pytest.mark.parametrize(("capture", "status", "said"), [
    ('device = "ring"\nqueues = 2\ncores = [1, 1]', 2, "capture.cores: 1 is given twice"),
    ('device = "ring"\ndump = "dma"\nengines = ["0000:00:00.7"]', 3, "capture.engines: this machine has no DMA engine"),
    ('device = "af_packet:flowcheck9"', 3, "capture: interface flowcheck9: No such device"),
    ('device = "eth0"', 2, "capture: 'eth0' is not a capture device"),
    ('device = "ring"\npath_mtu = 4096\ndump = "hold"\nring_mb = 1', 2, "capture.ring_mb: 1 MiB hold no ring"),
])
def test_a_check_refuses_what_cannot_hold(
    command: Callable[..., int], world: World, tmp_path: Path, capsys: Any, capture: str, status: int, said: str
) -> None:
    text = f'[control]\nlisten = "127.0.0.1:0"\ntoken_file = "{tmp_path}/token"\n[capture]\n{capture}\n'
    assert command("--check", text=f'{text}[replica]\ndirectory = "{tmp_path}"\n') == status
    assert said in capsys.readouterr().err and world.done == []


def test_a_check_looks_for_the_files_too(command: Callable[..., int], world: World, capsys: Any) -> None:
    assert command("--check", directory="/none such") == 3
    assert "replica files cannot be made there" in capsys.readouterr().err


@pytest.mark.parametrize(("url", "status", "said"), [
    ("nothing-of-that-name://x", 2, "no protocol that fsspec knows"),
    ("/proc/nothing/here", 3, "cannot be written"),
])
def test_a_check_tries_the_store(
    command: Callable[..., int], world: World, capsys: Any, url: str, status: int, said: str
) -> None:
    assert command("--check", settings=f'[store]\nurl = "{url}"\nevery = 1') == status
    error = capsys.readouterr().err
    assert "store.url" in error and said in error and world.done == []
