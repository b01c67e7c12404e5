"""What the updater refuses, and why. It may not import flowcheck; flowcheck maps these for the terminal.

    UpdaterError (ValueError)
    |- LayoutError      buckets do not cover the optimized tensors exactly once, or data does not fit
    |- OptimizerError   name or option that is unknown, out of range, or has another rounding mode
    `- ReplicaError     a call out of order on the slots of the replica, or tensors that do not fit it
       |- NoFreeSlot    every other slot is pinned by a reader: the update has to wait, nothing is lost
       `- NoRoom        there is not so much memory for its file
"""

from __future__ import annotations

__all__ = ["LayoutError", "NoFreeSlot", "NoRoom", "OptimizerError", "ReplicaError", "UpdaterError"]


class UpdaterError(ValueError):
    """Base: the message says what, where (tensor, element range, option, slot) and what is allowed."""


class LayoutError(UpdaterError):
    pass


class OptimizerError(UpdaterError):
    pass


class ReplicaError(UpdaterError):
    pass


class NoFreeSlot(ReplicaError):
    pass


class NoRoom(ReplicaError):
    pass
