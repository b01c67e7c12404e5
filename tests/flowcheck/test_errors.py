"""Numbers of bytes as people read them: never 0 of a unit that is too large."""

from __future__ import annotations

import pytest

from flowcheck.errors import size_text


@pytest.mark.parametrize(("nbytes", "decimal", "binary"), [
    (0, "0 B", "0 B"), (999, "999 B", "999 B"), (1000, "1.0 kB", "1000 B"), (40 << 10, "41.0 kB", "40.0 KiB"),
    (999_949, "999.9 kB", "976.5 KiB"), (999_950, "1.0 MB", "976.5 KiB"), ((1 << 20) - 60, "1.0 MB", "1023.9 KiB"),
    ((1 << 20) - 1, "1.0 MB", "1.0 MiB"), (3 << 40, "3.3 TB", "3.0 TiB"), (5000 << 40, "5497.6 TB", "5000.0 TiB"),
])
def test_the_unit_fits_the_number(nbytes: int, decimal: str, binary: str) -> None:
    assert (size_text(nbytes), size_text(nbytes, binary=True)) == (decimal, binary)
