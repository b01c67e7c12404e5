"""What a rank says of the gradients of its steps: in the order of the steps, also of those that it does not send."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from flowcheck.control.protocol import Fed, Unfed
from flowcheck.errors import UserError
from flowcheck.job.model import LOG
from flowcheck.trainer.connection.bulk_queue import BulkQueue
from flowcheck.trainer.describe.description import entries
from flowcheck.trainer.describe.optimizers import members, optimizer_of
from flowcheck.trainer.describe.parts import Ddp
from flowcheck.trainer.feed.feed import Feed
from flowcheck.trainer.feed.layout import feed_layout, read_by
from flowcheck.trainer.loop import Over


class Connection:
    """What has to be sent, until it is. The link is anything."""

    def __init__(self) -> None:
        self.feed = BulkQueue()

    def put_bulk(self, bulk: BulkQueue, pieces: Any, nbytes: int) -> bool:
        bulk.put("link", pieces, nbytes)  # type: ignore[arg-type]
        return True

    def sent(self) -> list[tuple[type, int]]:
        found = []
        while (part := self.feed.part("link")) is not None:  # type: ignore[arg-type]
            found.append((type(part.message), part.message.iteration))
            self.feed.went(part, 0.0)
        return found


def test_a_step_that_is_not_sent_is_said_after_those_that_are(wrapped: Callable[..., DistributedDataParallel]) -> None:
    model = wrapped(torch.nn.Linear(3, 2, bias=False))
    optimizer, part, said = torch.optim.Adam(model.parameters()), Ddp(model), list[str]()
    model.module.weight.grad = torch.ones(2, 3)
    feed = Feed(part.group, optimizer, entries(part, optimizer, LOG), "run", 0, said.append)
    connection = Connection()

    def step(number: int, skipped: bool = False) -> None:
        if not skipped:
            feed.before_step(0, last=True, followed=True)
            feed.after_step()
        feed.over([connection], Over(number, None, None, skipped, False, lambda: None, 0, True, ""))  # type: ignore[list-item]

    with closing(feed):
        feed.before_step(0, last=True, followed=True)
        job = feed.look()
        assert job is not None and [call.count for call in job.collectives.steady] == [6]
        step(1)
        step(2, skipped=True)
        step(3)
        step(4)  # both copies are on their way
        assert len(said) == 1
        assert connection.sent() == [(Fed, 1), (Unfed, 2), (Fed, 3), (Unfed, 4)]
        step(5)
        assert connection.sent() == [(Fed, 5)]


def test_a_boundary_between_backward_and_step_is_refused(wrapped: Callable[..., DistributedDataParallel]) -> None:
    model = wrapped(torch.nn.Linear(3, 2, bias=False))
    optimizer, part = torch.optim.Adam(model.parameters()), Ddp(model)
    feed = Feed(part.group, optimizer, entries(part, optimizer, LOG), "run", 0, lambda why: None)

    def iterate(number: int, early: bool = False) -> None:
        model(torch.ones(1, 3)).sum().backward()
        for ends in (early, not early):
            if ends:
                feed.over([], Over(number, None, None, False, False, lambda: None, 0, True, ""))
            else:
                feed.before_step(0, last=True, followed=True)
                feed.after_step()

    with closing(feed):
        iterate(0)
        assert feed.look() is not None
        iterate(1)
        with pytest.raises(UserError):
            iterate(2, early=True)


@pytest.mark.parametrize(("steps", "sent"), [
    ((0, 1), True), ((1, 0), True), ((0,), False), ((1,), False),
])
def test_of_several_optimizers_each_ones_gradients_are_those_of_its_own_step(
    wrapped: Callable[..., DistributedDataParallel], steps: tuple[int, ...], sent: bool
) -> None:
    """What a script does to the others' meanwhile is no matter; without a step of each nothing is sent."""
    model = wrapped(torch.nn.Linear(3, 2))
    parameters = list(model.parameters())
    optimizer, part = optimizer_of([torch.optim.Adam([one]) for one in parameters]), Ddp(model)
    feed = Feed(part.group, optimizer, entries(part, optimizer, LOG), "run", 0, lambda why: None)
    connection = Connection()

    def iterate(number: int, order: tuple[int, ...]) -> None:
        for one in parameters:
            one.grad = torch.full_like(one, -1.0)
        for which in order:
            parameters[which].grad = torch.full_like(parameters[which], which + 10.0 * number)
            feed.before_step(which, last=True, followed=True)
            feed.after_step()
            parameters[which].grad = None
        feed.over([connection], Over(number, None, None, False, False, lambda: None, 0, True, ""))  # type: ignore[list-item]

    with closing(feed):
        iterate(0, (0, 1))
        assert feed.look() is not None
        iterate(1, steps)
        came = connection.feed.part("link")  # type: ignore[arg-type]
        assert came is not None and isinstance(came.message, Fed) == sent
        if isinstance(came.message, Fed):
            numbers = torch.frombuffer(bytearray(came.data), dtype=torch.float32)
            assert numbers.unique().tolist() == [10.0 + came.message.bucket]


def test_of_an_optimizer_without_elements_nothing_is_sent(wrapped: Callable[..., DistributedDataParallel]) -> None:
    empty, full = torch.nn.Parameter(torch.zeros(0, 2)), torch.nn.Linear(3, 2)
    module = torch.nn.ModuleDict({"full": full})
    module.register_parameter("empty", empty)
    model = wrapped(module)
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    part = Ddp(model)
    for each in ([[empty], list(full.parameters())], [list(full.parameters()), [empty]]):
        optimizer = optimizer_of([torch.optim.Adam(some) for some in each])
        described = entries(part, optimizer, LOG)
        layout = feed_layout([read_by(described, one) for one in members(optimizer)], 1)
        assert layout.elements == [8]
        assert each[layout.of[0]][0] is not empty


def test_no_bucket_is_without_elements(wrapped: Callable[..., DistributedDataParallel]) -> None:
    model = torch.nn.Linear(3, 2)
    model.register_parameter("none", torch.nn.Parameter(torch.zeros(0, 2)))
    model.register_parameter("nothing", torch.nn.Parameter(torch.zeros(0)))
    optimizer, part = torch.optim.Adam(model.parameters()), Ddp(wrapped(model))
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    read = [read_by(entries(part, optimizer, LOG), optimizer)]
    layout = feed_layout(read, 1)
    assert layout.elements == [8]
    assert all(all(feed_layout(read, ranks).elements) for ranks in (2, 9))
    shares = [layout.share(rank, 3).elements for rank in range(3)]
    assert sorted(shares) == [[], [], [8]]
