"""The process that keeps copies, without a process: what it begins by its settings, what it is told, how it ends."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck.node.protect import worker as module
from flowcheck.node.protect.border import CopierSettings
from flowcheck.node.protect.placement import Part
from flowcheck.node.protect.worker import END_SECONDS, Copier, Rules, _Sources

from .test_copier_sources import MEMBER, given
from .test_sitting_turns import SAID


class Say(str):
    """In place of Lines."""

    def live(self) -> None:
        pass


class Exit(BaseException):
    pass


class Process:
    """main(), of which every part is noted."""

    def __init__(self, patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.did: list[Any] = []
        self.threads: list[Any] = []
        self.settings: CopierSettings | None = given(directory=str(tmp_path / "copies"), rules={
            "every": 3, "keep": 4, "most": 5, "seconds": 0.25})
        self.lines: list[Any] = []
        process = self

        class Mine(_Sources):
            def __init__(self, copier: Any, given: Any) -> None:
                process.copier, process.given, process.sources = copier, given, self
                self.part = None

            def renew(self, order: Any) -> None:
                process.did.append(("told", order.key))

            def journal(self, *given: Any) -> Any:
                assert given[2] == "say"
                process.did.append(("journal", *given[:2]))
                return SimpleNamespace(start=lambda: process.did.append("starts"),
                                       close=lambda seconds: process.did.append(("journal ends", seconds)))

        patch.setattr(module, "_Sources", Mine)
        patch.setattr(module, "begun", lambda model: self.settings)
        patch.setattr(module, "Lines", lambda events: Say("say"))
        patch.setattr(module, "Streams", lambda directory: SimpleNamespace(held=("streams", directory)))
        patch.setattr(module.threading, "Thread", self._thread)
        patch.setattr(module.os, "_exit", self._exit)
        patch.setattr(Copier, "close", lambda copier: self.did.append("copier ends"))

    def _thread(self, target: Any, args: Any, daemon: bool, name: str) -> Any:
        assert daemon is True
        self.threads.append((target, args, name))
        return SimpleNamespace(start=lambda: self.did.append(name), join=lambda seconds: self.did.append(
            (f"{name} ends", seconds, args[-1].is_set())))

    @staticmethod
    def _exit(status: int) -> None:
        raise Exit(status)

    def run(self, patch: pytest.MonkeyPatch, *lines: Any, **settings: Any) -> list[Any]:
        assert self.settings is not None
        self.settings = given(**json.loads(self.settings.encoded()) | settings)
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        patch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        with pytest.raises(Exit) as ended:
            module.main()
        assert ended.value.args == (0,)
        return self.did


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Process:
    return Process(monkeypatch, tmp_path)


def test_a_node_that_ended_at_once_needs_nothing(process: Process) -> None:
    process.settings = None
    assert module.main() == 0 and process.did == []


def test_copies_alone(process: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    did = process.run(monkeypatch, {"key": "a"}, {"key": "b"})
    assert did == [("told", "a"), ("told", "b"), "copier ends"] and process.sources.part is None
    assert process.copier._rules == Rules(3, 4, 5, 0.25) and process.copier._directory == tmp_path / "copies"
    assert process.copier._say == "say" and process.given.sources == (("h", 1),)


def test_journals_begin_and_end_with_it(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    did = process.run(monkeypatch, journal=[[["h", 1], ["h", 9]], [["i", 2], ["i", 8]]])
    assert did == [("journal", ("h", 1), ("h", 9)), ("journal", ("i", 2), ("i", 8)), "starts", "starts", "copier ends",
                   ("journal ends", END_SECONDS), ("journal ends", END_SECONDS)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_member_with_data_keeps_copies_of_its_own(
    process: Process, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Which the holders of parity encode."""
    did = process.run(monkeypatch, parity={**MEMBER, "number": number})
    assert did == ["copier ends"] and process.given.sources == (("h", 1), tuple(MEMBER["members"][number]))
    assert process.sources.part is None


def test_a_holder_of_parity_goes_round(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    did = process.run(monkeypatch, parity=MEMBER)
    assert did == ["flowcheck rounds", "copier ends"] and process.given.sources == (("h", 1),)
    assert process.sources.part == Part((2, 1), 2, ("h:1", "i:2"))
    [(target, (directory, rules, copier, sources, say, ending), _)] = process.threads
    assert (target, directory, rules, copier, sources, say) == (
        module._go_round, Path("/parity"), Rules(3, 4, 5, 0.25), process.copier, process.sources, "say")
    assert ending.is_set()


REGISTRY = SAID | {"kept": "/copies/placement.json"}


def test_whom_the_registry_tells(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    did = process.run(monkeypatch, registry=REGISTRY)
    assert did == ["flowcheck registry", "copier ends", ("flowcheck registry ends", END_SECONDS, True)]
    [(target, begun, _)] = process.threads
    assert target is module.sit
    registry, held, streams, placed, node, keys, say, _ = begun
    assert (registry.kept, streams, say) == (Path("/copies/placement.json"), list, "say")
    assert (held, placed, node) == (process.copier.held, process.sources.placed, process.sources.node)
    assert keys == process.sources.keys


def test_parity_that_the_registry_places(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may have to keep a stream goes round, and does nothing until it is said what."""
    did = process.run(monkeypatch, registry=REGISTRY, parity={**MEMBER, "members": [], "number": None, "data": []})
    assert did[:2] == ["flowcheck rounds", "flowcheck registry"] and process.sources.part is None
    assert process.threads[1][1][2] == ("streams", Path("/parity"))
