"""From a job manifest to mirrored packets with their truth.

    Job --per call: chunk_layout, schedule, values, encode--> messages --connection--> frames
        --which port sees them--> streams --faults--> Synthesis

The calls run in the manifest's order; every connection's steps, PSNs and CTS numbers run on through all of
them. Ranks advance together message by message. Frames are made
only for what a mirrored port sees. Written from the reference documents, nothing of the parser is used.
One thread; memory is that of the captured frames plus the stages of one call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flowcheck.errors import UserError
from flowcheck.job.model import Collective, Job, dtype_size
from lab.synth import contents
from lab.synth.chunk_layout import Operation, steps_per_chunk
from lab.synth.connection import PACKET_NS, Connection, Record, TransportOptions
from lab.synth.encode import encode
from lab.synth.families import family_of
from lab.synth.faults import Faults, apply
from lab.synth.mirror import Mirror
from lab.synth.packets import Endpoint
from lab.synth.schedule import Message, message_bytes, messages
from lab.synth.skip import skip
from lab.synth.truth import Carried, Ledger
from lab.synth.values import Array, Stages, generate_values, storage
from lab.synth.writer import write_capture

__all__ = ["Synthesis", "generate", "operation_of"]

Inputs = Callable[[int, int, int], Array]

_START_NS = 1_700_000_000_000_000_000
_DOWN_NS = 20_000  # a tree's results come down when the sums have gone up


@dataclass
class Synthesis:
    """Packets of the mirrored ports and everything true about them.

    packets: all ports together in time order, (nanoseconds, frame); with two mirrored ports a frame between
    them is there twice. ports: the same per mirrored rank. reduced: the result of every gradient bucket, 1-d,
    storage dtype (bfloat16 as uint16). gathered: every parameter group that an iteration gathers, likewise.
    parameters: initial model entries, flattened. truth: see truth.py.
    """

    job: Job
    ports: dict[int, list[tuple[int, bytes]]]
    reduced: dict[tuple[int, int], Array]
    parameters: dict[str, Array]
    truth: dict[str, Any] = field(default_factory=dict)
    gathered: dict[tuple[int, int], Array] = field(default_factory=dict)

    @property
    def packets(self) -> list[tuple[int, bytes]]:
        everything = [packet for port in self.ports.values() for packet in port]
        return sorted(everything, key=lambda packet: packet[0])

    def write(self, path: str | os.PathLike[str]) -> None:
        """One capture of all ports; pcapng if the name says so."""
        write_capture(path, self.packets)

    def write_ports(self, paths: Mapping[int, str | os.PathLike[str]]) -> None:
        """One capture per mirrored rank."""
        for rank, path in paths.items():
            write_capture(path, self.ports[rank])


def operation_of(job: Job, call: Collective) -> Operation:
    """A manifest's call as the layout sees it: AllGather and Broadcast in bytes, always on the ring."""
    c = job.communicator
    size = dtype_size(call.dtype)
    as_bytes = call.op in ("AllGather", "Broadcast")
    algorithm = call.algorithm or c.algorithm
    return Operation(
        call.op, algorithm if call.op == "AllReduce" else "ring", call.protocol or c.protocol,
        call.count * size if as_bytes else call.count, 1 if as_bytes else size, call.root, c.ranks,
        call.channels or c.channels, tuple(tuple(c.ring(channel)) for channel in range(c.channels)),
        c.max_threads, c.buffer_bytes, family_of(c.nccl_version),
    )


def generate(
    job: Job, *, iterations: int = 1, ports: Iterable[int] = (0,), directions: str = "both", seed: int = 0,
    loss: float = 0.0, reorder: float = 0.0, duplicate: float = 0.0, corrupt: float = 0.0,
    first_iteration: int = 0, parameters: dict[str, Array] | None = None,
    transport: TransportOptions | None = None, gradients: Inputs | None = None, mirror: Mirror | None = None,
    blocks: Inputs | None = None,
) -> Synthesis:
    """Synthesise `iterations` iterations of a job as seen at the mirrored ports.

    ports: what is mirrored: r is the port of rank r, or the first one of its merged NIC, whose next ones are
    r + ranks, r + 2*ranks and so on. directions: "in" (frames to that rank's host), "out", or "both".
    loss, reorder, duplicate, corrupt: probability per mirrored frame. first_iteration: the mirror starts
    there; everything before it is only counted (a start in mid-stream). parameters: initial model entries,
    flattened; default by seed. gradients: (iteration, bucket, rank) -> that rank's values of the bucket, 1-d
    in storage dtype; default by seed. blocks: likewise (iteration, parameter group, rank) -> that rank's block of
    what an AllGather of parameters gathers. mirror: how the switch delivers its copies (the truth does not know what
    it truncates); each port has a session of its own, counting from mirror.session.
    Raises UserError if job and options do not fit together.
    """
    mirrored = sorted(set(ports))
    for rank in mirrored:
        if not 0 <= rank < job.communicator.ranks * job.communicator.devices:
            raise UserError(
                f"there is no rank {rank} in a job of {job.communicator.ranks}", where="ports",
                remedy="name ranks from 0; further ports of merged NICs follow them",
            )
    if directions not in ("in", "out", "both"):
        raise UserError(f"{directions!r} is not in, out or both", where="direction", remedy="choose one")
    run = _Run(job, mirrored, directions, seed, transport or TransportOptions(), parameters, gradients, blocks)
    if not job.collectives.steady and first_iteration + iterations > 1:
        raise UserError("the job has no steady iteration", where="collectives.steady", remedy="ask for 1 iteration")
    wanted = range(first_iteration, first_iteration + iterations)
    iteration = -1
    while iteration < wanted.stop:
        run.silent = first_iteration > 0 and iteration < first_iteration
        if run.silent and iteration >= 2:
            iteration += skip(run.play, run.connections, iteration, first_iteration)
        else:
            run.play(iteration)
            iteration += 1
    return run.finish(Faults(loss, reorder, duplicate, corrupt), mirror or Mirror(), wanted)


class _Run:
    """State of one synthesis; `play` the calls of an iteration, then `finish`."""

    def __init__(
        self, job: Job, ports: list[int], directions: str, seed: int, transport: TransportOptions,
        parameters: dict[str, Array] | None, gradients: Inputs | None, blocks: Inputs | None,
    ) -> None:
        self.job, self.seed = job, seed
        self.silent = False
        self._ports, self._into, self._out = ports, directions != "out", directions != "in"
        self._time = _START_NS
        self._family = family_of(job.communicator.nccl_version)
        self._parameters = contents.initial_parameters(job, seed) if parameters is None else parameters
        self._gradients, self._blocks = gradients, blocks
        self._reduced: dict[tuple[int, int], Array] = {}
        self._gathered: dict[tuple[int, int], Array] = {}
        self._streams: dict[int, list[Record]] = {rank: [] for rank in ports}
        self._ledger = Ledger()
        self._hosts: dict[int, Endpoint] = {}
        self.connections: dict[tuple[int, int, int], Connection] = {}
        for flow in job.flows:
            for rank, address in ((flow.src, flow.src_addr), (flow.dst, flow.dst_addr)):
                mac = b"\x02\xfc" + rank.to_bytes(4, "big")
                self._hosts.setdefault(rank, Endpoint(mac, address))
        for flow in job.flows:
            self.connections[flow.channel, flow.src, flow.dst] = Connection(
                flow, job.communicator, self._family, self._hosts, transport, seed,
            )

    def _seen(self, src: int, dst: int) -> bool:
        if self.silent:
            return False
        ranks = self.job.communicator.ranks
        mirrored = {port % ranks for port in self._ports}
        return (self._out and src in mirrored) or (self._into and dst in mirrored)

    def play(self, iteration: int) -> None:
        """All calls of an iteration; -1 is the start-up."""
        calls = self.job.collectives.startup if iteration < 0 else self.job.iteration_collectives(iteration)
        carrying = self.job.gradient_calls(iteration) if iteration >= 0 else []
        gathering = self.job.parameter_calls(iteration) if iteration >= 0 else []
        gradients = {id(call): bucket for bucket, call in carrying}
        groups = {id(call): group for group, call in gathering}
        for index, call in enumerate(calls):
            op = operation_of(self.job, call)
            schedule = messages(op)
            self._check_flows(schedule, call)
            if self.silent:
                self._transfer(op, schedule, None, None, [])
                continue
            bucket, group = gradients.get(id(call)), groups.get(id(call))
            ranks = range(self.job.communicator.ranks)
            if bucket is not None and self._gradients is not None:
                inputs = [self._gradients(iteration, bucket, rank) for rank in ranks]
            elif group is not None and self._blocks is not None:
                inputs = [self._blocks(iteration, group, rank) for rank in ranks]
            elif group is not None:
                drawn = contents.data_seed(self.seed, iteration, 7000 + group)
                inputs = [generate_values(call.dtype, drawn, rank, call.count) for rank in ranks]
            else:
                inputs = contents.inputs_of(
                    self.job, call, seed=self.seed, iteration=iteration, index=index, bucket=bucket,
                    parameters=self._parameters,
                )
            if op.op in ("AllGather", "Broadcast"):
                inputs = [values.view(np.uint8) for values in inputs]
            stages = Stages(op, call.dtype, inputs)
            carried = None
            if bucket is not None:
                self._reduced[iteration, bucket] = stages.result
                drawn = contents.data_seed(self.seed, iteration, 1000 + bucket)
                carried = self._ledger.bucket(iteration, bucket, call, stages.result, drawn)
            elif group is not None:
                self._gathered[iteration, group] = stages.result.view(storage(call.dtype))
                carried = self._ledger.group(iteration, group, call, stages.result)
            elif call.carries == "parameters":
                carried = self._ledger.parameters(index, call, stages.result)
            self._transfer(op, schedule, stages, carried, [self.seed, iteration + 1, index])
            self._time += 20_000
        self._time += 300_000

    def _check_flows(self, schedule: dict[tuple[int, int, int], list[Message]], call: Collective) -> None:
        for channel, src, dst in schedule:
            if (channel, src, dst) not in self.connections:
                raise UserError(
                    f"{call.op} needs a connection from rank {src} to rank {dst} on channel {channel}",
                    where="flows", remedy="list every connection of the rings (and trees) in the manifest; a learnt "
                    "one has those alone that were captured",
                )

    def _transfer(
        self, op: Operation, schedule: dict[tuple[int, int, int], list[Message]], stages: Stages | None,
        carried: Carried | None, garbage: list[int],
    ) -> None:
        """Every message of a call, connection by connection in turns; without stages only counted."""
        sending = [(self.connections[key], sent) for key, sent in schedule.items()]
        for connection, _ in sending:
            grain = steps_per_chunk(op)
            connection.step = -(-connection.step // grain) * grain
        announced = [connection.step for connection, _ in sending]
        posted = [0] * len(sending)
        slot = op.buffers[op.protocol] // 8
        undefined = np.random.default_rng(garbage).integers(0, 256, slot if stages else 0, np.uint8)
        for turn in range(max((len(sent) for _, sent in sending), default=0)):
            latest = self._time
            for i, (connection, sent) in enumerate(sending):
                flow = connection.flow
                visible = (self._seen(flow.src, flow.dst), self._seen(flow.dst, flow.src))
                if turn >= len(sent):
                    continue
                at = self._time + i % 7 * 90
                # The receiver announces up to 8 steps ahead of what it has taken.
                while posted[i] < len(sent) and announced[i] + sent[posted[i]].steps <= connection.step + 8:
                    size = slot * sent[posted[i]].steps
                    self._record(connection.clear_to_send(at, op.protocol, announced[i], size, visible))
                    announced[i] += sent[posted[i]].steps
                    posted[i] += 1
                    at += 3 * PACKET_NS
                message = sent[turn]
                length = message_bytes(op, message, connection.step)
                wire, mark = None, -1
                if stages is not None and visible[0]:
                    part = stages.tensor(message.source)[message.start:message.start + message.elements]
                    data = np.ascontiguousarray(part).view(np.uint8)
                    wire = encode(op.protocol, data, connection.step, length, undefined).tobytes()
                    if carried is not None and message.reduced:
                        mark = carried.message(op.protocol, message.start * op.size, len(data), length)
                at = self._time + 4_000 + i % 7 * 90
                if op.algorithm == "tree" and message.reduced:
                    at += _DOWN_NS
                sending_now = connection.send(at, op.protocol, wire, length, mark, visible)
                latest = max(latest, self._record(sending_now, at))
                connection.step += message.steps
            self._time = latest + 1_000

    def _record(self, records: Iterator[Record], latest: int = 0) -> int:
        """Give each record to the ports that see it; the time of the last one."""
        ranks = self.job.communicator.ranks
        for record in records:
            latest = max(latest, record.time)
            for wanted, port in (
                (self._out, record.src + ranks * record.src_device),
                (self._into, record.dst + ranks * record.dst_device),
            ):
                if wanted and port in self._streams:
                    self._streams[port].append(record)
                    self._ledger.passed(record.piece)
        return latest

    def finish(self, faults: Faults, mirror: Mirror, iterations: range) -> Synthesis:
        ports: dict[int, list[tuple[int, bytes]]] = {}
        happened: dict[str, list[dict[str, Any]]] = {}
        for rank, stream in self._streams.items():
            stream.sort(key=lambda record: record.time)
            if faults.any:
                stream, said = apply(stream, faults, f"{self.seed}/{rank}")
                for name, entries in said.items():
                    happened.setdefault(name, []).extend({"port": rank, **entry} for entry in entries)
            for record in stream:
                self._ledger.arrived(record.piece)
            ports[rank] = [(record.time, record.frame) for record in stream]
            if mirror.any:
                switch = replace(mirror, session=mirror.session + len(ports) - 1)
                ports[rank] = [(time, switch.deliver(frame, i)) for i, (time, frame) in enumerate(ports[rank])]
        happened["retransmitted"] = [e for c in self.connections.values() for e in c.retransmitted]
        reduced = {key: value for key, value in self._reduced.items() if key[0] in iterations}
        truth = {
            "schema": "flowcheck/synth-truth/1", "seed": self.seed, "ports": self._ports,
            "directions": "both" if self._into and self._out else "in" if self._into else "out",
            "packets": {str(rank): len(packets) for rank, packets in ports.items()},
            **self._ledger.summary(iterations, happened),
        }
        gathered = {key: value for key, value in self._gathered.items() if key[0] in iterations}
        return Synthesis(self.job, ports, reduced, self._parameters, truth, gathered)

