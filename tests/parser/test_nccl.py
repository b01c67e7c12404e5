"""The table of NCCL versions. Values by hand from NCCL's wire format, 2.4 to 2.6, 3.1, 5.2 to 5.4, 6.1."""

from dataclasses import replace

import pytest

from flowcheck.job.model import MAX_DEVICES
from lab.synth.families import NEWEST, family_of
from parser.nccl import CTS_ELEMENTS, TABLE, Chunks, CtsElement, Parts, WireError, of, span
from tests.nccl_versions import UNREAD


def test_rows_follow_each_other_without_a_gap() -> None:
    assert [row.first for row in TABLE[1:]] == [row.last + 1 for row in TABLE[:-1]]
    assert (TABLE[0].first, TABLE[-1].last) == (12, 30)
    assert all(row.first <= row.last and of(row.example) is row and row.proven for row in TABLE)


@pytest.mark.parametrize("version", [UNREAD, UNREAD.removesuffix(".0"), "2.99.1", "2.11.4", "3.19.4", "1.19.4"])
def test_versions_that_were_never_read_are_refused(version: str) -> None:
    with pytest.raises(WireError, match=rf"outside 2\.12\.\.2\.{TABLE[-1].last}"):
        of(version)


@pytest.mark.parametrize("version", ["", "2", "two.19", "2.x.4"])
def test_what_is_not_a_version_is_refused(version: str) -> None:
    with pytest.raises(WireError, match="is not an NCCL version"):
        of(version)


@pytest.mark.parametrize(
    ("version", "versions"),
    [
        ("2.12.12", "2.12-2.15"), ("2.15.5", "2.12-2.15"), ("2.16.2", "2.16-2.18"), ("2.18.6", "2.16-2.18"),
        ("2.19.4", "2.19"), ("2.20.5", "2.20-2.21"), ("2.21.5", "2.20-2.21"), ("2.22.3", "2.22"), ("2.23.4", "2.23"),
        ("2.25.1", "2.24-2.25"), ("2.26.2", "2.26-2.28"), ("2.28.3", "2.26-2.28"), ("2.29.2", "2.29"),
        ("2.30.7", "2.30"),
    ],
)
def test_the_row_of_a_version(version: str, versions: str) -> None:
    assert of(version).versions == versions


@pytest.mark.parametrize(
    ("version", "element", "versions"),
    [
        ("2.12.12", CtsElement(32, 4, 12, 1, 16, 20, 24, 0, 8), "2.12-2.19"),
        ("2.19.4", CtsElement(32, 4, 12, 1, 16, 20, 24, 0, 8), "2.12-2.19"),
        ("2.20.5", CtsElement(64, 4, 12, 2, 20, 24, 32, 0, 8), "2.20-2.23"),
        ("2.23.4", CtsElement(64, 4, 12, 2, 20, 24, 32, 0, 8), "2.20-2.23"),
        ("2.24.3", CtsElement(64, 8, 16, 4, 32, 36, 40, 0, 8), "2.24-2.29"),
        ("2.29.2", CtsElement(64, 8, 16, 4, 32, 36, 40, 0, 8), "2.24-2.29"),
        ("2.30.7", CtsElement(64, 8, 16, 8, 48, 52, 56, 0, 8), "2.30"),
    ],
)
def test_the_clear_to_send_element(version: str, element: CtsElement, versions: str) -> None:
    assert of(version).cts == element and element.versions == versions and element in CTS_ELEMENTS


@pytest.mark.parametrize("change", [
    {"size_width": 2}, {"keys": 0}, {"bytes": 136}, {"rkey_at": -4},
    {"bytes": 63}, {"number_at": 57}, {"tag_at": 54}, {"keys": 9}, {"size_at": 7}, {"address_at": -1},
])
def test_an_element_whose_fields_are_not_possible_is_no_element(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"not possible|overlap"):
        replace(of("2.30.7").cts, **change)


def test_versions_of_rows_that_are_not_neighbours() -> None:
    assert span(TABLE) == "2.12-2.30" and span(TABLE[1:2]) == "2.16-2.18" and span(TABLE[4:6]) == "2.22-2.23"
    assert span([TABLE[0], TABLE[2], TABLE[3]]) == "2.12-2.15 or 2.19-2.21"


def test_every_port_of_a_merged_nic_has_a_key_in_the_element() -> None:
    assert [row.cts.keys for row in TABLE] == [row.devices for row in TABLE]


def test_a_manifest_may_name_as_many_ports_as_any_version_merges() -> None:
    assert max(row.devices for row in TABLE) == MAX_DEVICES


def test_what_else_changed_and_when() -> None:
    versions = [f"2.{minor}.1" for minor in range(12, 31)]
    assert [v for v in versions if of(v).always_pairs] == ["2.12.1", "2.13.1", "2.14.1", "2.15.1"]
    assert [v for v in versions if of(v).big_endian] == ["2.29.1", "2.30.1"]
    assert [of(v).devices for v in versions] == [1] * 8 + [2] * 4 + [4] * 6 + [8]
    assert [of(v).tree_threads for v in versions] == [0] * 10 + [640] * 9
    records = [row and row.bytes for row in (of(v).qp_info for v in versions)]
    assert records == [552] * 7 + [2600] + [3336] * 4 + [3576] * 2 + [3584] * 3 + [None, 4448]
    assert [of(v).chunks.parts for v in versions] == [Parts.LOOPS] * 8 + [Parts.RANGES] * 2 + [Parts.BYTES] * 9


def test_bytes_are_cut_by_these_rules() -> None:
    assert of("2.22.3").chunks == Chunks(Parts.BYTES, 512, 16, 1, clamped=True, floored=True)
    assert of("2.23.4").chunks == of("2.25.1").chunks == Chunks(Parts.BYTES, 16384, 0, 1)
    assert of("2.26.2").chunks == of("2.28.3").chunks == Chunks(Parts.BYTES, 16384, 0, 4)
    assert of("2.29.2").chunks == of("2.30.7").chunks == Chunks(Parts.BYTES, 32768, 0, 4, clamped=False)


def test_the_generator_was_written_from_the_same_facts() -> None:
    """Two tables, written apart: they must not have drifted."""
    assert (2, TABLE[-1].last) == NEWEST
    for minor in range(TABLE[0].first, TABLE[-1].last + 1):
        family, row = family_of(f"2.{minor}"), of(f"2.{minor}")
        at = {name: where for name, (where, _) in family.cts_fields.items()}
        cts = row.cts
        assert (cts.bytes, cts.size_width) == (family.cts_bytes, family.cts_fields["size"][1])
        assert (cts.address_at, cts.size_at, cts.rkey_at, cts.requests_at, cts.tag_at, cts.number_at) == tuple(
            at[name] for name in ("addr", "size", "rkey", "nreqs", "tag", "idx")
        )
        assert (row.big_endian, row.always_pairs) == (family.big_endian_imm, family.always_pair)
        rule = row.chunks
        assert (rule.min_traffic, rule.cell, rule.ll_weight) == (family.min_traffic, family.cell, family.ll_scale)
        assert (rule.clamped, rule.floored) == (family.clamp, family.floor_lo)
