"""A training script of Megatron-LM, followed by FlowCheck. This file is not run: read beside Megatron-LM d98e8a6.

    torchrun --nproc-per-node 8 -m flowcheck.run examples/megatron_train.py pretrain_gpt.py \
        --use-distributed-optimizer --num-distributed-optimizer-instances 2 --transformer-impl local \
        --no-gradient-accumulation-fusion --bf16 ...

In an environment without Transformer Engine and Apex, where Megatron-Core takes torch.optim.AdamW. Node and token come
from FLOWCHECK_NODE and FLOWCHECK_TOKEN_FILE. What is refused, and why: docs/use/frameworks.md.
"""

import runpy
import sys
from typing import Any

from megatron.training import training

import flowcheck


class Followed:
    """Megatron-LM's train_step, and what comes after it."""

    def __init__(self) -> None:
        self._own = training.train_step
        self._attachment: flowcheck.Attachment | None = None

    def train_step(
        self, forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, opt_param_scheduler: Any,
        *more: Any, **named: Any,
    ) -> Any:
        if self._attachment is None:  # now, because a checkpoint was loaded before
            self._attachment = flowcheck.attach(
                model, optimizer, scheduler=opt_param_scheduler, iteration=training.get_args().iteration,
                checksum_every=100,
            )
        result = self._own(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, *more, **named)
        self._attachment.step()  # what it clipped by, and a step that was skipped, the optimizer has said itself
        return result

    def close(self) -> None:
        if self._attachment is not None:
            self._attachment.close()


def main() -> None:
    followed = Followed()
    training.train_step = followed.train_step
    sys.argv = sys.argv[1:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        followed.close()


if __name__ == "__main__":
    main()
