"""What a trainer's hook reads off its optimizer, and that a result says what no test has shown."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from flowcheck.trainer.rounding import rounding_of

PCAPS = Path(__file__).resolve().parents[3] / "pcaps"


def on(device: str) -> torch.Tensor:
    return torch.zeros(2, device=device, requires_grad=True)


class OnGpu:
    """A parameter as a GPU has it, in what `rounding_of` looks at; there is no GPU here."""

    device = torch.device("cuda")


def groups(**options: object) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([on("cpu")], lr=1)
    optimizer.param_groups[:] = [{"lr": 1.0, "params": [OnGpu()], **options}]
    return optimizer


def test_the_form_decides() -> None:
    version = torch.__version__
    assert rounding_of(torch.optim.Adam([on("cpu")])) == ("torch-cpu", version)
    assert rounding_of(torch.optim.Adam([on("cpu")], foreach=True)) == ("torch-cpu", version)
    assert rounding_of(torch.optim.AdamW([on("cpu")], fused=True)) == ("torch-cpu-fused", version)
    assert rounding_of(groups()) == ("torch-cuda-foreach", version)
    assert rounding_of(groups(fused=True)) == ("torch-cuda-fused", version)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (groups(foreach=False), "divides by reciprocals"),
        (groups(capturable=True), "capturable=True"),
        (groups(lr=torch.tensor(1.0)), "tensor as lr"),
        (torch.optim.SGD([on("meta")], lr=1), "parameters on meta"),
        (torch.optim.Adam([{"params": [on("cpu")]}, {"params": [on("cpu")], "fused": True}]), "groups differently"),
    ],
)
def test_what_no_replica_can_follow_is_refused(optimizer: torch.optim.Optimizer, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rounding_of(optimizer)


def test_torch_is_all_it_needs() -> None:
    code = (
        "import sys\nsys.modules['numpy'] = None\nimport flowcheck.trainer.rounding\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('updater', 'parser', 'dataplane')]\nassert not bad, bad"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.parametrize("rounding", ["torch-cpu", "torch-cuda-foreach", ""])
def test_the_result_says_what_is_not_shown(replayed, tmp_path: Path, rounding: str) -> None:  # type: ignore[no-untyped-def]
    data = json.loads((PCAPS / "ring2-ll.job.json").read_text())
    del data["optimizer"]["rounding"]
    data["optimizer"] |= {"rounding": rounding} if rounding else {}
    job = tmp_path / "job.json"
    job.write_text(json.dumps(data))
    report, failure, out = replayed(PCAPS / "ring2-ll.pcap", job)
    assert not failure
    manifest = json.loads((out / "step-000006" / "manifest.json").read_text())
    assert manifest["rounding"] == (rounding or "torch-cuda-foreach")
    marks = ["rounding mode torch-cuda-foreach is unproven: its order of roundings was read in the sources of torch"
             " 2.13 and was never compared with a GPU"]
    assert manifest["unproven"] == report["unproven"] == ([] if rounding == "torch-cpu" else marks)


def test_a_version_that_is_none_is_refused() -> None:
    data = json.loads((PCAPS / "ring2-ll.job.json").read_text())
    for key, value, message in (("torch_version", "new", "not a torch version"), ("rounding", "apex", "is not one of")):
        with pytest.raises(UserError, match=message):
            job_from_dict(data | {"optimizer": data["optimizer"] | {key: value}})
