"""What node.toml and the files of tokens that it names are read from, and how much of what is wrong in it is said."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.config.load import load, position
from flowcheck.node.config.tokens import read_token, read_tokens

ONE, OTHER = "a token that only tests have", "another one that only tests have"
LEAST = '[control]\nlisten = "localhost:1"\ntoken_file = "{folder}/token"\n[capture]\ndevice = "d"\n'


def written(folder: Path, more: str = "", first: str = "") -> Path:
    path = folder / "node.toml"
    path.write_text(first + LEAST.format(folder=folder) + more)
    return path


# -- tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "tokens"), [
    (ONE, [ONE]), (f"{ONE}\n", [ONE]), (f"{ONE}\r\n\r\n\n", [ONE]), (f"{ONE}\n{OTHER}", [ONE, OTHER]),
    (f"  {ONE} \r\n\t{OTHER}\r\n", [ONE, OTHER]),
])
def test_one_token_or_two(tmp_path: Path, text: str, tokens: list[str]) -> None:
    path = tmp_path / "token"
    path.write_bytes(text.encode())
    assert read_tokens(path) == tuple(token.encode() for token in tokens) == read_tokens(str(path))
    assert read_token(path).strip() == tokens[0]


@pytest.mark.parametrize(("text", "what"), [
    (f"{ONE}\n{OTHER}\n{ONE}", "has 3 lines, each of which would be let in"),
    (f"{ONE}\n\n{OTHER}", "has 3 lines, each of which would be let in"),
    (f"{ONE}\nshort", "a token of 5 characters; 16 to 4096 are usable"),
    (f"\n{ONE}", "a token of 0 characters; 16 to 4096 are usable"),
])
def test_tokens_that_are_none(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        read_tokens(path)
    assert (refused.value.what, refused.value.where) == (what, str(path)) and refused.value.remedy


def test_what_is_read_again_and_again_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(UserError, match="is no regular file") as refused:
            read_tokens(path)
        assert refused.value.where == str(path)
    with pytest.raises(UserError, match="No such file") as refused:
        read_tokens(tmp_path / "none")
    assert refused.value.where == str(tmp_path / "none")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(EnvironmentProblem, match="symbolic links"):
        read_tokens(tmp_path / "loop")


def test_a_pipe_is_read_to_its_end_and_one_into_which_nobody_writes_is_empty(tmp_path: Path) -> None:
    """What a shell gives for `<(command)` comes in pieces."""
    reading, writing = os.pipe()
    begun = threading.Event()

    def write() -> None:
        os.write(writing, ONE[:7].encode())
        begun.wait(10)
        os.write(writing, ONE[7:].encode())
        os.close(writing)

    thread = threading.Thread(target=write)
    thread.start()
    threading.Timer(0.05, begun.set).start()
    assert read_token(f"/dev/fd/{reading}") == ONE
    thread.join()
    os.close(reading)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EnvironmentProblem, match="is empty or no text") as refused:
        read_token(tmp_path / "pipe")
    assert refused.value.where == str(tmp_path / "pipe")


def test_each_role_has_its_own_token_or_that_of_all(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(ONE)
    (tmp_path / "own").write_text(OTHER)
    config = load(written(tmp_path, f'[tokens]\nreader = "{tmp_path}/own"\n'))
    assert [config.token(role) for role in ("trainer", "peer", "reader", "operator")] == [
        ONE.encode(), ONE.encode(), OTHER.encode(), ONE.encode()]
    assert config.token() == ONE.encode()
    (tmp_path / "own").write_text("short")
    with pytest.raises(UserError, match="a token of 5 characters") as refused:
        config.token("reader")
    assert refused.value.where == str(tmp_path / "own") and refused.value.remedy


# -- what is wrong -------------------------------------------------------------------------------------------------


def test_the_first_five_are_said_and_misspelt_keys_go_first(tmp_path: Path) -> None:
    path = written(tmp_path, "queues = 0\nring_mb = 0\npath_mtu = 7\n[replica]\nslots = 9\narena = 3\nthreads = -1\n")
    with pytest.raises(UserError) as refused:
        load(path)
    assert refused.value.where == f"{path}: replica.arena"
    first, *others = refused.value.what.split("; ")
    assert first == "is not a key: did you mean arenas?" and others[-1].endswith(" (line 11, column 1)")
    assert [one.split(": ")[0] for one in others] == ["capture.path_mtu", "capture.queues", "capture.ring_mb",
                                                     "replica.slots"]


def test_a_value_that_is_no_table_is_named_and_not_its_keys(tmp_path: Path) -> None:
    path = written(tmp_path, first="replica = 3\n")
    with pytest.raises(UserError, match=r"\(line 1, column 1\)") as refused:
        load(path)
    assert refused.value.where == f"{path}: replica"


def test_a_key_of_another_table_is_sent_there(tmp_path: Path) -> None:
    """Also one of the first level; a table of no such name has no keys."""
    for first, more, where, what in (
        ("", "[replica]\ndevice = 3\n", "replica.device", "is not a key here, it is one of [capture]"),
        ("slots = 3\n", "", "slots", "is not a key here, it is one of [replica]"),
        ("", '[api]\nlisten = "localhost:1"\nurl = "x"\n', "api.url", "is not a key here, it is one of [store]"),
        ("", "[replica]\nqqqqqq = 1\n", "replica.qqqqqq", "is not a key (line 7, column 1)"),
    ):
        path = written(tmp_path, more, first)
        with pytest.raises(UserError) as refused:
            load(path)
        assert refused.value.where == f"{path}: {where}" and refused.value.what.startswith(what), refused.value.what


def test_what_stands_nowhere_is_said_without_a_place(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('[capture]\ndevice = "d"\n')
    with pytest.raises(UserError) as refused:
        load(path)
    assert (refused.value.what, refused.value.where) == ("is missing", f"{path}: control")


def test_jobs_that_are_followed_are_counted_also_where_there_is_one(tmp_path: Path) -> None:
    for more, where in (("", "follow[0].group"), ('group = "b"\n[[follow]]\nmanifest = "c"\ngroup = 7\n',
                                                  "follow[1].group")):
        path = written(tmp_path, f'[output]\nevery = 1\n[[follow]]\nmanifest = "a"\n{more}')
        with pytest.raises(UserError) as refused:
            load(path)
        assert refused.value.where == f"{path}: {where}"


@pytest.mark.parametrize(("key", "at"), [
    ("a.b", (2, 2)), ("a.c", (1, 2)), ("a[1].b", (6, 3)), ("a[2].b", None), ("a[0].c", (1, 2)), ("a[1].c", (5, 4)),
    ("x-y.z", (8, 1)), ("z", None), ("a", (1, 2)), ("q.b", None), ("x-y.b", (7, 2)), ("x-y.zz", (9, 1)),
])
def test_where_a_key_stands_among_others_of_its_name(key: str, at: tuple[int, int] | None) -> None:
    text = "[a]\n b= 1\n#b = 2\n\n[[ a]]\n  b  = 3\n[x-y]\nz.w = 1\nzz = 2\n"
    assert position(text, key) == at


def test_lines_end_in_either_way_or_not_at_all() -> None:
    assert position("a = 1\r\n[t]\r\nk = 2", "t.k") == (3, 1) and position("", "a") is None
