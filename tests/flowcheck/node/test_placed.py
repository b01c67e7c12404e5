"""Whom a holder of parity asks where a registry's root decides it: its group, by the file that was left for it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.node.protect.parity_shelf import Placed
from flowcheck.node.protect.placement import Decided, Member, Parity


def test_the_others_of_the_group_that_was_decided(tmp_path: Path) -> None:
    path, members = tmp_path / "placement.json", {name: Member(Site(name), f"{name}:{port}")
                                                  for port, name in enumerate("abcd", 1)}
    placed = Placed(path, "c")
    assert placed() == []
    decided = Decided(3, members, dict.fromkeys(members, ()), None, Parity(("a", "b"), ("c", "d")))

    def write(text: str | bytes, at: int) -> None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        os.utime(path, ns=(at, at))

    write(decided.text(), 10)
    assert placed() == [("a", 1), ("b", 2), ("d", 4)]
    write(replace(decided, parity=None).text(), 10)
    assert placed() == [("a", 1), ("b", 2), ("d", 4)]  # it has not changed, and is not read again
    write(replace(decided, parity=None).text(), 20)
    assert placed() == []
    write(decided.text(), 20)
    assert placed() == []  # nobody is an answer, too
    write(decided.text(), 30)
    assert len(placed()) == 3
    write(b"\xff", 40)
    assert placed() == []
    write(decided.text().replace("a:1", "a:0"), 50)
    assert placed() == []  # an address that is none: it was meant for nobody
    write(decided.text(), 60)
    assert len(placed()) == 3
    path.unlink()
    assert placed() == []
