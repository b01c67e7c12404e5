"""Weights are for whoever wrote them, whatever the umask, unless an operator says otherwise."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowcheck import durable
from flowcheck.ask.client import NodeClient
from flowcheck.ask.sources import addresses
from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.coding.parity import encode
from flowcheck.control.user_state import pack
from flowcheck.node.protect.journal import JobText, Journal
from flowcheck.node.versions.output import Hashes

from ..hand_api import KEY, HandApi, HandVersion
from .killed_writers import WRITERS, Writer


class Row(Writer):
    """Parity of two shards."""

    def work(self) -> object:
        node = NodeClient(addresses(self.node)[0], KEY, 60.0)
        offer = node.offers()[0]
        source = node, offer, node.version(offer)
        return encode([source, source], Code(2, 1), self.out / "deep" / "step-000007.parity", [2])


class Entries(Writer):
    def work(self) -> object:
        journal = Journal(self.out / "run" / "journal")
        journal.begin(JobText({}, ("run", 0, 2), 0, "0" * 64))
        return journal.add(3, {}, [torch.ones(3)], {})


class Lines(Writer):
    def work(self) -> object:
        return Hashes(self.out / "deep" / "hashes").close()


ALL = {**WRITERS, "row": Row, "entries": Entries, "lines": Lines}


@pytest.fixture
def api() -> Iterator[HandApi]:
    held = HandVersion(7)
    held.give(1, pack({"epoch": 3}, step=7, rank=1, ranks=2))
    with HandApi(held) as made:
        yield made


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    durable.let_read("owner")
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) | path.is_dir() << 12
            for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ALL)
def test_what_is_written_is_for_nobody_else(api: HandApi, tmp_path: Path, no_umask: None, name: str) -> None:
    writer = ALL[name](tmp_path / "out", api.name)
    writer.work()
    found = modes(writer.out)
    inside = [path for path in found if path.partition("/")[0].endswith(".dcp") and "/" in path]
    assert found and len(inside) < len(found)
    for path in found.keys() - inside:  # torch writes these, into a directory that nobody else can enter
        assert found[path] in (0o600, 0o700 | 1 << 12), path


@pytest.mark.parametrize(("whom", "file", "folder"), [("group", 0o640, 0o750), ("all", 0o644, 0o755)])
@pytest.mark.parametrize("umask", [0, 0o077])
@pytest.mark.parametrize("name", ["step", "store", "atomic", "lines"])
def test_an_operator_lets_others_read(
    api: HandApi, tmp_path: Path, no_umask: None, name: str, umask: int, whom: str, file: int, folder: int
) -> None:
    durable.let_read(whom)
    os.umask(umask)
    writer = ALL[name](tmp_path / "out", api.name)
    writer.work()
    assert set(modes(writer.out).values()) <= {file, folder | 1 << 12}


@pytest.mark.parametrize("name", ["step", "store", "atomic"])
@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_nothing_that_was_planted_under_the_name_aside_is_written_to(tmp_path: Path, name: str, planted: str) -> None:
    """Those names can be guessed. An error is as good as going on."""
    writer = ALL[name](tmp_path / "out", "")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for path in (writer.out / f".{name}.partial-{os.getpid()}" for name in ("status.json", "step-000007")):
        os.mkfifo(path) if planted == "pipe" else path.symlink_to(victim)
    try:
        writer.work()
    except Exception as error:
        assert "cannot be written" in str(error)
    assert victim.read_text() == "precious"
