"""How lines reach a switch: a local command (tc, Open vSwitch), or netmiko's driver over SSH (everything else).

What is sent is what render() printed, line by line, each answered by a prompt before the next; so "failed in the
middle" names the line. Nothing is logged here, and a password appears in no message, repr or exception.
One transport belongs to one thread.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from switch_configs.errors import DeviceError, PlanError
from switch_configs.schema import MirrorSession

__all__ = ["Credentials", "LocalTransport", "SshTransport", "Transport", "answer", "is_local", "typed"]

SECONDS = 30.0
CONNECT_SECONDS = 20.0
PROGRAMS = {"tc", "ip", "ovs-vsctl", "ovs-appctl"}
DRIVERS = {
    "comware": "hp_comware", "eos": "arista_eos", "nxos": "cisco_nxos", "junos": "juniper_junos",
    "sonic": "linux", "sonic-configdb": "linux", "cumulus": "linux",
}
SHELL = ("sonic", "sonic-configdb", "cumulus")
# What these command lines print instead of an exit status.
REFUSED = {
    "comware": r"(?m)^\s*%\s?\S|^\s*\^\s*$|^Error:|Unrecognized command|Wrong parameter|Permission denied",
    "eos": r"(?m)^% |^! .*(?:fail|error)|Invalid input",
    "nxos": r"(?m)^% |^ERROR|Invalid (?:command|interface|range)|^\s*\^\s*$",
    "junos": r"(?m)^error:|^\s*\^\s*$|syntax error|unknown command|commit failed",
}


class Transport(Protocol):
    def run(self, line: str, *, check: bool = True) -> str:
        """The output of one line. Raises DeviceError if the switch refused it (only if check) or went away."""

    def close(self) -> None: ...


def is_local(vendor: str) -> bool:
    return vendor in ("tc", "ovs")


@dataclass(frozen=True)
class Credentials:
    """password None: key_file, then the keys of the SSH agent. known_hosts None: the user's own file."""

    username: str
    password: str | None = field(default=None, repr=False)
    key_file: Path | None = None
    known_hosts: Path | None = None


class LocalTransport:
    """Runs tc, ip and ovs-* here, without a shell; in a network namespace if the session names one."""

    def __init__(self, session: MirrorSession) -> None:
        self._where = session.leaf
        self._prefix = ["ip", "netns", "exec", session.netns] if session.netns else []
        self._env = {**os.environ, "LC_ALL": "C"}
        if session.ovs_rundir:
            self._env["OVS_RUNDIR"] = session.ovs_rundir

    def run(self, line: str, *, check: bool = True) -> str:
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise DeviceError(f"not a command line: {line}: {error}", where=self._where) from None
        if words[0] not in PROGRAMS:
            raise DeviceError(f"{words[0]} is not among the local commands", where=self._where)
        try:
            done = subprocess.run(
                [*self._prefix, *words], env=self._env, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except FileNotFoundError as error:
            raise DeviceError(
                f"{error.filename} is not installed", where=self._where,
                remedy="apt-get install iproute2 openvswitch-switch",
            ) from None
        except subprocess.TimeoutExpired:
            raise DeviceError(
                f"no answer within {SECONDS:g} s: {line}", where=self._where, remedy="is the switch process running?"
            ) from None
        if done.returncode and check:
            said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
            raise DeviceError(f"refused: {line}: {said}", where=self._where, remedy="see the message of the command")
        return done.stdout if done.returncode == 0 else ""

    def close(self) -> None:
        pass


def typed(vendor: str, line: str) -> str:
    """What is sent for a line: shells have an exit status, which is asked for along with it."""
    return f"{line}; echo rc=$?" if vendor in SHELL else line


def answer(vendor: str, line: str, output: str, *, check: bool, where: str) -> str:
    """What the switch printed, without the exit status. Raises DeviceError if it refused the line (only if check)."""
    if vendor in SHELL:
        status = re.search(r"rc=(\d+)\s*$", output)
        failed = status is None or status[1] != "0"
        output = output[: status.start()] if status else output
    else:
        failed = re.search(REFUSED[vendor], output) is not None
    if failed and check:
        said = " ".join(output.split())[:200]
        raise DeviceError(f"refused: {line}: {said}", where=where, remedy="see the message of the switch")
    return output


class SshTransport:
    """netmiko's driver for the vendor. Host keys are checked against known_hosts, unknown ones refused."""

    def __init__(self, session: MirrorSession, credentials: Credentials) -> None:
        self._vendor, self._where = session.vendor, f"{session.leaf} ({session.address})"
        if session.address is None:
            raise DeviceError("the topology has no address for it", where=session.leaf, remedy="set leaf.address")
        self._connection = _connect(session, credentials, self._where)
        # Prompts change with the mode; all begin with the host name. netmiko keeps it without the last character.
        base = re.escape(self._connection.base_prompt.strip("<>[] "))
        self._prompt = rf"[<\[]?{base}[^\n]*[#>\]$]\s*$"

    def run(self, line: str, *, check: bool = True) -> str:
        try:
            output: str = self._connection.send_command(
                typed(self._vendor, line), expect_string=self._prompt, read_timeout=SECONDS
            )
        except Exception as error:  # netmiko and paramiko raise many kinds; all mean that the line was not answered
            first = (str(error).strip().splitlines() or [""])[0]
            raise DeviceError(
                f"no answer to: {line}: {type(error).__name__}: {first}", where=self._where,
                remedy="check the connection, and the switch's state with `flowcheck switch show`",
            ) from None
        return answer(self._vendor, line, output.replace("\r", ""), check=check, where=self._where)

    def close(self) -> None:
        try:
            self._connection.read_timeout_override = 0.3  # nothing read now is of use, and some drivers wait for more
            self._connection.disconnect()
        except Exception:  # nothing of value is lost with a connection that is gone already
            pass


def _connect(session: MirrorSession, credentials: Credentials, where: str) -> Any:
    try:
        from netmiko import ConnectHandler
    except ImportError:
        raise DeviceError("SSH needs netmiko", where=where, remedy="pip install netmiko") from None
    options: dict[str, Any] = {
        "device_type": DRIVERS[session.vendor], "host": session.address, "port": session.ssh_port,
        "username": credentials.username, "ssh_strict": True, "system_host_keys": credentials.known_hosts is None,
        "conn_timeout": CONNECT_SECONDS, "read_timeout_override": SECONDS,
        # use_keys would also offer what lies in ~/.ssh, and netmiko refuses it without a key_file
        "allow_agent": credentials.password is None, "use_keys": False, "fast_cli": True,
    }
    if credentials.known_hosts is not None:
        options |= {"alt_host_keys": True, "alt_key_file": str(credentials.known_hosts)}
    if credentials.key_file is not None:
        if not credentials.key_file.is_file():
            raise PlanError("there is no such key file", where=str(credentials.key_file), remedy="check --key")
        options["key_file"] = str(credentials.key_file)
    if credentials.password is not None:
        options["password"] = credentials.password
    try:
        return ConnectHandler(**options)
    except Exception as error:
        said = str(error)
        lines = [line for line in said.splitlines() if line.strip()] or [""]
        text = " ".join(lines[: 1 + lines[0].rstrip().endswith(":")])  # some begin with an announcement
        if credentials.password:
            text = text.replace(credentials.password, "***")
        raise DeviceError(
            f"cannot log in: {type(error).__name__}: {text}", where=where,
            remedy=f"check address, user, known_hosts and {_means(credentials)} (docs/use/switch.md)",
        ) from None


def _means(credentials: Credentials) -> str:
    """What the login was tried with."""
    if credentials.password is not None:
        return "the password"
    agent = "the keys of the SSH agent (`ssh-add -l` lists them)"
    return f"{credentials.key_file} or {agent}" if credentials.key_file is not None else agent
