"""What torch's own functions do to gradients between reduction and step, heard where a script calls them.

    stop = clipping_heard(before, after)             before(); torch clips; after(parameters, most, norm)
    stop = method_heard(scaler, "unscale_", ...)     the same for a method of one object

`torch.nn.utils.clip_grad_norm_` finds what multiplies gradients in its module whenever it is called, so it is heard
there, however a script has imported it. The function is of the whole process: it is put back when the last one who
listens stops. What listens never raises into the script.

torch and the standard library; the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

__all__ = ["clipping_heard", "method_heard"]

_log = logging.getLogger("flowcheck")
_NAME = "_clip_grads_with_norm_"
_PLACES = ((torch.nn.utils.clip_grad, _NAME), (torch.nn.utils, "clip_grads_with_norm_"))
_Clipped = Callable[[list[torch.Tensor], float, torch.Tensor], None]
_listeners: list[tuple[Callable[[], None], _Clipped]] = []
_originals: list[Any] = []  # of _PLACES, while anybody listens


def clipping_heard(before: Callable[[], None], after: _Clipped) -> Callable[[], None] | None:
    """Returns how to stop, which may be called twice; None: this torch has no such function."""
    if not all(hasattr(module, name) for module, name in _PLACES):
        return None
    listener = (before, after)
    if not _listeners:
        _originals[:] = [getattr(module, name) for module, name in _PLACES]
        for module, name in _PLACES:
            setattr(module, name, _heard(getattr(module, name)))
    _listeners.append(listener)

    def stop() -> None:
        if listener not in _listeners:
            return
        _listeners.remove(listener)
        if not _listeners:
            for (module, name), original in zip(_PLACES, _originals, strict=True):
                setattr(module, name, original)

    return stop


def _heard(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, *more: Any, **named: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for before, _ in tuple(_listeners):
            _safely(before)
        result = original(given, max_norm, total_norm, *more, **named)
        for _, after in tuple(_listeners):
            _safely(after, given, float(max_norm), total_norm)
        return result

    return clip


def method_heard(
    owner: Any, name: str, before: Callable[..., None], after: Callable[..., None]
) -> Callable[[], None]:
    """Hear a method of one object, with its arguments. Returns how to stop."""
    called = getattr(owner, name)

    @wraps(called)
    def method(*arguments: Any, **named: Any) -> Any:
        _safely(before, *arguments, **named)
        result = called(*arguments, **named)
        _safely(after, *arguments, **named)
        return result

    setattr(owner, name, method)

    def stop() -> None:
        if owner.__dict__.get(name) is method:
            delattr(owner, name)

    return stop


def _safely(call: Callable[..., None], *arguments: Any, **named: Any) -> None:
    try:
        call(*arguments, **named)
    except Exception:  # training goes on without us
        _log.exception("flowcheck: what gradients were changed by was not understood")
