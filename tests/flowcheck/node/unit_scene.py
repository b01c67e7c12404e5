"""A manager of services: systemd itself as process 1 of namespaces of its own, for a unit as it lies in deploy/.

Nothing of the machine is changed: what it writes goes to file systems in memory that end with it, /proc/sys is
read-only there, and it has a control group of its own. The network is that of the thread that starts it. Units of the
machine are not there; those that every service asks for are empty.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import LONGEST

__all__ = ["UNIT", "Manager"]

ROOT = Path(__file__).resolve().parents[3]
UNIT = ROOT / "deploy" / "flowcheck-node.service"
SYSTEMD = "/lib/systemd/systemd"
USER = "flowcheck"
UID = 64321

# Arguments: folder, root of the sources, prefix of this Python. Places of the unit: /opt, /etc, /var/lib, /dev/shm.
SETUP = f"""
set -e
folder=$1 sources=$2 prefix=$3
mount --make-rprivate /
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount --bind /dev/null /dev/console
mount -t tmpfs tmpfs /run
mkdir /run/over /run/work
mount -t overlay -o lowerdir=/etc,upperdir=/run/over,workdir=/run/work overlay /etc
while umount -R /sys/fs/cgroup 2>/dev/null; do :; done
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs /opt
mkdir -p /opt/flowcheck/.venv/bin /opt/sources /opt/python
mount --bind "$sources" /opt/sources
mount --bind "$prefix" /opt/python
mount -t tmpfs tmpfs /var/lib
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
echo {USER}:x:{UID}:{UID}::/nonexistent:/usr/sbin/nologin >> /etc/passwd
echo {USER}:x:{UID}: >> /etc/group
cp -r "$folder/etc" /etc/flowcheck
chown -R {USER}: /etc/flowcheck
cat > /opt/flowcheck/.venv/bin/flowcheck-node <<'END'
#!/bin/sh
PYTHONPATH=/opt/sources exec /opt/python/bin/python -P -m flowcheck.node "$@"
END
chmod 755 /opt/flowcheck/.venv/bin/flowcheck-node
export container=lxc SYSTEMD_UNIT_PATH="$folder/units"
exec {SYSTEMD} --system --unit=basic.target --log-target=null --show-status=0
"""
EMPTY = "[Unit]\nDefaultDependencies=no\n"
LINES = "/run/lines"


class Manager:
    """settings: node.toml. files: others of /etc/flowcheck, by name."""

    def __init__(self, folder: Path, settings: str, files: dict[str, bytes]) -> None:
        self._read = 0
        (folder / "etc").mkdir()
        for name, content in {"node.toml": settings.encode(), **files}.items():
            (folder / "etc" / name).write_bytes(content)
            (folder / "etc" / name).chmod(0o600)
        units = folder / "units"
        (units / f"{UNIT.name}.d").mkdir(parents=True)
        for name in ("basic.target", "sysinit.target", "shutdown.target"):
            (units / name).write_text(EMPTY)
        shutil.copy(UNIT, units)
        # There is no journal here. Where this process may not raise limits systemd cannot either, and LimitMEMLOCK is
        # of no use: then the right of which docs/understand/security.md says that it does as well.
        more = f"[Service]\nStandardOutput=append:{LINES}\nStandardError=append:{LINES}.errors\n"
        if not _may_raise_limits():
            more += "AmbientCapabilities=CAP_IPC_LOCK\nCapabilityBoundingSet=CAP_IPC_LOCK\n"
        (units / f"{UNIT.name}.d" / "here.conf").write_text(more)
        self._control = _control_groups() / f"flowcheck-test-{os.getpid()}"
        self._control.mkdir()
        words = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child",
                 "sh", "-c", SETUP, "sh", str(folder), str(ROOT), sys.prefix]
        self._log = (folder / "manager.log").open("w+")
        # A shell that is moved first: all that follows is in the control group.
        self._process = subprocess.Popen(
            ["sh", "-c", 'echo $$ > "$0"/cgroup.procs; exec "$@"', str(self._control), *words],
            stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self._first = 0
        try:
            self.until(self._runs)
        except BaseException:
            self.close()
            raise

    def _runs(self) -> bool:
        if self._process.poll() is not None:
            self._log.seek(0)
            pytest.skip(f"no systemd in namespaces here: {self._log.read()[-300:]}")
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children or Path(f"/proc/{children[0]}/comm").read_text().strip() != "systemd":
            return False
        self._first = int(children[0])
        return self.ask("is-system-running").stdout.strip() == "running"

    def until(self, holds: Any) -> None:
        deadline = time.monotonic() + LONGEST
        while not holds():
            assert time.monotonic() < deadline, (self.shown(), self.errors())
            time.sleep(0.05)

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """systemctl, there."""
        return subprocess.run(["nsenter", "-t", str(self._first), "-m", "-p", "-C", "systemctl", *words],
                              capture_output=True, text=True, timeout=LONGEST)

    def shown(self) -> dict[str, str]:
        done = self.ask("show", UNIT.name, "-p",
                        "ActiveState,SubState,Result,ExecMainStatus,ExecMainCode,NRestarts,MainPID")
        return dict(line.split("=", 1) for line in done.stdout.splitlines())

    def main(self) -> int:
        """The node's process, by its number outside."""
        [inside] = [self.shown()["MainPID"]]
        for one in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if one.name.isdigit() and f"NSpid:\t{one.name}\t{inside}\n" in (one / "status").read_text():
                    return int(one.name)
        raise AssertionError(f"no process {inside} in {self._first}'s namespace")

    def path(self, name: str) -> Path:
        """Of a file that the service sees under this name."""
        return Path(f"/proc/{self._first}/root{name}")

    def errors(self) -> str:
        with contextlib.suppress(OSError):
            return self.path(f"{LINES}.errors").read_text()[-3000:]
        return "no errors"

    def wait(self, event: str, **fields: Any) -> dict[str, Any]:
        """The next line of the node with these fields."""
        found, self._read = self._find(self._read, event, fields)
        return found

    def seen(self, event: str, **fields: Any) -> dict[str, Any]:
        """A line with these fields that has come already, or comes: as NodeProcess has it."""
        return self._find(0, event, fields)[0]

    def _find(self, at: int, event: str, fields: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The first such line from the at-th on, and the number of the one after it."""
        found: list[dict[str, Any]] = []

        def said() -> bool:
            nonlocal at
            with contextlib.suppress(FileNotFoundError):
                lines = self.path(LINES).read_text().split("\n")[:-1]
                while not found and at < len(lines):
                    line = json.loads(lines[at])
                    at += 1
                    if line["event"] == event and all(line.get(key) == value for key, value in fields.items()):
                        found.append(line)
            return bool(found)

        self.until(said)
        return found[0], at

    def close(self) -> None:
        """Ends all of it, whatever it does."""
        if self._first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait(LONGEST)
        self._log.close()
        self.until(lambda: not (self._control / "cgroup.procs").read_text())
        for folder, _, _ in os.walk(self._control, topdown=False):
            Path(folder).rmdir()


def _may_raise_limits() -> bool:
    """CAP_SYS_RESOURCE."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return bool(int(lines["CapEff"], 16) >> 24 & 1)


def _control_groups() -> Path:
    if os.geteuid() != 0:
        pytest.skip("needs root for namespaces")
    for program in (SYSTEMD, shutil.which("unshare"), shutil.which("nsenter"), shutil.which("systemctl")):
        if program is None or not Path(program).exists():
            pytest.skip("no systemd, unshare or nsenter is installed")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup2" and "rw" in options.split(","):
            return Path(place)
    pytest.skip("no control groups (version 2) that can be written to are mounted")
