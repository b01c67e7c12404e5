"""In which order a trainer's optimizer rounds: the manifest's `optimizer.rounding` and `torch_version`.

Needs torch and nothing else; a trainer calls it once, before it writes the manifest. What the replica cannot follow bit
for bit is refused here, where the remedy is.
"""

from __future__ import annotations

import torch

from flowcheck.errors import UserError

__all__ = ["rounding_of"]


def rounding_of(optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    """(rounding, torch version) of an optimizer of torch.optim. Raises UserError if no replica can equal it.

    On a GPU torch takes foreach unless told otherwise, and a loop over single tensors rounds differently there;
    on a CPU the two give the same bits.
    """
    found = {_rounding(group, parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if len(found) != 1:
        raise _refused("rounds its groups differently" if found else "has no parameters", "use one form for all")
    return found.pop(), torch.__version__


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
