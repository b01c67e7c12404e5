"""The job manifest: what is written is read back, and nothing that is not one gets past the reader."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowcheck.errors import FlowcheckError, UserError
from flowcheck.job.manifest import job_from_dict, json_schema, load_job
from flowcheck.job.model import (
    Bucket,
    Buckets,
    BucketSlice,
    Collective,
    Collectives,
    Communicator,
    Flow,
    Gradients,
    Job,
    ModelEntry,
    Optimizer,
    ParameterGroup,
    carries,
    dtype_size,
)

jsonschema = pytest.importorskip("jsonschema")


def small() -> dict[str, Any]:
    """A valid manifest as plain data: two ranks, one channel, one bucket of two tensors."""
    return {
        "communicator": {"ranks": 2, "nccl_version": "2.19.4"},
        "flows": [
            {"src": 0, "dst": 1, "channel": 0, "src_addr": "10.0.0.1", "dst_addr": "10.0.0.2", "qpns": [17]},
            {"src": 1, "dst": 0, "channel": 0, "src_addr": "10.0.0.2", "dst_addr": "10.0.0.1", "qpns": [17]},
        ],
        "collectives": {
            "startup": [{"op": "Broadcast", "count": 12, "carries": "parameters", "tensors": ["w", "b"]}],
            "iteration_0": [{"op": "AllReduce", "count": 12}],
            "rebuild": [{"op": "Broadcast", "count": 2, "dtype": "int32"}],
            "steady": [{"op": "AllReduce", "count": 12}],
        },
        "buckets": {"steady": [{"slices": [
            {"name": "b", "offset": 0, "length": 2}, {"name": "w", "offset": 2, "length": 10},
        ]}]},
        "model": [{"name": "w", "shape": [2, 5]}, {"name": "b", "shape": [2]}],
        "optimizer": {"name": "sgd", "groups": [{"params": ["w", "b"], "options": {"lr": 0.001}}]},
    }


# -- what is written is read back ------------------------------------------------------------------------

names = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=12)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    ranks = draw(st.integers(2, 8))
    channels = draw(st.integers(1, 4))
    qps = draw(st.integers(1, 4))
    version = 4 if draw(st.booleans()) else 6
    entries = [
        ModelEntry(name, draw(st.lists(st.integers(0, 5), max_size=3)), kind=draw(
            st.sampled_from(["optimized", "constant", "buffer"])))
        for name in draw(st.lists(names, unique=True, max_size=5))
    ]
    optimized = [e for e in entries if e.kind == "optimized"]
    slices, end = [], 0
    for entry in draw(st.permutations(optimized)):
        slices.append(BucketSlice(entry.name, end, entry.elements))
        end += entry.elements
    call = Collective("AllReduce", end, protocol=draw(st.sampled_from([None, "ll", "simple"])))
    orders: list[list[int]] = [draw(st.permutations(range(ranks))) for _ in range(channels)]
    rings = draw(st.sampled_from([[], orders[:1], orders]))
    options = {"lr": draw(st.floats(0, 1)), "betas": [0.9, 0.999], "amsgrad": draw(st.booleans())}
    return Job(
        Communicator(
            ranks, draw(st.sampled_from(["2.19", "2.27.7"])),
            protocol=draw(st.sampled_from(["ll", "simple"])), channels=channels,
            rings=rings,
            mtu=draw(st.sampled_from([256, 1024, 4096])), qps_per_connection=qps,
        ),
        [
            Flow(
                src, dst, c, f"10.0.0.{src}" if version == 4 else f"fe80::{src:x}",
                f"10.0.0.{dst}" if version == 4 else f"fe80::{dst:x}",
                [100 + c * qps + q for q in range(qps)],
            )
            for c in range(channels)
            for ring in [rings[c % len(rings)] if rings else range(ranks)]
            for src, dst in zip(ring, [*ring[1:], ring[0]], strict=True)
        ],
        Collectives(
            startup=[Collective("AllGather", 8, "uint8"), Collective("Broadcast", 3, root=ranks - 1)],
            iteration_0=[call], steady=draw(st.sampled_from([[], [call]])),
        ),
        Buckets(steady=[Bucket(slices)]), entries, Gradients(divisor=draw(st.integers(1, 8))),
        Optimizer("adam", [ParameterGroup([e.name], options) for e in optimized]) if optimized else None,
        draw(st.lists(names, unique=True, max_size=3)), draw(st.text("abc-0", max_size=8)), 7,
    )


@given(jobs())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_round_trip(job: Job) -> None:
    again = job_from_dict(json.loads(job.to_json()))
    assert again == job
    jsonschema.validate(json.loads(job.to_json()), json_schema())


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "job: one,two.json"  # separators of our own messages and of DPDK must not matter
    job = job_from_dict(small())
    path.write_text("\ufeff" + job.to_json(), encoding="utf-8")
    assert load_job(path) == job


def test_defaults_are_complete() -> None:
    job = job_from_dict({**small(), "communicator": {
        "ranks": 2, "nccl_version": "2.19", "buffer_bytes": {"ll": 262144},
    }})
    assert job.communicator.buffer_bytes == {"ll": 262144, "ll128": 4915200, "simple": 4194304}
    assert job.communicator.max_threads == {"ll": 512, "ll128": 640, "simple": 512}
    assert dtype_size("bfloat16") == 2


# -- what a job derives ----------------------------------------------------------------------------------


def test_order_of_calls() -> None:
    job = job_from_dict(small())
    assert [c.op for c in job.iteration_collectives(0)] == ["AllReduce"]
    assert [c.op for c in job.iteration_collectives(1)] == ["Broadcast", "AllReduce"]
    assert [c.op for c in job.iteration_collectives(2)] == ["AllReduce"]
    assert [index for index, _ in job.gradient_calls(1)] == [0]
    assert [carries(c) for c in job.iteration_collectives(1)] == ["other", "gradient"]
    assert job.bucket_layout(0) is job.buckets.steady, "an empty iteration_0 means: as in steady"


def test_ring_starts_at_rank_0() -> None:
    c = Communicator(4, "2.19", channels=2, rings=[[2, 0, 3, 1], [0, 1, 2, 3]])
    assert c.ring(0) == [0, 3, 1, 2]
    assert c.ring(1) == [0, 1, 2, 3]
    assert Communicator(3, "2.19").ring(5) == [0, 1, 2]


# -- every refusal names file and field ------------------------------------------------------------------

WRONG: list[tuple[str, Any, str]] = [
    # path, value, what the message must hold
    ("schema", "flowcheck/job/9", "schema: 'flowcheck/job/9'"),
    ("epoch", -1, "epoch: -1"),
    ("surprise", 1, "unknown field 'surprise'"),
    ("communicator", [], "communicator: expected an object, found a list"),
    ("communicator.ranks", 1, "communicator.ranks: 1 is not between"),
    ("communicator.ranks", 2.0, "expected a whole number, found 2.0"),
    ("communicator.ranks", True, "expected a whole number, found true"),
    ("communicator.ranks", 10**5000, "communicator.ranks: a number of more than 63 bits"),
    ("communicator.nccl_version", "latest", "communicator.nccl_version: 'latest'"),
    ("communicator.nccl_version", "2.19\n", "unprintable"),
    ("communicator.protocol", "LL", "communicator.protocol: 'LL' is not one of ll, ll128, simple"),
    ("communicator.algorithm", "nvls", "communicator.algorithm: 'nvls'"),
    ("communicator.channels", 65, "communicator.channels: 65"),
    ("communicator.mtu", 1500, "communicator.mtu: 1500"),
    ("communicator.adaptive_routing", 1, "expected true or false, found 1"),
    ("communicator.qps_per_connection", 0, "communicator.qps_per_connection: 0"),
    ("communicator.qps_per_connection", 2, "flows[0].qpns: 1 QP numbers for 2"),
    ("communicator.rings", [[0, 1], [1, 0]], "communicator.rings: 2 rings for 1 channels"),
    ("communicator.rings", [[0, 0]], "communicator.rings[0]: is not an ordering"),
    ("communicator.buffer_bytes", {"ll": 0}, "communicator.buffer_bytes.ll: 0"),
    ("communicator.buffer_bytes", {"llx": 1}, "'llx' is not one of"),
    ("communicator.max_threads", {"ll": 100}, "communicator.max_threads.ll: 100 threads"),
    ("flows.0.src", 2, "flows[0].src: 2 is not between 0 and 1"),
    ("flows.0.dst", 0, "flows[0].dst: rank 0 does not send to itself"),
    ("flows.0.channel", 1, "flows[0].channel: 1"),
    ("flows.0.src_addr", "host", "flows[0].src_addr: 'host' is not an IPv4 or IPv6 address"),
    ("flows.0.src_addr", "fe80::1%eth0", "flows[0].src_addr"),
    ("flows.0.dst_addr", "fe80::1", "flows[0].dst_addr: one address is IPv4"),
    ("flows.0.qpns", [1 << 24], "flows[0].qpns[0]: 16777216"),
    ("flows.0.cts_qpns", [1, 2], "flows[0].cts_qpns: 2 QP numbers"),
    ("flows.1", None, "flows[1]: expected an object, found null"),
    ("collectives.steady.0.op", "Reduce", "collectives.steady[0].op: 'Reduce'"),
    ("collectives.steady.0.count", -1, "collectives.steady[0].count: -1"),
    ("collectives.steady.0.count", 11, "slices[1]: elements 2..12 are outside a bucket of 11"),
    ("collectives.steady.0.dtype", "float8", "collectives.steady[0].dtype: 'float8'"),
    ("collectives.steady.0.dtype", "bfloat16", "reduced as bfloat16, and gradients.dtype says float32"),
    ("collectives.steady.0.carries", "parameters", "collectives.steady[0].carries: parameters are read"),
    ("collectives.steady.0.bucket", 3, "collectives.steady: the buckets of an iteration must be 0..0"),
    ("collectives.steady.0.channels", 2, "collectives.steady[0].channels: 2"),
    ("collectives.steady.0.tensors", ["w"], "collectives.steady[0].tensors: only a call"),
    ("collectives.startup.0.carries", "gradient", "collectives.startup[0].carries: a Broadcast puts no"),
    ("collectives.startup.0.tensors", ["v"], "collectives.startup[0].tensors[0]: 'v' is not in model"),
    ("collectives.rebuild.0.op", "AllReduce", "rebuild[0].carries: gradients are reduced in steady"),
    ("collectives.iteration_0", [], "collectives.iteration_0: steady reduces gradients"),
    ("buckets.steady", [{}, {}], "buckets.steady: 2 buckets are described, and 1 AllReduce"),
    ("buckets.steady.0.slices.0.name", "x", "buckets.steady[0].slices[0].name: 'x' is not in model"),
    ("buckets.steady.0.slices.0.length", 3, "buckets.steady[0].slices[0]: elements 0..3 are outside 'b' (2)"),
    ("buckets.steady.0.slices.0.offset", -1, "slices[0]: elements -1..1 are outside a bucket"),
    ("model.0.name", "b", "model[1].name: 'b' is already the name of model[0]"),
    ("model.0.name", "", "model[0].name: the name is empty"),
    ("model.0.name", "__metadata__", "model[0].name: the name '__metadata__'"),
    ("model.0.name", "a\ud800", "model[0].name: 'a\\ud800' has unprintable characters"),
    ("model.0.shape", [-1], "model[0].shape[0]: -1"),
    ("model.0.shape", [1 << 40, 1 << 40], "model[0].shape: more elements"),
    ("model.0.shape", [1] * 65, "model[0].shape: 65 dimensions"),
    ("model.0.kind", "frozen", "model[0].kind: 'frozen'"),
    ("model.0.kind", "constant", "optimizer.groups[0].params[0]: 'w' is not an optimized model entry"),
    ("gradients", {"divisor": 0}, "gradients.divisor: 0"),
    ("optimizer.name", "lamb", "optimizer.name: 'lamb'"),
    ("optimizer.corrections", {"0.9": {}}, "optimizer.corrections: only torch-cuda-fused asks a GPU for powers"),
    ("optimizer.corrections", [], "optimizer.corrections: expected an object, found a list"),
    ("optimizer.groups.0.params", ["w", "w"], "optimizer.groups[0].params[1]: 'w' is in two groups"),
    ("optimizer.groups.0.params", ["w"], "optimizer.groups: 'b' is in no group"),
    ("optimizer.groups.0.options.lr", math.nan, "optimizer.groups[0].options.lr: nan is not a finite"),
    ("optimizer.groups.0.options.lr", {}, "optimizer.groups[0].options.lr: an object is no"),
    ("optimizer.groups.0.options.betas", [[1]], "optimizer.groups[0].options.betas: nested values"),
    ("step_values", ["lr", "lr"], "step_values: names must be given once"),
]


@pytest.mark.parametrize(("path", "value", "expected"), WRONG, ids=lambda v: v if isinstance(v, str) else "")
def test_wrong_field_is_named(path: str, value: Any, expected: str) -> None:
    data = small()
    *steps, last = path.split(".")
    target: Any = data
    for step in steps:
        target = target[int(step)] if isinstance(target, list) else target.setdefault(step, {})
    target[int(last) if isinstance(target, list) else last] = value
    with pytest.raises(UserError) as caught:
        job_from_dict(data, where="job.json")
    message = str(caught.value)
    assert message.startswith("job.json: ") and expected in message, message
    assert "remedy: " in message
    message.encode()


def test_flow_beside_the_ring_is_named() -> None:
    data = small()
    data["communicator"].update(ranks=3, channels=2, rings=[[0, 1, 2], [0, 2, 1]])
    data["flows"][1].update(src=2, dst=1, channel=1)
    job_from_dict(data)
    data["flows"][1]["channel"] = 0
    with pytest.raises(UserError, match=r"flows\[1\].dst: rank 1 does not follow rank 2"):
        job_from_dict(data)
    data["communicator"]["algorithm"] = "tree"
    job_from_dict(data)


def test_doubled_flow_is_named() -> None:
    data = small()
    data["flows"].append({**data["flows"][0], "qpns": [18]})
    with pytest.raises(UserError, match=r"flows\[2\]: channel 0 from rank 0 to rank 1 is already flows\[0\]"):
        job_from_dict(data)
    data = small()
    data["communicator"]["channels"] = 2
    data["flows"].append({**data["flows"][0], "channel": 1})
    with pytest.raises(UserError, match=r"flows\[2\].qpns: QP 17 of 10.0.0.2 is already in flows\[0\]"):
        job_from_dict(data)


# -- files -----------------------------------------------------------------------------------------------

FILES = {
    "empty": (b"", "not valid JSON"),
    "half-written": (json.dumps(small()).encode()[:-20], "not valid JSON"),
    "not text": (b"\x0a\x0d\x0d\x0a\xff\xfe", "not UTF-8 text (byte 4)"),
    "NaN": (b'{"epoch": NaN}', "NaN is not JSON"),
    "infinite": (b'{"epoch": -Infinity}', "-Infinity is not JSON"),
    "overflow": (b'{"epoch": 1e999}', "too large for a number"),
    "many digits": (b'{"epoch": ' + b"9" * 10000 + b"}", "more than 63 bits"),
    "duplicate key": (b'{"epoch": 1, "epoch": 2}', "the key 'epoch' appears twice"),
    "deep": (b"[" * 100000, "nested too deeply"),
    "list": (b"[]", "expected an object, found a list"),
    "missing": (b"{}", "required field 'communicator' is missing"),
}


@pytest.mark.parametrize("case", FILES)
def test_bad_file_is_named(tmp_path: Path, case: str) -> None:
    content, expected = FILES[case]
    path = tmp_path / "job.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_job(path)
    assert str(path) in str(caught.value) and expected in str(caught.value), str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("path", ["absent.json", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_a_wrong_request(tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match="cannot read the job manifest") as caught:
        load_job(tmp_path / path)
    assert caught.value.exit_code == 2


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero here")
def test_endless_file_ends() -> None:
    with pytest.raises(UserError, match="larger than 256 MiB"):
        load_job("/dev/zero")


def test_message_with_a_hostile_file_name_can_be_printed() -> None:
    error = UserError("no", where="a\udcff\x1b[2J")
    assert str(error) == "a\\udcff\\x1b[2J: no"


# -- arbitrary input -------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(anything)
def test_arbitrary_json_is_refused_politely(data: Any) -> None:
    with pytest.raises(FlowcheckError):
        job_from_dict(data)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a manifest, outermost first."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(p for key, value in items for p in places(value, (*path, key)))]


@given(st.data())
@settings(max_examples=400)
def test_arbitrary_json_at_any_place(data: st.DataObject) -> None:
    """Accepted and then usable, or refused with a FlowcheckError: nothing else may come out."""
    manifest = small()
    *steps, last = data.draw(st.sampled_from(places(manifest)[1:]))
    target: Any = manifest
    for step in steps:
        target = target[step]
    if isinstance(target, dict) and data.draw(st.booleans()):
        del target[last]
    else:
        target[last] = data.draw(anything)
    try:
        job = job_from_dict(manifest)
    except FlowcheckError as error:
        str(error).encode()
        return
    assert job_from_dict(json.loads(job.to_json())) == job


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "surrogatepass")))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(content)
    with pytest.raises(FlowcheckError):
        load_job(path)


@given(st.integers(0, 2000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_truncated_at_any_byte(tmp_path: Path, length: int) -> None:
    whole = json.dumps(small()).encode()
    path = tmp_path / "job.json"
    path.write_bytes(whole[: length % len(whole)])
    with pytest.raises(FlowcheckError):
        load_job(path)


# -- documentation ---------------------------------------------------------------------------------------

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "manifest.md").read_text()
EXAMPLES = re.findall(r"^```json\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


def test_examples_can_be_loaded(tmp_path: Path) -> None:
    loaded = []
    for text in EXAMPLES:
        path = tmp_path / "job.json"
        path.write_text(text)
        jsonschema.validate(json.loads(text), json_schema())
        loaded.append(load_job(path))
    forms = [(job.communicator.ranks, job.communicator.protocol) for job in loaded]
    assert forms == [(2, "ll"), (4, "simple")]


def test_every_field_is_described() -> None:
    for name, definition in json_schema()["$defs"].items():
        for member in definition["properties"]:
            assert re.search(rf"`(groups\[\]\.)?{member}`", DOCUMENT), f"{name}.{member}"


def test_corrections_are_betas_steps_and_numbers_of_fp32() -> None:
    def with_corrections(corrections: Any) -> Job:
        data = small()
        data["optimizer"] |= {"name": "adamw", "rounding": "torch-cuda-fused", "corrections": corrections}
        return job_from_dict(data)

    good = {"0.95": {"6": 0.26490813493728638}, "0.0": {},
            "1e-05": {"1": 0.9999899864196777, "170000000000000000": 1.0}}
    job = with_corrections(good)
    assert job.optimizer is not None and job.optimizer.corrections == good
    assert job_from_dict(json.loads(job.to_json())) == job
    for corrections, message in (
        ({"0.950": {}}, "corrections.0.950: '0.950' is not a beta as Python writes it, such as 0.999"),
        ({"1.0": {}}, "'1.0' is not a beta"), ({"-0.5": {}}, "'-0.5' is not a beta"), ({"b": {}}, "'b' is not a beta"),
        ({"nan": {}}, "'nan' is not a beta"),
        ({"0.9": {"0": 0.5}}, "corrections.0.9.0: '0' is not a step, counted from 1"),
        ({"0.9": {"01": 0.5}}, "'01' is not a step"), ({"0.9": {"-1": 0.5}}, "'-1' is not a step"),
        ({"0.9": {"1" * 19: 0.5}}, "is not a step"),
        ({"0.9": {"1": 0.1}}, "corrections.0.9.1: 0.1 is not 1 - beta**step in fp32"),
        ({"0.95": {"7": 0.26490813493728638}}, "0.2649081349372864 is not"), ({"0.9": {"9" * 18: 0.0}}, "0.0 is not"),
        ({"0.9": {"1": -0.5}}, "-0.5 is not"), ({"0.9": {"1": 1.5}}, "1.5 is not"),
        ({"0.9": {"1": math.nan}}, "expected a number, found nan"),
        ({"0.9": {"1": "0.5"}}, "expected a number"), ({"0.9": 1}, "expected an object"),
    ):
        with pytest.raises(UserError) as refused:
            with_corrections(corrections)
        assert message in str(refused.value), corrections


# -- schema ----------------------------------------------------------------------------------------------


def test_published_schema_is_current() -> None:
    root = Path(__file__).resolve().parents[3]
    published = json.loads((root / "docs" / "reference" / "job.schema.json").read_text())
    assert published == json.loads(json.dumps(json_schema())), (
        "run: python -m flowcheck.job.manifest > docs/reference/job.schema.json"
    )
    printed = subprocess.run(
        [sys.executable, "-m", "flowcheck.job.manifest"], cwd=root, capture_output=True, text=True, check=True
    )
    assert json.loads(printed.stdout) == published


def test_schema_accepts_and_refuses_like_the_reader() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.check_schema(json_schema())
    validator.validate(small())
    for path, value in (("schema", "x"), ("surprise", 1), ("model", {}), ("optimizer", {"name": "lamb"})):
        assert not validator.is_valid({**small(), path: value})
