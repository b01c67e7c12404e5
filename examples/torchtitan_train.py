"""torchtitan's training script, followed by FlowCheck. Not run: read beside torchtitan 000204a, and no more.

    torchrun --nproc-per-node 8 -m flowcheck.run examples/torchtitan_train.py --job.config_file train.toml

In train.toml: parallelism.data_parallel_replicate_degree and data_parallel_shard_degree of 2 or more (HSDP), and no
gradient accumulation (training.global_batch_size left out). Node and token come from FLOWCHECK_NODE and
FLOWCHECK_TOKEN_FILE. What is refused, and why: docs/use/frameworks.md.
"""

from typing import Any
from unittest import mock

import torch
from torchtitan.config import ConfigManager
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

import flowcheck


class Followed(Trainer):
    """attachment: once training has begun."""

    attachment: flowcheck.Attachment | None = None

    def train_step(self, data_iterator: Any) -> None:
        if self.attachment is None:  # now, because a checkpoint was loaded after __init__
            if len(self.model_parts) > 1:
                raise SystemExit("flowcheck: several pipeline stages on one rank: docs/use/frameworks.md")
            (model,), (optimizer,) = self.model_parts, self.optimizers.optimizers
            self.attachment = flowcheck.attach(
                model, optimizer, scheduler=self.lr_schedulers, iteration=self.step - 1, checksum_every=100
            )
        norms: list[torch.Tensor] = []

        def clip(*given: Any, **named: Any) -> torch.Tensor:
            norms.append(titans_own(*given, **named))
            return norms[-1]

        titans_own = dist_utils.clip_grad_norm_
        with mock.patch.object(dist_utils, "clip_grad_norm_", clip):
            super().train_step(data_iterator)
        (norm,) = norms
        factor = torch.clamp(self.job_config.training.max_norm / (norm + 1e-6), max=1.0)  # as torch forms it
        self.attachment.step(clip=float(factor))

    def close(self) -> None:
        if self.attachment is not None:
            self.attachment.close()
        super().close()


def main() -> None:
    init_logger()
    trainer = Followed(ConfigManager().parse_args())
    try:
        trainer.train()
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
