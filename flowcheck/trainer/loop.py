"""What a training script writes of an iteration, and what that says of it.

    with attachment.iteration():            or attachment.step() at its end
        ...                                 forward, backward
        attachment.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

The factor that gradients were multiplied with is heard where torch clips, whoever calls it (describe/hearing.py). The
loss scale is heard where a GradScaler unscales this optimizer's gradients, or from the optimizer, which a scaler lets
unscale them itself (fused). Whether a step was skipped is heard from the optimizer: one scaler may serve
several, and makes its scale smaller whichever of them overflowed. So nothing of torch's arithmetic has to be written
again in a script. The training thread.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from flowcheck.errors import UserError
from flowcheck.trainer.changes import Changes
from flowcheck.trainer.describe.hearing import clipping_heard, method_heard, registrations_heard, unscaling_heard

__all__ = ["AttachmentState", "IterationInputs", "Over"]

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


class Over(NamedTuple):
    """An iteration that is over. kept: what this rank gives of itself, made when it is first asked for."""

    number: int
    clip: float | None
    scale: float | None
    skipped: bool
    checked: bool  # checksums are due
    kept: Callable[[], bytes | None]
    rank: int  # of the whole job
    stepped: bool  # the optimizer did, or the script or its scaler said that it did not
    renewed: str  # what was changed besides, "": nothing; no version follows from the one before


class IterationInputs:
    """What the script has said of the iteration that is under way; an Attachment is one."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._scale: float | None = None  # at the last boundary: that of the iteration
        self._clips: list[tuple[torch.Tensor, bool]] = []  # factors, and whether all gradients were multiplied
        self._measured: list[tuple[torch.Tensor, bool]] = []  # the same of calls that only want the norm: one of all
        self._unscaled: torch.Tensor | float | None = None  # the scale by which gradients were divided
        self._found_inf: torch.Tensor | None = None  # by which the optimizer itself skips its step
        self._registered = False  # something was, in a module of the model
        self._scaled_clip = False  # gradients were clipped before they were unscaled
        self._changes: Changes | None = None  # None: nothing is looked at
        self._hears_clipping = self._hears_scaler = False
        self._stops = ExitStack()  # what has to be called so that nothing is heard any more

    def step(
        self, clip: float | None = None, scale: float | None = None, skipped: bool = False, user: Given = None
    ) -> None:
        raise NotImplementedError

    def clip_grad_norm_(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """torch.nn.utils.clip_grad_norm_, which serves as well: `step` needs no `clip`. Returns the norm before it.

        parameters: all that the optimizer steps, once an iteration: where some of them are left out, or gradients are
        clipped twice, the iteration cannot be followed, and `step` refuses it by name. Raises what torch raises.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not self._hears_clipping:
            self._compare()
        norm = torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
        if not self._hears_clipping:
            self._clipped(given, float(max_norm), norm)
        return norm

    @contextmanager
    def iteration(self, user: Given = None) -> Iterator[None]:
        """The block is one iteration, with its optimizer step, and `step` is called at its end. One that raises is
        none. user: as of `step`, or a function that is called at the end."""
        yield
        self.step(user=user)

    # -- what is heard --

    def _listen(self, changes: Changes, modules: Iterable[torch.nn.Module]) -> None:
        """From now on, until `_deafen`. modules: of the model, with all that is in it. Ranks of one job have to stop at
        the same iteration: where a norm is a sum that they have parts of, hearing its factor adds them up."""
        self._changes = changes
        if (stop := clipping_heard(self._compare, self._clipped)) is not None:
            self._stops.callback(stop)
            self._hears_clipping = True
        inside = weakref.WeakSet(modules)
        self._stops.callback(registrations_heard(
            lambda module, _: self._expect_entries() if module in inside else None))
        self._stops.callback(unscaling_heard(self._unscaling, self._unscale))
        scaler = self._scaler
        if isinstance(scaler, torch.amp.GradScaler):
            self._hears_scaler = True
        elif callable(getattr(scaler, "unscale_", None)):
            self._stops.callback(method_heard(scaler, "unscale_", partial(self._unscaling, scaler),
                                              partial(self._unscale, scaler)))
            self._hears_scaler = True

    def _deafen(self) -> None:
        self._changes, self._hears_clipping, self._hears_scaler = None, False, False
        self._stops.close()

    def _compare(self) -> None:
        if self._changes is not None:
            self._changes.compare()

    def _clipped(self, given: Sequence[torch.Tensor], most: float, norm: torch.Tensor) -> None:
        """Gradients were multiplied. Those of another optimizer are no matter of ours."""
        mine = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        whole = len(given) == len(mine) and all(map(is_, given, mine))
        if not whole:
            clipped = set(map(id, given))
            if clipped.isdisjoint(map(id, mine)):
                return
            whole = all(parameter.grad is None or id(parameter) in clipped for parameter in mine)
        # As torch forms it, on the gradients' device; nobody waits for it here. Of shards (DTensors) the norm is a sum
        # that ranks have parts of: torch has added these up for its own factor, and does so again.
        whole_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        factor = torch.clamp(most / (whole_norm + 1e-6), max=1.0)
        if most == math.inf:  # a script that logs the norm: exactly 1, or NaN where the norm is no finite number
            for other, other_whole in self._measured:
                factor, whole = factor * other.to(factor.device), whole and other_whole
            self._measured = [(factor, whole)]
        else:
            self._clips = [*self._clips[-1:], (factor, whole)]
        if self._changes is not None:
            self._changes.altered()

    def _unscaling(self, scaler: Any, optimizer: Any) -> None:
        if optimizer is self._optimizer:
            self._compare()

    def _unscale(self, scaler: Any, optimizer: Any) -> None:
        """A scaler has divided gradients by its scale, whether `attach` was given it or not."""
        if optimizer is not self._optimizer or not scaler.is_enabled():
            return
        now = getattr(scaler, "_scale", None)
        self._unscaled = now.clone() if isinstance(now, torch.Tensor) else self._scale_now()
        self._scaled_clip = bool(self._clips)
        if self._changes is not None:
            self._changes.altered()

    def _reduced_again(self) -> None:
        """A backward pass has added to all gradients and reduced the sum: that is on the wire as it is now, with
        whatever they were multiplied with before."""
        self._clips, self._measured, self._unscaled, self._scaled_clip = [], [], None, False

    def _stepping(self) -> None:
        """The optimizer is about to step. A scaler may have left it to unscale gradients, and to skip."""
        self._found_inf = getattr(self._optimizer, "found_inf", None)
        by = getattr(self._optimizer, "grad_scale", None)
        if self._found_inf is not None and by is not None:
            self._unscaled, self._scaled_clip = by, bool(self._clips)

    def _expect_entries(self) -> None:
        """The model may have other entries, or the same under other names."""
        self._registered = True

    # -- the boundary --

    def _said_of_it(
        self, clip: float | None, scale: float | None, skipped: bool,
        heard: tuple[float | None, float | None, bool] | None = None, steps: int | None = None,
    ) -> tuple[float | None, float | None, bool]:
        """(clip, scale, skipped) of the iteration that is over, which is forgotten. heard: what its optimizer said
        itself. steps: that it made since the last boundary, None: nobody knows. Raises UserError where the script
        contradicts itself, or clipped what no single factor can say."""
        measured, self._measured = self._measured, []
        clips, self._clips = [one for one in measured if float(one[0]) != 1.0] or self._clips, []
        unscaled, self._unscaled = self._unscaled, None
        found_inf, self._found_inf = self._found_inf, None
        early, self._scaled_clip = self._scaled_clip, False
        before, self._scale = self._scale, self._scale_now()
        if heard is not None:
            if clips or clip is not None or scale is not None:
                raise UserError("the optimizer clips and scales itself, and the script says another factor",
                                where="step", remedy="step() without clip= and scale=; no clip_grad_norm_ besides")
            return heard[0], heard[1], heard[2] or skipped
        if early:
            raise UserError("gradients were clipped before they were unscaled, which rounds otherwise",
                            where="clip_grad_norm_", remedy="scaler.unscale_(optimizer) before clipping")
        if found_inf is not None:
            skipped = bool(found_inf)
        elif steps is None:
            skipped = skipped or (scale is None and before is not None and self._scale is not None
                                  and self._scale < before)
        elif skipped and steps:
            raise UserError("optimizer.step() was called in an iteration that the script calls skipped", where="step",
                            remedy="skipped=True only where the optimizer did nothing")
        else:
            skipped = steps == 0
        if clips and skipped:  # no gradient was used, whatever it was multiplied with, or is said to have been
            clip = float(clips[0][0]) if clip is None else clip
        elif clips:
            clip = _one_factor(clips, clip)
        if scale is None:
            if unscaled is not None:
                scale = float(unscaled)
            elif steps is None or not self._hears_scaler or skipped:
                scale = before  # which GradScaler makes smaller where it found an overflow
        return clip, scale, skipped

    def _scale_now(self) -> float | None:
        """Of the scaler; None: the script has none, or it does nothing."""
        if self._scaler is None or not getattr(self._scaler, "is_enabled", lambda: True)():
            return None
        get = getattr(self._scaler, "get_scale", None)
        return float(get()) if callable(get) else None


def _one_factor(clips: Sequence[tuple[torch.Tensor, bool]], told: float | None) -> float:
    """Raises UserError where gradients were not all multiplied by one factor, or the script says another one."""
    factor, whole = float(clips[0][0]), clips[0][1]
    if len(clips) > 1 or (told is not None and float(told) != factor and not (told != told and factor != factor)):
        raise UserError("gradients were clipped twice, or step() has a clip besides", where="clip_grad_norm_",
                        remedy="clip once an iteration, by clip_grad_norm_ or with clip=")
    if not whole:
        raise UserError("not all gradients of the optimizer were clipped", where="clip_grad_norm_",
                        remedy="all parameters of the optimizer in one call")
    return factor
