"""What a trainer's hook reads off its optimizer, and that a result says what no test has shown."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from flowcheck.trainer.describe.rounding import check_fused, corrections_of, rounding_of

PCAPS = Path(__file__).resolve().parents[3] / "pcaps"


def on(device: str) -> torch.Tensor:
    return torch.zeros(2, device=device, requires_grad=True)


class OnGpu:
    """A parameter as a GPU has it, in what `rounding_of` looks at; there is no GPU here."""

    device = torch.device("cuda")


def groups(kind: Any = torch.optim.SGD, **options: object) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind([on("cpu")], lr=1)
    optimizer.param_groups[:] = [{"lr": 1.0, "params": [OnGpu()], **options}]
    return optimizer


def test_the_form_decides() -> None:
    version = torch.__version__
    assert rounding_of(torch.optim.Adam([on("cpu")])) == ("torch-cpu", version)
    assert rounding_of(torch.optim.Adam([on("cpu")], foreach=True)) == ("torch-cpu", version)
    assert rounding_of(torch.optim.AdamW([on("cpu")], fused=True)) == ("torch-cpu-fused", version)
    assert rounding_of(groups()) == ("torch-cuda-foreach", version)
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        assert rounding_of(groups(kind, fused=True)) == ("torch-cuda-fused", version)
    assert rounding_of(groups(torch.optim.AdamW, fused=True, weight_decay=0.1)) == ("torch-cuda-fused", version)
    decoupled = groups(torch.optim.Adam, fused=True, weight_decay=0.1, decoupled_weight_decay=True)
    assert rounding_of(decoupled) == ("torch-cuda-fused", version)
    assert rounding_of(groups(torch.optim.Adam, weight_decay=0.1)) == ("torch-cuda-foreach", version)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (groups(foreach=False), "divides by reciprocals"),
        (groups(capturable=True), "capturable=True"),
        (groups(differentiable=True), "differentiable=True"),
        (groups(lr=torch.tensor(1.0)), "tensor as lr"),
        (groups(fused=True), "SGD with fused=True, which multiplies in double precision on a GPU"),
        (groups(torch.optim.Adam, fused=True, weight_decay=0.1), "Adam with weight_decay and fused=True"),
        (torch.optim.SGD([on("meta")], lr=1), "parameters on meta"),
        (torch.optim.Adam([{"params": [on("cpu")]}, {"params": [on("cpu")], "fused": True}]), "groups differently"),
    ],
)
def test_what_no_replica_can_follow_is_refused(optimizer: torch.optim.Optimizer, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rounding_of(optimizer)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: what its powf gives is in tests/golden"))])
def test_the_manifest_says_where_the_devices_powers_are_others(device: str) -> None:
    """Over all steps until beta**step has vanished; what is not listed is the correctly rounded power."""
    groups = [{"params": [], "betas": (0.0, 0.95)}, {"params": [on(device)], "betas": (0.0, 0.999)}]
    found = corrections_of(torch.optim.AdamW(groups, lr=1.0))
    assert list(found) == ["0.0", "0.95", "0.999"] and not found["0.0"]
    for beta, said in found.items():
        steps = torch.arange(1.0, 30001.0, device=device)
        base = torch.full_like(steps, float(beta))
        for step, here in enumerate((1 - torch.pow(base, steps)).tolist(), 1):
            right = float(1 - torch.tensor(float(base[0]) ** step))
            assert (said[str(step)] == here != right) if str(step) in said else here == right, f"{beta}, step {step}"


def test_it_is_the_parameters_device_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], torch.arange

    def arange(*given: Any, device: Any = None, **named: Any) -> torch.Tensor:
        asked.append(str(device))
        return real(*given, **named)

    monkeypatch.setattr(torch, "arange", arange)
    corrections_of(torch.optim.AdamW([on("meta")], lr=1.0))
    assert asked == ["meta", "meta"]


def test_a_default_type_of_torchs_changes_nothing() -> None:
    optimizer = torch.optim.AdamW([on("cpu")], lr=1.0)
    plain = corrections_of(optimizer)
    torch.set_default_dtype(torch.float64)
    try:
        assert corrections_of(optimizer) == plain
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_beta_whose_powers_hardly_vanish_is_refused() -> None:
    for beta in (0.99999, 0.99999999):  # the latter is 1 in fp32
        with pytest.raises(UserError, match=f"a beta of {beta}, whose powers do not vanish in 1048576 steps"):
            corrections_of(torch.optim.AdamW([on("cpu")], betas=(0.9, beta)))


def test_a_beta_that_is_none_is_refused() -> None:
    """torch asks for its range in the constructor alone."""
    for beta in (1.5, -0.5, float("nan")):
        optimizer = torch.optim.AdamW([on("cpu")])
        optimizer.param_groups[0]["betas"] = (0.9, beta)
        with pytest.raises(UserError, match=f"a beta of {beta}"):
            corrections_of(optimizer)


def test_what_a_schedule_makes_of_a_fused_optimizer_on_a_gpu() -> None:
    corrections: dict[str, dict[str, float]] = {"0.9": {}, "0.999": {}}
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        optimizer = groups(kind, fused=True, weight_decay=0.0, betas=(0.9, 0.999))
        check_fused(optimizer, corrections)
        optimizer.param_groups[0]["betas"] = (0.95, 0.999)
        with pytest.raises(UserError, match=r"a beta of 0\.95 that it had not before") as caught:
            check_fused(optimizer, corrections)
        assert "cycle_momentum=False" in caught.value.remedy
    optimizer = groups(torch.optim.Adam, fused=True, weight_decay=0.1, betas=(0.9, 0.999))
    with pytest.raises(UserError, match="Adam with weight_decay and fused=True"):
        check_fused(optimizer, corrections)


def test_torch_is_all_it_needs() -> None:
    code = (
        "import sys\nsys.modules['numpy'] = None\nimport flowcheck.trainer.describe.rounding\n"
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
    marks = ["rounding mode torch-cuda-foreach is proven for torch 2.11, not for 2.13"]
    assert manifest["unproven"] == report["unproven"] == ([] if rounding == "torch-cpu" else marks)


def test_a_version_that_is_none_is_refused() -> None:
    data = json.loads((PCAPS / "ring2-ll.job.json").read_text())
    for key, value, message in (("torch_version", "new", "not a torch version"), ("rounding", "apex", "is not one of")):
        with pytest.raises(UserError, match=message):
            job_from_dict(data | {"optimizer": data["optimizer"] | {key: value}})
