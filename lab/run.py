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
        run.begin(job, attach=True, recover=True)       the job goes on from what the nodes have

        run.start_holders()                     nodes without a port, of the fabric's config
        run.lose("node 0")                      kill -9, and all that it held goes with its machine

        run.kill_nodes()                        at once; what they hold stays in shared memory
        run.start_nodes(job)                    they come back, and find it
        run.catch_up()                          the job trains until they make versions again

`begin(job)` instead of `attach` trains without a node. Jobs may follow each other in the same processes, with nodes of
their own or none. Trainers run on one core, everything that is not training on another, where there are two. The run
belongs to the thread that made it: processes are killed when that thread ends.

Several nodes and one stage: all of them follow the same job, and are each other's peers. The ledger is of the first
one; what the others have published is in `twins`.
"""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flowcheck.errors import EnvironmentProblem, UserError
from lab.children import Cores
from lab.jobs import Training
from lab.network import netns
from lab.network.fabric import Fabric
from lab.node_files import Settings, addresses, apis, holder_toml, node_toml
from lab.record import Record, Tail, clear
from lab.share import Share
from lab.starter import Starter

__all__ = ["LabRun"]

RUN = "lab"  # run id of a job that may be recovered
START_SECONDS = 120.0  # torch on a core that others use too
ATTACHING = 4  # attach watches three, and sends manifest and connections after the next
ARRIVE_SECONDS = 30.0  # that the trainers' last words may take to the nodes, on cores that others use
QUIET_SECONDS = 90.0  # softroce gives a dead peer up after 60
END_SECONDS = 120.0


class LabRun(Record):
    """node_settings: per table of node.toml, added to ours. api: nodes serve their versions, and jobs may be recovered.
    """

    def __init__(
        self, fabric: Fabric, out: Path, *, backend: str = "softroce", cores: Cores | None = None, checksums: int = 5,
        node_settings: Settings | None = None, api: bool = False,
    ) -> None:
        super().__init__(fabric, out)
        self._backend = backend
        self._cores = cores or Cores()
        self._checksums, self._node_settings, self._api = checksums, node_settings or {}, api
        self._starter: Starter | None = None
        self._token = secrets.token_hex(16)
        self._nodes: list[str] = []
        self._holders: list[str] = []
        self._starts = 0
        self._mirrors = False  # the leaf copies to the nodes' ports
        self._let_go = False  # trainers have said goodbye to the nodes

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
        clear(self.out)
        self._spawn_trainers(self.out)

    def start_trainers_again(self) -> None:
        """In place of those that are gone; nodes go on. What they write goes into a folder of its own."""
        self._children.kill(self._trainers, END_SECONDS)
        self._drain()
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
            self._tails[name] = Tail(out / f"rank{rank}.jsonl")
        self._all_say("ready", self._trainers, START_SECONDS)

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
        self._begin(job)
        self._let_go = False
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
            return named("state", "patched", "log")

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
                "node": addresses(self.fabric.config) if job.stages == 1
                else addresses(self.fabric.config)[stage % self.fabric.config.nodes],
                "token": self._token, "checksum_every": self._checksums,
                "group": job.names[stage] if job.stages > 1 and not job.tied else "",
                **({"run_id": RUN} if self._api else {}),
            }
            for stage in range(job.stages)
        }

    @property
    def members(self) -> list[str]:
        """APIs of nodes and holders."""
        return apis(self.fabric.config)

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
            toml.write_text(node_toml(
                config, job, node, directory, token, self.fabric.shared, self._node_settings, self._api))
            command = [sys.executable, "-P", "-m", "flowcheck.node", "--config", str(toml), "--json"]
            role = config.roles[1 + config.ranks + node]
            self._start(name, role, command, directory / "log", self._cores.rest, {"OMP_NUM_THREADS": "1"})
            self._tails[name], self._said[name] = Tail(directory / "hashes.jsonl"), directory / "events.jsonl"
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
            toml = directory / "node.toml"
            toml.write_text(holder_toml(config, number, token, self.fabric.shared, self._node_settings))
            command = [sys.executable, "-P", "-m", "flowcheck.node", "--config", str(toml), "--json"]
            self._start(name, f"holder{number}", command, directory / "log", self._cores.rest, {"OMP_NUM_THREADS": "1"})
            self._said[name] = directory / "events.jsonl"
            started.append(name)
        self._holders += started
        self._all_say("holder_ready", started, START_SECONDS)

    def lose(self, name: str) -> None:
        """A node or a holder ("node 0", "holder 1") and its machine: kill -9, and what it held is gone."""
        kind, _, number = name.partition(" ")
        process = next(one for one in [*self._nodes, *self._holders] if one == name or one.startswith(f"{name},"))
        config = self.fabric.config
        role = config.roles[1 + config.ranks + int(number) + (config.nodes if kind == "holder" else 0)]
        self._children.let_end(process)
        netns.kill(config.namespace(role))
        self._children.wait(process, END_SECONDS)
        self._drain()
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
        self._drain()
        self._follow()
        self._nodes.clear()

    @property
    def node_pids(self) -> list[int]:
        """Of those that run; any thread."""
        return [self._children.process(name).pid for name in list(self._nodes)]

    def slowed(self, share: float) -> Share:
        """The nodes that run now get this part of their core's time, until the context ends."""
        return Share([self._children.process(name).pid for name in self._nodes], share)

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
        self._drain()
        self._follow()
        self.fabric.stop_mirror()
        self._mirrors = False
        self._nodes.clear()
        return statuses
