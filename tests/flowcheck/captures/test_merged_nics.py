"""Merged NICs: one message striped over the ports of a rank, each port a mirror stream of its own."""

import hashlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import Job, dtype_size
from flowcheck.rebuild.plan import plan_job
from lab.synth import Synthesis, example_job, generate
from tests.flowcheck.replayed import check_buckets, mask_of, replayed
from tests.nccl_versions import since

pytestmark = pytest.mark.usefixtures("eal")
REPLAY = settings(
    max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

jobs = st.builds(
    example_job,
    ranks=st.integers(2, 4),
    channels=st.integers(1, 2),
    protocol=st.sampled_from(["ll", "ll128", "simple"]),
    count=st.lists(st.integers(200, 30_000), min_size=1, max_size=2),
    version=st.sampled_from(since(20)),
    qps=st.integers(1, 2),
    split_data_on_qps=st.booleans(),
    adaptive_routing=st.booleans(),
    ipv6=st.booleans(),
    devices=st.just(2),
    seed=st.integers(0, 1000),
)


def _replay(job: Job, made: Synthesis, together: bool = False) -> tuple[dict, str]:
    with tempfile.TemporaryDirectory() as folder:
        return replayed(job, made, Path(folder), together=together)


@REPLAY
@given(jobs, st.booleans(), st.data())
def test_both_ports_in_two_captures_are_everything(job: Job, together: bool, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, job.communicator.ranks - 1))
    made = generate(job, iterations=2, ports=[rank, rank + job.communicator.ranks])
    assert all(made.ports.values())
    report, failure = _replay(job, made, together)
    assert failure == ""
    check_buckets(made, report)


@REPLAY
@given(jobs, st.integers(0, 1))
def test_one_of_the_ports_is_the_right_incomplete_set(job: Job, device: int) -> None:
    """What travels over the other port is named as not mirrored, to the element."""
    made = generate(job, iterations=3, ports=[device * job.communicator.ranks])
    if not any(b["carried"] for i in made.truth["iterations"] for b in i["buckets"]):
        return
    try:
        report, failure = _replay(job, made)
    except UserError:
        return  # all pieces of this port are empty or without a witness
    size = dtype_size(job.gradients.dtype)
    for iteration in made.truth["iterations"]:
        for bucket in iteration["buckets"]:
            found = report["iterations"][iteration["iteration"]]["buckets"][bucket["bucket"]]
            truth = made.reduced[iteration["iteration"], bucket["bucket"]].tobytes()
            placed = mask_of(bucket["elements"], [[p["start"], p["end"]] for p in found["placed"]])
            assert (placed == mask_of(bucket["elements"], bucket["carried"])).all()
            for part in found["placed"]:
                assert part["sha256"] == hashlib.sha256(truth[part["start"] * size : part["end"] * size]).hexdigest()
            missing = int((~placed).sum())
            assert found["missing"] == ({"not_mirrored": missing} if missing else {})
    # of a short LL128 message the second piece is fill-up only: then one port does carry all there is
    whole = [all(b["carried"] == [[0, b["elements"]]] for b in i["buckets"]) for i in made.truth["iterations"]]
    assert report["totals"]["iterations_complete"] == sum(whole)
    assert failure or all(whole)


def test_more_devices_than_the_version_merges() -> None:
    example_job(devices=4, version="2.27.7")
    for version, devices in (("2.19.4", 2), ("2.22.3", 3), ("2.27.7", 5)):
        with pytest.raises(UserError, match="merges at most"):
            plan_job(example_job(devices=devices, version=version))
    with pytest.raises(UserError, match="devices"):
        example_job(devices=9, version="2.30.7")


def test_addresses_of_each_queue_pair_are_checked() -> None:
    for name, value, message in (
        ("src_addrs", ["10.0.0.1"], "give one for each"),
        ("dst_addrs", ["10.0.0.1", "nonsense"], "is not an IPv4 or IPv6 address"),
        ("src_addrs", ["10.0.0.1", "fe80::1"], "IPv4 and IPv6 in one connection"),
    ):
        data = example_job(devices=2).to_dict()
        data["flows"][0][name] = value
        with pytest.raises(UserError, match=message):
            job_from_dict(data)
    data = example_job(devices=2).to_dict()
    data["flows"][0]["qpns"] = data["flows"][0]["qpns"][:1]
    with pytest.raises(UserError, match="on 2 devices"):
        job_from_dict(data)
