"""Where a job's nodes, their secret and certificates come from: arguments, and else the environment."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from flowcheck.errors import UserError
from flowcheck.trainer.settings import CA, NODE, TOKEN_FILE, address_of, context_of, nodes_of, token_of, tokens_of

SECRET, OTHER = "a secret that is long", "another secret that is long"


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NODE, TOKEN_FILE, CA):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    return tmp_path / "token"


# -- addresses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "address"), [
    ("host:1", ("host", 1)), ("host:65535", ("host", 65535)), ("[::1]:7070", ("::1", 7070)), ("::1:7", ("::1", 7)),
    ("XX:2", ("XX", 2)), ("X.example:2", ("X.example", 2)),
])
def test_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert address_of(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":7070", "host:-1", "host:x", "host:1x",
                                  "host:1.5", 7070, None, b"host:1"])
def test_what_is_none(text: Any) -> None:
    with pytest.raises(UserError, match="is not an address") as caught:
        address_of(text)
    assert caught.value.where == "node" and caught.value.remedy


@pytest.mark.parametrize(("text", "nodes"), [
    ("a:1", ["a:1"]), (" a:1 , b:2", ["a:1", "b:2"]), ("a:1,,b:2,", ["a:1", "b:2"]),
])
def test_nodes_of_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, nodes: list[str]) -> None:
    monkeypatch.setenv(NODE, text)
    assert nodes_of(None) == nodes
    assert nodes_of("given:1") == ["given:1"] and nodes_of(("x:1", "y:2")) == ["x:1", "y:2"] and nodes_of([]) == []


@pytest.mark.parametrize("text", [None, "", " , "])
def test_no_node(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    if text is not None:
        monkeypatch.setenv(NODE, text)
    with pytest.raises(UserError, match="no node is named") as caught:
        nodes_of(None)
    assert NODE in caught.value.remedy


# -- the secret ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [SECRET, f"{SECRET}\n", f"{SECRET}\nanother line\nand a third\n"])
def test_the_first_line_of_the_file_is_the_secret(file: Path, text: str) -> None:
    file.write_text(text)
    assert token_of(None) == token_of(SECRET) == SECRET.encode()


@pytest.mark.parametrize("given", [5, SECRET.encode(), f"{SECRET}\0{SECRET}", f"{SECRET}\x1b[1m"])
def test_a_secret_that_is_no_text(given: Any) -> None:
    with pytest.raises(UserError, match="is not a text") as caught:
        token_of(given)
    assert caught.value.where == "token" and caught.value.remedy


def test_no_secret(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=f"{TOKEN_FILE}: {file}: cannot be read"):
        token_of(None)
    file.write_bytes(b"\xff\xfe\xfd" * 20)
    with pytest.raises(UserError, match="cannot be read"):
        token_of(None)
    monkeypatch.delenv(TOKEN_FILE)
    with pytest.raises(UserError, match="token"):
        token_of(None)


@pytest.mark.parametrize(("mode", "said"), [(0o600, 0), (0o640, 1), (0o604, 1), (0o700, 0)])
def test_a_secret_that_others_may_read_is_said_once(
    file: Path, caplog: pytest.LogCaptureFixture, mode: int, said: int
) -> None:
    """It is taken all the same: a training job does not end for it."""
    file.write_text(SECRET)
    file.chmod(mode)
    assert [tokens_of(None)() for _ in range(2)] == [SECRET.encode()] * 2
    warned = [record for record in caplog.records if str(file) in record.getMessage()]
    assert len(warned) == said and all(record.levelname == "WARNING" for record in warned)


def test_a_secret_that_is_replaced_in_its_file_is_the_next_connections(file: Path) -> None:
    file.write_text(SECRET)
    from_file, given = tokens_of(None), tokens_of(SECRET)
    assert from_file() == given() == SECRET.encode()
    file.write_text(OTHER)
    assert (from_file(), given()) == (OTHER.encode(), SECRET.encode())
    file.unlink()
    with pytest.raises(UserError):
        from_file()
    assert given() == SECRET.encode()
    with pytest.raises(UserError):
        tokens_of(None)  # at once, and not at the first connection


# -- certificates ------------------------------------------------------------------------------------------------


def test_tls_where_certificates_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert context_of(None) is None and context_of("") is None
    assert isinstance(context_of("system"), ssl.SSLContext)
    monkeypatch.setenv(CA, "system")
    assert isinstance(context_of(None), ssl.SSLContext)
    assert context_of("") is None, "no TLS, whatever the environment says"


@pytest.mark.parametrize("ca", [5, b"system", "a\0b"])
def test_certificates_that_are_no_file(ca: Any) -> None:
    with pytest.raises(UserError, match="is not the name of a file") as caught:
        context_of(ca)
    assert caught.value.where == "ca"


def test_a_file_of_certificates_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CA, str(tmp_path / "ca.pem"))
    with pytest.raises(UserError):
        context_of(None)
