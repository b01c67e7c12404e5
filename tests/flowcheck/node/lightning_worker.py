"""One rank of a Lightning job with examples/lightning_callback.py; prints a JSON line per optimizer step.

    python -P lightning_worker.py RANK STORE-PORT NODE TOKEN EXAMPLES
"""

import json
import logging
import os
import sys
import warnings

RANK, PORT, NODE, TOKEN, EXAMPLES = sys.argv[1:6]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT, WORLD_SIZE="2", NODE_RANK=RANK, LOCAL_RANK="0",
                  RANK=RANK)
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
sys.path.insert(0, EXAMPLES)

import torch  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning_callback import FlowCheck, OwnGroup  # noqa: E402

COMMUNICATOR = {"ranks": 2, "nccl_version": "2.27.7"}
FLOW = {"src": int(RANK), "dst": 1 - int(RANK), "channel": 0, "src_addr": f"10.0.0.{1 + int(RANK)}",
        "dst_addr": f"10.0.0.{2 - int(RANK)}", "qpns": [17]}


class Job(LightningModule):
    """Two micro-batches a step, a metric of all ranks, and every gradient longer than what is clipped to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.said: list[dict[str, object]] = []

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean() * 100
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.said.append({"op": "AllReduce", "count": 5, "dtype": "float32"})
        self.before = {name: one.grad.clone() for name, one in self.layer.named_parameters()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Tell(Callback):
    """After the callback under test: how it is, and what gradients were multiplied with."""

    def __init__(self, check: FlowCheck) -> None:
        self.check = check

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: object) -> None:
        attachment = self.check.attachment
        assert attachment is not None and isinstance(module, Job)
        weight = module.layer.weight.grad
        factor = (weight / module.before["weight"]).flatten()[0].item() if module.said and weight is not None else None
        print(json.dumps({"number": attachment.number, "state": attachment.state, "why": attachment.why,
                          "factor": factor}), flush=True)


def main() -> None:
    torch.manual_seed(1)
    job = Job()
    check = FlowCheck(
        node=NODE, token=TOKEN, max_stall_s=20.0, collectives=lambda since: job.said[since:],
        topology=lambda: {"communicator": COMMUNICATOR, "flows": [FLOW]},
    )
    data = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=1)
    trainer = Trainer(
        accelerator="cpu", devices=1, num_nodes=2, strategy=OwnGroup(process_group_backend="gloo"), max_steps=6,
        accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=[check, Tell(check)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(job, data)


main()
