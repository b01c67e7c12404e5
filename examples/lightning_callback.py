"""FlowCheck in PyTorch Lightning: a strategy whose DDP has a process group of its own, and a callback.

    trainer = Trainer(strategy=OwnGroup(), callbacks=[FlowCheck(checksum_every=100)], gradient_clip_val=1.0)

Node and token come from FLOWCHECK_NODE and FLOWCHECK_TOKEN_FILE, or from arguments: those of flowcheck.attach. One
optimizer; clipping by norm. What Lightning itself reduces (metrics with sync_dist, barriers) then is on another
communicator, and costs nothing.
"""

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

import flowcheck


class OwnGroup(DDPStrategy):
    """DDP as Lightning makes it, and no call of anybody else's comes between its gradients."""

    def _setup_model(self, model: Any) -> Any:
        self._ddp_kwargs["process_group"] = dist.new_group()
        return super()._setup_model(model)


class FlowCheck(Callback):
    """attachment: once training has begun. options: of flowcheck.attach."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.attachment: flowcheck.Attachment | None = None
        self._steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        precision = trainer.precision_plugin
        attachment = self.attachment = flowcheck.attach(
            trainer.strategy.model, optimizer, scaler=getattr(precision, "scaler", None), **self._options
        )
        self._steps = trainer.global_step

        def clip(optimizer: Any, clip_val: float) -> None:
            attachment.clip_grad_norm_(precision.main_params(optimizer), clip_val)

        precision.clip_grad_by_norm = clip  # torch's own, and the factor is known

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.attachment is not None and trainer.global_step > self._steps:  # not where gradients are accumulated
            self._steps = trainer.global_step
            self.attachment.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.attachment is not None:
            self.attachment.close()
