"""What cannot be redone is refused by name, with a reason and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowcheck.errors import UserError
from flowcheck.trainer.log.hidden import Hidden
from flowcheck.trainer.log.refusals import coupled, refused

from .optimizers import MAKE, EightBit, Hiding, Lion, Muon, Normed, Rounding
from .recorded import Job


def one(count: int = 2) -> dict[str, torch.Tensor]:
    return {f"p{at}": torch.nn.Parameter(torch.ones(4)) for at in range(count)}


def called(name: str, module: str, base: type = Lion, **attributes: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer of that class, of a package that is not here."""
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = type(name, (base,), {"__module__": module})(parameters)
        vars(optimizer).update(attributes)
        return optimizer
    return make


class Closing(Lion):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        super().step(closure)


BNB = SimpleNamespace(max_unorm=0.0, percentile_clipping=100)
REFUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lbfgs": torch.optim.LBFGS,
    "closure": Closing,
    "sam": called("SAM", "sam"),
    "zero": called("ZeroRedundancyOptimizer", "torch.distributed.optim.zero_redundancy_optimizer"),
    "cpu adam": called("DeepSpeedCPUAdam", "deepspeed.ops.adam.cpu_adam"),
    "a class made of cpu adam": called("Mine", "mine", called("DeepSpeedCPUAdam", "deepspeed.ops.adam.cpu_adam")([
        torch.nn.Parameter(torch.ones(1))]).__class__),
    "deepspeed fused": called("FusedAdam", "deepspeed.ops.adam.fused_adam"),
    "deepspeed muon": called("MuonWithAuxAdam", "deepspeed.runtime.zero.muon.original_muon"),
    "te scales": called("FusedAdam", "transformer_engine.pytorch.optimizers.fused_adam", _scales={0: {"exp_avg": 1}}),
    "te decoupled": called("FusedAdam", "transformer_engine.pytorch.optimizers.fused_adam", use_decoupled_grad=True),
    "te capturable": called("FusedAdam", "transformer_engine.pytorch.optimizers.fused_adam", capturable=True),
    "apex masters": called("FusedAdam", "apex.optimizers.fused_adam", master_weights=True),
    "apex capturable": called("FusedAdam", "apex.optimizers.fused_adam", capturable=True),
    "apex lamb": called("FusedLAMB", "apex.optimizers.fused_lamb"),
    "prodigy": called("Prodigy", "prodigyopt.prodigy"),
    "d-adaptation": called("DAdaptAdam", "dadaptation.dadapt_adam"),
    "unorm": called("Optimizer8bit", "bitsandbytes.optim.optimizer",
                    args=SimpleNamespace(max_unorm=0.1, percentile_clipping=100)),
    "unorm of some": called("Optimizer8bit", "bitsandbytes.optim.optimizer", args=BNB,
                            mng=SimpleNamespace(pid2config={1: {"max_unorm": 1.0}}, index2config={})),
    "percentiles": called("Optimizer8bit", "bitsandbytes.optim.optimizer",
                          args=SimpleNamespace(max_unorm=0.0, percentile_clipping=5)),
    "psgd": called("Kron", "kron_torch.kron"),
    "emerging psgd": called("PSGDPro", "emerging_optimizers.psgd.psgd"),
    "offload": called("HybridDeviceOptimizer", "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"),
    "rounding by an attribute": called("AdamW", "torchao.optim.adam", bf16_stochastic_round=True),
    "rounding by an option": lambda p: Lion([{"params": p, "stochastic_rounding": True}]),
}
AT_ONCE = {"deepspeed fused", "apex lamb", "prodigy", "d-adaptation"}


@pytest.mark.parametrize("what", REFUSED)
def test_each_is_refused(what: str) -> None:
    parameters = one()
    optimizer = REFUSED[what](list(parameters.values()))
    error = refused(optimizer, parameters)
    assert isinstance(error, UserError) and error.remedy and type(optimizer).__name__ in error.what
    by_itself = refused(optimizer, parameters, at_once=True) is None
    assert by_itself == (what in AT_ONCE) == bool(coupled(optimizer))


SERVED = {
    "te": called("FusedAdam", "transformer_engine.pytorch.optimizers.fused_adam", _scales={}, capturable=False),
    "apex": called("FusedAdam", "apex.optimizers.fused_adam", master_weights=False, capturable=False),
    "bitsandbytes": called("Optimizer8bit", "bitsandbytes.optim.optimizer", args=BNB),
    "a FusedAdam of somebody else": called("FusedAdam", "mine", master_weights=True, capturable=True),
    "a module whose name begins alike": called("FusedLAMB", "apexes.optimizers"),
}


@pytest.mark.parametrize("what", SERVED)
def test_what_a_log_serves_is_not_refused(what: str) -> None:
    parameters = one()
    assert refused(SERVED[what](list(parameters.values())), parameters) is None


def test_none_of_torchs_is_refused_but_one_in_one_form() -> None:
    """Fused SGD with momentum in 16 bits, on a CPU: its own bits differ from call to call."""
    names = {(kind, dtype): refused((job := Job(kind, dtype)).optimizer, job.parameters)
             for kind in MAKE for dtype in (torch.float32, torch.bfloat16)}
    assert [key for key, error in names.items() if error is not None] == [("sgd-nesterov-fused", torch.bfloat16)]


def test_a_group_of_one_parameter_each_serves_deepspeeds() -> None:
    parameters = one()
    optimizer = REFUSED["deepspeed fused"]([{"params": [value]} for value in parameters.values()])
    assert refused(optimizer, parameters) is None and not coupled(optimizer)


def test_parameters_without_a_name_and_names_without_a_parameter() -> None:
    parameters = one(3)
    held = list(parameters.values())
    for optimizer, named in ((Lion(held), dict(list(parameters.items())[:2])), (Lion(held[:2]), parameters),
                             (Lion(held), parameters | {"again": held[0]})):
        assert refused(optimizer, named) is not None
    held[2].requires_grad_(False)
    assert refused(Lion(held), dict(list(parameters.items())[:2])) is None  # it is never stepped
    assert refused(object(), parameters) is not None


def test_state_of_all_parameters_together_needs_a_base_of_one_step() -> None:
    parameters = one()
    optimizer = Normed(list(parameters.values()))
    assert refused(optimizer, parameters) is None
    step(optimizer, parameters)
    assert refused(optimizer, parameters) is not None and coupled(optimizer)
    assert refused(optimizer, parameters, at_once=True) is None


# -- what shows in a step ----------------------------------------------------------------------------------------


def step(optimizer: torch.optim.Optimizer, parameters: dict[str, torch.Tensor]) -> None:
    for value in parameters.values():
        value.grad = torch.ones_like(value)
    optimizer.step()


def looked(optimizer: torch.optim.Optimizer, parameters: dict[str, torch.Tensor], steps: int = 6) -> Any:
    hidden = Hidden(optimizer)
    optimizer.register_step_pre_hook(lambda *given: hidden.before())
    optimizer.register_step_post_hook(lambda *given: hidden.after())
    for _ in range(steps):
        step(optimizer, parameters)
    return hidden.found


class Deep(Lion):
    """Counts in an object in a dict in a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.inner = [{"counter": SimpleNamespace(steps=0, next=None)}]

    def begin(self, group: dict[str, Any]) -> None:
        self.inner[0]["counter"].steps += 1


class Master(Lion):
    """Masters of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.masters = [value.detach().clone() for value in self.param_groups[0]["params"]]

    def begin(self, group: dict[str, Any]) -> None:
        for value in self.masters:
            value.add_(1)


class Drawing(Lion):
    """Random numbers of a generator of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.generator = torch.Generator().manual_seed(1)

    def begin(self, group: dict[str, Any]) -> None:
        torch.rand(3, generator=self.generator)


class Sharing(Lion):
    """One count for all parameters."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(p, grad, state, group)
        state["step"] = self.state[group["params"][0]].setdefault("step", torch.zeros(()))
        state["step"] += 1


@pytest.mark.parametrize("kind", [Hiding, Deep, Master, Drawing, Rounding, Sharing])
def test_what_no_log_has_is_found_in_the_first_steps(kind: type) -> None:
    parameters = one()
    found = looked(kind(list(parameters.values())), parameters)
    assert isinstance(found, UserError) and found.remedy and kind.__name__ in found.what


class Lazy(Lion):
    """Makes a table when it first needs it, keeps its parameters in a list, and a flat buffer that they lie in."""

    table: Any = None

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.held = list(self.param_groups[0]["params"])
        self.flat = torch.zeros(8)
        for at, value in enumerate(self.held):
            value.data = self.flat[4 * at : 4 * at + 4]

    def begin(self, group: dict[str, Any]) -> None:
        if self.table is None:
            self.table = torch.arange(3)


@pytest.mark.parametrize("kind", [Lion, EightBit, Muon, Lazy])
def test_nothing_is_found_where_there_is_nothing(kind: type) -> None:
    parameters = one()
    optimizer = kind(list(parameters.values()))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    assert looked(optimizer, parameters) is None
    schedule.step()


@pytest.mark.parametrize("kind", [kind for kind in MAKE if not kind.startswith("sparse")])
def test_nothing_is_found_in_torchs(kind: str) -> None:
    job = Job(kind)
    assert looked(job.optimizer, job.parameters, 4) is None
