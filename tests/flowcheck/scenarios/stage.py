"""A lab that plays scenarios one after the other: one network, one node, two ranks that are forked for each.

    with Stage(fabric, out) as stage:
        played = stage.play(SCENARIOS["adamw"])
        played.verdict

Each scenario has a run id of its own, so the node follows one job after the other, as in a cluster. One thread.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.request import Request, urlopen

import flowcheck
from flowcheck.ask.client import reader_key
from lab.children import Children, Cores
from lab.network import netns
from lab.network.fabric import Fabric

from .judge import Boundary, Offer, Verdict, Version, judge
from .run import sha256
from .table import SCENARIOS, Scenario

__all__ = ["Played", "Stage"]

ROOT = Path(__file__).resolve().parents[3]
RANKS = 2
CONTROL, API = "10.78.0.2:7070", "10.78.0.2:7071"
SOFTROCE = {"protocol": "LL128", "peer_timeout_s": 10}
START_SECONDS, PLAY_SECONDS, END_SECONDS = 120.0, 110.0, 10.0


@dataclass(repr=False)
class Played:
    """
    verdict: what came of it.
    events: what the node said.
    offers: what it offers afterwards, the one that `recover` gives first.
    seconds: that it took.
    """

    scenario: Scenario
    verdict: Verdict
    events: list[dict[str, Any]] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    seconds: float = 0.0
    broken: str = ""  # the script itself failed

    @property
    def good(self) -> bool:
        return not self.broken and self.verdict.good(self.scenario.expected)

    def __repr__(self) -> str:
        return f"{self.scenario.name}: {self.broken or self.verdict}"


class Stage:
    def __init__(self, fabric: Fabric, out: Path) -> None:
        self._fabric, self._out = fabric, out
        self._children = Children()
        self._token = secrets.token_hex(16)
        self._hashes, self._events = out / "hashes.jsonl", list[dict[str, Any]]()
        self._read = 0  # bytes of the hashes
        self._plays = 0

    def __enter__(self) -> Self:
        self._out.mkdir(parents=True, exist_ok=True)
        token = self._out / "token"
        token.touch(mode=0o600)
        token.write_text(self._token + "\n")
        (self._out / "node.toml").write_text(f"""
name = "{self._fabric.config.name}"
[control]
listen = "{CONTROL}"
token_file = "{token}"
insecure = true
[capture]
device = "af_packet:mir0"
path_mtu = 4096
huge = false
[replica]
directory = "{self._fabric.shared}"
keep = false
[output]
directory = "{self._out / 'steps'}"
every = 1
keep_hashes = "{self._hashes}"
[api]
listen = "{API}"
insecure = true
""")
        cores = Cores()
        self._start("node", "node", ["flowcheck.node", "--config", str(self._out / "node.toml"), "--json"], cores.rest)
        for rank in range(RANKS):
            self._start(f"rank {rank}", f"r{rank}",
                        ["tests.flowcheck.scenarios.rank", str(rank), str(RANKS), str(self._out)], cores.trainers,
                        {"interface": "fab0", "address": f"10.77.0.{10 + rank}", **SOFTROCE})
        waited = {"node", "rank 0", "rank 1"}

        def ready(name: str, event: dict[str, Any]) -> None:
            if event["event"] in ("listening", "ready"):
                waited.discard(name)

        self._hear(lambda: not waited, START_SECONDS, ready)
        self._fabric.start_mirror()
        self.play(SCENARIOS["adamw"])  # a node's first job takes it a second or two
        return self

    def __exit__(self, *_: object) -> None:
        self._children.kill(["node", "rank 0", "rank 1"], END_SECONDS)
        self._fabric.stop_mirror()

    def _start(
        self, name: str, role: str, module: Sequence[str], core: int | None, softroce: dict[str, Any] | None = None
    ) -> None:
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "ctl0"}
        if softroce is not None:
            env["FLOWCHECK_SOFTROCE"] = json.dumps(softroce)
        log = self._out / f"{name.replace(' ', '')}.log"
        with log.open("ab") as stderr:
            process = self._fabric.spawn(role, [sys.executable, "-P", "-m", *module], core=core, env=env,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
        self._children.add(name, process, log)

    def _hear(
        self, until: Callable[[], bool], seconds: float,
        heard: Callable[[str, dict[str, Any]], None] = lambda name, event: None,
    ) -> bool:
        """What processes say, until then. False: it has not come to that in `seconds`."""
        end = time.monotonic() + seconds
        for name, event in self._children.events(lambda: until() or time.monotonic() > end, seconds + 1):
            if name == "node":
                self._events.append(event)
            heard(name, event)
        return until()

    def play(self, scenario: Scenario, **attach: Any) -> Played:
        """attach: more arguments of flowcheck.attach. Raises EnvironmentProblem where the lab itself fails."""
        began, self._plays = time.monotonic(), self._plays + 1
        run_id, first = f"{scenario.name}-{self._plays}", len(self._events)
        folder = self._out / run_id
        folder.mkdir()
        settings = {"node": CONTROL, "token": self._token, "checksum_every": scenario.sums, "run_id": run_id, **attach}
        broken, versions = "", list[Version]()
        for start in range(scenario.starts):
            statuses = self._once(scenario, start, run_id, settings)
            versions += self._versions(start, run_id, first)
            if any(statuses):
                broken = f"ranks ended with {statuses}: {self._log()}"
                break
        events = self._events[first:]
        said, why = dict[int, str](), ""
        for event in events:
            if event["event"] == "lost":
                why = event["why"]
            elif event["event"] == "iteration" and event["status"] in ("diverged", "lost"):
                said[event["iteration"]] = f"the node: {event['status']}: {why}"
        at = scenario.at
        offers = self._offers(run_id)
        verdict = judge(at, self._boundaries(run_id), versions, said, offers)
        return Played(scenario, verdict, events, offers, time.monotonic() - began, broken)

    def _once(self, scenario: Scenario, start: int, run_id: str, settings: dict[str, Any]) -> list[int]:
        """One start of a script, until the node has let its job go. Exit statuses of the ranks."""
        first, statuses = len(self._events), list[int]()
        order = {"script": scenario.name, "start": start, "run_id": run_id, "settings": settings,
                 "iterations": scenario.iterations, "at": scenario.at if scenario.at is not None else 0}
        for rank in range(RANKS):
            self._children.tell(f"rank {rank}", order)

        def heard(name: str, event: dict[str, Any]) -> None:
            if event["event"] == "over":
                statuses.append(event["status"])

        self._hear(lambda: len(statuses) == RANKS, PLAY_SECONDS, heard)

        def ended() -> bool:
            return any(event["event"] == "end" and event["run_id"] == run_id for event in self._events[first:])

        if self._followed(run_id, start):
            self._hear(ended, END_SECONDS)
        return statuses

    def _boundaries(self, run_id: str) -> list[Boundary]:
        files = sorted((self._out / run_id).glob("rank*.jsonl"))
        return [Boundary(**json.loads(line)) for path in files for line in path.read_text().splitlines()]

    def _followed(self, run_id: str, start: int) -> bool:
        """Has the node a job that it will say the end of?"""
        states = [one.state for one in self._boundaries(run_id) if one.start == start]
        return "attached" in states and states[-1] != "refused"

    def _versions(self, start: int, run_id: str, first: int) -> list[Version]:
        """What was published since the last call."""
        with self._hashes.open("a+") as file:
            file.seek(self._read)
            lines = [json.loads(line) for line in file.readlines()]
            self._read = file.tell()
        said: dict[int, set[str]] = {}
        for event in self._events[first:]:
            if event["event"] == "iteration":
                said.setdefault(event["iteration"], set()).add(event["status"])
        for one in self._boundaries(run_id):
            if one.start == start:
                said.setdefault(one.published[0], set()).add(one.published[1])
        for path in (self._out / "steps").glob(f"{run_id}/**/step-*/manifest.json"):
            manifest = json.loads(path.read_text())
            said.setdefault(manifest["step"] - 1, set()).add(manifest["status"])
        return [Version(start, line["iteration"], line["tensors"], line["optimizer"],
                        frozenset(said.get(line["iteration"], ()))) for line in lines]

    def _offers(self, run_id: str) -> list[Offer]:
        key = reader_key(self._token.encode())

        def ask() -> Any:
            with urlopen(Request(f"http://{API}/v1/versions", headers={"Authorization": f"Bearer {key}"})) as answer:
                return json.load(answer), flowcheck.recover(API, token=self._token, run_id=run_id, together=False)

        said, recovered = netns.inside(self._fabric.config.namespace("r0"), ask)
        offers = [Offer(one["step"] - 1, one["status"]) for one in said["versions"] if one["run_id"] == run_id]
        if recovered:
            tensors = {name: sha256(tensor) for name, tensor in recovered.model.items()}
            offers.insert(0, Offer(recovered.step - 1, recovered.status, True, tensors))
        return offers

    def _log(self) -> str:
        lines = [line for rank in range(RANKS) for line in (self._out / f"rank{rank}.log").read_text().splitlines()]
        return " / ".join(lines[-4:])
