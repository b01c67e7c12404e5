"""[nodes]: one list of machines, switches over it, and keys of earlier releases that say the same."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.errors import UserError
from flowcheck.node import cli
from flowcheck.node.config.load import load
from flowcheck.node.config.node import NodeConfig

OWN = "10.0.0.2"
LEAST: dict[str, Any] = {
    "control": {"listen": f"{OWN}:7070", "token_file": "t", "insecure": True}, "capture": {"device": "d"},
    "api": {"listen": f"{OWN}:7071", "insecure": True}, "replica": {"slots": 4},
}
OTHERS = [f"10.0.0.{number}" for number in range(3, 9)]


def text_of(tables: dict[str, Any]) -> str:
    def value(one: Any) -> str:
        if isinstance(one, dict):
            return "{" + ", ".join(f"{json.dumps(key)} = {value(each)}" for key, each in one.items()) + "}"
        return "[" + ", ".join(map(value, one)) + "]" if isinstance(one, list) else json.dumps(one)

    return "".join(f"[{table}]\n" + "".join(f"{key} = {value(one)}\n" for key, one in keys.items())
                   for table, keys in tables.items())


def merged(*all_tables: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for tables in all_tables:
        for table, keys in tables.items():
            made[table] = {**made.get(table, {}), **keys}
    return made


class Read:
    """A node.toml as it is loaded, and what is said of it."""

    def __init__(self, folder: Path, tables: dict[str, Any]) -> None:
        self.notes: list[str] = []
        (folder / "node.toml").write_text(text_of(tables))
        self.config = load(folder / "node.toml", self.notes.append)


@pytest.fixture
def refused(tmp_path: Path) -> Any:
    def of(*tables: dict[str, Any]) -> UserError:
        with pytest.raises(UserError) as caught:
            Read(tmp_path, merged(LEAST, *tables))
        return caught.value

    return of


# -- the switches --------------------------------------------------------------------------------------------------


def test_one_list_serves_every_feature(tmp_path: Path) -> None:
    """The same list on all machines: each leaves itself out."""
    read = Read(tmp_path, merged(LEAST, {
        "nodes": {"addresses": [OWN, *OTHERS[:2]]}, "replica": {"peers": True, "peer_versions": True},
        "common": {"nodes": True}, "protect": {"copies": True, "journal": True},
    }))
    config = read.config
    assert config.protect is not None and read.notes == []
    assert config.replica.peers == config.common.nodes == ("10.0.0.3:7070", "10.0.0.4:7070")
    assert config.protect.copies == config.replica.peer_versions == ("10.0.0.3:7071", "10.0.0.4:7071")
    assert config.protect.journal == {"10.0.0.3:7071": "10.0.0.3:7070", "10.0.0.4:7071": "10.0.0.4:7070"}


def test_a_feature_may_have_some_of_the_list(tmp_path: Path) -> None:
    """By host, or by a port of a machine that has its own; a version comes from whoever mirrors the same."""
    config = Read(tmp_path, merged(LEAST, {
        "nodes": {"addresses": [*OTHERS[:2], {"control": "[::1]:5", "api": "[::1]:6"}, {"api": "h:9"}]},
        "replica": {"peers": ["10.0.0.4", "[::1]:6"], "peer_versions": True},
        "common": {"nodes": ["10.0.0.3"]}, "protect": {"copies": ["h", "::1"]},
    })).config
    assert config.protect is not None
    assert config.replica.peers == ("10.0.0.4:7070", "[::1]:5")
    assert config.replica.peer_versions == ("10.0.0.4:7071", "[::1]:6")
    assert config.common.nodes == ("10.0.0.3:7070",) and config.protect.copies == ("h:9", "[::1]:6")


def test_a_machine_without_a_port_is_not_meant_by_true(tmp_path: Path) -> None:
    tables = merged(LEAST, {"nodes": {"addresses": [OTHERS[0], {"api": "[::1]:9"}]}, "common": {"nodes": True},
                            "protect": {"copies": True}, "replica": {"peers": False}})
    config = Read(tmp_path, tables).config
    assert config.protect is not None and config.replica.peers == ()
    assert config.common.nodes == ("10.0.0.3:7070",) and config.protect.copies == ("10.0.0.3:7071", "[::1]:9")


def test_a_group_with_parity_is_the_list_and_a_registry_places_it_otherwise(tmp_path: Path) -> None:
    holder: dict[str, Any] = {
        "tokens": {"reader": "t", "peer": "t"}, "api": {"listen": "10.0.0.9:7071", "insecure": True},
        "protect": {"parity": "2+1"}, "nodes": {"addresses": ["10.0.0.3", "10.0.0.4", "10.0.0.9"]}}
    config = Read(tmp_path, holder).config
    assert config.protect is not None and config.member == 2 and not config.protect.placed
    assert config.protect.group == ("10.0.0.3:7071", "10.0.0.4:7071", "10.0.0.9:7071")
    placed = Read(tmp_path, merged(holder, {"nodes": {"registry": "etcd://a:1, b:2"}})).config
    assert placed.protect is not None and placed.protect.placed and placed.protect.group == ()
    assert placed.nodes.registry == ("http://a:1", "http://b:2")
    tables = [{"control": f"{host}:7070", "api": f"{host}:7071"} for host in ("10.0.0.3", "10.0.0.4", "10.0.0.9")]
    journal = Read(tmp_path, merged(holder, {"protect": {"journal": True}, "nodes": {"addresses": tables}})).config
    assert journal.protect is not None
    assert journal.protect.journal == {f"{host}:7071": f"{host}:7070" for host in ("10.0.0.3", "10.0.0.4")}


def test_where_it_listens_everywhere_it_says_which_one_it_is(tmp_path: Path, refused: Any) -> None:
    anywhere = {"control": {"listen": "0.0.0.0:7070"}, "api": {"listen": "[::]:7071"},
                "nodes": {"addresses": [OWN, *OTHERS]}, "common": {"nodes": True}}
    error = refused(anywhere)
    assert error.where.endswith("nodes.advertise") and "0.0.0.0:7070" in error.what
    for advertise in (OWN, f"{OWN}:7071"):
        config = Read(tmp_path, merged(LEAST, anywhere, {"nodes": {"advertise": advertise}})).config
        assert config.common.addresses == [(host, 7070) for host in OTHERS] and config.advertise == f"{OWN}:7071"


@pytest.mark.parametrize(("tables", "where", "what"), [
    ({"nodes": {"addresses": ["h:7070"]}}, "nodes.addresses", "is not a host"),
    ({"nodes": {"addresses": [7]}}, "nodes.addresses", "is not a host"),
    ({"nodes": {"addresses": [{"port": "h:1"}]}}, "nodes.addresses", "port is not a key of a machine"),
    ({"nodes": {"addresses": [{"contrl": "h:1"}]}}, "nodes.addresses", "did you mean control?"),
    ({"nodes": {"addresses": [{"api": "h"}]}}, "nodes.addresses", "is not HOST:PORT"),
    ({"nodes": {"addresses": ["h", "h"]}, "common": {"nodes": True}}, "nodes.addresses", "h is given twice"),
    ({"nodes": {"addresses": [{"api": "h:1"}, {"api": "h:01"}]}}, "nodes.addresses", "h:1 is given twice"),
    ({"nodes": {"addresses": "h"}, "common": {"nodes": True}}, "nodes.addresses", "not a list"),
    ({"common": {"nodes": True}}, "common.nodes", "nodes.addresses is missing"),
    ({"nodes": {"addresses": [OWN]}, "replica": {"peers": True}}, "replica.peers", "no other machine"),
    ({"nodes": {"addresses": [{"api": "h:1"}]}, "replica": {"peers": True}}, "replica.peers", "no other machine"),
    ({"nodes": {"addresses": [{"api": "h:1"}]}, "replica": {"peers": ["h"]}}, "replica.peers", "control port of h:1"),
    ({"nodes": {"addresses": ["h"]}, "replica": {"peers": ["g"]}}, "replica.peers", "g is none of nodes.addresses"),
    ({"nodes": {"addresses": ["h"]}, "replica": {"peers": [3]}}, "replica.peers", "3 is none of nodes.addresses"),
    ({"nodes": {"addresses": [{"api": "h:1"}, {"api": "h:2"}]}, "protect": {"copies": ["h"]}}, "protect.copies",
     "h is several of nodes.addresses"),
    ({"control": {"listen": f"{OWN}:0"}, "nodes": {"addresses": ["h"]}, "common": {"nodes": True}}, "common.nodes",
     "the control port of h"),
    ({"nodes": {"addresses": ["::1"]}, "protect": {"copies": True, "journal": ["g"]}}, "protect.journal", "g is none"),
    ({"protect": {"copies": 3, "journal": True}}, "protect.copies", "not a list"),
    ({"protect": {"copies": [{"a": 1}], "journal": True}}, "protect.copies.0", "not a text"),
    ({"nodes": {"addresses": ["::1"]}, "protect": {"copies": True, "parity": "x", "group": 5, "journal": True}},
     "protect.parity", "pattern"),
    ({"nodes": {"addresses": ["::1"]}, "protect": {"copies": True, "parity": "2+1"}}, "protect.group", "names 1 nodes"),
    ({"nodes": {"registry": "http://h:1"}}, "protect", "is missing"),
    ({"nodes": {"registry": "http://me:hidden@h:1"}, "protect": {}}, "nodes.registry", "a user or a password"),
    ({"nodes": {"advertise": "h:0"}}, "nodes.advertise", "nobody listens at port 0"),
    ({"nodes": {"advertise": "a b"}}, "nodes.advertise", "HOST:PORT"),
    ({"nodes": {"leaf": "a"}, "protect": {"leaf": "b", "copies": ["h:1"]}}, "protect.leaf", "nodes.leaf"),
    ({"protect": {"copies": ["h:1"], "registry_user": "me"}}, "protect.registry_user", "registry_password_file"),
])
def test_what_is_wrong_is_named(refused: Any, tables: dict[str, Any], where: str, what: str) -> None:
    error = refused(tables)
    assert error.where.endswith(f"node.toml: {where}") and what in error.what and "hidden" not in str(error)


@pytest.mark.parametrize("entry", [
    "10.0.0.3:7071", "ck1:7070", "[fd00::3]:7070", "::ffff:10.0.0.3:7070", "[fd00::3", "fd00::3]", "[ck1]",
    "10.0.0.300", "10.0.0", "0.0.0.0", "::", "0::0", "[::]", "fd00::3::4", "", "a b", {"api": "10.0.0.300:7071"},
    {"control": "0.0.0.0:7070"},
])
def test_an_entry_that_is_no_host_is_refused_as_it_is_written(refused: Any, entry: Any) -> None:
    error = refused({"nodes": {"addresses": [entry]}, "common": {"nodes": True}})
    named = entry if isinstance(entry, str) else next(iter(entry.values())).rpartition(":")[0]
    assert error.where.endswith("node.toml: nodes.addresses") and repr(named) in error.what


@pytest.mark.parametrize(("given", "endpoints"), [
    (["etcd://10.0.0.1:2379"], ["http://10.0.0.1:2379"]),
    (["etcds://a:1", "ETCD://b:2", "https://c:3"], ["https://a:1", "http://b:2", "https://c:3"]),
    ("etcd://a:1,etcd://b:2", ["http://a:1", "http://b:2"]),
    ("etcd://a:1, b:2,", ["http://a:1", "http://b:2"]),
    ("etcds://a:1,b:2,http://c:3,d:4", ["https://a:1", "https://b:2", "http://c:3", "http://d:4"]),
])
@pytest.mark.parametrize("table", ["nodes", "protect"])
def test_endpoints_of_etcd_are_said_in_any_way(tmp_path: Path, given: Any, endpoints: list[str], table: str) -> None:
    config = Read(tmp_path, merged(LEAST, {"protect": {}}, {table: {"registry": given}})).config
    assert list(config.nodes.registry) == endpoints


@pytest.mark.parametrize("table", ["nodes", "protect"])
@pytest.mark.parametrize(("given", "named"), [
    (["a:1"], "a:1"), ("h", "h"), (["ftp://a:1"], "ftp://a:1"), ("etcd://a:1,etcd://b", "http://b"),
    (["http://a:70000"], "port 70000"), (["http://fd00::3:1"], "http://fd00::3:1"), (["http://a:1", ""], "''"),
])
def test_what_is_no_endpoint_of_etcd_is_said_where_it_stands(refused: Any, given: Any, named: str, table: str) -> None:
    error = refused({"protect": {}}, {table: {"registry": given}})
    assert error.where.endswith(f"node.toml: {table}.registry") and named in error.what and "(line " in error.what


@pytest.mark.parametrize("given", [["etcd://10.0.0.1:2379"], "etcd://10.0.0.1:2379", ["http://10.0.0.1:2379"]])
def test_a_password_is_for_no_endpoint_without_encryption(refused: Any, given: Any) -> None:
    error = refused({"protect": {}, "nodes": {"registry": given, "registry_user": "u", "registry_password_file": "p"}})
    assert error.where.endswith("nodes.registry") and "not encrypted" in error.what


SIX = {"control": {"listen": "[fd00::2]:7070"}, "api": {"listen": "[fd00::2]:7071"}}
ALL = {"control": {"listen": "0.0.0.0:7070"}, "api": {"listen": "0.0.0.0:7071"}, "nodes": {"advertise": OWN}}
NAMED = {"nodes": {"addresses": ["ck0", "ck1"]}, "common": {"nodes": True}}


@pytest.mark.parametrize(("tables", "where"), [
    (NAMED, "nodes.advertise"),
    (merged(NAMED, {"nodes": {"advertise": "ck0.example"}}), "nodes.advertise"),
    (merged(ALL, NAMED), "nodes.advertise"),
    (merged(NAMED, {"nodes": {"addresses": OTHERS, "advertise": "10.1.0.2"}}), "nodes.advertise"),
    (merged(ALL, {"nodes": {"addresses": [OWN]}, "replica": {"peers": [OWN]}}), "replica.peers"),
    (merged(ALL, {"nodes": {"addresses": [OWN]}, "protect": {"copies": [OWN]}}), "protect.copies"),
    (merged(ALL, {"common": {"nodes": [f"{OWN}:7070"]}}), "common.nodes"),
    (merged(SIX, {"common": {"nodes": ["[fd00:0::2]:7070"]}}), "common.nodes"),
    ({"common": {"nodes": [f"[::ffff:{OWN}]:7070"]}}, "common.nodes"),
    ({"common": {"nodes": ["ck1:7070", "CK1:7070"]}}, "common.nodes"),
    ({"common": {"nodes": ["[fd00::3]:7070", "[fd00:0::3]:7070"]}}, "common.nodes"),
])
def test_no_node_is_its_own_peer_or_another_s_twin(refused: Any, tables: dict[str, Any], where: str) -> None:
    assert refused(tables).where.endswith(f"node.toml: {where}")


@pytest.mark.parametrize(("tables", "others"), [
    (merged(SIX, {"nodes": {"addresses": ["fd00:0::2", "fd00::3"]}}), ["[fd00::3]:7070"]),
    ({"nodes": {"addresses": [f"::ffff:{OWN}", "fd00::3"]}}, ["[fd00::3]:7070"]),
    ({"nodes": {"addresses": ["CK0", "ck1"], "advertise": "ck0"}}, ["ck1:7070"]),
    ({"nodes": {"addresses": [OWN, "ck1"]}}, ["ck1:7070"]),
    ({"nodes": {"addresses": OTHERS[:1]}}, ["10.0.0.3:7070"]),
])
def test_a_node_knows_itself_however_it_is_written(tmp_path: Path, tables: dict[str, Any], others: list[str]) -> None:
    config = Read(tmp_path, merged(LEAST, tables, {"common": {"nodes": True}})).config
    assert list(config.common.nodes) == others


@pytest.mark.parametrize(("tables", "where", "said"), [
    ({"nodes": {"addresses": []}, "common": {"nodes": True}}, "common.nodes", "nodes.addresses"),
    ({"nodes": {"addresses": []}, "protect": {"copies": True}}, "protect.copies", "nodes.addresses"),
    ({"replica": {"peers": ["10.0.0.3:7070"], "peer_versions": True}}, "replica.peer_versions", "nodes.addresses"),
    *(({"nodes": {"addresses": twice}, "replica": {"peers": True, "peer_versions": True}}, "nodes.addresses", "twice")
      for twice in (["h", "h"], ["ck1", "CK1"], ["fd00::3", "fd00:0::3"],
                    ["10.0.0.3", {"control": "10.0.0.3:7070", "api": "10.0.0.3:9"}])),
])
def test_the_key_that_is_wrong_is_named(refused: Any, tables: dict[str, Any], where: str, said: str) -> None:
    error = refused(tables)
    assert error.where.endswith(f"node.toml: {where}") and said in error.what


@pytest.mark.parametrize(("text", "where"), [
    ('[node]\naddresses = ["10.0.0.3"]\n', "node"), ('[[nodes]]\naddresses = ["10.0.0.3"]\n', "nodes"),
    ('[nodes]\naddress = ["10.0.0.3"]\n', "nodes.address"), ('[nodes]\nadresses = ["10.0.0.3"]\n', "nodes.adresses"),
])
def test_what_is_misspelt_is_named_before_what_it_leads_to(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "node.toml"
    path.write_text(text_of(merged(LEAST, {"common": {"nodes": True}})) + text)
    with pytest.raises(UserError) as caught:
        load(path)
    assert caught.value.where == f"{path}: {where}" and "(line " in caught.value.what
    path.write_text('nodes = ["10.0.0.3"]\n' + text_of(merged(LEAST, {"common": {"nodes": True}})))
    with pytest.raises(UserError) as caught:
        load(path)
    assert caught.value.where == f"{path}: nodes"


@pytest.mark.parametrize(("tables", "where"), [
    *(({"nodes": {key: "x"}}, f"nodes.{key}") for key in ("registry_ca", "cluster", "host", "leaf", "rack")),
    *(({"protect": {"copies": ["h:1"], key: 5}}, f"protect.{key}") for key in ("replicas", "grace", "replace_seconds")),
    ({"nodes": {"registry": "http://e:1"}, "protect": {"journal": True}}, "protect.journal"),
    ({"nodes": {"addresses": [OWN, *OTHERS[:2]]}, "protect": {"parity": "2+1", "journal": True}}, "protect.journal"),
])
def test_a_key_that_would_do_nothing_is_refused(refused: Any, tables: dict[str, Any], where: str) -> None:
    assert refused(tables).where.endswith(f"node.toml: {where}")


# -- keys of earlier releases --------------------------------------------------------------------------------------


@st.composite
def old_forms(draw: st.DrawFn) -> dict[str, Any]:
    """Any of the six lists, and of the keys that were in [protect]. Ports of others are this node's own, or not."""
    api = draw(st.booleans())
    ports = draw(st.lists(st.sampled_from(((7070, 7071), (7070, 9), (5, 7071), (5, 9))), min_size=6, max_size=6))
    at = {kind: [f"{host}:{port[kind == 'api']}" for host, port in zip(OTHERS, ports, strict=True)]
          for kind in ("control", "api")}

    def some(kind: str) -> list[str]:
        return draw(st.lists(st.sampled_from(at[kind]), unique=True, max_size=4))

    tables = merged(LEAST, {"replica": {"peers": some("control"), "peer_versions": some("api")},
                            "common": {"nodes": some("control")}})
    if draw(st.booleans()):
        tables["control"]["listen"] = "0.0.0.0:7070"
    if not api:
        del tables["api"]
    copies, strings = some("api"), st.text("ab\"\\\u00e9", max_size=3)
    if copies or draw(st.booleans()):
        tables["protect"] = {"copies": copies}
        journal = [one for one in copies if draw(st.booleans())]
        if journal:
            odd = draw(st.sampled_from((None, 7999)))  # another port than the other lists have for that machine
            tables["protect"]["journal"] = {
                one: at["control"][at["api"].index(one)] if odd is None else f"{one.rpartition(':')[0]}:{odd}"
                for one in journal}
        if draw(st.booleans()):  # of the new form already, but for the journal
            tables["nodes"] = {"addresses": [{"control": one, "api": other} for one, other in zip(
                at["control"], at["api"], strict=True)] if draw(st.booleans()) else list(OTHERS)}
        if api and draw(st.booleans()):
            tables["protect"]["parity"], tables["protect"]["group"] = "2+1", [f"{OWN}:7071", *at["api"][:2]]
        if api and draw(st.booleans()):
            tables["protect"] |= {"registry": ["http://e:1"], "cluster": "c" + draw(strings), "leaf": draw(strings)}
        if draw(st.booleans()):
            tables["protect"]["advertise"] = f"{OWN}:7071"
    return tables


def settings_of(config: NodeConfig) -> dict[str, Any]:
    made = config.model_dump()
    del made["nodes"]["addresses"]  # the old form has no such list
    return made


@given(tables=old_forms())
def test_an_old_form_and_what_is_said_to_write_for_it_are_the_same_settings(
    tmp_path_factory: pytest.TempPathFactory, tables: dict[str, Any],
) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        old = Read(folder, tables)
    except UserError:  # a group that has no place for what is drawn, no copies and no registry, ...
        return
    if not old.notes:
        assert "nodes" in tables or not any([
            tables["replica"]["peers"], tables["replica"]["peer_versions"], tables["common"]["nodes"]])
        assert "journal" not in tables.get("protect", {})
        return
    [note] = old.notes
    parts = note.partition(": ")[2].partition(": the next release does not read this form. Remove")
    keys, text = (parts[0], parts[2].partition("\n")[2]) if parts[1] else ("", "")
    lines = [one for one in text.splitlines() if " the next release does not read this form, and nodes." not in one]
    left = "protect.journal: the next release does not read this form, and nodes.addresses" in note
    assert not left or "nodes" in tables
    new = merged(tables)
    for table, _, key in (name.partition(".") for name in keys.split(", ") if name):
        del new[table][key]
    again = Read(folder, merged(new, tomllib.loads("\n".join(lines))))
    assert bool(again.notes) == left and settings_of(again.config) == settings_of(old.config)


def test_an_old_journal_beside_a_list_is_renewed_with_its_own_ports(tmp_path: Path) -> None:
    """The list has other control ports: it is amended where nothing else means them."""
    old = merged(LEAST, {"nodes": {"addresses": list(OTHERS[:2])}, "protect": {
        "copies": True, "journal": {"10.0.0.3:7071": "10.0.0.3:7999", "10.0.0.4:7071": "10.0.0.4:7070"}}})
    read = Read(tmp_path, old)
    [note] = read.notes
    new = merged(old)
    del new["protect"]["journal"]
    again = Read(tmp_path, merged(new, tomllib.loads(note.partition("\n")[2])))
    assert again.notes == [] and settings_of(again.config) == settings_of(read.config)
    [note] = Read(tmp_path, merged(old, {"common": {"nodes": True}})).notes  # which are at 7070
    assert "protect.journal" in note and "nodes.addresses" in note and "[protect]" not in note


def test_each_old_key_is_said_and_no_new_one(tmp_path: Path) -> None:
    protect = {"copies": ["10.0.0.3:7071"], "registry": ["http://e:1"]}
    for table, key, one in (("replica", "peers", ["10.0.0.3:7070"]), ("replica", "peer_versions", ["10.0.0.3:7071"]),
                            ("common", "nodes", ["10.0.0.3:7070"]), ("protect", "copies", protect["copies"]),
                            ("replica", "resync", "ranges"), ("replica", "resync", "state")):
        [note] = Read(tmp_path, merged(LEAST, {table: {key: one}})).notes
        assert f"{table}.{key}" in note
    [note] = Read(tmp_path, merged(LEAST, {"protect": protect})).notes
    assert "protect.copies, protect.registry: " in note and 'registry = ["http://e:1"]' in note
    assert Read(tmp_path, merged(LEAST, {"nodes": {"addresses": ["::1"], "registry": "http://e:1"},
                                         "protect": {"copies": True}})).notes == []


@pytest.mark.parametrize("check", [True, False])
def test_the_command_says_it_at_a_start_and_with_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, check: bool,
) -> None:
    """On standard error: events go to the other. The token is missing, so nothing is started."""
    path = tmp_path / "node.toml"
    path.write_text(text_of({"tokens": {"reader": "none", "peer": "none"}, "api": {"listen": "127.0.0.1:7071"},
                             "protect": {"copies": ["127.0.0.2:7071"], "directory": str(tmp_path)}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flowcheck-node", "--config", str(path), *(["--check"] if check else [])])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, error = capsys.readouterr()
    assert ended.value.code == 2 and "protect.copies" in error and "copies = true" in error and "[nodes]" not in out


def test_what_is_no_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("nodes = 3\n" + text_of(merged(LEAST, {"common": {"nodes": True}})))
    with pytest.raises(UserError) as caught:
        load(path)
    assert f"{path}: " in caught.value.where and "nodes" in caught.value.where
