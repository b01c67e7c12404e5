"""Three mirrors into one arena: the rows, and that what they time is right."""

from lab.bench import merge


def test_rows_of_merge() -> None:
    rows = merge.run(1, 1 << 20)
    names = [f"merge.{protocol}.{mtu}{what}" for mtu in (1024, 4096) for protocol in ("ll", "ll128", "simple")
             for what in ("", ".bare")]
    assert [row.name for row in rows] == names
    assert [row.target for row in rows] == [3.0, None] * 6
    assert all(row.unit == "ns/packet" and row.less_is_better for row in rows)
    assert all(min(row.value, row.limit) > 0 for row in rows)  # which is less, a busy machine decides in one round
