"""A job's reduced gradients as packets straight from memory: for jobs that are too large to be trained in a lab.

    stream = GradientStream(job, descriptor)
    for packets in stream.play(iteration, gradients): ...     message by message; gradients(bucket) -> its bytes

What a mirror port shows of the way down of a tree: messages in the order of synth's schedule, connections in turns,
frames by softroce's C. A message is never copied on its way, and of the schedule only the messages are kept, so that
an iteration of some GB goes out as fast as the interface takes it. One thread.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from flowcheck.errors import UserError
from flowcheck.job.model import Collective, Job
from lab.softroce._stream import Stream
from lab.synth.families import family_of
from lab.synth.generate import operation_of
from lab.synth.schedule import messages

__all__ = ["GradientStream"]

Bytes = NDArray[np.uint8]
_REMOTE, _RKEY = 0x7F00_0000_0000, 0x1234


class _Connection:
    """stream: of its QP. step: of the connection, the next one."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.step = stream, 0


class GradientStream:
    """socket: a descriptor that is bound to the interface of the mirror port. From the communicator's birth on.

    Raises UserError for a job that has more than gradients, or not on SIMPLE trees: partial sums are not made here.
    """

    def __init__(self, job: Job, descriptor: int) -> None:
        c = job.communicator
        calls = [*job.collectives.startup, *job.collectives.rebuild]
        if calls or c.protocol != "simple" or c.algorithm != "tree" or c.queue_pairs != 1:
            raise UserError(
                "gradients are streamed on SIMPLE trees with one QP, without other calls", where="communicator",
                remedy="flowcheck synth makes all other traffic",
            )
        self._job = job
        self._slot = c.buffer_bytes["simple"] // 8
        self._connections: dict[tuple[int, int, int], _Connection] = {}
        for flow in job.flows:
            ends = [
                (b"\x02\xfc" + rank.to_bytes(4, "big"), socket.inet_aton(address))
                for rank, address in ((flow.src, flow.src_addr), (flow.dst, flow.dst_addr))
            ]
            reply = flow.cts_qpns[0] if flow.cts_qpns else flow.qpns[0] ^ 1
            self._connections[flow.channel, flow.src, flow.dst] = _Connection(Stream(
                descriptor, ends[0], ends[1], flow.qpns[0], reply, c.mtu,
                big_endian_imm=family_of(c.nccl_version).big_endian_imm,
            ))

    def play(self, iteration: int, gradients: Callable[[int], Bytes]) -> Iterator[int]:
        """Send an iteration, the next one; after each message how many packets it was. gradients: the reduced bytes of
        a bucket, which stay as they are meanwhile."""
        for bucket, call in self._job.gradient_calls(iteration):
            yield from self._call(call, gradients(bucket))

    def _call(self, call: Collective, data: Bytes) -> Iterator[int]:
        op = operation_of(self._job, call)
        sending = [
            (self._connections[key], sent) for key, sent in messages(op).items() if key in self._connections
        ]
        for turn in range(max((len(sent) for _, sent in sending), default=0)):
            for connection, sent in sending:
                if turn >= len(sent):
                    continue
                message = sent[turn]
                if not message.reduced:
                    raise UserError("the job names a connection that carries partial sums", where="flows")
                first = message.start * op.size
                address = _REMOTE + connection.step % 8 * self._slot
                yield connection.stream.send(data[first : first + message.elements * op.size], address, _RKEY)
                connection.step += message.steps
