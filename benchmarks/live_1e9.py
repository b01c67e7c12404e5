"""A job of 10^9 parameters through the live node: versions equal to torch's, and where the time goes.

    .venv/bin/python -P benchmarks/live_1e9.py [--parameters 1e9] [--iterations 3] [--gbps 100] [--journal DIRECTORY]
                                                                                                      as root

`flowcheck-node` runs on one end of a veth pair. The other end is sent bf16 gradients as SIMPLE packets of 4 KB on 8
channels, by a thread in C (lab/stream.py) pinned to the last processor, at the rate at which the node takes
them: no more than IN_FLIGHT packets are ahead of its counters. Every packet is to be placed. Parameters are bf16 alone,
updated by SGD without momentum in the order of torch on a CPU, so that as much as possible fits: per parameter 2 bytes
for each of two versions, 2 for each of two arenas, 2 for the state while it comes, and 2 for the gradients here.

Iteration 0 has one bucket, as DDP's has, and is compared alone. The others have buckets of 25 MB and follow each other
without a pause. Printed are, for each iteration, seconds from its first packet to its last and to its version; the
slack, which is the next one's first packet less that; what the node says of the iteration; and processor seconds by
thread of the node. Memory is asked for before anything is started. With --journal the node keeps one there, of JOURNAL
iterations and its bases, so that the slack with and without it can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataplane.counters import read_counters
from flowcheck.control.protocol import Joined, Link, Manifest, Progress, RecordsError, State, Wanted, greet
from flowcheck.control.tensors import header, packed_bytes, pieces
from flowcheck.errors import EnvironmentProblem
from flowcheck.job.model import Flow, Job
from lab.network import netns
from lab.stream import GradientStream
from lab.synth import example_job
from lab.synth.schedule import tree_of
from updater.reader import Reader

NAMESPACE, NEAR, FAR = "fc-live-1e9", "near", "far"
TOKEN = b"a token that only this benchmark has"
BUCKET = 25 << 20
CHANNELS, MTU, LR = 8, 4096, 0.5
IN_FLIGHT = 2048  # packets; the kernel keeps 4096 for the node
RING = 1 << 16
SHIFT = 1_000_003  # elements by which the gradients of an iteration lie behind those of the one before
SLOTS = ARENAS = 2
JOURNAL = 16  # room in iterations, bases among them
PAGES = 400 << 20  # what node and trainer take besides: torch twice, rings, interpreters
LONGEST = 600.0
ROLES = {"fc-rx": "receive", "fc-place": "place", "fc-update": "update"}


# -- the job -------------------------------------------------------------------------------------------------


def make_job(parameters: int) -> Job:
    each = min(BUCKET // 2, parameters)
    counts = [each] * (parameters // each) + [parameters % each] * bool(parameters % each)
    job = example_job(
        ranks=2, channels=CHANNELS, count=counts, dtype="bfloat16", protocol="simple", algorithm="tree", mtu=MTU,
        startup=False, rebuild=False, optimizer="sgd", options={"lr": LR}, masters="none",
    )
    assert job.optimizer is not None
    job.optimizer.threads, job.optimizer.torch_version = 1, torch.__version__.partition("+")[0]
    down = []
    for flow in job.flows:
        root = tree_of(2, flow.channel, CHANNELS).parent.index(-1)
        if flow.src == root:
            down.append(flow)
    job.flows = down or [Flow(0, 1, c, "10.0.0.1", "10.0.0.2", [0x100 + c]) for c in range(CHANNELS)]
    return job


def drawn(seed: int, count: int, exponent: int) -> np.ndarray:
    """bf16 of both signs with random mantissas, between 2**(exponent - 127) and 16 times that; as uint16."""
    bits = np.random.default_rng(seed).integers(0, 1 << 16, count, np.uint16)
    bits &= 0x81FF
    bits |= exponent << 7
    return bits


class Run:
    """The training run that never was: gradients of every iteration, and what torch makes of them."""

    def __init__(self, job: Job, iterations: int) -> None:
        self.job = job
        self.count = sum(entry.elements for entry in job.model)
        self._gradients = drawn(1, self.count + iterations * SHIFT, 116)

    def gradients(self, iteration: int, bucket: int) -> np.ndarray:
        """Elements of a bucket as uint16. All buckets of an iteration lie one behind the other."""
        counts = [call.count for _, call in self.job.gradient_calls(iteration)]
        first = iteration * SHIFT + sum(counts[:bucket])
        return self._gradients[first : first + counts[bucket]]

    def parameter(self, number: int) -> torch.Tensor:
        """Of the state before iteration 0."""
        entry = self.job.model[number]
        return torch.from_numpy(drawn(1000 + number, entry.elements, 120)).view(torch.bfloat16).reshape(entry.shape)

    def equal(self, version: Any, iterations: int) -> int:
        """Tensors of a version that are, bit for bit, torch's after so many iterations. Raises AssertionError."""
        where: dict[str, list[tuple[int, int, int]]] = {}
        for kind in (0, 1):
            for bucket, layout in enumerate(self.job.bucket_layout(kind)):
                for piece in layout.slices:
                    assert piece.start == 0
                    where.setdefault(piece.name, []).append((bucket, piece.offset, piece.length))
        for number, entry in enumerate(self.job.model):
            tensor = torch.nn.Parameter(self.parameter(number))
            optimizer = torch.optim.SGD([tensor], lr=LR)
            for t in range(iterations):
                bucket, offset, length = where[entry.name][min(t, 1)]
                bits = self.gradients(t, bucket)[offset : offset + length]
                tensor.grad = torch.from_numpy(bits).view(torch.bfloat16).reshape(entry.shape)
                optimizer.step()
            ours = version.parameters[entry.name].view(torch.int16)
            assert torch.equal(ours, tensor.detach().view(torch.int16)), f"{entry.name} differs"
        return len(self.job.model)


# -- memory --------------------------------------------------------------------------------------------------


def memory(count: int, iterations: int, slots: int) -> dict[str, int]:
    """Bytes, by what takes them."""
    return {
        f"node: {slots} versions of bf16 parameters": slots * 2 * count,
        f"node: {ARENAS} arenas, and a bit for 8 bytes of each": ARENAS * 2 * count * 65 // 64,
        "node: the state while it comes": 2 * count,
        "here: gradients": 2 * (count + iterations * SHIFT),
        "both: programs, rings": PAGES + RING * 4352,
    }


def check_memory(count: int, iterations: int, slots: int) -> None:
    parts = memory(count, iterations, slots)
    for what, size in parts.items():
        print(f"{what:52} {size / 1e9:7.2f} GB")
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available, needed = int(lines["MemAvailable"].split()[0]) << 10, sum(parts.values())
    print(f"{'together, of what is available':52} {needed / 1e9:7.2f} of {available / 1e9:.2f} GB", flush=True)
    if needed > available:
        raise EnvironmentProblem(
            f"{count:.3g} parameters need {needed / 1e9:.1f} GB, {available / 1e9:.1f} are available",
            where="--parameters", remedy=f"at most {count * available / needed:.2g}, or a larger machine",
        )


# -- the node ------------------------------------------------------------------------------------------------


class Node:
    def __init__(self, folder: Path, count: int, slots: int, journal: Path | None) -> None:
        (folder / "token").write_bytes(TOKEN)
        kept = "" if journal is None else (
            f'[journal]\ndirectory = "{journal}"\nmegabytes = {1 + JOURNAL * 2 * count // (1 << 20)}\n')
        (folder / "node.toml").write_text(f"""
name = "{NAMESPACE}"
[control]
listen = "127.0.0.1:0"
token_file = "{folder / 'token'}"
[capture]
device = "af_packet:{NEAR}"
path_mtu = {MTU}
ring_size = {RING}
huge = false
[replica]
directory = "/dev/shm"
slots = {slots}
arenas = {ARENAS}
threads = 1
keep = false
{kept}""")
        self._command = [
            *netns.prefix(NAMESPACE), sys.executable, "-P", "-m", "flowcheck.node", "--config",
            str(folder / "node.toml"),
        ]
        self.events: list[dict[str, Any]] = []

    def check(self) -> None:
        """What `--check` says: it refuses what the machine does not have."""
        subprocess.run([*self._command, "--check"], check=True)

    def start(self) -> tuple[str, int]:
        self.process = subprocess.Popen([*self._command, "--json"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "listening":
                break
        else:
            raise EnvironmentProblem("the node has ended", where="flowcheck-node", remedy="its own words say why")
        threading.Thread(target=self._listen, daemon=True).start()
        host, _, port = event["control"].rpartition(":")
        return host, int(port)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            self.events.append(event)
            if event["event"] in ("dropped", "lost", "waiting", "behind", "problem", "journaled", "hole", "base"):
                print("node:", line.strip(), flush=True)

    def received(self) -> int:
        return sum(queue["received"] for one in read_counters() if one.pid == self.process.pid for queue in one.queues)

    def seconds(self) -> dict[str, float]:
        """Processor time by name of thread; what has none of its own follows the group, and answers trainers."""
        found: dict[str, float] = {}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            used = sum(map(int, rest.split()[11:13])) / os.sysconf("SC_CLK_TCK")
            role = ROLES.get(name, "follow, control")
            found[role] = found.get(role, 0.0) + used
        return found


class Trainer:
    """Rank 0 at the control port."""

    def __init__(self, address: tuple[str, int], run: Run) -> None:
        self._run, job = run, run.job
        # The loopback of the namespace; the socket goes on working outside.
        sock = netns.inside(NAMESPACE, lambda: socket.create_connection(address, timeout=LONGEST))
        self._link = Link(sock)
        greet(self._link, TOKEN, group="", run_id=job.run_id, epoch=job.epoch, rank=0, ranks=2)
        self._heard: queue.Queue[tuple[float, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                message, _ = self._link.receive()
                self._heard.put((time.monotonic(), message))
        except RecordsError as error:
            self._heard.put((time.monotonic(), error))

    def expect(self, kind: type, **fields: Any) -> float:
        """When a message came."""
        while True:
            when, message = self._heard.get(timeout=LONGEST)
            if isinstance(message, RecordsError):
                raise message
            if isinstance(message, kind) and all(getattr(message, key) == value for key, value in fields.items()):
                return when
            if isinstance(message, Wanted) and kind is Progress and message.what:
                raise SystemExit(f"the node has lost the job: {message.why}")

    def attach(self) -> None:
        job = self._run.job
        self._link.send(Manifest(job.to_dict()))
        self.expect(Wanted, what=["state"])
        shapes = {f"model.{e.name}": torch.empty(e.shape, dtype=torch.bfloat16, device="meta") for e in job.model}
        head, order = header(shapes)
        number = {f"model.{entry.name}": i for i, entry in enumerate(job.model)}

        def parts() -> Iterator[bytes | memoryview]:
            yield head
            for name in order:
                yield from pieces(self._run.parameter(number[name]))

        self._link.send(State(0), parts(), packed_bytes(shapes))
        self.expect(Joined, iteration=0)


# -- the run -------------------------------------------------------------------------------------------------


def send(
    stream: GradientStream, run: Run, iteration: int, node: Node, sent: int, gbps: float
) -> tuple[float, float, int]:
    """When the first message of an iteration began to leave, and when the last one had left; all packets so far."""
    first, before = time.monotonic(), sent
    taken = node.received()
    for packets in stream.play(iteration, lambda bucket: run.gradients(iteration, bucket).view(np.uint8)):
        sent += packets
        time.sleep(max(0.0, first + 1e-9 * MTU * (sent - before) / gbps - time.monotonic()))
        while sent - taken > IN_FLIGHT:
            taken = node.received()
    return first, time.monotonic(), sent


def measure(run: Run, node: Node, trainer: Trainer, descriptor: int, iterations: int, gbps: float) -> None:
    stream, sent = GradientStream(run.job, descriptor), 0
    times, published = [], []
    before = node.seconds()
    for t in range(iterations):
        first, last, sent = send(stream, run, t, node, sent, gbps)
        times.append((first, last))
        if t == 0:
            published.append(trainer.expect(Progress, iteration=0))
            compare(run, 1)
    published += [trainer.expect(Progress, iteration=t) for t in range(1, iterations)]
    after = node.seconds()
    compare(run, iterations)
    gb = 2e-9 * run.count
    for t, ((first, last), at) in enumerate(zip(times, published, strict=True)):
        slack = f"{times[t + 1][0] - at:8.3f}" if 0 < t < iterations - 1 else "       -"
        rate = gb / (last - first)
        print(f"iteration {t}: {last - first:8.3f} s to its last packet ({rate:.2f} GB/s), {at - first:8.3f} to its"
              f" version, {at - last:8.3f} after the last packet, slack {slack}")
    for event in node.events:
        if event["event"] == "iteration":
            print("  " + json.dumps(event))
    for name, used in sorted(after.items(), key=lambda pair: -pair[1]):
        if (spent := used - before.get(name, 0.0)) >= 0.05:
            print(f"  {name:16} {spent:8.2f} s of processor time, {spent / iterations / gb:6.2f} per GB of gradients")


def compare(run: Run, iterations: int) -> None:
    begin = time.monotonic()
    (path,) = Path("/dev/shm").glob(f"flowcheck-{NAMESPACE}-*.replica") or (None,)
    with Reader(path).pinned() as version:
        assert version.step == iterations, version.step
        equal = run.equal(version, iterations)
    print(f"version {iterations}: {equal} tensors of {run.count:.3g} parameters are torch's, bit for bit"
          f" ({time.monotonic() - begin:.0f} s to compare)", flush=True)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--parameters", type=float, default=1e9)
    asked.add_argument("--iterations", type=int, default=3)
    asked.add_argument("--gbps", type=float, default=100.0, help="most GB of packets per second")
    asked.add_argument("--journal", type=Path, help="a directory: keep the gradients there, too")
    options = asked.parse_args()
    count = int(options.parameters)
    torch.set_num_threads(1)  # which elements of a bf16 tensor round in a scalar loop depends on it
    netns.require()
    slots = SLOTS + (options.journal is not None)  # one for the base that is written
    check_memory(count, options.iterations, slots)
    job = make_job(count)
    run = Run(job, options.iterations)
    netns.add(NAMESPACE)
    try:
        netns.quiet(NAMESPACE)
        netns.batch(NAMESPACE, [f"link add {NEAR} mtu 9000 type veth peer name {FAR} mtu 9000", f"link set {NEAR} up",
                                f"link set {FAR} up"])
        with tempfile.TemporaryDirectory() as folder:
            node = Node(Path(folder), count, slots, options.journal)
            node.check()
            address = node.start()
            try:
                trainer = Trainer(address, run)
                begin = time.monotonic()
                trainer.attach()
                print(f"the state took {time.monotonic() - begin:.1f} s", flush=True)
                mirror = netns.inside(NAMESPACE, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
                netns.inside(NAMESPACE, lambda: mirror.bind((FAR, 0)))
                os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # of this thread: the one that sends
                measure(run, node, trainer, mirror.fileno(), options.iterations, options.gbps)
            finally:
                node.process.terminate()
                node.process.wait()
    finally:
        netns.delete(NAMESPACE)


if __name__ == "__main__":
    try:
        main()
    except EnvironmentProblem as error:
        sys.exit(f"live_1e9: {error.message()}")
