"""Switches that answer over SSH as six command lines do: prompts, modes, candidates, timers, refusals.

    SshSwitch(device) -> .port, .known_hosts; every line that netmiko's driver sends reaches device.execute()

They hold real state, so `show` after `apply` prints what was configured, in the vendor's format. `refuse` makes one
line fail as the vendor words it; `drop` closes the connection at a line; `broken` keeps sessions from coming up.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
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

    def prompt(self) -> str:
        raise NotImplementedError

    def handle(self, line: str) -> str:
        raise NotImplementedError

    def execute(self, line: str) -> str:
        self.lines.append(line)
        if self.drop and re.search(self.drop, line):
            self.drop = ""
            raise ConnectionAbortedError
        if self.refuse and re.search(self.refuse, line):
            return self.error
        return self.handle(line)


def short(port: str) -> str:
    return port.replace("Ethernet", "Et") if port[8:9] != "1" or "/" not in port else port.replace("Ethernet", "Eth")


class Eos(Device):
    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, list[str]] = {}
        self.candidate: dict[str, list[str]] = {}
        self.backup: dict[str, list[str]] | None = None

    def prompt(self) -> str:
        return f"{self.host}{f'({self.mode})' if self.mode else ''}#"

    def handle(self, line: str) -> str:
        if line.startswith("terminal width"):
            return "Width set to 511 columns."
        if line.startswith("terminal length"):
            return "Pagination disabled."
        if match := re.fullmatch(r"configure session (\S+) (commit|abort)", line):
            if self.backup is None:
                return "% No such session"
            if match[2] == "abort":
                self.running = self.backup
            self.backup = None
        elif match := re.fullmatch(r"configure session (\S+)", line):
            self.mode, self.candidate = f"config-s-{match[1][:6]}", copy.deepcopy(self.running)
        elif line == "configure":
            self.mode, self.candidate = "config", self.running
        elif line.startswith("commit timer"):
            self.backup, self.running, self.mode = self.running, self.candidate, ""
        elif line in ("abort", "end"):
            self.mode = ""
        elif match := re.fullmatch(r"monitor session (\S+) (.+)", line):
            self.candidate.setdefault(match[1], []).append(match[2])
        elif match := re.fullmatch(r"no monitor session (\S+)", line):
            self.candidate.pop(match[1], None)
        elif line.startswith("show running-config section"):
            return "\n".join(f"monitor session {n} {part}" for n, parts in self.running.items() for part in parts)
        elif line == "show monitor session":
            return "\n".join(self.shown(name, parts) for name, parts in self.running.items()) or "No sessions created"
        return ""

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
            self.mode = "config-if"
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
        elif match := re.fullmatch(r"mirroring-group (\d+) local", line):
            self.groups[match[1]] = {"sources": [], "to": None}
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
            f"    Mirroring port:\n{rows}\n    Monitor port: {group['to'] or ''}\n"
        )


class Junos(Device):
    error = "error: syntax error: unknown command"

    def __init__(self) -> None:
        super().__init__()
        self.committed: list[str] = []
        self.before: list[str] = []
        self.candidate: list[str] = []

    def prompt(self) -> str:
        return f"{'[edit]' + chr(10) if self.mode else ''}admin@{self.host}{'#' if self.mode else '>'} "

    def handle(self, line: str) -> str:
        fixed = {
            "set cli screen-width 511": "Screen width set to 511", "set cli screen-length 0": "Screen length set to 0",
            "set cli complete-on-space off": "Disabling complete-on-space",
        }  # fmt: skip
        if line in fixed:
            return fixed[line]
        if line == "configure exclusive":
            self.mode, self.candidate = "edit", list(self.committed)
            return "warning: uncommitted changes will be discarded on exit\nEntering configuration mode"
        if line == "exit configuration-mode":
            self.mode = ""
            return "Exiting configuration mode"
        if line.startswith("set ") and self.mode:
            self.candidate.append(line)
        elif line.startswith("delete ") and self.mode:
            self.candidate = [old for old in self.candidate if not old.startswith("set" + line[6:] + " ")]
        elif line.startswith("rollback"):
            self.candidate = list(self.committed if line.endswith("0") else self.before)
            return "load complete"
        elif line.startswith("commit"):
            if self.candidate != self.committed:
                self.before, self.committed = self.committed, self.candidate
            timed = "commit confirmed will be automatically rolled back in 5 minutes unless confirmed\n"
            return (timed if "confirmed" in line else "") + "commit complete"
        elif line == "show | compare":
            return "\n".join(f"+ {new}" for new in self.candidate if new not in self.committed)
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
            ]  # fmt: skip
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

    def handle(self, line: str) -> str:
        if match := re.fullmatch(r"sudo config mirror_session span add (\S+) (\S+) (\S+) (\S+)", line):
            self.sessions[match[1]] = {
                "type": "SPAN", "dst_port": match[2], "src_port": match[3], "direction": match[4].upper(),
            }  # fmt: skip
        elif match := re.fullmatch(r"sudo config mirror_session remove (\S+)", line):
            del self.sessions[match[1]]
        elif match := re.fullmatch(r"echo '(.*)' > \S+", line):
            self.file = json.loads(match[1])
        elif line.startswith("sudo config load"):
            self.sessions |= self.file["MIRROR_SESSION"]
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
        self.backup: dict[str, Any] | None = None

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
        elif line == "nv config apply --confirm-no":
            self.applied = self.backup if self.backup is not None else self.applied
        elif line.startswith("nv config apply") and self.pending is not None:
            self.backup, self.applied, self.pending = self.applied, self.pending, None
            return "applied [rev_id: 4]"
        elif line.startswith("nv show system port-mirror"):
            return json.dumps(self.applied, indent=2)
        elif line.startswith("nv show interface"):
            return json.dumps({"mtu": 9216, "state": {"down" if self.broken else "up": {}}})
        return ""


DEVICES: dict[str, type[Device]] = {
    "eos": Eos, "nxos": Nxos, "comware": Comware, "junos": Junos, "sonic": Sonic, "sonic-configdb": Sonic,
    "cumulus": Cumulus,
}  # fmt: skip


class _Login(paramiko.ServerInterface):
    def __init__(self, password: str) -> None:
        self.password = password

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
            transport.start_server(server=_Login(self.password))
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

    def close(self) -> None:
        self.listener.close()
        for transport in self.transports:
            transport.close()
        for thread in self.threads[1:]:
            thread.join(5)
