"""What a start of the job says of itself: one text on all ranks, another one for each attachment, later ones later."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from flowcheck.control.start import Start
from flowcheck.trainer import starts
from flowcheck.trainer.recover.recovery import recover
from flowcheck.trainer.starts import after, started

from ..hand_api import TOKEN, HandApi, HandVersion
from ..hand_node import until
from .training import joined


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "_now", starts._Process())
    monkeypatch.setattr(starts, "_newest", 0)


@pytest.fixture
def store() -> Iterator[dist.HashStore]:
    made = dist.HashStore()
    dist.init_process_group("gloo", store=made, rank=0, world_size=1)
    yield made
    dist.destroy_process_group()


def begun(group: str = "", iteration: int = 0) -> Start:
    start = Start.of(started(group, iteration))
    assert start is not None
    return start


def test_ranks_say_the_same_and_attachments_are_counted(store: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = begun("a", 4), begun("a", 9)
    assert (first.first, first.number, again.first, again.number) == (4, 0, 9, 1) and first.line < again.line
    monkeypatch.setattr(starts, "_now", starts._Process())  # as another rank, with the same store
    other = begun("a", 4)
    assert str(other) == str(first) and begun("b", 4).line == first.line, "and the groups of one start"
    monkeypatch.setattr(starts, "_now", starts._Process())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert begun("a", 4).line > first.line, "an agent keeps its store when it starts ranks anew"


def test_every_attachment_of_a_group_has_its_number(store: dist.HashStore) -> None:
    assert [begun("a").number for _ in range(4)] == [0, 1, 2, 3] and begun("b").number == 0


def test_a_process_that_lived_through_a_new_start_agrees_with_one_that_did_not(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    lived = begun()
    monkeypatch.setattr(starts, "_now", starts._Process())
    assert str(begun()) == str(lived)


def test_without_torch_distributed_a_rank_speaks_for_itself() -> None:
    assert begun().line < begun().line


def test_a_new_process_group_is_another_start(store: dist.HashStore) -> None:
    before = begun()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert begun().line > before.line


def test_what_recover_has_seen_is_earlier_whatever_clocks_say(store: dist.HashStore) -> None:
    here = begun()
    ahead = Start(here.began + 10**18, here.token, 0, 0)
    with HandApi(HandVersion(7, start=f"{ahead.line} {'f' * 64}")) as api:
        assert recover(api.name, token=TOKEN, together=False).step == 7
    assert begun().line > ahead.line
    after([""])
    assert begun().line > ahead.line


def test_an_attachment_has_the_epoch_that_a_node_gives_it(training, hand_node, caplog) -> None:
    one = training()
    peer = joined(one, hand_node)
    assert one.attachment.epoch == 0
    for _ in "ab":
        peer.send("epoch", epoch=3, why="another start has made step 7")
    until(lambda: one.attachment.epoch == 3)
    one.iterate()
    assert peer.expect("record")["iteration"] == 3 and one.attachment.state == "attached" and one.attachment.why == ""
    assert caplog.text.count("another start has made step 7") == 1
