"""Torch's flight recorder: a dump that torch 2.13 made of gloo's calls, one made now, and dumps that cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.trainer.nccl import flight_recorder
from flowcheck.trainer.nccl.flight_recorder import BUFFER_VARIABLES, DUMPS, Recorder, parse_flights

RECORDED = Path(__file__).resolve().parents[2] / "data/texts/flight-recorder-torch-2.13-gloo.json"


def dump() -> dict[str, Any]:
    return dict(json.loads(RECORDED.read_text()))


def entry(number: int = 0, **other: Any) -> dict[str, Any]:
    return {
        "record_id": number, "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce",
        "collective_seq_id": number + 1, "p2p_seq_id": 0, "op_id": number + 1, "is_p2p": False, "input_sizes": [[5]],
        "input_dtypes": ["Float"], "output_sizes": [[5]], "output_dtypes": ["Float"], **other,
    }


def of(*entries: dict[str, Any], **other: Any) -> str:
    return json.dumps({"version": "2.10", "entries": list(entries), **other})


def test_a_recorded_dump() -> None:
    flights = parse_flights(RECORDED.read_bytes())
    assert (flights.version, flights.groups) == ("2.10", {"0": "default_pg", "1": "mine"})
    assert [(one.name, one.sizes, one.types) for one in flights.group("1")] == [
        ("gloo:all_reduce", ((9,),), ("Long",)),
    ]
    mine = flights.group("0")
    assert [one.sequence for one in mine] == list(range(1, 14))
    assert [one.collective() for one in mine[:5]] == [
        {"op": "Broadcast", "count": 7, "dtype": "float32"}, {"op": "AllReduce", "count": 15, "dtype": "float32"},
        {"op": "AllGather", "count": 4, "dtype": "float32"}, {"op": "AllGather", "count": 4, "dtype": "float32"},
        {"op": "AllGather", "count": 1, "dtype": "int64"},  # DDP compares parameters
    ]
    assert [one.collective()["count"] for one in mine[7:12]] == [8, 3, 1, 8, 8]  # buckets, and their announcement
    with pytest.raises(UserError, match="gloo:barrier which a manifest cannot have"):
        mine[12].collective()


SCRIPT = """
import os, sys
os.environ[{variable!r}] = "50"
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from flowcheck.trainer.nccl.flight_recorder import Recorder
recorder = Recorder({dump!r})
for size in range(1, 61):
    dist.all_reduce(torch.zeros(size, dtype=torch.float16))
    if size == 20:
        print([one.collective() for one in recorder.read().group("0")] == [
            {{"op": "AllReduce", "count": size, "dtype": "float16"}} for size in range(1, 21)])
print([one.record for one in recorder.read().entries] == list(range(10, 60)))
try:
    recorder.read().group("0")
except ValueError as error:
    print(error)
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # a thread of gloo that is still at work would abort the interpreter's own end
"""


@pytest.mark.parametrize("variable", BUFFER_VARIABLES)
def test_this_torchs_own_recorder(variable: str) -> None:
    """Of gloo: a build without NCCL has that one alone. Both names of the variable."""
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(variable=variable, dump=DUMPS[1])],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == [
        "True", "True", "torch's flight recorder: call 11 of process group '0' comes where call 1 should be",
    ]


def test_a_torch_without_nccl() -> None:
    import torch._C

    if hasattr(torch._C._distributed_c10d, DUMPS[0]):
        pytest.skip("this torch has NCCL")
    with pytest.raises(EnvironmentProblem, match=f"has no {DUMPS[0]}"):
        Recorder()


@pytest.mark.parametrize(("name", "other", "found"), [
    ("nccl:all_reduce", {}, ("AllReduce", 5)),
    ("nccl:all_reduce_barrier", {}, ("AllReduce", 5)),
    ("nccl:allreduce_coalesced", {}, ("AllReduce", 5)),  # inside a coalescing manager, as Megatron-Core calls it
    ("nccl:_all_gather_base", {"output_sizes": [[20]]}, ("AllGather", 5)),
    ("nccl:_reduce_scatter_base", {"output_sizes": [[2]], "input_sizes": [[8]]}, ("ReduceScatter", 2)),
    ("nccl:broadcast", {"input_sizes": [[2, 3, 4]], "output_sizes": [[2, 3, 4]]}, ("Broadcast", 24)),
    ("nccl:broadcast", {"input_sizes": [[]], "output_sizes": [[]]}, ("Broadcast", 1)),
    ("nccl:all_reduce", {"input_sizes": [[0]], "output_sizes": [[0]]}, ("AllReduce", 0)),
])
def test_operations(name: str, other: dict[str, Any], found: tuple[str, int]) -> None:
    (one,) = parse_flights(of(entry(profiling_name=name, **other))).entries
    assert (one.collective()["op"], one.collective()["count"]) == found


@pytest.mark.parametrize(("text", "kind"), [
    ("Half", "float16"), ("BFloat16", "bfloat16"), ("Float", "float32"), ("Double", "float64"), ("Int", "int32"),
    ("Long", "int64"), ("Byte", "uint8"), ("Char", "int8"),
])
def test_types(text: str, kind: str) -> None:
    assert parse_flights(of(entry(input_dtypes=[text]))).entries[0].collective()["dtype"] == kind


@pytest.mark.parametrize(("other", "what"), [
    ({"profiling_name": "nccl:all_to_all"}, "nccl:all_to_all which a manifest cannot have"),
    ({"profiling_name": "nccl:send 0->1", "is_p2p": True}, "send 0->1 which a manifest cannot have"),
    ({"input_sizes": [[5], [6]], "input_dtypes": ["Float", "Float"]}, "has 2 tensors"),
    ({"input_dtypes": ["ComplexFloat"]}, "is of ComplexFloat"),
    ({"profiling_name": "nccl:all_gather", "output_sizes": [[5], [6]]}, "tensors of different sizes"),
])
def test_calls_without_a_form(other: dict[str, Any], what: str) -> None:
    (one,) = parse_flights(of(entry(7, **other))).entries
    with pytest.raises(UserError, match=what) as refused:
        one.collective()
    assert refused.value.where == "torch's flight recorder, record 7"


def test_versions_of_the_form() -> None:
    for version in ("2.3", "2.4", "2.7", "2.10"):
        assert parse_flights(of(entry(), version=version, nccl_version="2.21.5")).library == "2.21.5"
    assert parse_flights(of(entry(), comm_lib_version="2.27.7")).library == "2.27.7"
    for odd in ("1.5", "3.0", "", 2, None):
        with pytest.raises(UserError, match="has the version"):
            parse_flights(of(entry(), version=odd))


def test_point_to_point_is_not_counted_among_a_groups_calls() -> None:
    flights = parse_flights(of(entry(0), entry(1, is_p2p=True, collective_seq_id=1), entry(2, collective_seq_id=2)))
    assert [one.record for one in flights.group("0")] == [0, 2]


def test_a_group_that_has_no_calls() -> None:
    with pytest.raises(UserError, match="no call of process group '9'; there are: 0"):
        parse_flights(of(entry())).group("9")
    with pytest.raises(UserError, match="there are: none"):
        parse_flights(of()).group("0")


def test_a_call_that_is_missing_or_twice() -> None:
    for numbers, found, expected in (((1, 3), 3, 2), ((2, 3), 2, 1), ((1, 1), 1, 2)):
        entries = [entry(at, collective_seq_id=number) for at, number in enumerate(numbers)]
        with pytest.raises(UserError, match=f"call {found} of process group '0' comes where call {expected}"):
            parse_flights(of(*entries)).group("0")


@pytest.mark.parametrize(("text", "what"), [
    ("", "is not JSON"), ("{", "is not JSON"), (b"\x80\x02}q\x00.", "is not JSON"), ("[]", "is not an object"),
    ("null", "is not an object"), ("[" * 100000, "is not JSON"),
    (json.dumps({"version": "2.10", "entries": {}}), "no list of entries"),
    (json.dumps({"version": "2.10", "entries": [1]}), "entry 0 is not an object"),
    (of(entry(1), entry(0)), "record 0 after record 1"), (of(entry(1), entry(1)), "record 1 after record 1"),
])
def test_dumps_that_cannot_be(text: str | bytes, what: str) -> None:
    with pytest.raises(UserError, match=what):
        parse_flights(text)


@pytest.mark.parametrize(("key", "value"), [
    ("record_id", -1), ("record_id", "1"), ("record_id", True), ("record_id", 1 << 63), ("process_group", "0"),
    ("process_group", ["0"]), ("process_group", [0, 1]), ("profiling_name", None), ("collective_seq_id", 1.5),
    ("is_p2p", 1), ("input_sizes", None), ("input_sizes", [5]), ("input_sizes", [[-1]]), ("input_sizes", [["5"]]),
    ("input_sizes", [[1 << 24, 1 << 24]]), ("input_sizes", [[1] * 65]), ("input_sizes", [[True]]),
    ("output_sizes", [[1 << 50]]), ("input_dtypes", "Float"), ("input_dtypes", [1]), ("input_dtypes", []),
])
def test_entries_that_cannot_be(key: str, value: Any) -> None:
    with pytest.raises(UserError, match="entry 1 has"):
        parse_flights(of(entry(0), entry(1, **{key: value})))


def test_a_dump_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "DUMP_MAX", 100)
    with pytest.raises(UserError, match="more than 100"):
        parse_flights(RECORDED.read_bytes())


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                    max_leaves=8)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(entry())), JSON)
def test_any_value(key: str, value: Any) -> None:
    try:
        flights = parse_flights(of(entry(0, **{key: value})))
        flights.group(flights.entries[0].group)[0].collective()
    except UserError as error:
        assert "flight recorder" in error.where


@settings(max_examples=100, deadline=None)
@given(st.integers(0, RECORDED.stat().st_size - 2))
def test_a_dump_that_is_cut(length: int) -> None:
    with pytest.raises(UserError, match="is not JSON"):
        parse_flights(RECORDED.read_bytes()[:length])
