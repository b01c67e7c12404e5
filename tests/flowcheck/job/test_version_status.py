"""Statuses of versions: as text and back, whatever the text is, and in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.job.version_status import KINDS, VersionStatus, kind_of

STATUSES = st.one_of(
    st.sampled_from([VersionStatus(kind) for kind in KINDS if kind != "follows"]),
    st.integers(0, 1 << 47).map(VersionStatus.follows),
)


@given(STATUSES, STATUSES)
def test_a_status_is_its_text_and_has_its_place(one: VersionStatus, other: VersionStatus) -> None:
    assert VersionStatus.of(str(one)) == one and kind_of(str(one)) == one.kind
    assert (one < other) + (other < one) + (one == other) == 1
    assert one.verified == (str(one) == "verified") and one.diverged == (str(one) == "diverged")


def test_the_order() -> None:
    texts = ["diverged", "unverified", "follows 0", "follows 9", "follows 10", "verified"]
    assert sorted(set(texts), key=VersionStatus.of) == texts


@given(st.one_of(st.text(), st.none(), st.integers(), st.lists(st.text())))
@pytest.mark.filterwarnings("error")
def test_whatever_it_is_it_is_read(text: object) -> None:
    assert str(VersionStatus.of(text)) in (text, "unverified")


@pytest.mark.parametrize("text", [
    "follows", "follows ", "follows -1", "follows 01", "follows 1.0", "follows \u0663", "follows 1 ", " follows 1",
    "follows 1\n", "Verified", "follows " + "9" * 30, "follows 7", "follows 8",
])
def test_what_no_version_of_step_7_can_have_is_unverified(text: str) -> None:
    assert str(VersionStatus.of(text, 7)) == "unverified"
