"""In which order a trainer's optimizer rounds: the manifest's `optimizer.rounding` and `torch_version`.

A trainer calls it once, before it writes the manifest. What the replica cannot follow bit for bit is refused here,
where the remedy is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flowcheck.errors import UserError
from flowcheck.trainer.describe.optimizers import members

__all__ = ["check_fused", "corrections_of", "rounding_of"]

MOST_STEPS = 1 << 20  # looked at for a beta; by then 1 - 0.9999**step has long been 1


def rounding_of(optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    """(rounding, torch version) of an optimizer of torch.optim. Raises UserError if no replica can equal it.

    On a GPU torch takes foreach unless set otherwise, and a loop over single tensors rounds differently there;
    on a CPU the two give the same bits.
    """
    for one in members(optimizer):
        _check_fused(one)
    found = {_rounding(group, parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if len(found) != 1:
        raise _refused("rounds its groups differently" if found else "has no parameters", "use one form for all")
    return found.pop(), torch.__version__


def corrections_of(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, float]]:
    """What the manifest says of this GPU's powf (job.Optimizer.corrections), for an optimizer of torch-cuda-fused. One
    computation on the GPU for every beta, waited for. Raises UserError if a beta needs more steps than are looked at.
    """
    device = next(parameter for group in optimizer.param_groups for parameter in group["params"]).device
    betas = sorted({float(beta) for group in optimizer.param_groups for beta in group["betas"]})
    return {repr(beta): _corrections(beta, device) for beta in betas}


def check_fused(optimizer: torch.optim.Optimizer, corrections: Mapping[str, Mapping[str, float]]) -> None:
    """Is an optimizer of torch-cuda-fused still one that is followed? Schedules change groups in mid-run. Raises
    UserError. corrections: of `corrections_of`, when it was described."""
    for one in members(optimizer):
        _check_fused(one)
    for beta in (beta for group in optimizer.param_groups for beta in group["betas"]):
        if repr(float(beta)) not in corrections:
            raise _refused(f"has a beta of {beta} that it had not before, whose powers here are not in the manifest",
                           "betas that stay as they are (OneCycleLR: cycle_momentum=False), or leave fused out")


def _corrections(beta: float, device: torch.device) -> dict[str, float]:
    base = float(torch.tensor(beta, dtype=torch.float32))
    if not 0 <= beta < 1:
        raise _refused(f"has a beta of {beta}", "betas of at least 0 and below 1")
    if base**MOST_STEPS > 2**-25:
        raise _refused(f"has a beta of {beta}, whose powers do not vanish in {MOST_STEPS} steps",
                       "leave fused out, or take a lower beta")
    last = 1 if base == 0 else math.ceil(25 * math.log(2) / -math.log(base))  # 1 - 2^-25 is 1 in fp32
    steps = torch.arange(1, last + 1, dtype=torch.float32, device=device)
    here = (1 - torch.pow(torch.full_like(steps, base), steps)).cpu()
    right = 1 - torch.tensor([base**step for step in range(1, last + 1)], dtype=torch.float32)
    return {str(step + 1): float(here[step]) for step in (here != right).nonzero().flatten().tolist()}


def _check_fused(optimizer: torch.optim.Optimizer) -> None:
    """Fused on a GPU there are two orders that no kernel follows."""
    fused = [group for group in optimizer.param_groups
             if group.get("fused") and any(one.device.type == "cuda" for one in group["params"])]
    if fused and isinstance(optimizer, torch.optim.SGD):
        raise _refused("is SGD with fused=True, which multiplies in double precision on a GPU", "leave fused out")
    if isinstance(optimizer, torch.optim.AdamW):  # of which later versions of torch make an Adam
        return
    for group in fused:
        if group.get("weight_decay") and not group.get("decoupled_weight_decay"):
            raise _refused("is Adam with weight_decay and fused=True, which rounds some elements otherwise on a GPU",
                           "AdamW, or leave fused out")


def _rounding(group: dict[str, object], parameter: torch.Tensor) -> str:
    for option in ("capturable", "differentiable"):
        if group.get(option):
            raise _refused(f"has {option}=True, which rounds in an order of its own", f"leave {option} out")
    kind = parameter.device.type
    if kind not in ("cpu", "cuda"):
        raise _refused(f"has parameters on {kind}", "move them to a CUDA device or to the CPU")
    if isinstance(group.get("lr"), torch.Tensor):
        raise _refused("has a tensor as lr, which is rounded in an order of its own", "give lr as a number")
    if group.get("fused"):
        return f"torch-{kind}-fused"
    if kind == "cpu":
        return "torch-cpu"
    if group.get("foreach") is False:
        raise _refused("has foreach=False, which divides by reciprocals on a GPU", "leave it out, or say fused=True")
    return "torch-cuda-foreach"


def _refused(what: str, remedy: str) -> UserError:
    return UserError(f"the optimizer {what}", where="torch.optim", remedy=remedy)
