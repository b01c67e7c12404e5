"""What torch's own functions do to gradients between reduction and step, heard where a script calls them.

    stop = clipping_heard(before, after)             before(); torch clips; after(parameters, most, norm)
    stop = unscaling_heard(before, after)            before(scaler, optimizer); it unscales; after(scaler, optimizer)
    stop = method_heard(scaler, "unscale_", ...)     the same for a method of one object
    stop = own_hooks_heard(call)                     call(reducer): a communication hook of torch's own was registered
    stop = registrations_heard(call)                 call(module, name): a parameter, buffer or module that is new

`torch.nn.utils.clip_grad_norm_` finds what multiplies gradients in its module whenever it is called, and a GradScaler
finds `unscale_` in its class. So they are heard there, however a script has imported them. These functions are of the
whole process: they are put back when the last one who listens stops. What listens never raises into the script.

torch and the standard library; the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

__all__ = ["clipping_heard", "method_heard", "own_hooks_heard", "registrations_heard", "unscaling_heard"]

_log = logging.getLogger("flowcheck")
_CLIPPING = ((torch.nn.utils.clip_grad, "_clip_grads_with_norm_"), (torch.nn.utils, "clip_grads_with_norm_"))
_UNSCALING = ((torch.amp.GradScaler, "unscale_"), (ShardedGradScaler, "unscale_"))
_OWN_HOOKS = ((torch.distributed, "_register_builtin_comm_hook"),)
_Given = ParamSpec("_Given")
_Listener = tuple[Callable[..., None], Callable[..., None]]
_listeners: dict[Any, list[_Listener]] = {_CLIPPING: [], _UNSCALING: [], _OWN_HOOKS: []}
_originals: dict[Any, list[Any]] = {}  # of such places, while anybody listens


def clipping_heard(before: Callable[[], None], after: Callable[..., None]) -> Callable[[], None] | None:
    """after(parameters, largest norm, norm). Returns how to stop, which may be called twice; None: this torch has no
    such function."""

    def heard(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, *more: Any, **named: Any) -> Any:
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            _tell(_CLIPPING, 0)
            result = original(given, max_norm, total_norm, *more, **named)
            _tell(_CLIPPING, 1, given, float(max_norm), total_norm)
            return result

        return clip

    return _listen(_CLIPPING, heard, (before, after))


def unscaling_heard(before: Callable[[Any, Any], None], after: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Of every GradScaler of torch. Returns how to stop, which may be called twice."""

    def heard(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def unscale(scaler: Any, optimizer: Any) -> Any:
            _tell(_UNSCALING, 0, scaler, optimizer)
            result = original(scaler, optimizer)
            _tell(_UNSCALING, 1, scaler, optimizer)
            return result

        return unscale

    stop = _listen(_UNSCALING, heard, (before, after))
    assert stop is not None  # torch has had both classes since long
    return stop


def own_hooks_heard(call: Callable[[Any], None]) -> Callable[[], None] | None:
    """Of every DistributedDataParallel object. Returns how to stop, which may be called twice; None: this torch has no
    such function."""

    def heard(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def register(reducer: Any, *more: object, **named: object) -> Any:
            result = original(reducer, *more, **named)
            _tell(_OWN_HOOKS, 1, reducer)
            return result

        return register

    return _listen(_OWN_HOOKS, heard, (call, call))


def _listen(places: Any, heard: Callable[[Any], Any], listener: _Listener) -> Callable[[], None] | None:
    if not all(hasattr(owner, name) for owner, name in places):
        return None
    listeners = _listeners[places]
    if not listeners:
        _originals[places] = [getattr(owner, name) for owner, name in places]
        for (owner, name), original in zip(places, _originals[places], strict=True):
            setattr(owner, name, heard(original))
    listeners.append(listener)

    def stop() -> None:
        if listener not in listeners:
            return
        listeners.remove(listener)
        if not listeners:
            for (owner, name), original in zip(places, _originals.pop(places), strict=True):
                setattr(owner, name, original)

    return stop


def _tell(places: Any, which: int, *arguments: Any) -> None:
    for listener in tuple(_listeners[places]):
        _safely(listener[which], *arguments)


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


def registrations_heard(call: Callable[[torch.nn.Module, str], None]) -> Callable[[], None]:
    """Of every module of this process; what torch calls for this costs nothing where nothing is registered. A buffer
    that gets another tensor is not a new one. Returns how to stop."""

    def came(module: torch.nn.Module, name: str, _: object) -> None:
        _safely(call, module, name)

    def buffer_came(module: torch.nn.Module, name: str, _: object) -> None:
        if name not in module._buffers:
            _safely(call, module, name)

    hooks = torch.nn.modules.module
    handles = [hooks.register_module_parameter_registration_hook(came),
               hooks.register_module_module_registration_hook(came),
               hooks.register_module_buffer_registration_hook(buffer_came)]

    def stop() -> None:
        for handle in handles:
            handle.remove()

    return stop


def _safely(call: Callable[_Given, None], *arguments: _Given.args, **named: _Given.kwargs) -> None:
    try:
        call(*arguments, **named)
    except Exception:  # training goes on without us
        _log.exception("flowcheck: what gradients were changed by was not understood")
