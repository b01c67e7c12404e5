"""netmiko's real drivers against an SSH server that speaks each vendor's prompts: apply, change, failure in the
middle, connection lost, rollback, remove, and what must not happen: a password shown, a foreign session touched."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from switch_configs.errors import DeviceError, PlanError
from switch_configs.manage import Manager
from switch_configs.schema import MirrorPlan, MirrorSession, Source
from switch_configs.transport import Credentials, SshTransport

pytest.importorskip("netmiko", reason="netmiko (extra `switch`) is not installed")
import paramiko

from . import devices

PORT = {"comware": "HundredGigE1/0/{}", "nxos": "Ethernet1/{}", "cumulus": "swp{}", "junos": "et-0/0/{}"}
VENDORS = list(devices.DEVICES)


def some(*vendors: str) -> pytest.MarkDecorator:
    """These platforms in `make test`, the others in `make test-all`: one platform takes about two seconds."""
    every = [pytest.param(v, marks=() if v in vendors else pytest.mark.slow) for v in VENDORS]
    return pytest.mark.parametrize("lab", every, indirect=True)


class Lab:
    def __init__(self, vendor: str, folder: Path) -> None:
        self.vendor = vendor
        self.device = devices.DEVICES[vendor]()
        self.server = devices.SshSwitch(self.device, folder)
        self.managers: list[Manager] = []

    def manager(self, direction="both", ports=(1, 2), password=None, login=None, **changes) -> Manager:
        port = PORT.get(self.vendor, "Ethernet{}")
        fields = {
            "leaf": "leaf1", "vendor": self.vendor, "direction": direction, "destination": port.format(48),
            "destination_gbps": 400, "address": "127.0.0.1", "ssh_port": self.server.port,
            "sources": [Source(port=port.format(n), rank=n, speed_gbps=100) for n in ports],
        }
        session = MirrorSession.model_validate(fields | changes)
        login = login or Credentials("admin", password or self.server.password, known_hosts=self.server.known_hosts)
        self.managers.append(Manager(session, lambda: SshTransport(session, login)))
        return self.managers[-1]

    def close(self) -> None:
        for manager in self.managers:
            manager.close()
        self.server.close()


@pytest.fixture(params=VENDORS)
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(request.param, tmp_path)
    yield lab
    lab.close()


@pytest.fixture
def one(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(getattr(request, "param", "eos"), tmp_path)
    yield lab
    lab.close()


def ports(state) -> list[tuple[str, str]]:
    return sorted((s.port, s.direction) for s in state.sources)


def test_apply_change_remove(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    m = lab.manager()
    assert not m.show().mine.exists
    difference = m.difference()
    state = m.apply(difference, save=True)
    assert state.active and state.same_as(m.session), state
    assert m.difference().commands == ()  # idempotent
    typed = [line.partition("; echo rc=$?")[0] for line in lab.device.lines]
    start = typed.index(difference.commands[0])
    shown = list(difference.commands)
    assert typed[start : start + len(shown)] == shown  # what was shown is what was typed, in that order

    change = lab.manager("ingress", (2, 3))
    assert change.difference().lines
    assert change.apply(change.difference()).same_as(change.session)
    assert change.remove() and not change.remove()
    assert not change.show().mine.exists
    assert lab.server.password not in caplog.text + repr(m._open)


@some("sonic", "eos")
def test_each_direction_of_a_port_may_have_a_session_of_its_own(lab: Lab) -> None:
    """Beside a session that copies the other direction, anybody's; not where nobody says that the platform can."""
    port = PORT.get(lab.vendor, "Ethernet{}")
    consent = lab.vendor in ("eos", "comware", "cumulus")
    first = lab.manager("ingress", (1,), split_directions=consent)
    first.apply(first.difference())
    more = {"name": "flowcheck-2", "number": 2, "destination": port.format(49)}
    if consent:
        with pytest.raises(PlanError, match="already mirrored by session"):
            lab.manager("egress", (1,), **more).difference()
        more["split_directions"] = True
    second = lab.manager("egress", (1,), **more)
    assert second.apply(second.difference()).same_as(second.session)
    assert first.show().mine.active and first.difference().commands == ()
    more = {**more, "name": "flowcheck-3", "number": 3, "destination": port.format(50)}
    with pytest.raises(PlanError, match="already mirrored by session"):
        lab.manager("egress", (1,), **more).difference()
    assert first.remove() and second.show().mine.same_as(second.session)


@some("eos", "nxos", "comware", "junos", "sonic", "cumulus")
def test_failure_in_the_middle_is_taken_back(lab: Lab) -> None:
    old = lab.manager("ingress", (1,))
    old.apply(old.difference())
    before = ports(old.show().mine)
    m = lab.manager("both", (1, 2))
    difference = m.difference()
    lab.device.refuse = {
        "sonic": "span add flowcheck Ethernet48 Ethernet1,Ethernet2", "sonic-configdb": r"Ethernet1,Ethernet2",
        "cumulus": "source-port swp1,swp2", "junos": r"egress interface et-0/0/2", "comware": "1 mirroring-port .*both",
        "eos": "source Ethernet2 both", "nxos": "source interface Ethernet1/2 both",
    }[lab.vendor]
    with pytest.raises(DeviceError, match="the change was taken back"):
        m.apply(difference)
    state = old.show().mine
    assert state.active and ports(state) == before and m.show().mine.same_as(old.session)


@some("nxos", "sonic", "cumulus")
def test_not_active_is_rolled_back_with_the_reason(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("switch_configs.manage.SETTLE_SECONDS", 0.3)
    lab.device.broken = True
    m = lab.manager()
    with pytest.raises(DeviceError, match=r"applied, but not active: .*taken back") as caught:
        m.apply(m.difference())
    words = {"comware": "Incomplete", "eos": "inactive", "nxos": "No operational", "junos": "down",
             "cumulus": "down"}.get(lab.vendor, "status error")
    assert words in str(caught.value)
    assert not m.show().mine.exists


@some("eos", "comware")
def test_connection_lost_in_the_middle(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("switch_configs.transport.SECONDS", 1.0)
    m = lab.manager()
    difference = m.difference()
    lab.device.drop = "mirroring-group 1 monitor-port|destination|config load|span add|output interface"
    with pytest.raises(DeviceError, match=r"no answer to: .*taken back"):
        m.apply(difference)
    assert not m.show().mine.exists


@some("comware", "sonic")
def test_somebody_elses_session_is_refused_and_untouched(lab: Lab) -> None:
    elsewhere = PORT.get(lab.vendor, "Ethernet{}").format(47)
    other = lab.manager("ingress", (1,), name="other", number=5, destination=elsewhere)
    other.apply(other.difference())
    m = lab.manager("both", (1, 2))
    with pytest.raises(PlanError, match="already mirrored by session"):
        m.difference()
    free = lab.manager("both", (2, 3))
    free.apply(free.difference())
    assert [o.name in ("other", "5") for o in free.show().others] == [True]
    free.remove()
    assert other.show().mine.active
    clash = lab.manager("both", (3,), name="other", number=5)
    if lab.vendor in ("comware", "cumulus"):  # no room for a mark: another destination means another owner
        with pytest.raises(PlanError, match="somebody else's"):
            clash.difference()
        with pytest.raises(PlanError, match="not ours"):
            clash.remove()


def test_nxos_number_of_another_description_is_not_ours(tmp_path: Path) -> None:
    lab = Lab("nxos", tmp_path)
    try:
        lab.device.sessions["1"] = ["description ids", "source interface Ethernet1/9 rx", "no shut"]
        with pytest.raises(PlanError, match="somebody else's"):
            lab.manager().difference()
        with pytest.raises(PlanError, match="not ours"):
            lab.manager().remove()
        assert "1" in lab.device.sessions
    finally:
        lab.close()


def test_timed_undo_is_pending_until_confirmed(one: Lab) -> None:
    m = one.manager()
    m.apply(m.difference())
    lines = one.device.lines
    name = next(line.split()[2] for line in lines if line.startswith("configure session flowcheck-"))
    timer, confirm = lines.index("commit timer 00:05:00"), lines.index(f"configure session {name} commit")
    assert timer < confirm and "show monitor session" in lines[timer:confirm]
    assert "show monitor session" in lines[confirm:]  # read again: the timer could have been faster


def test_the_command_gives_the_port_back_over_ssh(one: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """apply writes down beside the plan how the port was, remove types it and forgets it; the password is nowhere."""
    from flowcheck.cli import app

    one.device.running["interface Ethernet48"] = ["mtu 5000", "no lldp transmit"]
    plan = MirrorPlan(sessions=[one.manager().session], groups=[], nodes_per_leaf={"leaf1": 1})
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    monkeypatch.setenv("FLOWCHECK_SWITCH_USER", "admin")
    monkeypatch.setenv("FLOWCHECK_SWITCH_PASSWORD", one.server.password)
    login = ["--known-hosts", str(one.server.known_hosts), "--commit", "--yes"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        app(["switch", "apply", str(path), *login], standalone_mode=False)
        assert "mtu 9214" in one.device.running["interface Ethernet48"]
        assert "mtu 5000" in (tmp_path / "plan.json.undo").read_text()
        app(["switch", "remove", str(path), *login], standalone_mode=False)
    assert sorted(one.device.running["interface Ethernet48"]) == ["mtu 5000", "no lldp transmit"]
    assert "the port has its earlier settings back" in said.getvalue() and one.server.password not in said.getvalue()
    assert not (tmp_path / "plan.json.undo").exists()


def test_wrong_password_unknown_host_key_and_no_server(one: Lab, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cannot log in") as caught:
        one.manager(password="wr0ng-Pa55").show()
    assert "wr0ng-Pa55" not in str(caught.value) + caught.value.remedy
    one.server.known_hosts.write_text("")
    with pytest.raises(DeviceError, match="cannot log in"):
        one.manager().show()
    one.server.stop_listening()
    with pytest.raises(DeviceError, match="cannot log in"):
        one.manager().show()
    assert "s3cret" not in repr(Credentials("admin", "s3cret"))


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's SSH agent, a real one, without keys yet; yields a folder for keys. No keys in the home directory."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("ssh-agent (package openssh-client) is not installed")
    asked: list[paramiko.Agent] = []

    class Noted(paramiko.Agent):
        """Closed at the end: paramiko leaves that of a login that failed to the collector."""

        def __init__(self) -> None:
            super().__init__()
            asked.append(self)

    monkeypatch.setattr(paramiko.client, "Agent", Noted)
    with tempfile.TemporaryDirectory(prefix="fc") as folder:  # the name of a socket is at most 107 characters long
        words = ["ssh-agent", "-D", "-s", "-a", f"{folder}/agent"]
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None and "SSH_AUTH_SOCK" in process.stdout.readline()  # it listens now
                monkeypatch.setenv("SSH_AUTH_SOCK", f"{folder}/agent")
                monkeypatch.setenv("HOME", folder)
                yield Path(folder)
            finally:
                for one in asked:
                    one.close()
                process.kill()


def key_file(folder: Path) -> tuple[Path, paramiko.PKey]:
    key = paramiko.ECDSAKey.generate()
    path = folder / "key"
    key.write_private_key_file(str(path))
    return path, key


def test_login_by_the_agents_keys(one: Lab, agent: Path) -> None:
    path, key = key_file(agent)
    subprocess.run(["ssh-add", str(path)], capture_output=True, check=True)
    path.unlink()
    one.server.authorized.append(key)
    m = one.manager(login=Credentials("admin", known_hosts=one.server.known_hosts))
    assert m.apply(m.difference()).active


def test_the_command_logs_in_by_the_agents_keys(
    one: Lab, agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No password anywhere, no --key: what docs/use/switch.md calls the keys of the SSH agent."""
    from flowcheck.cli import app

    path, key = key_file(agent)
    subprocess.run(["ssh-add", str(path)], capture_output=True, check=True)
    one.server.authorized.append(key)
    plan = MirrorPlan(sessions=[one.manager().session], groups=[], nodes_per_leaf={"leaf1": 1})
    (tmp_path / "plan.json").write_text(plan.to_json())
    for name in ("FLOWCHECK_SWITCH_PASSWORD", "FLOWCHECK_SWITCH_PASSWORD_LEAF1"):
        monkeypatch.delenv(name, raising=False)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        app(["switch", "diff", str(tmp_path / "plan.json"), "--user", "admin", "--known-hosts",
             str(one.server.known_hosts)], standalone_mode=False)
    assert "leaf1 session flowcheck (eos): changes" in said.getvalue()


def test_login_by_a_key_file(one: Lab, agent: Path) -> None:
    path, key = key_file(agent)
    one.server.authorized.append(key)
    login = Credentials("admin", key_file=path, known_hosts=one.server.known_hosts)
    assert not one.manager(login=login).show().mine.exists


def test_a_key_file_that_is_not_there_is_named(one: Lab, tmp_path: Path) -> None:
    login = Credentials("admin", key_file=tmp_path / "key", known_hosts=one.server.known_hosts)
    with pytest.raises(PlanError, match="no such key file") as caught:
        one.manager(login=login).show()
    assert caught.value.where == str(tmp_path / "key")


def test_an_agent_without_the_right_key_is_refused_by_the_switch(one: Lab, agent: Path) -> None:
    one.server.authorized.append(paramiko.ECDSAKey.generate())
    with pytest.raises(DeviceError, match=r"cannot log in: .*[Aa]uthentication") as caught:
        one.manager(login=Credentials("admin", known_hosts=one.server.known_hosts)).show()
    assert "ssh-add -l" in caught.value.remedy
