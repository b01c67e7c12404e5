"""Somebody who can write to etcd, a real one, and has no token of these nodes: he can take away, and add nothing. And
etcd itself lets in who logs in, and nobody else."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.errors import UserError
from flowcheck.node.config.load import load
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.protect import registry_loop as sitting
from flowcheck.node.protect.border import Rules
from flowcheck.node.protect.copier import Copier
from flowcheck.node.protect.placement import Decided, Have, Member
from flowcheck.node.protect.registry import HAVE, MEMBERS, PLACEMENT, ROOT, RegistryError
from flowcheck.node.protect.worker import _Sources

from ..certificates import issue
from ..hand_api import NODE_KEY, HandApi, HandVersion
from ..hand_node import until
from .registry_scene import EtcdServer, etcd_server, free_ports, signed
from .test_copier_sources import given
from .test_sitting_turns import sits

PREFIX = "/flowcheck/c/"


def etcdctl(server: EtcdServer, *words: str, value: str | None = None) -> str:
    """As an attacker has it, or an administrator: the program of etcd itself would do as well."""
    from etcd3gw.client import Etcd3Client

    host, _, port = server.endpoints[0].removeprefix("http://").rpartition(":")
    client = Etcd3Client(host, int(port), api_path="/v3/", timeout=60.0)
    if value is not None:
        client.put(PREFIX + words[0], value)
        return ""
    return json.dumps(client.post(client.get_url(words[0]), json=json.loads(words[1])))


class Listener:
    """At the attacker's address. came: how many connections."""

    def __init__(self) -> None:
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.sock.getsockname()[1]}"

    def came(self) -> int:
        """By now: whoever has come is in the queue."""
        self.sock.setblocking(False)
        count = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self.sock.accept()[0].close()
                count += 1
        return count


@pytest.fixture
def evil() -> Iterator[Listener]:
    one = Listener()
    yield one
    one.sock.close()


class Holder:
    """A holder's thread in the registry and its copies, as protect/worker.py has them."""

    def __init__(self, server: EtcdServer, folder: Path, stack: contextlib.ExitStack) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.folder = folder
        copier = Copier(folder / "copies", Rules(seconds=0.01), self._say)
        stack.callback(copier.close, 60.0)
        sources = _Sources(copier, given(sources=[], key=NODE_KEY, keys=[NODE_KEY], own="127.0.0.1:9"))
        registry = sits(endpoints=server.endpoints, ca="", replicas=2, grace=0.3, standby=False, directory=str(folder),
                        site={"name": "holder", "leaf": "l"}, kept=str(folder / "placement.json"))
        ending = threading.Event()
        thread = threading.Thread(target=sitting.sit, args=(
            registry, copier.held, list, sources.placed, sources.node, sources.keys,
            self._say, ending))
        thread.start()
        stack.callback(thread.join, 60.0)
        stack.callback(ending.set)

    def _say(self, event: str, **fields: Any) -> None:
        self.said.append((event, fields))

    def heard(self, event: str) -> list[dict[str, Any]]:
        return [fields for one, fields in self.said if one == event]

    def decided(self) -> Decided:
        path = self.folder / "placement.json"
        return Decided.of(path.read_text()) if path.exists() else Decided()


def planted(address: str) -> dict[str, str]:
    """Each key as nodes had it before they signed: a node of an earlier release writes the same."""
    evil = Member(Site("evil"), address)
    own = [{"run_id": "run", "epoch": 1_000_000, "shard": ""}]
    have = json.dumps({"epoch": 1_000_000, "copies": [], "own": own, "parity": []})
    decision = Decided(1_000_000, {"evil": evil, "holder": Member(Site("holder"), "127.0.0.1:9")},
                       {"evil": ("holder",), "holder": ("evil",)})
    return {MEMBERS + "evil": evil.text(), HAVE + "evil": have, PLACEMENT: decision.text()}


def test_a_put_without_the_token_places_nobody_and_contacts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: Listener
) -> None:
    """One PUT of each key before the holder comes, and again while it works. Whom it follows is the member that signs;
    at the attacker's address nobody ever asks, so nothing is shown there; it is said once."""
    monkeypatch.setattr(sitting, "TURN_SECONDS", 0.1)
    with etcd_server(tmp_path / "etcd") as server, HandApi(HandVersion(4)) as api, contextlib.ExitStack() as stack:
        for key, value in planted(evil.address).items():
            etcdctl(server, key, value=value)
        source = signed(server.endpoints, "c")
        member = Member(Site("source"), api.name)
        holder = Holder(server, tmp_path, stack)

        def copied() -> bool:
            source.renew({MEMBERS + "source": member.text()})
            etcdctl(server, MEMBERS + "evil", value=planted(evil.address)[MEMBERS + "evil"])
            return bool(holder.heard("copied"))

        until(copied)
        assert {one["source"] for one in holder.heard("copied")} == {api.name}
        assert {name for one in holder.heard("placed") for name in one["copies"]} == {"source"}
        assert set(holder.decided().members) == {"holder", "source"} and holder.decided().epoch < 1000
        (unsigned,) = holder.heard("unsigned")
        assert unsigned["count"] == 3 and MEMBERS + "evil" in unsigned["keys"]
        # a signed value, under another name, or with a lease that is not the one that is signed, is no other thing
        there = json.loads(etcdctl(server, "/kv/range", json.dumps({
            "key": base64.b64encode(f"{PREFIX}{MEMBERS}source".encode()).decode()})))["kvs"][0]
        sealed = base64.b64decode(there["value"]).decode()
        etcdctl(server, MEMBERS + "other", value=sealed)
        root = source.read()[ROOT]
        assert root.value == "holder"
        before = holder.decided().epoch
        end = time.monotonic() + 1.0
        until(lambda: copied() and time.monotonic() > end)
        assert set(holder.decided().members) == {"holder", "source"} and holder.decided().epoch == before
        assert evil.came() == 0


def test_a_root_that_nobody_has_signed_is_no_root_and_stops_placement_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: Listener
) -> None:
    """What he can: whoever may write may stop. It is said by name, and it is over when the key is deleted."""
    monkeypatch.setattr(sitting, "TURN_SECONDS", 0.1)
    with etcd_server(tmp_path / "etcd") as server, contextlib.ExitStack() as stack:
        etcdctl(server, ROOT, value="evil")
        holder = Holder(server, tmp_path, stack)
        until(lambda: holder.heard("registered"))
        assert holder.heard("registered")[0]["root"] == "" and holder.heard("unsigned")[0]["keys"] == [ROOT]
        assert holder.heard("placed") == []
        etcdctl(server, "/kv/deleterange", json.dumps({"key": base64.b64encode((PREFIX + ROOT).encode()).decode()}))
        until(lambda: holder.heard("placed"))
        assert evil.came() == 0


def test_haves_of_nobody_move_no_epoch_and_end_no_recovery(tmp_path: Path) -> None:
    with etcd_server(tmp_path / "etcd") as server:
        one = signed(server.endpoints, "c")
        one.renew({MEMBERS + "one": Member(Site("one"), "h:1").text(), HAVE + "one": json.dumps(
            {"epoch": 2, "copies": [], "own": [], "parity": []})})
        etcdctl(server, HAVE + "one", value=json.dumps({"epoch": 1_000_000, "copies": []}))
        assert HAVE + "one" not in one.read()
        one.renew({HAVE + "one": json.dumps({"epoch": 2, "copies": [], "own": [], "parity": []})})  # it is put back
        assert Have.of(one.read()[HAVE + "one"].value).epoch == 2


# -- etcd's own doors ----------------------------------------------------------------------------------------------


def enable_users(server: EtcdServer) -> None:
    for path, body in (("/auth/user/add", {"name": "root", "password": "of root"}),
                       ("/auth/user/grant", {"user": "root", "role": "root"}),
                       ("/auth/user/add", {"name": "nodes", "password": "p@ss:w/ord"}),
                       ("/auth/role/add", {"name": "flowcheck"}),
                       ("/auth/role/grant", {"name": "flowcheck", "perm": {
                           "permType": 2, "key": base64.b64encode(b"/flowcheck/").decode(),
                           "range_end": base64.b64encode(b"/flowcheck0").decode()}}),
                       ("/auth/user/grant", {"user": "nodes", "role": "flowcheck"}), ("/auth/enable", {})):
        with contextlib.suppress(Exception):  # a role that is there from the beginning
            etcdctl(server, path, json.dumps(body))


def test_who_logs_in_is_let_in(tmp_path: Path) -> None:
    """The password is asked for again when a login is over, so that one that was replaced is used; and it is in no
    error."""
    from flowcheck.node.protect.registry_etcd import Etcd

    with etcd_server(tmp_path / "etcd") as server:
        enable_users(server)
        password = ["p@ss:w/ord"]
        one = Etcd(server.endpoints, "c", seconds=30.0, login=("nodes", lambda: password[0]))
        one.renew({MEMBERS + "a": "1"})
        assert one.read()[MEMBERS + "a"].value == "1"
        server.kill()
        server.start()  # its logins are gone

        def again() -> bool:
            with contextlib.suppress(RegistryError):
                one.renew({MEMBERS + "a": "1"})
                return one.read()[MEMBERS + "a"].value == "1"
            return False

        until(again)
        for login in (None, ("nodes", lambda: "a wrong secret"), ("nobody", lambda: "a wrong secret")):
            with pytest.raises(RegistryError) as caught:
                Etcd(server.endpoints, "c", seconds=30.0, login=login).read()
            assert "secret" not in caught.value.message()


def test_a_certificate_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To an etcd that wants one. Whom the environment trusts is no matter where the settings say whom."""
    from flowcheck.node.protect.registry_etcd import Etcd

    own, wrong = issue(tmp_path, "own"), issue(tmp_path, "wrong")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(wrong.ca))
    client, peer = free_ports(2)
    url = f"https://127.0.0.1:{client}"
    if shutil.which("etcd") is None:
        pytest.skip("no etcd here: apt-get install etcd-server")
    process = subprocess.Popen([
        "etcd", "--data-dir", str(tmp_path / "data"), "--listen-client-urls", url, "--advertise-client-urls", url,
        "--listen-peer-urls", f"http://127.0.0.1:{peer}", "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
        "--initial-cluster", f"default=http://127.0.0.1:{peer}", "--cert-file", str(own.cert), "--key-file",
        str(own.key), "--client-cert-auth", "--trusted-ca-file", str(own.ca),
    ], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        def read(cert: tuple[str, str] | None) -> bool:
            try:
                Etcd([url], "c", str(own.ca), 30.0, cert=cert).read()
            except RegistryError:
                return False
            return True

        until(lambda: read((str(own.cert), str(own.key))))
        assert not read(None) and not read((str(wrong.cert), str(wrong.key)))
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.parametrize("endpoint", [
    "https://me:hidden@h:1", "http://me@h:1", "https://h:1/@hidden", "https://h:1?hidden", "https://h:1#hidden",
    "https://h:\u0661", "https://h\0:1", "https://h:0",
])
def test_an_endpoint_is_an_address_and_shows_no_secret(endpoint: str) -> None:
    from flowcheck.node.protect.registry_etcd import check_endpoints

    with pytest.raises(UserError) as caught:
        check_endpoints([endpoint])
    assert "hidden" not in caught.value.message() or "@" not in endpoint


def test_settings_with_a_password_in_an_endpoint_show_it_nowhere(tmp_path: Path) -> None:
    """It is refused while they are read, before anything is said of them."""
    tables = {"tokens": {"peer": "t"}, "api": {"listen": "127.0.0.1:0"}, "protect": {
        "registry": ["https://me:hidden@h:1"]}}
    with pytest.raises(ValidationError) as raw:
        NodeConfig.model_validate(tables)
    assert "nodes.registry" in str(raw.value) and "hidden" not in str(raw.value)
    (tmp_path / "node.toml").write_text(
        '[tokens]\npeer = "t"\n[api]\nlisten = "127.0.0.1:0"\n[protect]\nregistry = ["https://me:hidden@h:1"]\n')
    with pytest.raises(UserError) as caught:
        load(tmp_path / "node.toml")
    assert "registry_password_file" in caught.value.message() and "hidden" not in caught.value.message()
