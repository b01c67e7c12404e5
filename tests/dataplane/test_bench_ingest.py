"""The form of `flowcheck bench ingest`, and that what it times places the right bytes. Timing is not tested."""

from __future__ import annotations

from flowcheck.bench import ingest


def test_rows(eal, monkeypatch):
    monkeypatch.setattr(ingest, "LAP_BYTES", 1 << 20)
    monkeypatch.setattr(ingest, "LAPS", 2)
    monkeypatch.setattr(ingest, "COLD_LAP_BYTES", 1 << 20)
    monkeypatch.setattr(ingest, "MEMORY_MB", 64)
    rows = ingest.run(1, 4 << 20)
    ways = [
        f"{dump}{more}" for dump in ("hold", "copy", "dma") for more in ("", ".place", ".place.icrc", ".place.threads")
    ]
    assert [row.name for row in rows] == [f"ingest.{mtu}.{way}" for mtu in (1024, 4096) for way in [*ways, "cold"]]
    assert {row.name for row in rows if row.target} == {
        f"ingest.{m}.{w}" for m in (1024, 4096) for w in ("hold.place", "cold")
    }
    assert all(row.value > 0 and row.limit > 0 for row in rows)
