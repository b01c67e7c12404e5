"""node.toml: what is wrong in it is named with its place, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.config.capture import AUTO
from flowcheck.node.config.load import load, position

GOOD = """
name = "n"
[control]
listen = "127.0.0.1:0"
token_file = "{folder}/token"
[capture]
device = "af_packet:lo"
huge = false
[replica]
directory = "{folder}"
"""


def settings(folder: Path, old: str = "", new: str = "") -> Path:
    (folder / "token").write_text("a token that only tests have\n")
    text = GOOD.format(folder=folder)
    assert old in text
    path = folder / "node.toml"
    path.write_text(text.replace(old, new) if old else text)
    return path


def test_a_good_one(tmp_path: Path) -> None:
    config = load(settings(tmp_path))
    assert config.control.address == ("127.0.0.1", 0) and config.token() == b"a token that only tests have"


@pytest.mark.parametrize(("old", "new", "where", "what"), [
    ('name = "n"', 'nmae = "n"', "nmae", "is not a key"),
    ('name = "n"', 'name = "a/b"', "name", "pattern"),
    ('name = "n"', 'groups = "two"', "groups", "integer"),
    ('name = "n"', "record_seconds = nan", "record_seconds", "less than or equal to 86400"),
    ('"127.0.0.1:0"', '"7070"', "control.listen", "HOST:PORT"),
    ('"127.0.0.1:0"', '"127.0.0.1:70000"', "control.listen", "HOST:PORT"),
    ("huge = false", "queues = 0", "capture.queues", "greater than or equal to 1"),
    ("[replica]", "[replica]\nslots = 9", "replica.slots", "less than or equal to 4"),
    ("[replica]", '[replica]\npeers = ["a"]', "replica.peers", "HOST:PORT, an IPv6 address"),
    ("[replica]", '[replica]\npeer_versions = ["a"]', "replica.peer_versions", "HOST:PORT, an IPv6 address"),
    ("[replica]", '[replica]\npeers = ["b:1", "a:0"]', "replica.peers", "a:0: nobody listens at port 0"),
    ("[replica]", '[replica]\npeers = ["a:70000"]', "replica.peers", "HOST:PORT, an IPv6 address"),
    ("[replica]", '[replica]\npeers = ["a:1", "a:1"]', "replica.peers", "a:1 is given twice"),
    ("[replica]", '[replica]\npeers = ["a:1", "a:01"]', "replica.peers", "a:1 is given twice"),
    ("[replica]", "[replica]\npeers = " + str([f"a:{i}" for i in range(1, 18)]), "replica.peers", "at most 16"),
    ("[replica]", '[common]\nnodes = ["a"]\n[replica]', "common.nodes", "HOST:PORT, an IPv6 address"),
    ("[replica]", '[common]\nnodes = ["b:1", "a:0"]\n[replica]', "common.nodes", "a:0: nobody listens at port 0"),
    ("[replica]", '[common]\nnodes = ["a:1", "a:01"]\n[replica]', "common.nodes", "a:1 is given twice"),
    ("[replica]", '[common]\nnodes = ["a:1"]\n[replica]\nslots = 2', "replica.slots", "2 leave none to keep a version"),
    ("[replica]", "[replica", "node.toml", "is not TOML"),
    ("[replica]", '[journal]\ndirectory = "a"\nmegabytes = 9\n[replica]\nslots = 2', "replica.slots",
     "2 leave none to update while a base of the journal is written"),
    ("[replica]", '[journal]\ndirectory = "a"\n[replica]', "journal.megabytes", ""),
    ("[replica]", '[store]\nurl = "x"\nevery = 1\noptions = {since = 2026-01-02}\n[replica]', "store.options",
     "since has a date or a time in it"),
    ("[replica]", '[store]\nurl = "x"\nevery = 1\noptions = {a = {b = [07:32:00]}}\n[replica]', "store.options",
     "a has a date or a time in it"),
    ("[replica]", '[output]\ndirectory = "a\\u0000b"\n[replica]', "output.directory", "has a NUL character in it"),
    ("[replica]", '[tls]\ncert = "a\\u0000b"\nkey = "k"\n[replica]', "tls.cert", "has a NUL character in it"),
    ("[replica]", '[store]\nurl = "a\\u0000b"\nevery = 1\n[replica]', "store.url", "has a NUL character in it"),
    ("[replica]", '[protect]\ncopies = ["a:1"]\ndirectory = "a\\u0000b"\n[replica]', "protect.directory",
     "has a NUL character in it"),
])
def test_wrong_ones_are_named(tmp_path: Path, old: str, new: str, where: str, what: str) -> None:
    with pytest.raises(UserError) as refused:
        load(settings(tmp_path, old, new))
    assert where in refused.value.where and what in refused.value.what and refused.value.remedy


# -- each key: its default, its bounds, and what lies beyond -------------------------------------------------------


def test_what_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('[control]\nlisten = "localhost:1"\ntoken_file = "t"\n[capture]\ndevice = "d"\n')
    assert load(path).model_dump() == {
        "control": {"listen": "localhost:1", "token_file": Path("t"), "insecure": False, "connections": 256,
                    "strangers": 1024, "strangers_per_address": 256, "inbox_mb": 512},
        "capture": ({
            "device": "d", "path_mtu": 0, "dump": "copy", "engines": (), "queues": 1, "cores": (),
            "place_cores": (), "huge": None,
            "ring_size": None, "ring_mb": None, "iteration_bytes": None,
        },),
        "feed": None,
        "replica": {"directory": Path("/dev/shm"), "slots": 3, "threads": 1, "keep": True, "arenas": 4,
                    "patience_packets": 0, "memory_mb": 65536, "resync": "ranges", "resync_mb": 32,
                    "peers": (), "peer_iterations": 2, "peer_seconds": 1.0, "journal": False,
                    "peer_versions": ()},
        "output": {"directory": Path("out"), "readable_by": "owner", "every": 0, "keep_hashes": None,
                   "status_file": None},
        "common": {"nodes": (), "seconds": 300.0}, "follow": (),
        "nodes": {"addresses": (), "registry": (), "registry_ca": "", "registry_cert": None, "registry_key": None,
                  "registry_user": "", "registry_password_file": None, "cluster": "default", "advertise": None,
                  "host": "", "leaf": "", "rack": ""},
        "api": None, "protect": None, "store": None, "journal": None, "telemetry": None, "tls": None, "name": "node",
        "groups": 1, "record_seconds": 30.0,
        "tokens": {"trainer": None, "peer": None, "reader": None, "operator": None},
    }


def test_others_have_addresses_and_iterations_for_peers_take_arenas(tmp_path: Path) -> None:
    alone = load(settings(tmp_path)).replica
    assert (alone.peer_addresses, alone.arenas, alone.regions) == ([], 4, 4)
    path = settings(tmp_path, "[replica]", '[replica]\npeer_iterations = 5\npeers = ["a:7070", "[::1]:65535"]')
    found = load(path).replica
    assert found.peer_addresses == [("a", 7070), ("::1", 65535)] and (found.arenas, found.regions) == (4, 9)
    path = settings(tmp_path, "[replica]", '[replica]\npeer_versions = ["b:7071", "[::1]:7"]')
    assert load(path).replica.version_addresses == [("b", 7071), ("::1", 7)] and load(path).replica.regions == 4
    path.write_text(path.read_text() + '[common]\nnodes = ["b:7", "[::1]:65535"]\n')
    assert load(path).common.addresses == [("b", 7), ("::1", 65535)]


@pytest.mark.parametrize(("control", "more", "where", "what"), [
    ("127.0.0.1:7", '[common]\nnodes = ["b:7", "127.0.0.1:07"]', "common.nodes", "127.0.0.1:7 is this node itself"),
    ("127.0.0.1:7", '[replica]\npeers = ["b:7", "127.0.0.1:07"]', "replica.peers", "127.0.0.1:7 is this node itself"),
    ("127.0.0.1:7", '[replica]\npeer_versions = ["b:1", "[::1]:7"]\n[api]\nlisten = "[::1]:7"', "replica.peer_versions",
     "[::1]:7 is this node itself"),
    ("", '[common]\nnodes = ["b:7"]', "tokens.peer", "is missing, and common.nodes names nodes"),
    ("", '[replica]\npeer_versions = ["b:7"]', "tokens.peer", "is missing, and replica.peer_versions names nodes"),
])
def test_others_are_others_and_ask_for_a_token_of_peers(
    tmp_path: Path, control: str, more: str, where: str, what: str
) -> None:
    """control: where it listens, and it has a token for all; "": it has one of trainers alone."""
    tokens = f'token_file = "{tmp_path}/t"' if control else f'[tokens]\ntrainer = "{tmp_path}/t"'
    path = tmp_path / "node.toml"
    listen = f'listen = "{control or "127.0.0.1:0"}"'
    path.write_text(f'capture = {{ device = "d" }}\n[control]\n{listen}\n{tokens}\n{more}\n')
    with pytest.raises(UserError) as refused:
        load(path)
    assert refused.value.where == f"{path}: {where}" and what in refused.value.what


@pytest.mark.parametrize(("table", "key"), [
    ("control", "listen"), ("capture", "device"), ("", "control"), ("", "capture"),
])
def test_what_may_not_be_left_out(tmp_path: Path, table: str, key: str) -> None:
    tables = {"control": {"listen": "localhost:1", "token_file": "t"}, "capture": {"device": "d"}}
    del (tables[table] if table else tables)[key]  # type: ignore[attr-defined]
    path = tmp_path / "node.toml"
    path.write_text("".join(
        f"[{name}]\n" + "".join(f'{k} = "{v}"\n' for k, v in keys.items()) for name, keys in tables.items()
    ))
    with pytest.raises(UserError, match="is missing") as refused:
        load(path)
    assert refused.value.where == f"{path}: {f'{table}.{key}' if table else key}"


LEAST = {"control": {"listen": '"localhost:1"', "token_file": '"t"'}, "capture": {"device": '"d"'}}


@pytest.mark.parametrize(("table", "typo", "instead", "where", "what"), [
    ("control", 'listne = "localhost:1"', "listen", "control.listne", "is not a key: did you mean listen? (line"),
    ("capture", 'devise = "d"', "device", "capture.devise", "is not a key: did you mean device? (line"),
    ("capture", "ringsize = 64", "", "capture.ringsize", "is not a key: did you mean ring_size?"),
    ("capture", "arenas = 3", "", "capture.arenas", "is not a key here, it is one of [replica]"),
    ("", "group = 2", "", "group", "is not a key: did you mean groups?"),
    *[(table, "xyzzy = 2", "", f"{table}.xyzzy".strip("."), "is not a key (line")
      for table in ("", "control", "capture", "replica", "output", "common")],
    ("control", "groups = 2", "", "control.groups", "is not a key here, it is one above all tables"),
    ("output", 'listn = "h:1"', "", "output.listn", "is not a key: did you mean listen, one of [control]?"),
    ("control", "recrd_seconds = 2", "", "control.recrd_seconds", "is not a key: did you mean record_seconds, one ab"),
    ("protect", 'regisrty = "http://h:1"', "", "protect.regisrty", "is not a key: did you mean registry of [nodes]?"),
    ("protect", "copis = true", "", "protect.copis", "is not a key: did you mean copies?"),
    ("nodes", 'adresses = ["h"]', "", "nodes.adresses", "is not a key: did you mean addresses?"),
])
def test_a_misspelt_key_is_named_and_not_what_is_missing_for_it(
    tmp_path: Path, table: str, typo: str, instead: str, where: str, what: str
) -> None:
    tables = {name: [f"{k} = {v}" for k, v in keys.items() if k != instead] for name, keys in LEAST.items()}
    tables.setdefault(table, []).append(typo)
    path = tmp_path / "node.toml"
    path.write_text("\n".join(tables.pop("", [])) + "".join(
        f"\n[{name}]\n" + "\n".join(lines) for name, lines in tables.items()
    ))
    with pytest.raises(UserError) as refused:
        load(path)
    assert refused.value.where == f"{path}: {where}" and refused.value.what.startswith(what)
    assert refused.value.remedy == "docs/use/settings.md has every key"


CONTROL = '[control]\nlisten = "localhost:1"\ntoken_file = "t"\n'


@pytest.mark.parametrize(("text", "where", "what"), [
    ('[controll]\nlisten = "localhost:1"\n', "controll", "did you mean control?; capture: is missing"),
    (f'{CONTROL}[protectt]\ncopies = ["h:1"]\n', "protectt", "did you mean protect? ("),
    (f"capture = []\n{CONTROL}", "capture", "[protect]"), (f"capture = 1\n{CONTROL}", "capture", "list"),
])
def test_tables_that_are_none(tmp_path: Path, text: str, where: str, what: str) -> None:
    path = tmp_path / "node.toml"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        load(path)
    assert refused.value.where == f"{path}: {where}" and what in refused.value.what


# table, key, the least and the most value, the first that is too small and the first that is too large ("": none)
BOUNDS = [
    ("control", "connections", "1", "65536", "0", "65537"),
    ("capture", "queues", "1", "16", "0", "17"),
    ("capture", "ring_size", "64", "16777216", "63", "16777217"),
    ("capture", "ring_mb", "1", "16777216", "0", "16777217"),
    ("capture", "iteration_bytes", "1", "281474976710656", "0", "281474976710657"),
    ("replica", "slots", "2", "4", "1", "5"),
    ("replica", "threads", "0", "256", "-1", "257"),
    ("replica", "arenas", "2", "64", "1", "65"),
    ("replica", "memory_mb", "1", "1000000000", "0", ""),
    ("replica", "peer_iterations", "1", "64", "0", "65"),
    ("replica", "peer_seconds", "1e-9", "10.0", "0.0", "10.01"),
    ("common", "seconds", "1e-9", "86400.0", "0.0", "86400.01"),
    ("output", "every", "0", "1000000000", "-1", ""),
    ("journal", "keep", "0", "1073741824", "-1", "1073741825"),
    ("", "groups", "1", "8", "0", "9"),
    ("", "record_seconds", "1e-9", "86400.0", "0.0", "86400.01"),
]


def _with(folder: Path, table: str, key: str, value: str) -> Path:
    (folder / "token").write_text("a token that only tests have\n")
    path = folder / "node.toml"
    text = f'[control]\nlisten = "localhost:1"\ntoken_file = "{folder}/token"\n[capture]\ndevice = "d"\n'
    line = f"{key} = {value}\n" + ('directory = "j"\nmegabytes = 9\n' if table == "journal" else "")
    if not table:
        path.write_text(line + text)
    elif f"[{table}]\n" in text:
        path.write_text(text.replace(f"[{table}]\n", f"[{table}]\n{line}"))
    else:
        path.write_text(f"{text}[{table}]\n{line}")
    return path


@pytest.mark.parametrize(("table", "key", "least", "most", "below", "above"), BOUNDS, ids=[row[1] for row in BOUNDS])
def test_bounds(tmp_path: Path, table: str, key: str, least: str, most: str, below: str, above: str) -> None:
    for value in (least, most):
        config = load(_with(tmp_path, table, key, value))
        part = config.capture[0] if table == "capture" else getattr(config, table) if table else config
        assert getattr(part, key) == float(value)
    for value in filter(None, (below, above)):
        with pytest.raises(UserError) as refused:
            load(_with(tmp_path, table, key, value))
        assert refused.value.where.endswith(f": {f'{table}.{key}' if table else key}")


def test_settings_do_not_change_after_they_were_checked(tmp_path: Path) -> None:
    config = load(settings(tmp_path))
    with pytest.raises(ValidationError, match="frozen"):
        config.groups = 9  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.control.connections = 0  # type: ignore[misc]


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 32])
def test_names_that_are_usable(tmp_path: Path, name: str) -> None:
    assert load(_with(tmp_path, "", "name", f'"{name}"')).name == name


@pytest.mark.parametrize("name", ["", "x" * 33, "a b", "a/b", "\u00e9", "a\\n"])
def test_names_that_are_not(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="pattern"):
        load(_with(tmp_path, "", "name", f'"{name}"'))


@pytest.mark.parametrize(("listen", "address"), [
    ("127.0.0.1:7070", ("127.0.0.1", 7070)),
    ("node-1.example:65535", ("node-1.example", 65535)),
    ("h:0", ("h", 0)),
    ("[::1]:7070", ("::1", 7070)),
    ("[fE80::1.2.3.4]:1", ("fE80::1.2.3.4", 1)),
])
def test_addresses(tmp_path: Path, listen: str, address: tuple[str, int]) -> None:
    assert load(settings(tmp_path, '"127.0.0.1:0"', f'"{listen}"\ninsecure = true')).control.address == address


@pytest.mark.parametrize("listen", [
    "", "7070", ":7070", "h:", "h:x", "h:-1", "h:65536", "h:123456", "::1:7070", "[::1]", "[::1]7070", "[]:1", "[h]:1",
    "a[b]:1", "h:1 ", "h:1:2", "[::1]:65536",
])
def test_what_is_not_an_address(tmp_path: Path, listen: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT, an IPv6 address in brackets") as refused:
        load(settings(tmp_path, "127.0.0.1:0", listen))
    assert refused.value.where == f"{tmp_path}/node.toml: control.listen"
    assert ("and ports are 0 to 65535" in refused.value.what) == listen.endswith(("65536", "123456"))


# -- the files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "token"), [
    (b"a token that only tests have", b"a token that only tests have"),
    (b"  sixteen letters!  \nsecond line\n", b"sixteen letters!"),
    (b"a token that only tests have\r\n\xc3\xa9", b"a token that only tests have"),
])
def test_the_token_is_the_first_line(tmp_path: Path, content: bytes, token: bytes) -> None:
    config = load(settings(tmp_path))
    (tmp_path / "token").write_bytes(content)
    assert config.token() == token


@pytest.mark.parametrize(("content", "kind", "what"), [
    (b"", EnvironmentProblem, "is empty or no text"),
    (b"\xff\xfe a token that only tests have", EnvironmentProblem, "is empty or no text"),
    (b"\na token that only tests have", UserError, "a token of 0 characters; 16 to 4096 are usable"),
    (b"fifteen letters\n", UserError, "a token of 15 characters; 16 to 4096 are usable"),
])
def test_token_files_that_are_not(tmp_path: Path, content: bytes, kind: type, what: str) -> None:
    config = load(settings(tmp_path))
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(kind) as refused:
        config.token()
    assert refused.value.what == what
    assert refused.value.where == f"{tmp_path}/token" and refused.value.remedy


def test_a_token_file_that_is_a_folder(tmp_path: Path) -> None:
    config = load(settings(tmp_path, "/token", ""))
    with pytest.raises(EnvironmentProblem) as refused:
        config.token()
    assert (refused.value.what, refused.value.where) == ("Is a directory", str(tmp_path))
    assert refused.value.remedy == "a readable file with a token in its first line"


def test_settings_of_a_mebibyte_and_of_one_byte_more(tmp_path: Path) -> None:
    path = settings(tmp_path)
    path.write_bytes(path.read_bytes().ljust(1048576, b"\n"))
    assert load(path).name == "n"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(UserError) as refused:
        load(path)
    assert (refused.value.what, refused.value.where) == ("has more than 1048576 bytes", str(path))


def test_settings_that_are_not_text(tmp_path: Path) -> None:
    path = settings(tmp_path)
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match="is not TOML: ") as refused:
        load(path)
    assert refused.value.where == str(path)


def test_settings_that_are_a_folder(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem) as refused:
        load(tmp_path)
    assert (refused.value.what, refused.value.where) == ("cannot be read: Is a directory", str(tmp_path))
    assert refused.value.remedy == "give the node's settings with --config"


def test_files_without_an_end(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="/dev/zero: has more than"):
        load(Path("/dev/zero"))
    with pytest.raises(UserError, match="/dev/zero: has more than"):
        load(settings(tmp_path, f"{tmp_path}/token", "/dev/zero")).token()


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"node\.toml: cannot be read") as refused:
        load(tmp_path / "node.toml")
    assert refused.value.exit_code == 2  # as of every command
    with pytest.raises(UserError, match="No such file") as refused:
        load(settings(tmp_path, "/token", "/tokens")).token()
    assert refused.value.where == f"{tmp_path}/tokens"


# -- captures --------------------------------------------------------------------------------------------------


def captures(folder: Path, *tables: str) -> Path:
    (folder / "token").write_text("a token that only tests have\n")
    path = folder / "node.toml"
    text = f'[control]\nlisten = "localhost:1"\ntoken_file = "{folder}/token"\n'
    path.write_text(text + "".join(f"[[capture]]\n{table}\n" for table in tables))
    return path


def test_a_list_of_captures(tmp_path: Path) -> None:
    config = load(captures(
        tmp_path, 'device = "af_packet:a"\nhuge = true',
        'device = "0000:81:00.0"\npath_mtu = 4096\ndump = "dma"\nengines = "auto"\nqueues = 2\ncores = [2, 3]',
        'device = "ring"\ndump = "dma"\nengines = ["dma_skeleton", "dma_skeleton"]\niteration_bytes = 1000',
    ))
    assert [one.device for one in config.capture] == ["af_packet:a", "0000:81:00.0", "ring"]
    assert [one.engines for one in config.capture] == [(), AUTO, ("dma_skeleton", "dma_skeleton")]
    assert [config.table(i) for i in range(3)] == ["capture[0]", "capture[1]", "capture[2]"]
    assert config.huge is True


@pytest.mark.parametrize("form", ["[capture]", "[[capture]]"])
def test_one_capture_is_a_table_or_a_list_of_one(tmp_path: Path, form: str) -> None:
    config = load(settings(tmp_path, "[capture]", form))
    assert [one.device for one in config.capture] == ["af_packet:lo"]
    assert config.table(0) == "capture" and config.huge is False
    with pytest.raises(UserError, match="greater than or equal to 1") as refused:
        load(settings(tmp_path, "[capture]", f"{form}\nqueues = 0"))
    assert refused.value.where == f"{tmp_path}/node.toml: capture.queues"


@pytest.mark.parametrize(("second", "key", "what"), [
    ('device = "b"\nqueues = 0', "[1].queues", "greater than or equal to 1"),
    ('devise = "b"', "[1].devise", "is not a key: did you mean device? (line"),
    ('device = "b"\narenas = 3', "[1].arenas", "is not a key here, it is one of [replica]"),
    ('device = "b"\nqueues = 2\ncores = [1, "x"]', "[1].cores", "valid integer"),
    ('device = "b"\npath_mtu = 1500', "[1].path_mtu", "1024, 2048 or 4096"),
    ('device = "b"\ndump = "fly"', "[1].dump", "'copy', 'hold' or 'dma'"),
    ('device = "b"\nring_size = 100', "[1].ring_size", "100 is not a power of two"),
    ('device = "b"\nring_size = 128\nring_mb = 1', "[1].ring_mb", "ring_size is given, too"),
    ('device = "b"\nring_mb = 1\niteration_bytes = 1', "[1].iteration_bytes", "ring_mb is given, too"),
    ('device = "b"\nqueues = 2\ncores = [4]', "[1].cores", "1 cores for 2 queues"),
    ('device = "b"\ndump = "dma"', "[1].engines", 'dump = "dma" needs DMA engines'),
    ('device = "b"\nengines = "auto"', "[1].engines", "this is 'copy'"),
    ('device = "b"\ndump = "dma"\nengines = "x"', "[1].engines", 'a list of names, or "auto"'),
    ('device = "b"\ndump = "dma"\nqueues = 2\nengines = ["x"]', "[1].engines", "1 engines for 2 queues"),
    ('device = "af_packet:a"', "[1].device", "a is given twice: capture[0].device has it"),
    ('device = "af_xdp:a"', "[1].device", "a is given twice: capture[0].device has it"),
    ('device = "b"\nqueues = 2\ncores = [3, 1]', "[1].cores", "1 is given twice: capture[0].cores has it"),
    ('device = "b"\nqueues = 2\ncores = [3, 3]', "[1].cores", "3 is given twice: capture[1].cores has it"),
    ('device = "b"\nplace_cores = [1]', "[1].place_cores", "1 is given twice: capture[0].cores has it"),
    ('device = "b"\ncores = [2]\nplace_cores = [2]', "[1].place_cores", "2 is given twice: capture[1].cores has it"),
    ('device = "b"\nqueues = 2\nplace_cores = [4]', "[1].place_cores", "1 cores for 2 queues"),
    ('device = "b"\ndump = "dma"\nengines = ["wq0.0"]', "[1].engines", "wq0.0 is given twice: capture[0].engines"),
    ('device = "b"\nhuge = false', ".huge", "all captures of a node have the same memory"),
])
def test_what_is_wrong_in_one_of_several_captures_is_named_with_its_index(
    tmp_path: Path, second: str, key: str, what: str
) -> None:
    first = 'device = "af_packet:a"\ncores = [1]\nhuge = true\ndump = "dma"\nengines = ["wq0.0"]'
    with pytest.raises(UserError) as refused:
        load(captures(tmp_path, first, second))
    assert refused.value.where == f"{tmp_path}/node.toml: capture{key}" and what in refused.value.what


def test_a_pci_address_is_the_same_in_both_cases(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"0000:8a:00\.0 is given twice"):
        load(captures(tmp_path, 'device = "0000:8a:00.0"', 'device = "0000:8A:00.0"'))


def test_more_queues_than_a_node_reads(tmp_path: Path) -> None:
    most = [f'device = "d{i}"\nqueues = 16' for i in range(4)]
    assert len(load(captures(tmp_path, *most)).capture) == 4
    with pytest.raises(UserError, match="65 in all captures together: a node reads at most 64") as refused:
        load(captures(tmp_path, *most, 'device = "one more"'))
    assert refused.value.where.endswith(": capture.queues")


# -- the HTTP API --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listen", ["127.0.0.1:7071", "127.9.9.9:0", "[::1]:7071", "localhost:7071"])
def test_the_loopback_may_be_listened_at(tmp_path: Path, listen: str) -> None:
    api = load(settings(tmp_path, "[replica]", f'[api]\nlisten = "{listen}"\n[replica]')).api
    assert api is not None and not api.insecure
    host, _, port = listen.rpartition(":")
    assert api.address == (host.strip("[]"), int(port))


@pytest.mark.parametrize("listen", ["10.0.0.2:7071", "0.0.0.0:7071", "[::]:7071", "node1:7071", "localhost.evil:1"])
def test_elsewhere_only_in_so_many_words(tmp_path: Path, listen: str) -> None:
    text = f'[api]\nlisten = "{listen}"\n'
    with pytest.raises(UserError, match="is not the loopback") as refused:
        load(settings(tmp_path, "[replica]", f"{text}[replica]"))
    assert refused.value.where.endswith(": api.listen") and "insecure = true" in refused.value.what
    api = load(settings(tmp_path, "[replica]", f"{text}insecure = true\n[replica]")).api
    assert api is not None and api.insecure


def test_an_api_listens_somewhere(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is missing") as refused:
        load(settings(tmp_path, "[replica]", "[api]\n[replica]"))
    assert refused.value.where.endswith(": api.listen")
    with pytest.raises(UserError, match="HOST:PORT"):
        load(settings(tmp_path, "[replica]", '[api]\nlisten = "7071"\n[replica]'))
    with pytest.raises(UserError, match="did you mean insecure"):
        load(settings(tmp_path, "[replica]", '[api]\nlisten = "localhost:1"\ninsecur = true\n[replica]'))


def test_a_replica_that_is_read_needs_three_slots(tmp_path: Path) -> None:
    """One is served, one is pinned by who reads, one is built."""
    table = '[api]\nlisten = "localhost:1"\n[replica]\nslots = '
    with pytest.raises(UserError) as refused:
        load(settings(tmp_path, "[replica]", f"{table}2"))
    assert refused.value.where.endswith(": replica.slots") and "3 at least" in refused.value.what
    assert load(settings(tmp_path, "[replica]", f"{table}3")).replica.slots == 3
    assert load(settings(tmp_path, "[replica]", "[replica]\nslots = 2")).api is None


# -- a store -------------------------------------------------------------------------------------------------------


def with_store(tmp_path: Path, keys: str, replica: str = "[replica]") -> Any:
    return load(settings(tmp_path, "[replica]", f"[store]\n{keys}\n{replica}"))


def test_a_store(tmp_path: Path) -> None:
    store = with_store(tmp_path, 'url = "s3://b/c"\nminutes = 0.5\noptions = { key = "k", deep = { er = 1 } }').store
    assert store.model_dump() == {
        "url": "s3://b/c", "every": 0, "minutes": 0.5, "deltas": False, "keep": 0, "keep_hours": 0.0, "keep_every": 0,
        "seconds": 60.0,
        "options": {"key": "k", "deep": {"er": 1}},
    }
    assert with_store(tmp_path, 'url = "/mnt/x"\nevery = 1\nkeep = 1\nkeep_every = 5').store.keep_every == 5


@pytest.mark.parametrize(
    ("keys", "where", "what"),
    [
        ("every = 1", "url", "is missing"), ('url = ""\nevery = 1', "url", "at least 1"),
        ('url = "s3://"\nevery = 1', "url", "PROTOCOL://PLACE"), ('url = "://x"\nevery = 1', "url", "PROTOCOL://PLACE"),
        ('url = "zip::s3://x/y"\nevery = 1', "url", "chains"),
        ('url = "x"', "every", "one of them says when"), ('url = "x"\nevery = -1', "every", "greater"),
        ('url = "x"\nminutes = -1', "minutes", "greater"), ('url = "x"\nevery = 1\nkeep = -1', "keep", "greater"),
        ('url = "x"\nevery = 1\nkeep_every = 7', "keep_every", "stay anyway"),
        ('url = "x"\nevery = 1\nseconds = 0.9', "seconds", "greater"),
        ('url = "x"\nevery = 1\nseconds = 3601', "seconds", "less"),
        ('url = "x"\nevery = 1\noptions = 3', "options", "table"),
        ('url = "x"\nevry = 1', "evry", "did you mean every"),
        ('url = "x"\nevery = 1\ndeltas = true', "deltas", "no [journal]"),
    ],
)
def test_a_store_that_is_none(tmp_path: Path, keys: str, where: str, what: str) -> None:
    with pytest.raises(UserError) as refused:
        with_store(tmp_path, keys)
    assert refused.value.where.endswith(f": store.{where}") and what in refused.value.what


@pytest.mark.parametrize("url", [
    "s3://AKIA:SE/CR+ET@bucket/a", "ftp://me:SECRET@host/a", "http://host/a?sig=SECRET&x=1", "https://SECRET@host/a",
])
@pytest.mark.parametrize("key", ["url", "options"])
def test_a_secret_in_a_url_is_refused_and_not_shown(tmp_path: Path, url: str, key: str) -> None:
    """Some libraries use it, others drop it without a word; and whatever has the URL would print it."""
    keys = f'url = "{url}"' if key == "url" else f'url = "s3://b"\noptions = {{ client = {{ endpoint = "{url}" }} }}'
    with pytest.raises(UserError) as refused:
        with_store(tmp_path, f"{keys}\nevery = 1")
    assert refused.value.where.endswith(f": store.{key}")
    assert "SE" not in refused.value.message().replace("RESET", "")


@pytest.mark.parametrize("url", ["s3://b/a@b", "http://minio:9000/a", "sftp://me@host/a",
                                 "abfs://box@account.dfs/a", "/data/a?b=c", "file:" + "///data/x?y"])
def test_what_has_no_secret_is_a_place(tmp_path: Path, url: str) -> None:
    store = with_store(tmp_path, f'url = "{url}"\nevery = 1').store
    assert store is not None and store.url == url


@pytest.mark.parametrize(("api", "least"), [("", 3), ('[api]\nlisten = "localhost:1"\n', 4)])
def test_a_replica_that_is_stored_needs_a_slot_for_that(tmp_path: Path, api: str, least: int) -> None:
    for slots in (least - 1, least):
        replica = f"{api}[replica]\nslots = {slots}"
        if slots == least:
            assert with_store(tmp_path, 'url = "x"\nevery = 1', replica).replica.slots == least
            continue
        with pytest.raises(UserError) as refused:
            with_store(tmp_path, 'url = "x"\nevery = 1', replica)
        assert refused.value.where.endswith(": replica.slots") and f"{least} at least" in refused.value.what


# -- where it stands -----------------------------------------------------------------------------------------------


WHERE = """name = "n"
  groups = 2

[control]
listen = "a:1"       # slots = 3
[[capture]]
device = "d"
[[ capture ]]
  device = "e"
cores = [1]
[replica]
slots = 3
"""


@pytest.mark.parametrize(("key", "at"), [
    ("name", (1, 1)), ("groups", (2, 3)), ("control.listen", (5, 1)), ("capture[0].device", (7, 1)),
    ("capture[1].device", (9, 3)), ("capture[1].cores", (10, 1)), ("capture[0].cores", (6, 3)),
    ("replica.slots", (12, 1)),
    ("replica.threads", (11, 2)), ("control", (4, 2)), ("output.every", None), ("slots", None), ("evice", None),
])
def test_where_a_key_stands(key: str, at: tuple[int, int] | None) -> None:
    assert position(WHERE, key) == at


def test_a_wrong_value_is_named_with_its_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"less than or equal to 4 \(line 10, column 3\)"):
        load(settings(tmp_path, "[replica]", "[replica]\n  slots = 9"))
    with pytest.raises(UserError, match=r"at line 9, column"):
        load(settings(tmp_path, "[replica]", "[replica"))
