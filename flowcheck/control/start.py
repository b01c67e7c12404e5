"""Which start of a job's trainers a version belongs to, and which of two starts is the later one.

    instance = str(Start(began, token, number, first))     what every rank of one start says of itself (Hello.instance)
    Start.of(instance)                                     None: of trainers that do not say when they began
    text = start_text(digest, instance)                    what a replica's file and a manifest have as `start`
    line_of(text)                                          its line, "": not known
    order(key)                                             versions of a run sorted by this: what lives comes last
    ranks(versions)                                        sorts those of several runs: what lives comes last

A run that is started again from an older version leaves a line of versions that no trainer goes on with. Its steps may
be higher than those of the line that lives, and both may say one epoch. So the line of the later start comes first, and
steps are compared within a line alone. Where files say no line, epochs alone tell versions apart. The line is in the
trainers' own words, so all nodes, groups and files name it alike. Standard library. Any thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["LINE", "Key", "Start", "line_in", "line_of", "naming", "order", "ranks", "start_text"]

_START = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{4})-([0-9a-f]{1,12})")
LINE = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}-[0-9a-f]{4}")
#: Epoch, step and, where it is known, line of a version.
Key = tuple[int, int] | tuple[int, int, str]


@dataclass(frozen=True)
class Start:
    """One start of a job's trainers, the same on all ranks and in all groups.

    began: nanoseconds since 1970. token: 16 hexadecimal digits. number: of the attachments that a group has had since
    torch.distributed was started. first: number of the iteration that it goes on with.
    """

    began: int
    token: str
    number: int
    first: int

    def __str__(self) -> str:
        return f"{self.line}-{self.first:x}"

    @property
    def line(self) -> str:
        """Sorted as text, the later start comes last."""
        return f"{self.began & (1 << 64) - 1:016x}-{self.token}-{min(self.number, 0xffff):04x}"

    @classmethod
    def of(cls, text: str) -> Start | None:
        found = _START.fullmatch(text)
        return cls(int(found[1], 16), found[2], int(found[3], 16), int(found[4], 16)) if found else None


def start_text(digest: str, instance: str) -> str:
    """digest: of one group's start, "": it has none."""
    said = Start.of(instance)
    return f"{said.line} {digest}" if said is not None and digest else digest


def line_of(start: str) -> str:
    line = start.partition(" ")[0]
    return line if LINE.fullmatch(line) else ""


def line_in(key: Key) -> str:
    return key[2] if len(key) == 3 else ""


def order(key: Key) -> tuple[int, str, int]:
    return key[0], line_in(key), key[1]


def naming(held: Sequence[Iterable[Key]]) -> Callable[[Key], Key]:
    """One name for each version, whoever has it. held: of each rank.

    Nodes number a start alike only where they hear each other. So of a line the newest epoch is meant that anybody
    says, and none that is older than that of a line which began before it: a node that knows of no other start has the
    epoch that trainers say, while another one counts. A node of an older release says no line: what it has is of the
    line that is known of its epoch, as long as nobody sees two there.
    """
    epochs, lines, several = dict[str, int](), dict[int, str](), set[int]()
    for keys in held:
        seen: dict[int, str] = {}
        for key in keys:
            epoch, line = key[0], line_in(key)
            epochs[line] = max(epochs.get(line, 0), epoch)
            if seen.setdefault(epoch, line) != line or (line and lines.setdefault(epoch, line) != line):
                several.add(epoch)

    newest = 0
    for line in sorted(filter(None, epochs)):
        newest = epochs[line] = max(newest, epochs[line])

    def name(key: Key) -> Key:
        line = line_in(key) or ("" if key[0] in several else lines.get(key[0], ""))
        return (epochs.get(line, key[0]), key[1], line) if line else key

    return name


def ranks(versions: Iterable[tuple[str, Key]]) -> Callable[[str, Key], tuple[str, tuple[int, str, int]]]:
    """What sorts versions of several runs, each a run's id and a key: the run that was started last comes last, and of
    a run the line that lives. Runs that say no line come before all others, by epoch and step."""
    keys: dict[str, list[Key]] = {}
    for run_id, key in versions:
        keys.setdefault(run_id, []).append(key)
    names = {run_id: naming([held]) for run_id, held in keys.items()}
    latest = {run_id: max(map(line_in, held)) for run_id, held in keys.items()}
    return lambda run_id, key: (latest[run_id], order(names[run_id](key)))
