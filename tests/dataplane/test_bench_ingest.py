"""The form of `flowcheck bench ingest`, and that what it times places the right bytes. Timing is not tested."""

from __future__ import annotations

from lab.bench import ingest


def test_rows(eal, monkeypatch):
    monkeypatch.setattr(ingest, "LAP_BYTES", 1 << 20)
    monkeypatch.setattr(ingest, "LAPS", 2)
    monkeypatch.setattr(ingest, "COLD_LAP_BYTES", 1 << 20)
    monkeypatch.setattr(ingest, "MEMORY_MB", 64)
    rows = ingest.run(1, 4 << 20)
    dumps = [
        f"{dump}{more}" for dump in ("copy", "dma", "hold") for more in ("", ".place", ".place.icrc", ".place.threads")
    ]
    ways = ["ll", "ll.bare", *dumps, "ll128", "ll128.bare", "simple", "simple.bare", "cold"]
    assert [row.name for row in rows] == [f"ingest.{mtu}.{way}" for mtu in (1024, 4096) for way in ways]
    assert {row.name for row in rows if row.target} == {
        f"ingest.{m}.{w}" for m in (1024, 4096) for w in ("ll", "ll128", "simple", "cold")
    }
    assert all(row.value > 0 and row.limit > 0 for row in rows)
