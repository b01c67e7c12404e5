"""The table of NCCL versions. Values by hand from NCCL's wire format, 2.4 to 2.6, 3.1, 5.2 to 5.4, 6.1."""

import pytest

from flowcheck.lab.synth.families import FAMILIES
from parser.nccl import CTS_ELEMENTS, TABLE, Chunks, CtsElement, Parts, WireError, of


def test_rows_follow_each_other_without_a_gap() -> None:
    assert [row.first for row in TABLE[1:]] == [row.last + 1 for row in TABLE[:-1]]
    assert (TABLE[0].first, TABLE[-1].last) == (12, 30)
    assert all(row.first <= row.last and of(row.example) is row and row.proven for row in TABLE)


@pytest.mark.parametrize("version", ["2.31.0", "2.31", "2.99.1", "2.11.4", "3.19.4", "1.19.4"])
def test_versions_that_were_never_read_are_refused(version: str) -> None:
    with pytest.raises(WireError, match=r"outside 2\.12\.\.2\.30"):
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
        ("2.12.12", CtsElement(32, 4, 12, 16, 20, 24), "2.12-2.19"),
        ("2.19.4", CtsElement(32, 4, 12, 16, 20, 24), "2.12-2.19"),
        ("2.20.5", CtsElement(64, 4, 12, 20, 24, 32), "2.20-2.23"),
        ("2.23.4", CtsElement(64, 4, 12, 20, 24, 32), "2.20-2.23"),
        ("2.24.3", CtsElement(64, 8, 16, 32, 36, 40), "2.24-2.29"),
        ("2.29.2", CtsElement(64, 8, 16, 32, 36, 40), "2.24-2.29"),
        ("2.30.7", CtsElement(64, 8, 16, 48, 52, 56), "2.30"),
    ],
)
def test_the_clear_to_send_element(version: str, element: CtsElement, versions: str) -> None:
    assert of(version).cts == element and element.versions == versions and element in CTS_ELEMENTS


def test_what_else_changed_and_when() -> None:
    versions = [f"2.{minor}.1" for minor in range(12, 31)]
    assert [v for v in versions if of(v).always_pairs] == ["2.12.1", "2.13.1", "2.14.1", "2.15.1"]
    assert [v for v in versions if of(v).big_endian] == ["2.29.1", "2.30.1"]
    assert [of(v).devices for v in versions] == [1] * 8 + [2] * 4 + [4] * 6 + [8]
    assert [of(v).tree_threads for v in versions] == [0] * 10 + [640] * 9
    assert [of(v).qp_info for v in versions] == [552] * 7 + [2600] + [3336] * 4 + [3576] * 2 + [3584] * 3 + [0, 4448]
    assert [of(v).chunks.parts for v in versions] == [Parts.LOOPS] * 8 + [Parts.RANGES] * 2 + [Parts.BYTES] * 9


def test_bytes_are_cut_by_these_rules() -> None:
    assert of("2.22.3").chunks == Chunks(Parts.BYTES, 512, 16, 1, clamped=True, floored=True)
    assert of("2.23.4").chunks == of("2.25.1").chunks == Chunks(Parts.BYTES, 16384, 0, 1)
    assert of("2.26.2").chunks == of("2.28.3").chunks == Chunks(Parts.BYTES, 16384, 0, 4)
    assert of("2.29.2").chunks == of("2.30.7").chunks == Chunks(Parts.BYTES, 32768, 0, 4, clamped=False)


def test_the_generator_was_written_from_the_same_facts() -> None:
    """Two tables, written apart: they must not have drifted."""
    for family in FAMILIES:
        row, at = of(f"2.{family.first[1]}.0"), {name: where for name, (where, _) in family.cts_fields.items()}
        assert row.cts == CtsElement(
            family.cts_bytes, family.cts_fields["size"][1], at["rkey"], at["nreqs"], at["tag"], at["idx"],
        )
        assert (row.big_endian, row.always_pairs) == (family.big_endian_imm, family.always_pair)
        rule = row.chunks
        assert (rule.min_traffic, rule.ll_weight) == (family.min_traffic, family.ll_scale)
        assert (rule.clamped, rule.floored, bool(rule.cell)) == (family.clamp, family.floor_lo, family.fixed_cell)
