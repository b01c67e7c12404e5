"""One rank of a Hugging Face job with examples/transformers_callback.py; prints a JSON line per optimizer step.

    python -P transformers_worker.py RANK STORE-PORT NODE TOKEN EXAMPLES OUT
"""

import json
import os
import sys
import warnings

RANK, PORT, NODE, TOKEN, EXAMPLES, OUT = sys.argv[1:7]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT, WORLD_SIZE="2", LOCAL_RANK=RANK, RANK=RANK,
                  LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
warnings.simplefilter("ignore")
sys.path.insert(0, EXAMPLES)

import torch  # noqa: E402
from transformers import TrainerCallback, TrainingArguments  # noqa: E402
from transformers_callback import FlowCheck, OwnGroup  # noqa: E402

COMMUNICATOR = {"ranks": 2, "nccl_version": "2.27.7"}
FLOW = {"src": int(RANK), "dst": 1 - int(RANK), "channel": 0, "src_addr": f"10.0.0.{1 + int(RANK)}",
        "dst_addr": f"10.0.0.{2 - int(RANK)}", "qpns": [17]}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean() * 100}


class Tell(TrainerCallback):
    """The calls of DDP's group; and after the callback under test, how it is and how long its gradients are."""

    def __init__(self, check: FlowCheck, model: Net) -> None:
        self.check, self.model, self.said = check, model, []

    def on_train_begin(self, args: object, state: object, control: object, **_: object) -> None:
        ddp = self.check._trainer.model_wrapped
        world = torch.distributed.group.WORLD
        print(json.dumps({"wrapped": type(ddp).__name__, "own": ddp.process_group is not world}), flush=True)
        self.said.append({"op": "Broadcast", "count": 5, "dtype": "float32"})

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **_: object) -> None:
        self.said.append({"op": "AllReduce", "count": 5, "dtype": "float32"})

    def on_optimizer_step(self, args: object, state: object, control: object, **_: object) -> None:
        self.after = torch.cat([one.grad.flatten() for one in self.model.parameters()])

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        attachment = self.check.attachment
        clipped = float(self.after.norm())
        print(json.dumps({"number": attachment.number, "state": attachment.state, "why": attachment.why,
                          "clipped": clipped}), flush=True)


def main() -> None:
    torch.manual_seed(1)
    model = Net()
    data = [{"x": torch.randn(4), "labels": torch.zeros(1)} for _ in range(48)]
    arguments = TrainingArguments(
        OUT, use_cpu=True, ddp_backend="gloo", ddp_find_unused_parameters=False, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, max_steps=6, max_grad_norm=0.5, logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, learning_rate=0.01, optim="adamw_torch", lr_scheduler_type="cosine",
    )
    trainer = OwnGroup(model, arguments, train_dataset=data)
    check = FlowCheck(trainer, node=NODE, token=TOKEN, max_stall_s=20.0, collectives=lambda since: tell.said[since:],
                      topology=lambda: {"communicator": COMMUNICATOR, "flows": [FLOW]})
    tell = Tell(check, model)
    trainer.add_callback(check)
    trainer.add_callback(tell)
    trainer.train()


main()
