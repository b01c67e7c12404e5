"""What a training script writes of an iteration, and what that says of it.

    with attachment.iteration():            or attachment.step() at its end
        ...                                 forward, backward
        attachment.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

`clip_grad_norm_` is torch's own and keeps the factor that gradients were multiplied with; the loss scale, and whether a
step was skipped, come from the scaler that `attach` was given. So nothing of torch's arithmetic has to be written
again in a script. The training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flowcheck.errors import UserError

__all__ = ["AttachmentState", "Told"]

Given = dict[str, Any] | Callable[[], dict[str, Any]] | None
Parameters = torch.Tensor | Iterable[torch.Tensor]


class AttachmentState(StrEnum):
    """How an attachment is, the best first; of several nodes that of the best. Each is its name in lower case, too:
    `attachment.state == "attached"`. `attachment.why` says why."""

    ATTACHED = "attached"  # versions are made
    ATTACHING = "attaching"  # the node has no versions yet
    WATCHING = "watching"  # the job is not known yet, or again
    LOST = "lost"  # no connection to the node; tried again
    REFUSED = "refused"  # this job cannot be followed; not tried again
    CLOSED = "closed"  # `close` was called


class Told:
    """What the script has said of the iteration that is under way; an Attachment is one."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._scale: float | None = None  # at the last boundary: that of the iteration
        self._clips: list[tuple[torch.Tensor, bool]] = []  # factors, and whether all gradients were multiplied

    def step(
        self, clip: float | None = None, scale: float | None = None, skipped: bool = False, user: Given = None
    ) -> None:
        raise NotImplementedError

    def clip_grad_norm_(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """torch.nn.utils.clip_grad_norm_, and `step` needs no `clip`. Returns the norm before it.

        parameters: all that the optimizer steps, once an iteration: where some of them are left out, or gradients are
        clipped twice, the iteration cannot be followed, and `step` refuses it by name. Raises what torch raises.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
        # As torch forms it, on the gradients' device; nobody waits for it here. Of shards (DTensors) the norm is a sum
        # that ranks have parts of: torch has added these up for its own factor, and does so again.
        whole_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        factor = torch.clamp(max_norm / (whole_norm + 1e-6), max=1.0)
        clipped = {id(parameter) for parameter in given}
        whole = all(parameter.grad is None or id(parameter) in clipped
                    for group in self._optimizer.param_groups for parameter in group["params"])
        self._clips = [*self._clips[-1:], (factor, whole)]
        return norm

    @contextmanager
    def iteration(self, user: Given = None) -> Iterator[None]:
        """The block is one iteration, with its optimizer step, and `step` is called at its end. One that raises is
        none. user: as of `step`, or a function that is called at the end."""
        yield
        self.step(user=user)

    def _said_of_it(
        self, clip: float | None, scale: float | None, skipped: bool,
        heard: tuple[float | None, float | None, bool] | None = None,
    ) -> tuple[float | None, float | None, bool]:
        """(clip, scale, skipped) of the iteration that is over, which is forgotten. heard: what its optimizer said
        itself. Raises UserError where the script contradicts itself, or clipped what no single factor can say."""
        clips, self._clips = self._clips, []
        before, self._scale = self._scale, self._scale_now()
        if heard is not None:
            if clips or clip is not None or scale is not None:
                raise UserError("the optimizer clips and scales itself, and the script says another factor",
                                where="step", remedy="step() without clip= and scale=; no clip_grad_norm_ besides")
            return heard[0], heard[1], heard[2] or skipped
        if clips:
            if len(clips) > 1 or clip is not None:
                raise UserError("gradients were clipped twice, or step() has a clip besides", where="clip_grad_norm_",
                                remedy="clip once an iteration, by attachment.clip_grad_norm_ or with clip=")
            factor, whole = clips[0]
            if not whole:
                raise UserError("not all gradients of the optimizer were clipped", where="clip_grad_norm_",
                                remedy="all parameters of the optimizer in one call")
            clip = float(factor)
        if scale is None and before is not None:
            scale = before  # which GradScaler makes smaller where it found an overflow
            skipped = skipped or (self._scale is not None and self._scale < before)
        return clip, scale, skipped

    def _scale_now(self) -> float | None:
        """Of the scaler; None: there is none, or it does nothing."""
        if self._scaler is None or not getattr(self._scaler, "is_enabled", lambda: True)():
            return None
        get = getattr(self._scaler, "get_scale", None)
        return float(get()) if callable(get) else None
