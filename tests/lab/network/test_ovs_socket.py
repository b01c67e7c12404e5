"""A daemon is up when it listens, and not when the file of its socket is there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lab.network.ovs import listens


def test_a_file_is_not_somebody_who_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("a long name " * 12)  # longer than an address of a socket may be
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert not listens(folder / "db.sock")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("db.sock")
        assert (folder / "db.sock").is_socket() and not listens(folder / "db.sock")
        one.listen()
        assert listens(folder / "db.sock")
    assert not listens(folder / "db.sock"), "nobody is there any more"
