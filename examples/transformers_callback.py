"""FlowCheck in Hugging Face's Trainer: a Trainer whose DDP has a process group of its own, and a callback.

    trainer = OwnGroup(model, TrainingArguments(..., ddp_find_unused_parameters=False), ...)
    trainer.add_callback(FlowCheck(trainer, checksum_every=100))
    trainer.train()

Node and token come from FLOWCHECK_NODE and FLOWCHECK_TOKEN_FILE, or from arguments: those of flowcheck.attach. What the
Trainer itself reduces (the loss that it logs, tokens of a batch) then is on another communicator, and costs nothing.
"""

from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs
from transformers import Trainer, TrainerCallback

import flowcheck


class _OfItsOwn(DistributedDataParallelKwargs):
    """What accelerate gives to DDP, and a process group that nobody else calls."""

    def to_kwargs(self) -> dict[str, Any]:
        return {**super().to_kwargs(), "process_group": dist.new_group()}


class OwnGroup(Trainer):
    """The Trainer as it is, but for its DDP's process group."""

    def _wrap_model(self, *given: Any, **named: Any) -> Any:
        wrapped = super()._wrap_model(*given, **named)
        handler = self.accelerator.ddp_handler
        if isinstance(handler, DistributedDataParallelKwargs):  # which accelerate asks next
            self.accelerator.ddp_handler = _OfItsOwn(**vars(handler))
        return wrapped


class FlowCheck(TrainerCallback):
    """attachment: once training has begun. options: of flowcheck.attach."""

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self._trainer, self._options = trainer, options
        self.attachment: flowcheck.Attachment | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, accelerator = self._trainer, self._trainer.accelerator
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # in accelerate's wrapper, torch's own
        attachment = self.attachment = flowcheck.attach(
            trainer.model_wrapped, optimizer, scheduler=trainer.lr_scheduler, scaler=accelerator.scaler,
            **{"iteration": state.global_step} | self._options,
        )

        def clip(parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
            accelerator.unscale_gradients()  # as accelerate's own does it
            return attachment.clip_grad_norm_(list(parameters), max_norm, norm_type)

        accelerator.clip_grad_norm_ = clip

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.attachment is not None:
            self.attachment.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.attachment is not None:
            self.attachment.close()
