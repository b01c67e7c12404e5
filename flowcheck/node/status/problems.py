"""What is wrong at the moment apart from what groups say of themselves: for the box at the top of the status page.

    wrong = Wrong();  wrong.hear(event, fields, now)      of every event
    wrong.document(now)                                   [{"what", "name", "since", "text"}], the newest last

A checkpoint that cannot be written is wrong until one of its group is, a store until it has a version, a registry until
it answers, files of tokens and certificates until they are read, a trainer that does not know its job until the node
follows that. A problem that says what it is `about` is there until `solved` says the same. Other problems have no event
that ends them: each is there for SECONDS after it was said last, and so is a trainer that does not know its job, for it
may have gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

__all__ = ["MOST", "SECONDS", "Wrong"]

MOST = 32
MOST_TEXT = 600
SECONDS = 600.0
LAPSE = ("problem", "watching")  # who watches may have gone
_ENDS = {"written": "unwritten", "gathered": "unwritten", "stored": "unstored", "registered": "unregistered",
         "attached": "watching"}
_Key = tuple[str, str, str]  # what, the group's name, and what it is about


class Wrong:
    """Not safe for threads."""

    def __init__(self) -> None:
        self._held: OrderedDict[_Key, dict[str, Any]] = OrderedDict()  # that was said last comes last

    def hear(self, event: str, fields: Mapping[str, Any], now: float) -> None:
        name, about = fields.get("name") or "", str(fields.get("about") or fields.get("process") or "")
        if event in _ENDS:
            self._held.pop((_ENDS[event], name, ""), None)
            self._held.pop((_ENDS[event], "", ""), None)  # of all groups
            return
        if event in ("solved", "access"):
            self._held.pop(("problem", name, about or event), None)
            return
        what = "unwritten" if event == "problem" and fields.get("step") is not None else event
        if what not in ("problem", *_ENDS.values()):
            return
        key = what, name, about if what == "problem" else ""
        one = self._held.setdefault(key, {"what": what, "name": name, "since": now})
        one["text"], one["last"] = " ".join(str(fields["why"]).split())[:MOST_TEXT], now
        self._held.move_to_end(key)
        while len(self._held) > MOST:
            self._held.popitem(last=False)

    def document(self, now: float) -> list[dict[str, Any]]:
        """Plain data that nobody changes any more."""
        for key in [(what, name, about) for (what, name, about), one in self._held.items()
                    if what in LAPSE and not about and now - one["last"] > SECONDS]:
            del self._held[key]
        return [{key: value for key, value in one.items() if key != "last"} for one in self._held.values()]
