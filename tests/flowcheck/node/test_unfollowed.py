"""What a group says while it does not follow its job yet: to its ranks, and to the log."""

from __future__ import annotations

from typing import Any

from flowcheck.node.groups.unfollowed import AGAIN, NAMED, REASONS, Unfollowed


class Said:
    def __init__(self, group: str = "shard1") -> None:
        self.now = 100.0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.it = Unfollowed(group, lambda event, **fields: self.events.append((event, fields)), lambda: self.now)


def test_ranks_are_named_by_group_and_by_their_place_in_the_job() -> None:
    said = Said()
    assert said.it.ranks([1]) == "rank 1 of group 'shard1'"
    said.it.placed([1, 3, 5])
    assert said.it.ranks([1, 2]) == "rank 1, 2 of group 'shard1' (3, 5 of the job)"
    assert said.it.ranks(range(20)).startswith(f"rank {', '.join(map(str, range(NAMED)))} of group")
    said.it.restarted()
    assert said.it.ranks([1]) == "rank 1 of group 'shard1'"
    alone = Said("")
    alone.it.placed([0, 1])
    assert alone.it.ranks([1]) == "rank 1"  # it is the same number


def test_a_refusal_goes_with_what_is_waited_for_until_the_job_is_followed() -> None:
    said = Said("")
    assert said.it.missing([1]) == "connections of rank 1 are not here" and said.it.why == ""
    said.it.refused("memory_mb: too little\n  remedy: more")
    assert said.it.missing([1]) == (
        "the job was refused: memory_mb: too little; remedy: more; tried again when connections of rank 1 are here")
    said.it.followed()
    assert said.it.missing([0]) == "connections of rank 0 are not here" and said.it.why == ""
    said.it.refused("again")
    said.it.restarted()
    assert said.it.why == ""


def test_what_is_waited_for_is_said_once_in_a_while() -> None:
    said = Said()
    for rank, why in ((0, "no bucket"), (1, "no bucket"), (0, ""), (0, "two alike")):
        said.it.watches(rank, why)
    assert [(event, fields["rank"]) for event, fields in said.events] == [("watching", 0), ("watching", 0)]
    assert "rank 0 of group 'shard1'" in said.events[0][1]["why"] and "no bucket" in said.events[0][1]["why"]
    said.now += AGAIN
    said.it.watches(1, "no bucket")
    assert said.events[2][1]["rank"] == 1
    said.it.followed()
    said.it.watches(1, "no bucket")
    assert len(said.events) == 4, "it was followed between"


def test_reasons_are_bounded() -> None:
    said = Said()
    for number in range(REASONS + 3):
        said.it.watches(0, f"reason {number}")
    assert len(said.events) == REASONS
