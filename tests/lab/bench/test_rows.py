"""Rows: ratios inside a round, where they were taken, and how they are shown."""

import io
import json

import pytest
from rich.console import Console

from lab.bench.rows import Row, Setting, alternate, here, page_kind, print_rows, quantile

SETTING = Setting("a processor", "2 MB", "avx2", {"ll": "t0@8192"})


def test_ratios_are_taken_inside_a_round() -> None:
    row = Row.of("x", "GB/s", [10.0, 20.0, 40.0], [20.0, 40.0, 80.0], 0.5)
    assert (row.ratio, row.p10, row.p90, row.value, row.rounds) == (0.5, 0.5, 0.5, 20.0, 3)
    assert row.reached and not Row.of("x", "ns/packet", [2.0], [1.0], 1.2).reached
    assert Row.of("x", "GB/s", [1.0], [1.0], None).reached is None
    assert quantile([1.0, 2.0, 3.0], 0.1) == pytest.approx(1.2)


def test_rounds_alternate_and_the_first_is_thrown_away() -> None:
    order: list[str] = []

    def contender(name: str) -> float:
        order.append(name)
        return float(len(order))

    samples = alternate({"a": lambda: contender("a"), "b": lambda: contender("b")}, 3)
    assert "".join(order) == "baabbaab"
    assert samples == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}


# -- where it was taken --------------------------------------------------------------------------------


def test_a_row_says_where_it_was_taken() -> None:
    row = Row.of("x.y", "GB/s", [1.0], [2.0], None, here("1 GB", adam="two vectors"))
    fields = json.loads(json.dumps(row.as_dict()))
    assert fields["processor"] and fields["pages"] == "1 GB"
    assert fields["kernels"] in ("avx512", "avx2", "portable")
    assert set(fields["choices"]) == {"ll", "ll128", "simple", "adam"} and "@" in fields["choices"]["ll"]
    assert "setting" not in fields
    assert Row.of("x.y", "GB/s", [1.0], [2.0], None).setting.pages != "1 GB"


SMAPS = """\
1000-3000 rw-p 00000000 00:00 0
Size:                 8 kB
KernelPageSize:        4 kB
AnonHugePages:         0 kB
VmFlags: rd wr
3000-9000 rw-p 00000000 00:00 0                          [heap]
KernelPageSize:        4 kB
AnonHugePages:      2048 kB
a000-b000 rw-s 00000000 00:0f 12 /anon_hugepage (deleted)
KernelPageSize:     2048 kB
AnonHugePages:         0 kB
"""


@pytest.mark.parametrize(("address", "kind"), [
    (0x1000, "4 KB"), (0x2FFF, "4 KB"), (0x3000, "4 KB, transparently 2 MB"), (0x9000, "unknown"), (0xA800, "2 MB"),
])
def test_page_kind(address: int, kind: str) -> None:
    assert page_kind(io.StringIO(SMAPS), address) == kind


# -- how they are shown --------------------------------------------------------------------------------


def shown(*rows: Row) -> str:
    out = io.StringIO()
    print_rows(list(rows), Console(file=out, width=80))
    return out.getvalue()


def test_rows_fit_80_columns() -> None:
    names = ["adam.flat.1t.torch-cuda-foreach.bf16", "ingest.4096.hold.place.threads", "parse.256flows.small"]
    rows = [Row.of(name, "ns/packet", [12345.0, 120.0], [230.0, 99.0], 1.25, SETTING) for name in names]
    text = shown(*rows)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "flat.1t.torch-cuda-foreach.bf16" in text and "<=1.25!" in text and text.endswith("! missed\n")


def test_a_name_without_room_goes_on_below() -> None:
    """Nothing of any column is left out."""
    name = "adam.200.2t.torch-cuda-foreach.bf16.torch-single"
    text = shown(Row.of(name, "param/us", [12345.0] * 3, [678.0, 999.0, 1.0], 1.0, SETTING))
    assert all(len(line) <= 80 for line in text.splitlines())
    first, second = text.splitlines()[-2:]
    assert first.startswith("200.2t.torch-cuda-foreach.bf16. 12345 param/us ") and first.split()[-1] == ">=1"
    assert second.split() == ["torch-single"] and "…" not in text


def test_a_table_for_each_bench_and_setting() -> None:
    text = shown(
        Row.of("a.one", "GB/s", [150.0], [100.0], 1.0, SETTING), Row.of("a.two", "GB/s", [15.0], [10.0], 2.0, SETTING),
        Row.of("a.three", "GB/s", [1.5], [1.0], None, Setting("another", "4 KB", "avx512", {})),
    )
    assert text.count("a processor; pages of 2 MB; avx2: ll t0@8192") == 1 and text.count("another; pages of 4 KB") == 1
    assert [line.split()[0] for line in text.splitlines()][1:4] == ["a", "one", "two"]
    assert " 150 GB/s 100 " in " ".join(text.split()) and ">=2!" in text and ">=1!" not in text


def test_nothing_is_missed_where_nothing_is_missed() -> None:
    assert "missed" not in shown(Row.of("a.b", "ms/GB", [1.0], [5.0], 1.0, SETTING))
