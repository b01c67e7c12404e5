"""The optimizer of a manifest: what no replica could step by is refused, at the field that says it."""

from __future__ import annotations

from typing import Any

import pytest

from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from lab.synth import example_job
from lab.synth.example import sharded_job


def manifest(dtype: str = "float32", masters: str = "", **optimizer: Any) -> dict[str, Any]:
    job = example_job(count=100, dtype=dtype, masters="state" if dtype != "float32" else "").to_dict()
    job["optimizer"].update(masters=masters, **optimizer)
    return job


def options(job: dict[str, Any], **more: Any) -> dict[str, Any]:
    job["optimizer"]["groups"][0]["options"].update(more)
    return job


@pytest.mark.parametrize("job", [
    manifest(), manifest(torch_version="2.13.0+cpu"), manifest(torch_version="2.6"), manifest(threads=4096),
    manifest("bfloat16", "none"), manifest("bfloat16", "state"), manifest("float16", "upcast"),
    options(manifest(), foreach=True), options(manifest("bfloat16", "none"), foreach=False),
    options(manifest("bfloat16", "state"), foreach=True), options(manifest(), betas=[0.9] * 8),
])
def test_what_can_be_stepped_by_is_a_job(job: dict[str, Any]) -> None:
    assert job_from_dict(job, where="m.json").optimizer is not None


def mixed() -> dict[str, Any]:
    """One entry of 16 bits and one of 32, gradients of 32."""
    job = manifest("float32", "none")
    job["model"][0]["dtype"] = "bfloat16"
    return job


@pytest.mark.parametrize(("job", "where", "what"), [
    (manifest(rounding="torch-tpu"), "optimizer.rounding", "torch-tpu"),
    (manifest("float32", "float64"), "optimizer.masters", "float64"),
    (manifest("float32", "state"), "optimizer.masters", "no optimized entry has 16 bits"),
    (manifest("float32", "upcast"), "optimizer.masters", "no optimized entry has 16 bits"),
    (manifest(threads=4097), "optimizer.threads", "4097"), (manifest(threads=-1), "optimizer.threads", "-1"),
    (mixed(), "optimizer.masters", "is updated in bfloat16 alone, and gradients are float32"),
    (options(manifest("bfloat16", "none"), foreach=True), "optimizer.groups[0].options.foreach", "order of its own"),
    (manifest(torch_version="newest"), "optimizer.torch_version", "'newest' is not a torch version"),
    (manifest(torch_version="2"), "optimizer.torch_version", "'2' is not a torch version"),
    (options(manifest(), betas=[0.9] * 9), "optimizer.groups[0].options.betas", "a list of 9 values"),
    (options(manifest(), lr=1 << 63), "optimizer.groups[0].options.lr", "is out of range"),
    (options(manifest(), lr="\x07"), "optimizer.groups[0].options.lr", "unprintable"),
])
def test_what_cannot_be_stepped_by_is_refused(job: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(UserError) as refused:
        job_from_dict(job, where="m.json")
    assert refused.value.where == f"m.json: {where}" and what in refused.value.what


def test_a_job_that_gathers_parameters_alone_has_no_optimizer() -> None:
    job = sharded_job(count=(20, 12)).to_dict()
    job["optimizer"] = {"name": "sgd", "groups": [{"params": [one["name"] for one in job["model"]]}]}
    with pytest.raises(UserError) as refused:
        job_from_dict(job, where="m.json")
    assert refused.value.where == "m.json: optimizer" and "reduce no gradients" in refused.value.what
