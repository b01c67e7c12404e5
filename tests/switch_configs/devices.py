"""Switches that answer over SSH as six command lines do: prompts, modes, candidates, timers, refusals.

    SshSwitch(device) -> .port, .known_hosts; every line that netmiko's driver sends reaches device.execute()

They hold real state, so `show` after `apply` prints what was configured, in the vendor's format, and ports keep the
settings of their own. `refuse` makes one line fail as the vendor words it; `drop` closes the connection at a line;
`broken` keeps sessions from coming up; `now` is the device's clock in seconds, by which commit timers run out.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shlex
import socket
import threading
from pathlib import Path
from typing import Any

import paramiko


class Device:
    host = "leaf1"
    error = "% Invalid input"

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.refuse = self.drop = ""
        self.broken = False
        self.mode = ""
        self.now = 0.0
        self.deadline: float | None = None  # of a commit that waits for its confirmation

    def wait(self, minutes: str) -> None:
        self.deadline = self.now + 60 * float(minutes)

    def expire(self) -> None:
        """The timer ran out: the configuration before the commit is back."""

    def prompt(self) -> str:
        raise NotImplementedError

    def handle(self, line: str) -> str:
        raise NotImplementedError

    def execute(self, line: str) -> str:
        self.lines.append(line)
        if self.deadline is not None and self.now >= self.deadline:
            self.deadline = None
            self.expire()
        if self.drop and re.search(self.drop, line):
            self.drop = ""
            raise ConnectionAbortedError
        if self.refuse and re.search(self.refuse, line):
            return self.error
        return self.handle(line)


def short(port: str) -> str:
    return port.replace("Ethernet", "Et") if port[8:9] != "1" or "/" not in port else port.replace("Ethernet", "Eth")


class Eos(Device):
    """State: session lines and port lines in one dictionary by heading, so that a candidate is a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, list[str]] = {}
        self.candidate: dict[str, list[str]] = {}
        self.before: dict[str, list[str]] = {}
        self.open = self.at = ""
        self.finished: set[str] = set()

    def prompt(self) -> str:
        return f"{self.host}{f'({self.mode})' if self.mode else ''}#"

    def expire(self) -> None:
        self.running = self.before

    def handle(self, line: str) -> str:
        if line.startswith("terminal width"):
            return "Width set to 511 columns."
        if line.startswith("terminal length"):
            return "Pagination disabled."
        if match := re.fullmatch(r"configure session (\S+) (commit|abort)", line):
            if self.deadline is None or match[1] != self.open:
                return "% No such session" if match[1] != self.open else ""
            if match[2] == "abort":
                self.running = self.before
            self.deadline = None
        elif match := re.fullmatch(r"configure session (\S+)", line):
            if match[1] in self.finished:
                return f"% Cannot enter session {match[1]} (already completed)"
            self.open = match[1]
            self.mode, self.candidate = f"config-s-{match[1][:6]}", copy.deepcopy(self.running)
        elif line == "configure":
            self.mode, self.candidate = "config", self.running
        elif match := re.fullmatch(r"commit timer 00:(\d\d):00", line):
            self.before, self.running, self.mode = self.running, self.candidate, ""
            self.finished.add(self.open)
            self.wait(match[1])
        elif line in ("abort", "end"):
            self.mode = ""
        elif match := re.fullmatch(r"monitor session (\S+) (.+)", line):
            self.candidate.setdefault(match[1], []).append(match[2])
        elif match := re.fullmatch(r"no monitor session (\S+)", line):
            self.candidate.pop(match[1], None)
        elif match := re.fullmatch(r"interface (\S+)", line):
            self.at = f"interface {match[1]}"
        elif re.fullmatch(r"(?:no )?(?:mtu(?: \d+)?|lldp (?:transmit|receive))", line) and self.mode:
            self.port(line)
        elif line.startswith("show running-config section"):
            return "\n".join(
                f"monitor session {n} {part}" for n, parts in self.sessions() for part in parts
            )
        elif match := re.fullmatch(r"show running-config interfaces (\S+)", line):
            found = self.running.get(f"interface {match[1]}", [])
            return "\n".join([f"interface {match[1]}", *(f"   {part}" for part in found)])
        elif line == "show configuration sessions detail":
            waits = f"Session with pending commit timer: {self.open}\n" if self.deadline is not None else ""
            return f"Maximum number of completed sessions: 1\n{waits}"
        elif line == "show monitor session":
            return "\n".join(self.shown(name, parts) for name, parts in self.sessions()) or "No sessions created"
        return ""

    def sessions(self) -> list[tuple[str, list[str]]]:
        return [(name, parts) for name, parts in self.running.items() if not name.startswith("interface ")]

    def port(self, line: str) -> None:
        """Defaults are not in a running configuration: `no mtu` and `lldp transmit` take a line away."""
        lines = self.candidate.setdefault(self.at, [])
        word = line.split()[1 if line.startswith("no mtu") else 0]
        plain = line.removeprefix("no ")
        lines[:] = [old for old in lines if old.removeprefix("no ") != plain and not (word == "mtu" and "mtu" in old)]
        if line != "no mtu" and not line.startswith("lldp"):
            lines.append(line)

    def shown(self, name: str, parts: list[str]) -> str:
        groups: dict[str, list[str]] = {"Rx": [], "Tx": [], "Both": []}
        target = ""
        for part in parts:
            words = part.split()
            if words[0] == "source":
                groups[words[2].capitalize() if len(words) > 2 else "Both"].append(short(words[1]))
            elif words[0] == "destination":
                target = f"    {short(words[1])} :  {'inactive' if self.broken else 'active'}"
        sources = "\n".join(f"  {way}:        {', '.join(ports)}" for way, ports in groups.items() if ports)
        head = f"Session {name}\n------------------------\n\nSource Ports:\n\n"
        return f"{head}{sources}\n\nDestination Ports:\n\n{target}\n"


class Nxos(Device):
    error = "                 ^\n% Invalid command at '^' marker."

    def __init__(self) -> None:
        super().__init__()
        self.sessions: dict[str, list[str]] = {}
        self.at = ""
        self.ports: dict[str, dict[str, str]] = {}

    def port(self, name: str) -> dict[str, str]:
        return self.ports.setdefault(
            name, {"switchport": "no switchport", "switchport monitor": "no switchport monitor", "mtu": "mtu 1500",
                   "shutdown": "shutdown"},
        )

    def prompt(self) -> str:
        return f"{self.host}{f'({self.mode})' if self.mode else ''}# "

    def handle(self, line: str) -> str:
        if line.startswith("terminal width"):
            return ""
        if line == "configure terminal":
            self.mode = "config"
            return "Enter configuration commands, one per line. End with CNTL/Z."
        if line == "end":
            self.mode = ""
        elif line == "exit" and self.mode:
            self.mode = "config"
        elif line.startswith("interface"):
            self.mode, self.at = "config-if", line.split()[1]
        elif self.mode == "config-if":
            if line == "no mtu":
                line = "mtu 1500"
            key = "mtu" if line.startswith("mtu") else line.removeprefix("no ")
            self.port(self.at)[key] = line
        elif match := re.fullmatch(r"show running-config interface (\S+) all", line):
            return "\n".join([f"interface {match[1]}", *(f"  {text}" for text in self.port(match[1]).values())])
        elif match := re.fullmatch(r"monitor session (\d+) type local", line):
            self.mode, self.at = "config-monitor", match[1]
            self.sessions.setdefault(match[1], [])
        elif match := re.fullmatch(r"no monitor session (\d+)", line):
            self.sessions.pop(match[1], None)
        elif self.mode == "config-monitor":
            self.sessions[self.at].append(line)
        elif line == "show running-config monitor":
            out = ["!Command: show running-config monitor", "version 9.3(9)"]
            for number, lines in self.sessions.items():
                out += [f"monitor session {number}", *(f"  {text}" for text in lines)]
            return "\n".join(out)
        elif line == "show monitor session all":
            return "\n".join(self.shown(number, lines) for number, lines in self.sessions.items())
        return ""

    def shown(self, number: str, lines: list[str]) -> str:
        state = "up" if "no shut" in lines and not self.broken else "down (Session admin shut)"
        if self.broken:
            state = "down (No operational src/dst)"
        ways: dict[str, list[str]] = {"rx": [], "tx": [], "both": []}
        target = ""
        for line in lines:
            words = line.split()
            if words[0] == "source":
                for way in ("rx", "tx") if words[3] == "both" else (words[3],):
                    ways[way].append(short(words[2]))
            elif words[0] == "destination":
                target = short(words[2])
        rows = "\n".join(f"    {way:<14}: {'  '.join(ports)}" for way, ports in ways.items())
        return (
            f"   session {number}\n---------------\ntype              : local\nstate             : {state}\n"
            f"acl-name          : acl-name not specified\nsource intf       : \n{rows}\nsource VLANs      : \n"
            f"    rx            : \ndestination ports : {target}\n"
        )


class Comware(Device):
    error = "            ^\n % Wrong parameter found at '^' position."

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, dict[str, Any]] = {}
        self.ports_of: dict[str, list[str]] = {}

    def prompt(self) -> str:
        return f"[{self.host}{self.mode[1:]}]" if self.mode else f"<{self.host}>"

    def handle(self, line: str) -> str:
        if line == "system-view":
            self.mode = "s"
            return "System View: return to User View with Ctrl+Z."
        if line == "return":
            self.mode = ""
        elif line == "quit":
            self.mode = "s" if len(self.mode) > 1 else ""
        elif line.startswith("interface"):
            self.mode = "s-" + line.split()[1]
        elif self.mode.startswith("s-") and re.fullmatch(r"(?:undo )?(?:stp|lldp|jumboframe) enable(?: \d+)?", line):
            lines = self.ports_of.setdefault(self.mode[2:], [])
            word = line.removeprefix("undo ").split()[0]
            lines[:] = [old for old in lines if word not in old]
            if line not in ("stp enable", "lldp enable", "jumboframe enable"):  # defaults are not printed
                lines.append(line)
        elif match := re.fullmatch(r"display current-configuration interface (\S+)", line):
            return "\n".join(["#", f"interface {match[1]}", *(f" {t}" for t in self.ports_of.get(match[1], [])), "#"])
        elif match := re.fullmatch(r"mirroring-group (\d+) local(?: sampler (\S+))?", line):
            self.groups[match[1]] = {"sources": [], "to": None, "sampler": match[2]}
        elif match := re.fullmatch(r"mirroring-group (\d+) mirroring-port (.+) (inbound|outbound|both)", line):
            self.groups[match[1]]["sources"] += [(port, match[3].capitalize()) for port in self.ports(match[2])]
        elif match := re.fullmatch(r"mirroring-group (\d+) monitor-port (\S+)", line):
            self.groups[match[1]]["to"] = match[2]
        elif match := re.fullmatch(r"undo mirroring-group (\d+)", line):
            if self.groups.pop(match[1], None) is None:
                return "The mirroring group doesn't exist."
        elif line == "display mirroring-group all":
            return "\n".join(self.shown(number, group) for number, group in self.groups.items())
        return ""

    def ports(self, text: str) -> list[str]:
        out: list[str] = []
        words = text.split()
        for at, word in enumerate(words):
            if word == "to":
                stem, first = re.fullmatch(r"(.*/)(\d+)", words[at - 1]).groups()  # type: ignore[union-attr]
                last = int(words[at + 1].rpartition("/")[2])
                out += [f"{stem}{n}" for n in range(int(first) + 1, last)]
            else:
                out.append(word)
        return out

    def shown(self, number: str, group: dict[str, Any]) -> str:
        whole = group["to"] and group["sources"] and not self.broken
        rows = "\n".join(f"        {port}  {way}" for port, way in group["sources"])
        return (
            f"Mirroring group {number}:\n    Type: Local\n    Status: {'Active' if whole else 'Incomplete'}\n"
            + (f"    Sampler: {group['sampler']}\n" if group["sampler"] else "") +
            f"    Mirroring port:\n{rows}\n    Monitor port: {group['to'] or ''}\n"
        )


class Junos(Device):
    error = "error: syntax error: unknown command"

    def __init__(self) -> None:
        super().__init__()
        self.committed: list[str] = []
        self.before: list[str] = []
        self.candidate: list[str] = []
        self.comment = ""

    def expire(self) -> None:
        self.before, self.committed = self.committed, self.before  # itself a commit: `rollback 1` would undo it

    def prompt(self) -> str:
        return f"{'[edit]' + chr(10) if self.mode else ''}admin@{self.host}{'#' if self.mode else '>'} "

    def handle(self, line: str) -> str:
        fixed = {
            "set cli screen-width 511": "Screen width set to 511", "set cli screen-length 0": "Screen length set to 0",
            "set cli complete-on-space off": "Disabling complete-on-space",
        }
        if line in fixed:
            return fixed[line]
        if line == "configure exclusive":
            self.mode, self.candidate = "edit", list(self.committed)
            return "warning: uncommitted changes will be discarded on exit\nEntering configuration mode"
        if line == "exit configuration-mode":
            self.mode = ""
            return "Exiting configuration mode"
        if line.startswith("set ") and self.mode:
            if " mtu " in line:  # a leaf has one value
                head = line.rpartition(" ")[0]
                self.candidate = [old for old in self.candidate if not old.startswith(f"{head} ")]
            self.candidate += [line] if line not in self.candidate else []
        elif line.startswith("delete ") and self.mode:
            self.candidate = [old for old in self.candidate if not old.startswith("set" + line[6:] + " ")]
        elif line.startswith("rollback"):
            self.candidate = list(self.committed if line.endswith("0") else self.before)
            return "load complete"
        elif line.startswith("commit"):
            if self.candidate != self.committed:
                self.before, self.committed = self.committed, self.candidate
            self.deadline = None
            timed = re.fullmatch(r"commit confirmed (\d+) comment \"([^\"]*)\"", line)
            if timed is None:
                return "commit complete"
            self.wait(timed[1])
            self.comment = timed[2]
            return f"commit confirmed will be automatically rolled back in {timed[1]} minutes\ncommit complete"
        elif line == "show | compare":
            return "\n".join(f"+ {new}" for new in self.candidate if new not in self.committed)
        elif match := re.fullmatch(r"show configuration interfaces (\S+) \| display set", line):
            return "\n".join(old for old in self.committed if old.startswith(f"set interfaces {match[1]} "))
        elif line == "show system commit":
            waits = f" commit confirmed, rollback in 5mins\n    {self.comment}\n    rollback pending"
            newest = f"0   2026-05-06 06:38:48 UTC by admin via cli{waits if self.deadline is not None else ''}"
            return f"{newest}\n1   2026-05-05 06:38:48 UTC by ops via cli"
        elif line == "show configuration forwarding-options | display set":
            return "\n".join(old for old in self.committed if " forwarding-options " in old)
        elif line == "show forwarding-options analyzer":
            return self.analyzers()
        return ""

    def analyzers(self) -> str:
        out = []
        names = re.findall(r"(?m)analyzer (\S+) output", "\n".join(self.committed))
        for name in names:
            text = "\n".join(self.committed)
            rows = [
                ("Analyzer name", name), ("Mirror rate", "1"), ("Maximum packet length", "0"),
                ("State", "down" if self.broken else "up"),
            ]
            for way, label in (("ingress", "Ingress monitored interfaces"), ("egress", "Egress monitored interfaces")):
                rows += [(label, port) for port in re.findall(rf"analyzer {name} input {way} interface (\S+)", text)]
            outputs = re.findall(rf"analyzer {name} output interface (\S+)", text)
            rows += [("Output interface", port) for port in outputs]
            out += [f"  {label:<33}: {value}" for label, value in rows]
        return "\n".join(out)


class Shell(Device):
    """A Linux shell: `line; echo rc=$?`."""

    name = "switch"

    def prompt(self) -> str:
        return f"admin@{self.name}:~$ "

    def execute(self, line: str) -> str:
        body, echo, _ = line.partition("; echo rc=$?")
        try:
            output, status = super().execute(body), 0
            if self.refuse and re.search(self.refuse, body):
                status = 2
        except KeyError:
            output, status = "Error: no such session", 2
        return f"{output}\nrc={status}" if echo else output


class Sonic(Shell):
    error = "Error: Session name already exists"
    HEAD = ("Name", "Status", "DST Port", "SRC Port", "Direction", "Queue", "Policer")

    def __init__(self) -> None:
        super().__init__()
        self.sessions: dict[str, dict[str, str]] = {}
        self.file: Any = None

    def handle(self, line: str) -> str:
        if match := re.fullmatch(r"sudo config mirror_session span add (\S+) (\S+) (\S+) (\S+)", line):
            self.sessions[match[1]] = {
                "type": "SPAN", "dst_port": match[2], "src_port": match[3], "direction": match[4].upper(),
            }
        elif match := re.fullmatch(r"sudo config mirror_session remove (\S+)", line):
            del self.sessions[match[1]]
        elif line.startswith("echo "):
            self.file = json.loads(shlex.split(line)[1])
        elif line.startswith("sudo config load"):
            self.sessions |= self.file["MIRROR_SESSION"]
        elif line.startswith("rm -f"):
            self.file = None
        elif match := re.fullmatch(r"sonic-db-cli (\w+) HGETALL '\w+\|(\S+)'", line):
            entry = self.sessions.get(match[2], {})
            state = {"status": "error" if self.broken else "active"} if entry else {}
            return str(entry if match[1] == "CONFIG_DB" else state)
        elif line == "show mirror_session":
            return self.table()
        return ""

    def table(self) -> str:
        rows = [
            (name, "error" if self.broken else "active", e["dst_port"], e["src_port"], e["direction"].lower(), "", "")
            for name, e in self.sessions.items()
        ]
        widths = [max(len(row[i]) for row in [self.HEAD, *rows]) for i in range(len(self.HEAD))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in [self.HEAD, *rows]]
        dashes = "  ".join("-" * w for w in widths)
        erspan = "Name    Status    SRC IP    Monitor Port\n------  --------  --------  --------------"
        return "\n".join(["ERSPAN Sessions", erspan, "", "SPAN Sessions", lines[0], dashes, *lines[1:]])


class Cumulus(Shell):
    name = "leaf1:mgmt"
    error = "Error: invalid command"

    def __init__(self) -> None:
        super().__init__()
        self.applied: dict[str, Any] = {}
        self.pending: dict[str, Any] | None = None
        self.backup: dict[str, Any] = {}

    def expire(self) -> None:
        self.applied = self.backup

    def handle(self, line: str) -> str:
        edit = r"nv (set|unset) system port-mirror session (\d+)(?: span (\S+) (\S+))?"
        if match := re.fullmatch(edit, line):
            self.pending = copy.deepcopy(self.applied) if self.pending is None else self.pending
            if match[1] == "unset":
                self.pending.pop(match[2], None)
            else:
                span = self.pending.setdefault(match[2], {"span": {}})["span"]
                span[match[3]] = match[4] if match[3] == "direction" else {p: {} for p in match[4].split(",")}
        elif line == "nv config diff":
            changed = self.pending is not None and self.pending != self.applied
            return "- set:\n    system:\n      port-mirror:\n        session: ..." if changed else ""
        elif line == "nv config detach":
            self.pending = None
        elif match := re.fullmatch(r"nv set interface (\S+) link mtu (\d+)", line):
            self.pending = copy.deepcopy(self.applied) if self.pending is None else self.pending
            self.pending[f"mtu {match[1]}"] = int(match[2])
        elif line in ("nv config apply --confirm-no", "nv config apply --confirm-yes"):
            if self.deadline is None:
                raise KeyError("nothing waits")
            self.applied = self.backup if line.endswith("no") else self.applied
            self.deadline = None
        elif line == "nv config apply --confirm-status || true":
            if self.deadline is not None:
                return f"{int(self.deadline - self.now)} seconds"
        elif line.startswith("nv config apply") and self.pending is not None:
            self.backup, self.applied, self.pending = self.applied, self.pending, None
            if match := re.search(r"--confirm (\d+)", line):
                self.wait(match[1])
            return "applied [rev_id: 4]"
        elif line.startswith("nv show system port-mirror"):
            return json.dumps({k: v for k, v in self.applied.items() if not k.startswith("mtu ")}, indent=2)
        elif line.startswith("nv show interface"):
            mtu = self.applied.get(f"mtu {line.split()[3]}", 1500)
            return json.dumps({"mtu": mtu, "state": {"down" if self.broken else "up": {}}})
        return ""


DEVICES: dict[str, type[Device]] = {
    "eos": Eos, "nxos": Nxos, "comware": Comware, "junos": Junos, "sonic": Sonic, "sonic-configdb": Sonic,
    "cumulus": Cumulus,
}


class _Login(paramiko.ServerInterface):
    def __init__(self, password: str, keys: list[paramiko.PKey]) -> None:
        self.password, self.keys = password, keys

    def get_allowed_auths(self, username: str) -> str:
        return "publickey,password" if self.keys else "password"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_SUCCESSFUL if username == "admin" and key in self.keys else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_auth_password(self, username: str, password: str) -> int:
        good = (username, password) == ("admin", self.password)
        return paramiko.AUTH_SUCCESSFUL if good else paramiko.AUTH_FAILED

    def check_channel_pty_request(self, *_: Any) -> bool:
        return True

    def check_channel_shell_request(self, channel: Any) -> bool:
        return True


class SshSwitch:
    """An SSH server on 127.0.0.1 with one device behind it; every connection sees the same state."""

    def __init__(self, device: Device, folder: Path, password: str = "s3cret-Pa55") -> None:
        self.device, self.password = device, password
        self.authorized: list[paramiko.PKey] = []  # keys of users, besides the password
        self.key = paramiko.ECDSAKey.generate()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {self.key.get_name()} {self.key.get_base64()}\n")
        self.transports: list[paramiko.Transport] = []
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.threads.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
            self.threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        transport = paramiko.Transport(client)
        self.transports.append(transport)
        transport.add_server_key(self.key)
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            transport.start_server(server=_Login(self.password, self.authorized))
            channel = None
            while channel is None and transport.is_active():
                channel = transport.accept(0.1)
            if channel is not None:
                self._talk(channel)
        transport.close()

    def _talk(self, channel: Any) -> None:
        self.device.mode = ""
        channel.sendall(self.device.prompt().encode())
        buffer = ""
        while data := channel.recv(4096):
            buffer += data.decode()
            while match := re.search(r"\r\n|\r|\n", buffer):
                line, buffer = buffer[: match.start()].strip(), buffer[match.end() :]
                if line in ("exit", "logout", "quit") and not self.device.mode:
                    return
                try:
                    output = self.device.execute(line) if line else ""
                except ConnectionAbortedError:
                    return
                text = f"{line}\n{output}\n{self.device.prompt()}" if output else f"{line}\n{self.device.prompt()}"
                channel.sendall(text.replace("\n", "\r\n").encode())

    def stop_listening(self) -> None:
        if self.threads[0].is_alive():
            self.listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake who waits in accept
            self.threads[0].join()
            self.listener.close()

    def close(self) -> None:
        """Returns when all threads have ended, those of paramiko too."""
        self.stop_listening()
        for transport in self.transports:
            transport.close()
        for thread in [*self.threads[1:], *self.transports]:
            thread.join()
