"""Copies of tensors that lie on their devices, on their way to this machine's memory.

    copies = Copies(tensors, nbytes)        the training thread, in the order of the device's stream; no wait for it
    copies.on_host()                        a thread that sends

Torch and the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["Copies"]


class Copies:
    """Of one message; made on the training thread after the copies were begun. nbytes: of all tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor], nbytes: int) -> None:
        self._tensors, self.nbytes = tensors, nbytes
        self._begun: dict[torch.device, torch.cuda.Event] = {}
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            self._begun[device] = torch.cuda.Event()
            self._begun[device].record(torch.cuda.current_stream(device))

    def on_host(self) -> Mapping[str, torch.Tensor]:
        """Waits until they are there."""
        out = dict(self._tensors)
        for device, begun in self._begun.items():
            side = torch.cuda.Stream(device)  # training's own is many kernels ahead, and would be waited for
            side.wait_event(begun)
            with torch.cuda.stream(side):
                out |= {name: value.cpu() for name, value in self._tensors.items() if value.device == device}
        return out
