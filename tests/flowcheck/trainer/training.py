"""A training loop on a real DDP model, and how far its attachment is with a node made by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flowcheck
from flowcheck.trainer import following, state_upload

from ..hand_node import TOKEN, HandNode, Peer, until

COMMUNICATOR = {"ranks": 2, "nccl_version": "2.27.7"}
FLOW = {"src": 0, "dst": 1, "channel": 0, "src_addr": "10.0.0.1", "dst_addr": "10.0.0.2", "qpns": [17]}


class Training:
    """A training loop whose communicator's calls are made up, and its attachment."""

    def __init__(self, wrap: Any, *addresses: tuple[str, int], layer: torch.nn.Module | None = None, rank: int = 0,
                 make: Callable[[Any], torch.optim.Optimizer] | None = None, wraps: Any = (), **options: Any) -> None:
        """wraps: more options of DistributedDataParallel."""
        torch.manual_seed(1)
        self.model = wrap(layer if layer is not None else torch.nn.Linear(2, 2), rank=rank, **dict(wraps))
        self.optimizer = (make or (lambda p: torch.optim.SGD(p, lr=1.0)))(self.model.parameters())
        self.elements = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.said: list[dict[str, Any]] = []
        nodes = [f"{host}:{port}" for host, port in addresses]
        self.attachment = flowcheck.attach(
            self.model, self.optimizer, node=nodes if len(nodes) > 1 else nodes[0], token=TOKEN.decode(),
            **{"max_stall_s": 0.0, "topology": lambda: {"communicator": COMMUNICATOR, "flows": [FLOW]},
               "collectives": lambda since: self.said[since:]} | options,
        )

    def backward(self, calls: int = 1) -> None:
        self.model(torch.ones(3, 2)).square().sum().backward()
        self.said.extend([{"op": "AllReduce", "count": self.elements, "dtype": "float32"}] * calls)

    def train(self, *, step: int = 1, calls: int = 1, between: Callable[[], Any] = lambda: None) -> None:
        """One iteration, without attachment.step(). between: after the reduction, before the step."""
        self.backward(calls)
        between()
        for _ in range(step):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def iterate(self, times: int = 1, **told: Any) -> None:
        for _ in range(times):
            self.train(step=0 if told.get("skipped") else 1)
            self.attachment.step(**told)

    @property
    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.module.state_dict().items()}


class Every(torch.nn.Module):
    """An optimized tensor, one that is frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.frozen = torch.nn.Parameter(torch.tensor([3.0]), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.weight


def connected(one: Training, node: HandNode, **more: Any) -> Peer:
    """The connection, once its opening (which is empty as long as the job is not known) has gone out. more: fields of
    the Welcome."""
    peer = node.welcome(**more)
    until(lambda: one.attachment._senders[0].connected and not one.attachment._senders[0]._again.is_set())
    return peer


def known(one: Training, node: HandNode, *, manifest: bool = True, **more: Any) -> Peer:
    """Three iterations, after which the job is known to the node."""
    peer = connected(one, node, **more)
    one.iterate(3)
    peer.expect("flows")
    if manifest:
        peer.expect("manifest")
    return peer


def clock_of_waiting(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """What ranks wait at a boundary is measured by this one."""
    for module in (following, state_upload):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))


def joined(one: Training, node: HandNode, **options: Any) -> Peer:
    """Attached, after three iterations."""
    peer = known(one, node, **options)
    peer.send("joined", iteration=3)
    until(lambda: one.attachment.state == "attached")
    return peer
