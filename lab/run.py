"""One run of the lab: trainers and nodes on a fabric, job after job, and the ledger of what came out.

    with Fabric(config) as fabric, LabRun(fabric, out) as run:
        run.start_nodes(job)                    the nodes listen, then the mirror starts
        run.attach(job)                         the job begins, and trains until the nodes have its state
        run.train(30)                           goes on; between two orders nothing is in flight
        run.end()                               trainers let go
        run.finish_nodes()                      nodes say what they have, and end
        run.ledger.summary().all_equal

        run.train_and_die(30, rank=2, iteration=17, at="allreduce")     a rank is killed, and with it the job
        run.start_trainers_again()
        run.begin(job, attach=True, recover=True)                       the job goes on from what the nodes have

        run.start_holders()                                             nodes without a port, of the fabric's config
    run.lose("node 0")                                              kill -9, and all that it held goes with its machine

    run.kill_nodes()                                                at once; what they hold stays in shared memory
        run.start_nodes(job)                                            they come back, and find it
        run.catch_up()                                                  the job trains until they make versions again

`begin(job)` instead of `attach` trains without a node. Jobs may follow each other in the same processes, with nodes of
their own or none. Trainers run on one core, everything that is not training on another, where there are two. The run
belongs to the thread that made it: processes are killed when that thread ends.

Several nodes and one stage: all of them follow the same job, and are each other's peers. The ledger is of the first
one; what the others have published is in `twins`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flowcheck.errors import EnvironmentProblem, UserError
from lab import netns
from lab.children import Children
from lab.compare import Ledger
from lab.fabric import Fabric
from lab.jobs import Training
from lab.share import Share
from lab.starter import Starter

__all__ = ["Cores", "LabRun", "nobody"]

CONTROL_PORT, API_PORT = 7070, 7071
RUN = "lab"  # run id of a job that may be recovered
START_SECONDS = 120.0  # torch on a core that others use too
ATTACHING = 4  # attach watches three, and sends manifest and connections after the next
PEERING = {"peer_iterations": 8, "peer_seconds": 5.0}  # nodes that share a core are not in step
ARRIVE_SECONDS = 30.0  # that the trainers' last words may take to the nodes, on cores that others use
QUIET_SECONDS = 90.0  # softroce gives a dead peer up after 60
END_SECONDS = 120.0
OUTPUTS = ("rank[0-9]*.jsonl", "rank[0-9]*.log", "node[0-9]*-[0-9]*", "holder[0-9]*", "again[0-9]*", "saved[0-9]*",
           "token", "lost.json")
MARK = ".flowcheck-lab"  # such a folder's outputs are ours to remove


class Cores:
    """trainers, and everything else; None where there is only one core to have."""

    def __init__(self) -> None:
        usable = sorted(os.sched_getaffinity(0))
        self.trainers: int | None = usable[0] if len(usable) > 1 else None
        self.rest: int | None = usable[1] if len(usable) > 1 else None


def nobody(ledger: Ledger, *, last: bool = False) -> None:
    """A watcher that does not look."""


class LabRun:
    """watch: set it to be called with the ledger after every event. node_settings: per table of node.toml, added to
    ours. api: nodes serve their versions, and jobs may be recovered."""

    def __init__(
        self, fabric: Fabric, out: Path, *, backend: str = "softroce", cores: Cores | None = None, checksums: int = 5,
        node_settings: Mapping[str, Mapping[str, Any]] | None = None, api: bool = False,
    ) -> None:
        self.fabric, self.out = fabric, out
        self.ledger = Ledger(0, [])
        self.events: list[tuple[str, dict[str, Any]]] = []  # of the nodes of this job, all of them
        self.held: list[tuple[str, dict[str, Any]]] = []  # what holders have said
        self.twins: list[tuple[str, dict[str, Any]]] = []  # hashes of versions of nodes that the ledger is not of
        self.iterations: list[dict[str, Any]] = []  # of this job's first rank of each stage, in order
        self.communicators: list[dict[str, Any]] = []  # what each rank said of its connections when the job ended
        self._backend = backend
        self.watch: Callable[..., None] = nobody
        self._cores = cores or Cores()
        self._checksums, self._node_settings, self._api = checksums, node_settings or {}, api
        self.recovered: list[dict[str, Any]] = []  # what each rank of this job said of it
        self._children = Children()
        self._starter: Starter | None = None
        self._tails: dict[str, _Tail] = {}
        self._said: dict[str, Path] = {}  # where what a node says is kept
        self._token = secrets.token_hex(16)
        self._job: Training | None = None
        self._nodes: list[str] = []
        self._holders: list[str] = []
        self._starts = 0
        self._mirrors = False  # the leaf copies to the nodes' ports
        self._let_go = False  # trainers have said goodbye to the nodes
        self._jobs = -1  # number of the current job

    def __enter__(self) -> Self:
        try:
            self.start_trainers()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        try:
            self._children.kill([*self._trainers, *self._nodes, *self._holders], END_SECONDS)
        finally:
            if self._starter is not None:
                self._starter.close()

    @property
    def _trainers(self) -> list[str]:
        return [f"rank {rank}" for rank in range(self.fabric.config.ranks)]

    # -- trainers -------------------------------------------------------------------------------------------

    def start_trainers(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        earlier = [path for pattern in OUTPUTS for path in self.out.glob(pattern)]
        if earlier and not (self.out / MARK).exists():
            raise UserError(
                f"{earlier[0].name} is there, and no lab has written it", where=str(self.out),
                remedy="a folder of its own: a lab removes what an earlier one has left in it",
            )
        (self.out / MARK).touch()
        for old in earlier:
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink()
        self._spawn_trainers(self.out)

    def start_trainers_again(self) -> None:
        """In place of those that are gone; nodes go on. What they write goes into a folder of its own."""
        self._children.kill(self._trainers, END_SECONDS)
        for name, event in self._children.drain():
            self._take(name, event)
        out = self.out / f"again{self._jobs}"
        out.mkdir()
        self._spawn_trainers(out)

    def _spawn_trainers(self, out: Path) -> None:
        starter = self._starter = self._starter or Starter({"OMP_NUM_THREADS": "1"})
        for rank, name in enumerate(self._trainers):
            settings = {"interface": "fab0", "address": f"10.77.0.{10 + rank}"}
            arguments = ["--rank", str(rank), "--ranks", str(self.fabric.config.ranks), "--backend", self._backend,
                         "--out", str(out)]
            with (out / f"rank{rank}.log").open("ab") as log:
                process = starter.start(
                    arguments, namespace=self.fabric.config.namespace(f"r{rank}"), core=self._cores.trainers,
                    env={"FLOWCHECK_SOFTROCE": json.dumps(settings)}, stderr=log,
                )
            self._children.add(name, process, Path(log.name))
            self._tails[name] = _Tail(out / f"rank{rank}.jsonl")
        self._all_say("ready", self._trainers, START_SECONDS)

    def _all_say(self, what: str, names: Sequence[str], seconds: float) -> None:
        """Until each of these processes has said an event."""
        said: set[str] = set()
        for name, event in self._events(lambda: len(said) == len(names), seconds):
            if event.get("event") == what:
                said.add(name)
            self._take(name, event)

    def _events(self, until: Callable[[], bool], seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """What processes say until then; raises EnvironmentProblem when one of them, or of the network's, is gone."""

        def stop() -> bool:
            self.fabric.check()
            return until()

        return self._children.events(stop, seconds)

    def _start(
        self, name: str, role: str, command: Sequence[str], log: Path, core: int | None, env: Mapping[str, str]
    ) -> None:
        with log.open("ab") as stderr:
            process = self.fabric.spawn(role, command, core=core, env=env, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=stderr)
        self._children.add(name, process, log)

    def begin(
        self, job: Training, *, attach: bool = False, recover: bool = False, saving: tuple[str, int] | None = None
    ) -> None:
        """A job with new communicators, without a step of it. recover: from what the nodes have. saving: one of
        saving.SAVERS, and every how many iterations. Raises UserError where it does not fit the lab."""
        if job.ranks > len(self._trainers):
            raise UserError(f"the job has {job.ranks} ranks and the lab {len(self._trainers)}", where="flowcheck lab",
                            remedy="give both the same number")
        self._follow()  # what is left of the job before
        self._job, self._jobs, self._let_go = job, self._jobs + 1, False
        self.ledger = Ledger([len(job.group(number)) for number in range(len(job.names))], job.names)
        self.iterations, self.communicators, self.twins, self.recovered = [], [], [], []
        orders = self._attach_orders(job) if attach else None
        begin = {"number": self._jobs, "job": job.to_dict(), "softroce": dict(job.softroce), "attach": orders}
        if recover:
            begin["recover"] = {"nodes": self.members, "token": self._token, "run_id": RUN, "seconds": QUIET_SECONDS}
        if saving is not None:
            begin["saving"] = [*saving, str(self.out / f"saved{self._jobs}")]
        self._order({"begin": begin})

    def train(self, iterations: int) -> None:
        """So many more iterations of the job."""
        self._order({"iterations": iterations})

    def train_and_die(
        self, iterations: int, *, rank: int, iteration: int, at: str,
        heard: Callable[[str, dict[str, Any]], object] = lambda name, event: None,
    ) -> None:
        """Train until a rank kills itself at an instant of an iteration (trainer.INSTANTS); the others stand still.
        heard: called with all that processes say until then."""
        for name in self._trainers:
            self._children.let_end(name)
        victim = f"rank {rank}"
        die = {"rank": rank, "iteration": iteration, "at": at}
        for name in self._trainers:
            self._children.tell(name, {"iterations": iterations, "die": die})
        process = self._children.process(victim)
        for name, event in self._events(lambda: process.poll() is not None, QUIET_SECONDS):
            self._take(name, event)
            heard(name, event)

    def end(self) -> None:
        """Trainers let nodes and communicators go."""
        self._order({"end": True})
        self._let_go = True

    def _order(self, order: dict[str, Any]) -> None:
        for name in self._trainers:
            self._children.tell(name, order)
        self._all_say("done", self._trainers, QUIET_SECONDS)

    def attach(self, job: Training, most: int = 60) -> int:
        """Begin a job with the nodes, and train until every stage's node has the trainers' state, whole or by ranges;
        the iteration that its first version is of. Raises EnvironmentProblem if that takes more than `most` iterations.
        """
        self.begin(job, attach=True)
        self.train(ATTACHING)
        names, nodes = job.names, self._nodes  # a node for each stage, one for all of them, or several for one
        wanted = {(nodes[i % len(nodes)], names[i % len(names)]) for i in range(max(len(nodes), len(names)))}

        def named(*events: str) -> dict[tuple[str, str], dict[str, Any]]:
            return {(node, said.get("name", "")): said for node, said in self.events
                    if node in self._nodes and said["event"] in events}

        def here() -> dict[tuple[str, str], dict[str, Any]]:
            return named("state", "patched")

        self._quietly(lambda: named("attached").keys() >= wanted, START_SECONDS)
        self._train_until(lambda: here().keys() >= wanted, most - ATTACHING, "no state was taken")
        return max(said["iteration"] for said in here().values())

    def catch_up(self, most: int = 2000) -> None:
        """Train until every stage's node that was started last has published a version. Raises EnvironmentProblem if
        that takes more than `most` iterations."""

        def here() -> bool:
            made = {(node, said["name"]) for node, said in self.events if said["event"] == "iteration"
                    and said["published"] and node in self._nodes}
            return len(made) >= max(len(self._nodes), len(self.ledger.names))

        self._train_until(here, most, "no version was published")

    def _train_until(self, here: Callable[[], bool], most: int, why: str) -> None:
        trained = 0
        while not here():
            if trained >= most:
                said = "; ".join(str(event) for _, event in self.events[-3:])
                raise EnvironmentProblem(f"{why} in {trained} iterations; the nodes said: {said}",
                                         where="flowcheck lab", remedy=f"see the logs in {self.out}")
            self.train(1)
            trained += 1
            self._quietly(here, 0.2)

    def _attach_orders(self, job: Training) -> dict[str, dict[str, Any]]:
        """For each stage the arguments of flowcheck.attach."""
        if not self._nodes:
            raise UserError("no node is running", where="begin", remedy="call start_nodes first")
        return {
            str(stage): {
                "node": self._addresses if job.stages == 1 else self._addresses[stage % self.fabric.config.nodes],
                "token": self._token, "checksum_every": self._checksums,
                "group": job.names[stage] if job.stages > 1 and not job.tied else "",
                **({"run_id": RUN} if self._api else {}),
            }
            for stage in range(job.stages)
        }

    @property
    def members(self) -> list[str]:
        """APIs of nodes and holders."""
        config = self.fabric.config
        return [f"10.78.0.{2 + number}:{API_PORT}" for number in range(config.nodes + config.holders)]

    @property
    def _addresses(self) -> list[str]:
        return [f"10.78.0.{2 + node}:{CONTROL_PORT}" for node in range(self.fabric.config.nodes)]

    def finish_trainers(self) -> None:
        """Trainers end by themselves: their orders are over."""
        for name in self._trainers:
            self._children.let_end(name, close=True)
        for name in self._trainers:
            if status := self._children.wait(name, END_SECONDS):
                raise EnvironmentProblem(f"{name} ended with status {status}", where="flowcheck lab",
                                         remedy=f"its log: {self.out}/{name.replace(' ', '')}.log")

    # -- nodes ----------------------------------------------------------------------------------------------

    def start_nodes(self, job: Training) -> None:
        """Start the nodes that are not there for a job, wait until they listen, and mirror."""
        self._starts += 1
        self.events = []
        config = self.fabric.config
        token, started = self._token_file(), list[str]()
        for node in range(config.nodes):
            if any(one.split(",")[0] == f"node {node}" for one in self._nodes):
                continue
            name = f"node {node}" if self._starts == 1 else f"node {node}, start {self._starts}"
            directory = self.out / f"node{node}-{self._starts}"
            directory.mkdir()
            toml = directory / "node.toml"
            hashes = directory / "hashes.jsonl"
            toml.write_text(self._toml(job, node, directory, token, hashes))
            command = [sys.executable, "-P", "-m", "flowcheck.node", "--config", str(toml), "--json"]
            role = config.roles[1 + config.ranks + node]
            self._start(name, role, command, directory / "log", self._cores.rest, {"OMP_NUM_THREADS": "1"})
            self._tails[name], self._said[name] = _Tail(hashes), directory / "events.jsonl"
            started.append(name)
        self._nodes = sorted([*self._nodes, *started], key=lambda name: int(name.split(",")[0].split()[1]))
        self._all_say("listening", started, START_SECONDS)
        if not self._mirrors:
            self.fabric.start_mirror()
        self._mirrors = True

    def _token_file(self) -> Path:
        token = self.out / "token"
        token.touch(mode=0o600)
        token.write_text(self._token + "\n")
        return token

    def start_holders(self) -> None:
        """Those that are not there, and wait until they listen."""
        config, token, started = self.fabric.config, self._token_file(), list[str]()
        for number in range(config.holders):
            name = f"holder {number}"
            if name in self._holders:
                continue
            directory = self.out / f"holder{number}"
            directory.mkdir(exist_ok=True)
            tables: dict[str, dict[str, Any]] = {
                "": {"name": f"{config.name}.holder{number}"}, "tokens": {"reader": str(token), "peer": str(token)},
                "api": {"listen": self.members[config.nodes + number], "insecure": True},
                "protect": {"directory": str(self.fabric.shared), **self._node_settings.get("protect", {})},
            }
            toml = directory / "node.toml"
            toml.write_text(_toml(tables))
            command = [sys.executable, "-P", "-m", "flowcheck.node", "--config", str(toml), "--json"]
            self._start(name, f"holder{number}", command, directory / "log", self._cores.rest, {"OMP_NUM_THREADS": "1"})
            self._said[name] = directory / "events.jsonl"
            started.append(name)
        self._holders += started
        self._all_say("holding", started, START_SECONDS)

    def lose(self, name: str) -> None:
        """A node or a holder ("node 0", "holder 1") and its machine: kill -9, and what it held is gone."""
        kind, _, number = name.partition(" ")
        process = next(one for one in [*self._nodes, *self._holders] if one == name or one.startswith(f"{name},"))
        config = self.fabric.config
        role = config.roles[1 + config.ranks + int(number) + (config.nodes if kind == "holder" else 0)]
        self._children.let_end(process)
        netns.kill(config.namespace(role))
        self._children.wait(process, END_SECONDS)
        for said, event in self._children.drain():
            self._take(said, event)
        self._follow()
        (self._nodes if kind == "node" else self._holders).remove(process)
        self.held = [(one, event) for one, event in self.held if one != process]
        full = f"{config.name}.{number if kind == 'node' else f'holder{number}'}"
        for path in self.fabric.shared.glob(f"flowcheck-{full}[.-]*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def whole(self, epoch: int, step: int = 0) -> int:
        """A step of this epoch, from `step` on, that all holders have parity of; -1: there is none."""
        newest = {name: said["step"] for name, said in self.held
                  if said["event"] == "protected" and said["epoch"] == epoch and said["step"] >= step}
        return min(newest.values()) if self._holders and newest.keys() >= set(self._holders) else -1

    def train_until_parity(self, epoch: int, step: int = 0, most: int = 200) -> None:
        """Until all holders have some of this epoch, of this step or a later one. Raises EnvironmentProblem."""
        self._train_until(lambda: self.whole(epoch, step) >= 0, most,
                          f"no parity of step {step} of epoch {epoch}; holders said {self.held[-3:]}")

    def finish_holders(self) -> list[int]:
        """End them in order; their exit statuses."""
        for name in self._holders:
            self._children.let_end(name)
            self._children.process(name).send_signal(signal.SIGTERM)
        statuses = [self._children.wait(name, END_SECONDS) for name in self._holders]
        self._holders.clear()
        return statuses

    def stop_node(self, node: int, stopped: bool = True) -> None:
        """A node that gets no time at all, until it gets some again, or is killed."""
        self._children.process(self._nodes[node]).send_signal(signal.SIGSTOP if stopped else signal.SIGCONT)

    def kill_nodes(self) -> None:
        """kill -9, all of them; the mirror goes on. `start_nodes` starts others that have their names and places."""
        self._children.kill(self._nodes, END_SECONDS)
        for name, event in self._children.drain():
            self._take(name, event)
        self._follow()
        self._nodes.clear()

    def _toml(self, job: Training, node: int, directory: Path, token: Path, hashes: Path) -> str:
        shared, own = (len(job.names) if self.fabric.config.nodes == 1 else 1), self._addresses[node]
        peers, name = [one for one in self._addresses if one != own] if job.stages == 1 else [], self.fabric.config.name
        tables: dict[str, dict[str, Any]] = {
            "": {"name": f"{name}.{node}" if self.fabric.config.nodes > 1 else name, "groups": shared},
            "control": {"listen": own, "token_file": str(token), "insecure": True},  # the lab's own network
            # Ordinary memory: several nodes and tests would take the machine's few huge pages from each other.
            "capture": {"device": "af_packet:mir0", "path_mtu": job.softroce.get("mtu", 4096), "huge": False},
            "replica": {"directory": str(self.fabric.shared), "keep": False},
            "output": {"directory": str(directory / "steps"), "keep_hashes": str(hashes)},
        }
        tables["replica"] |= PEERING | {"peers": peers} if peers else {}
        if job.stages > 1 and self.fabric.config.nodes > 1:
            tables["common"] = {"nodes": [one for one in self._addresses if one != own]}
        if self._api:
            tables["api"] = {"listen": f"10.78.0.{2 + node}:{API_PORT}", "insecure": True}
        for table, values in self._node_settings.items():
            tables[table] = {**tables.get(table, {}), **values}
        return _toml(tables)

    def wait_for_nodes(self, iteration: int, seconds: float = 60.0) -> None:
        """Until the nodes have said what became of an iteration, of every stage; gives up in silence when nothing has
        been heard for `seconds`: the ledger then says what is missing."""
        stages = range(len(self.ledger.names))
        self._quietly(lambda: all(self.ledger.row(stage, iteration).verdict != "waiting" for stage in stages), seconds)

    def wait_for_event(self, event: str, seconds: float = 60.0, **fields: Any) -> dict[str, Any]:
        """The first event of a node that is like this, past or future. Raises EnvironmentProblem if none comes."""

        def found() -> dict[str, Any] | None:
            return next((said for _, said in self.events
                         if said["event"] == event and fields.items() <= said.items()), None)

        self._quietly(lambda: found() is not None, seconds)
        said = found()
        if said is None:
            raise EnvironmentProblem(f"no node has said {event} {fields}", where="flowcheck lab",
                                     remedy=f"see the nodes' logs in {self.out}")
        return said

    def _quietly(self, until: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds

        def stop() -> bool:
            self._follow()
            return until() or time.monotonic() > end

        for name, event in self._events(stop, seconds + 1):
            self._take(name, event)

    @property
    def node_pids(self) -> list[int]:
        """Of those that run; any thread."""
        return [self._children.process(name).pid for name in list(self._nodes)]

    def slowed(self, share: float) -> Share:
        """The nodes that run now get this part of their core's time, until the context ends."""
        return Share([self._children.process(name).pid for name in self._nodes], share)

    @property
    def trained(self) -> int:
        """Iterations that the job has made, counted from its first start; 0: none since it was begun anew."""
        return int(self.iterations[-1]["iteration"]) + 1 if self.iterations else 0

    def _attached(self) -> bool:
        """Is there a node that has not heard the last of a job's ranks yet?"""
        last = {(name, said["name"]): said["event"] for name, said in self.events
                if said["event"] in ("attached", "job_refused", "end")}
        return any(name in self._nodes and event == "attached" for (name, _), event in last.items())

    def finish_nodes(self) -> list[int]:
        """Stop mirroring, end the nodes in order; their exit statuses. Where trainers have said goodbye the nodes hear
        that first, for ARRIVE_SECONDS: what was sent before it has arrived by then."""
        if self._let_go:
            self._quietly(lambda: not self._attached(), ARRIVE_SECONDS)
        for name in self._nodes:
            self._children.let_end(name)
            self._children.process(name).send_signal(signal.SIGTERM)
        statuses = [self._children.wait(name, END_SECONDS) for name in self._nodes]
        for name, event in self._children.drain():
            self._take(name, event)
        self._follow()
        self.fabric.stop_mirror()
        self._mirrors = False
        self._nodes.clear()
        return statuses

    # -- what is said ---------------------------------------------------------------------------------------

    def _take(self, name: str, event: dict[str, Any]) -> None:
        if name.startswith("node"):
            self.events.append((name, event))
            with self._said[name].open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
            if event.get("event") == "iteration" and not self._is_twin(name):
                self.ledger.status(event)
            elif event.get("event") == "unjudged" and not self._is_twin(name):
                for number in range(event["first"], event["last"] + 1):
                    self.ledger.status({**event, "iteration": number, "published": False, "failed": [event["why"]]})
            elif event.get("event") in ("state", "patched") and not self._is_twin(name):  # the first: versions begin
                self.ledger.state(event)
        elif name.startswith("holder"):
            self.held.append((name, event))
            with self._said[name].open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
        elif event.get("event") == "iteration" and self._job and event["rank"] % self._job.data_ranks == 0:
            self.iterations.append(event)
        elif event.get("event") == "recovered":
            self.recovered.append(event)
        elif event.get("event") == "communicator":
            self.communicators.append(event)
        self._follow()
        self.watch(self.ledger)

    def _is_twin(self, name: str) -> bool:
        """Does a node follow what the first one follows, too?"""
        one = self._job is None or self._job.stages == 1
        return one and name.startswith("node") and not name.startswith("node 0")

    def _follow(self) -> None:
        """Read what is new in the hash files, of this job."""
        for name, tail in self._tails.items():
            for line in tail.lines():
                if self._is_twin(name):
                    self.twins.append((name, line))
                elif name.startswith("node"):
                    self.ledger.node(line)
                elif line["job"] == self._jobs:
                    self.ledger.trainer(line)


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The table "" first."""
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]"] if table else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


class _Tail:
    """Whole lines that a file has grown by."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def lines(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                raw = file.read()
        except FileNotFoundError:
            return []
        self._at += len(raw)
        *whole, self._rest = (self._rest + raw).split(b"\n")
        return [json.loads(line) for line in whole]
