"""Which optimizers' steps cannot be made again from base and log, by name, each with its reason and a remedy.

    error = refused(optimizer, parameters, at_once)     a UserError to raise, or None
    why = coupled(optimizer)                            its base has to be of one step; "": it need not

A table has what was read or run of optimizers that have names, and rules have what an object shows of itself. What
shows only in a step is found by hidden.py, and what shows nowhere by the checksums of the records: a coupling that no
rule knows, a counter in a module or behind a C call.

torch and the standard library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flowcheck.errors import UserError
from flowcheck.trainer.describe.optimizers import members, parameters_of
from flowcheck.trainer.describe.parts import local, stepped

__all__ = ["coupled", "refused"]


@dataclass(frozen=True)
class _Row:
    """module, names: of a class among those that the optimizer's is made of; "": any module. when: is it so of this
    object. why, remedy: for the message. at_once: a base of one step is a remedy."""

    module: str
    names: tuple[str, ...]
    when: Callable[[Any], bool]
    why: str
    remedy: str = ""
    at_once: bool = False


def _always(optimizer: Any) -> bool:
    return True


def _several(optimizer: Any) -> bool:
    return any(len(group["params"]) > 1 for group in optimizer.param_groups)


def _has(name: str) -> Callable[[Any], bool]:
    """Is there something in that attribute?"""
    return lambda optimizer: bool(getattr(optimizer, name, None))


def _bitsandbytes(name: str, usual: float) -> Callable[[Any], bool]:
    """Is an argument of bitsandbytes another one, for all parameters or for some?"""
    def other(optimizer: Any) -> bool:
        said = [getattr(getattr(optimizer, "args", None), name, usual)]
        manager = getattr(optimizer, "mng", None)
        for configs in (getattr(manager, "pid2config", None), getattr(manager, "index2config", None)):
            said += [config.get(name, usual) for config in (configs or {}).values()]
        return any(one != usual for one in said)
    return other


def _unsteady(optimizer: Any) -> bool:
    """Does torch's kernel write other bits from call to call? Tried with torch 2.13: in 16 bits with momentum, on a
    CPU, some of a momentum's last elements are others each time."""
    return any(
        group.get("fused") and group.get("momentum") and any(
            local(one).is_cpu and one.element_size() == 2 for one in group["params"])
        for group in optimizer.param_groups
    )


ADAMS = ("FusedAdam",)
TABLE = (
    _Row("torch.optim", ("LBFGS",), _always, "evaluates the model again within a step, as often as it likes",
         "an optimizer that takes the gradients that are there"),
    _Row("torch.optim", ("SGD",), _unsteady,
         "is fused and has momentum and 16-bit parameters on a CPU, with which torch gives other bits from run to run",
         "fused=False"),
    _Row("", ("SAM", "GSAM"), _always, "takes a second gradient within a step", "the optimizer inside it"),
    _Row("torch.distributed.optim", ("ZeroRedundancyOptimizer",), _always, "keeps its state in an optimizer inside it",
         "that one: its attribute `optim`"),
    _Row("deepspeed.ops.adam", ("DeepSpeedCPUAdam",), _always,
         "multiplies running products of its betas in C++, which a new one computes otherwise (pow)",
         "torch.optim.AdamW(fused=True) on the CPU, or no offload"),
    _Row("deepspeed.ops.adam", ADAMS, _several, "counts the steps of a group on its last parameter alone",
         "a base of all parameters at once; or a group for each parameter, as ZeRO makes them", at_once=True),
    _Row("deepspeed.runtime.zero.muon", ("Muon", "MuonWithAuxAdam", "SingleDeviceMuon", "SingleDeviceMuonWithAuxAdam"),
         _always, "has its momentum advanced by DeepSpeed, before the step", "torch.optim.Muon"),
    _Row("transformer_engine", ADAMS, _has("_scales"), "keeps scales of its state outside of optimizer.state",
         "state and masters in float32 or bfloat16"),
    _Row("transformer_engine", ADAMS, _has("use_decoupled_grad"), "reads `decoupled_grad` instead of `grad`",
         "use_decoupled_grad=False (Megatron-Core: no precision-aware optimizer)"),
    _Row("transformer_engine", ADAMS, _has("capturable"), "counts by the overflow of the step before, in an attribute",
         "capturable=False"),
    _Row("apex", ADAMS, _has("capturable"), "counts by the overflow of the step before, in an attribute",
         "capturable=False"),
    _Row("apex", ADAMS, _has("master_weights"), "keeps its masters outside of its groups and of optimizer.state",
         "master_weights=False"),
    _Row("apex", ("FusedLAMB", "FusedMixedPrecisionLamb"), _always, "divides by a norm over all parameters",
         "a base of all parameters at once", at_once=True),
    _Row("prodigyopt", ("Prodigy",), _always, "computes one factor from all parameters",
         "a base of all parameters at once", at_once=True),
    _Row("dadaptation", ("DAdaptAdam", "DAdaptSGD", "DAdaptAdaGrad", "DAdaptAdan", "DAdaptLion"), _always,
         "computes one factor from all parameters", "a base of all parameters at once", at_once=True),
    _Row("bitsandbytes", ("Optimizer8bit",), _bitsandbytes("max_unorm", 0.0),
         "has max_unorm, whose norm is summed in an order that differs from run to run", "max_unorm=0"),
    _Row("bitsandbytes", ("Optimizer8bit",), _bitsandbytes("percentile_clipping", 100),
         "has percentile_clipping, whose norm is summed in an order that differs from run to run",
         "percentile_clipping=100"),
    _Row("emerging_optimizers", ("PSGDPro", "PSGD"), _always, "draws random numbers within a step",
         "SOAP or Muon of that package"),
    _Row("", ("Kron", "PSGD"), _always, "draws random numbers within a step", "an optimizer that draws none"),
    _Row("megatron.core", ("HybridDeviceOptimizer",), _always,
         "copies gradients to optimizers inside it, which was not tried", "no offload of the optimizer"),
)


def refused(optimizer: Any, parameters: Mapping[str, torch.Tensor], at_once: bool = False) -> UserError | None:
    """parameters: those of the optimizer that have names. at_once: bases are of one step."""
    if not isinstance(optimizer, torch.optim.Optimizer) or len(each := members(optimizer)) == 1:
        return _refused(optimizer, parameters, at_once)
    for one in each:
        if coupled(one):
            return UserError(f"{type(one).__name__} {coupled(one)}: beside other optimizers its steps cannot be made"
                             " again from a log", where="optimizer", remedy="the one optimizer of the job")
        held = set(map(id, parameters_of(one)))
        mine = {name: parameter for name, parameter in parameters.items() if id(parameter) in held}
        if (error := _refused(one, mine, at_once)) is not None:
            return error
    return _unnamed(optimizer, parameters, lambda what, remedy: UserError(what, where="optimizer", remedy=remedy))


def _refused(optimizer: Any, parameters: Mapping[str, torch.Tensor], at_once: bool) -> UserError | None:
    name = type(optimizer).__name__

    def error(what: str, remedy: str) -> UserError:
        return UserError(f"{name} {what}: its steps cannot be made again from a log", where="optimizer", remedy=remedy)

    if not isinstance(optimizer, torch.optim.Optimizer):
        return error("is not a torch.optim.Optimizer", "the optimizer inside it")
    for row in TABLE:
        if _is(optimizer, row) and not (row.at_once and at_once) and row.when(optimizer):
            return error(row.why, row.remedy)
    if _needs_closure(optimizer):
        return error("needs a closure, and may call it more than once",
                     "an optimizer that takes the gradients that are there")
    if found := _rounding(optimizer):
        return error(f"has {found}: it rounds by random numbers", f"{found}=False")
    if not at_once and (why := _other_state(optimizer)):
        return error(why, "a base of all parameters at once")
    return _unnamed(optimizer, parameters, error)


def coupled(optimizer: torch.optim.Optimizer) -> str:
    """Why all parameters of a base have to be of one step."""
    for one in members(optimizer):
        for row in TABLE:
            if row.at_once and _is(one, row) and row.when(one):
                return row.why
    return _other_state(optimizer)


def _is(optimizer: Any, row: _Row) -> bool:
    return any(base.__name__ in row.names and (not row.module or f"{base.__module__}.".startswith(f"{row.module}."))
               for base in type(optimizer).__mro__)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    try:
        arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    except (TypeError, ValueError):  # it is not written in Python
        return False
    return any(one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in arguments)


def _rounding(optimizer: torch.optim.Optimizer) -> str:
    """The name of an attribute or option that says so; "": none does."""
    for held in (vars(optimizer), *optimizer.param_groups):
        for name, value in held.items():
            if isinstance(name, str) and "stochastic" in name and value is True:
                return name
    return ""


def _other_state(optimizer: torch.optim.Optimizer) -> str:
    held = set(map(id, parameters_of(optimizer)))
    state: Mapping[Any, Any] = optimizer.state
    other = next((key for key in state if id(key) not in held), None)
    return f"keeps state of all parameters together, under {other!r}" if isinstance(other, str) else (
        "keeps state of what is not one of its parameters" if other is not None else "")


def _unnamed(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], error: Callable[[str, str], UserError]
) -> UserError | None:
    named = [id(one) for one in parameters.values()]
    held = {id(one): one for one in parameters_of(optimizer)}
    for one in held.values():
        if stepped(one) and id(one) not in named:
            return error(f"has a parameter of shape {tuple(one.shape)} that has no name", "the parameters of the model")
    for name, one in parameters.items():
        if id(one) not in held:
            return error(f"has no parameter {name!r}", "the optimizer of that model")
    if len(set(named)) != len(named):
        return error("has a parameter of two names", "one name for each parameter")
    return None
