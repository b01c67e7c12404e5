"""How fast a state goes over the control connection, both sides in one process on the loopback: decision 0008.

    .venv/bin/python -P benchmarks/control_link.py

256 MB of float32 tensors, packed, sent, received and unpacked; GB per second of processor time, both sides together.
"""

from __future__ import annotations

import socket
import threading
import time

import torch

from flowcheck.control.protocol import Limits, Link, State
from flowcheck.control.tensors import TensorSpec, header, packed_bytes, pieces, unpack

ELEMENTS, TENSORS, ROUNDS = 1 << 24, 4, 7


def main() -> None:
    tensors = {f"model.{i}": torch.zeros(ELEMENTS) for i in range(TENSORS)}
    specs = {name: TensorSpec("float32", (ELEMENTS,)) for name in tensors}
    size = packed_bytes(tensors)
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = Link(socket.create_connection(server.getsockname()))
        into = Link(server.accept()[0])
    into.limits = lambda: Limits(payload={"state": size}, seconds=600.0)

    def send() -> None:
        head, order = header(tensors)
        out.send(State(0), [head, *(piece for name in order for piece in pieces(tensors[name]))], size)

    rates = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        sender = threading.Thread(target=send)
        sender.start()
        unpack(into.payload(into.receive()[1]), specs, "state")
        sender.join()
        rates.append(size / (time.process_time() - begin) / 1e9)
    rates.sort()
    print(f"{rates[0]:.2f} {rates[ROUNDS // 2]:.2f} {rates[-1]:.2f} GB/s of processor time: least, median, most")
    out.close()
    into.close()


if __name__ == "__main__":
    main()
