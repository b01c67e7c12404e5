"""A DDP trainer of your own in the lab, followed by a node of your own. As root, in the project's folder:

    flowcheck lab up --name mine --ranks 2
    python -c "import secrets; print(secrets.token_hex(16))" > token
    ip netns exec flowcheck-mine-node flowcheck-node --config examples/node.toml &
    ip netns exec flowcheck-mine-r1 python examples/lab_trainer.py 1 &
    ip netns exec flowcheck-mine-r0 python examples/lab_trainer.py 0
    kill %1; flowcheck lab down --name mine

Rank 0 reads the node's newest version at the end, as any process of this machine can, and compares it with itself.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANK, RANKS, ITERATIONS = int(sys.argv[1]), 2, 20
os.environ["FLOWCHECK_SOFTROCE"] = json.dumps({"interface": "fab0", "address": f"10.77.0.{10 + RANK}"})

import flowcheck  # noqa: E402
import lab.softroce  # noqa: E402, F401  # the backend; it reads the variable when a group is made
from updater.reader import Reader  # noqa: E402


def main() -> int:
    dist.init_process_group("softroce", init_method="tcp://10.78.0.10:29500", rank=RANK, world_size=RANKS)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 1))
    # A group of its own: whatever else the script reduces must not come between the gradients.
    ddp = DistributedDataParallel(model, process_group=dist.new_group())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    attachment = flowcheck.attach(
        ddp, optimizer, node="10.78.0.2:7070", token=Path("token").read_text(), checksum_every=5
    )
    torch.manual_seed(RANK)
    for _ in range(ITERATIONS):
        x = torch.randn(32, 20)
        with attachment.iteration():
            torch.nn.functional.mse_loss(ddp(x), x.sum(1, keepdim=True)).backward()
            attachment.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    end = time.monotonic() + 30
    while attachment.published[0] < ITERATIONS - 1 and time.monotonic() < end:
        time.sleep(0.05)
    status, why = attachment.published[1], attachment.why
    equal = RANK != 0 or same(model)
    attachment.close()
    dist.destroy_process_group()
    print(f"rank {RANK}: {'equal' if equal else 'NOT EQUAL'}, {status or why}")
    return 0 if equal else 1


def same(model: torch.nn.Module) -> bool:
    """Is the newest version behind the last iteration, and every tensor in it ours, bit for bit?"""
    paths = sorted(Path("/dev/shm").glob("flowcheck-mine--*.replica"))
    if not paths:
        return False
    reader = Reader(paths[-1])
    with reader.pinned() as version:
        state = model.state_dict()
        equal = version.step == ITERATIONS and all(torch.equal(version.parameters[n], state[n]) for n in state)
        del version  # before the file is closed
    reader.close()
    return equal


if __name__ == "__main__":
    sys.exit(main())
