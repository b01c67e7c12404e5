"""What a trainer hears of the node as it comes in, by TLS or without, and the state by ranges that it may then give."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.control.protocol import RESYNC, Flows, Link, Patch, RecordsError, Wanted, greet
from flowcheck.control.tls import Secure, client_context, server_context
from flowcheck.node.groups import connection

from ..certificates import issue
from .control_scene import Enter, entering
from .test_control import PLAN, STATE_BYTES
from .test_control_server import TOKEN, Port


@pytest.fixture
def enter() -> Iterator[Enter]:
    with entering() as begin:
        yield begin


def come(one: Port, *secure: Any) -> Any:
    """A trainer greets the node. secure: a context of TLS, and the name that it asks for."""
    host, _, port = one.server.address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=60)
    link = Link(sock, Secure(sock, *secure) if secure else None)
    with contextlib.closing(link):
        welcome = greet(link, TOKEN, run_id="run", epoch=3, rank=0, ranks=4, group="", instance="first")
        assert link.receive(wait=60) == (Wanted(["user", "userhead", "notice"], ""), 0)
        return welcome


def test_a_node_with_a_certificate_speaks_to_whom_it_is_proved(tmp_path: Path) -> None:
    """And to nobody without TLS. The certificate is asked for anew for each connection: it may be exchanged."""
    first, second = issue(tmp_path, "first"), issue(tmp_path, "second")
    used = [first]
    with contextlib.closing(Port(tls=lambda: server_context(used[0].cert, used[0].key))) as one:
        one.server.start()
        come(one, client_context(str(first.ca)), "127.0.0.1")
        used[0] = second
        come(one, client_context(str(second.ca)), "127.0.0.1")
        for plain in ((), (client_context(str(first.ca)), "127.0.0.1")):
            with pytest.raises(RecordsError):
                come(one, *plain)


@pytest.mark.parametrize("how", RESYNC)
def test_a_trainer_hears_how_it_will_be_asked_for_its_state(how: str) -> None:
    with contextlib.closing(Port(resync=how)) as one:
        one.server.start()
        assert come(one).resync == how


# -- state by ranges -----------------------------------------------------------------------------------------------


def test_state_by_ranges_has_tensors_unless_it_is_refused(enter: Enter) -> None:
    known = enter(rank=2, plan=PLAN)
    refused, some = Patch(4, 5, refused="it is not here"), Patch(4, 5, [["w", 0, 3]])
    known.send(refused)
    assert known.group.next() == (refused, {})
    known.send(some)
    assert known.why() == ("a patch without tensors", "host:1") and known.group.next() == ("left", True)


def test_it_has_as_many_elements_as_its_ranges(enter: Enter) -> None:
    known, ranges = enter(plan=PLAN), [["w", 0, 1], ["c", 0, 2], ["w", 2, 1]]
    tensors = {"model.w": torch.tensor([1.0, 3.0]), "model.c": torch.ones(2, dtype=torch.float16),
               "optimizer.w.step": torch.tensor(2.0), "optimizer.w.exp_avg": torch.tensor([4.0, 5.0])}
    known.send(Patch(4, 5, ranges), tensors)
    assert known.group.next() == (Patch(4, 5, ranges), {name: tensor.tolist() for name, tensor in tensors.items()})
    known.send(Patch(5, 5, ranges[:2]), tensors)
    assert known.why() == ("tensor 'model.w' is F32 [2], not F32 [1]", "host:1: Patch")


def test_it_is_at_most_as_large_as_what_is_asked_for_at_once(enter: Enter, monkeypatch: pytest.MonkeyPatch) -> None:
    """And at most as large as the whole state."""
    known = enter(plan=PLAN)
    known.send(Flows([]))
    known.group.next()
    for most, size in ((10, STATE_BYTES - 48 - 64 + 10), (111, STATE_BYTES - 1), (113, STATE_BYTES)):
        monkeypatch.setattr(connection, "PATCH_BYTES", most)
        assert known.near.limits().payload["patch"] == size


def test_any_rank_may_give_it(enter: Enter) -> None:
    known, head = enter(rank=3, plan=PLAN), Patch(4, 5, [["w", 0, 3]])
    known.promise(head, STATE_BYTES + 1)
    assert known.why()[0] == f"a payload of {STATE_BYTES + 1} bytes, at most {STATE_BYTES} are read here"
