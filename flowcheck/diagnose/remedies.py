"""What to do about packets that carry RoCEv2 and cannot be read: one sentence per cause, for replay and learning.

    remedy_of({"truncated": 1223, "not_roce": 4110}) -> "the packets are cut: ..."     of what most packets suffer from

Causes are the words of the report's `drops` (docs/reference/report.md). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["remedy_of", "worst"]

_REMEDIES = {
    "truncated": "the packets are cut: raise the snap length (tcpdump -s 0), or the mirror's own truncation",
    "icrc": "their ICRC is wrong: they were changed after they were sent, or the capture did not keep it. Mirror them "
    "unchanged",
    "encapsulated: encrypted": "mirror after the decryption, or switch it off for the mirrored ports",
    "encapsulated": "mirror with SPAN, or with ERSPAN or GRE that carry whole Ethernet frames",
}


_INNOCENT = ("not_roce", "control", "other_roce")  # packets that nothing is wrong with


def worst(drops: Mapping[str, int]) -> str:
    """The cause that most packets of `drops` have, "" if nothing is wrong with any of them."""
    return max((cause for cause in drops if cause not in _INNOCENT), key=drops.__getitem__, default="")


def remedy_of(drops: Mapping[str, int]) -> str:
    """For the cause that most packets of `drops` have, or "" if that is not one of those above."""
    return next((text for cause, text in _REMEDIES.items() if worst(drops).startswith(cause)), "")
