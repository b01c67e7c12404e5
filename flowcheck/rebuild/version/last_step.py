"""The weights before the newest step and after it, as long as both versions lie in the replica."""

from __future__ import annotations

import torch

from updater.slot import Slot, SlotState

__all__ = ["LastStep"]


class LastStep:
    """Versions (iteration/measuring.py) of two slots. Nobody pins them: `whole` says whether they were used again."""

    def __init__(self, before: Slot, after: Slot) -> None:
        self._slots = [(slot, slot.step) for slot in (before, after)]
        self.before, self.after = (_weights(slot) for slot in (before, after))

    @classmethod
    def of(cls, slots: list[Slot], step: int) -> LastStep | None:
        """None: one of both versions is not here."""
        found = {slot.step: slot for slot in slots if slot.state in (SlotState.COMPLETE, SlotState.PINNED)}
        return cls(found[step - 1], found[step]) if {step - 1, step} <= found.keys() else None

    @property
    def whole(self) -> bool:
        return all(slot.step == step and slot.state in (SlotState.COMPLETE, SlotState.PINNED)
                   for slot, step in self._slots)


def _weights(slot: Slot) -> dict[str, torch.Tensor]:
    """What the optimizer updates: fp32 masters where there are any."""
    return slot.parameters | slot.masters
