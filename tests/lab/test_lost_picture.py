"""What a run that lost nodes recorded, as a picture: who was there when, what was made of which step, both losses."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def event(name: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"event": name, "time": 1000.0 + at, **fields}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two nodes and a holder: node 0 is lost at 4 s, the ranks at 5 s; all is there again at 8 s."""
    marks = [event("", at, who=who, what=what, iteration=number) for at, who, what, number in (
        (0, "ranks", "train", 0), (4, "node 0", "lost", 6), (5, "ranks", "lost", 8), (8, "ranks", "train", 0),
        (12, "ranks", "end", 12))]
    (tmp_path / "lost.json").write_text(json.dumps({
        "parity": "2+1", "members": ["node 0", "node 1", "holder 0"], "died": 8, "step": 4, "marks": marks,
        "undisturbed": {str(number): 5.0 - number / 8 for number in range(12)},
        "before": {str(number): 5.0 - number / 8 for number in range(8)},
        "after": {str(number): 5.0 - number / 8 for number in range(4, 12)},
    }))
    said = {
        "node0-1": [event("listening", -3), event("iteration", 1, published=True),
                    event("iteration", 2, published=False), event("copied", 3, step=4)],
        "node0-2": [event("listening", 6), event("iteration", 9, published=True), event("copied", 10, step=8)],
        "node1-1": [event("listening", -3), event("iteration", 1.5, published=True), event("copied", 3.5, step=4)],
        "holder0": [event("holder_ready", -2), event("protected", 3.75, step=4), event("holder_ready", 9.5),
                    event("protected", 11, step=8), event("protected", 13, step=12)],
    }
    for name, events in said.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in events))
    return tmp_path


def test_a_record_is_drawn_and_the_same_one_is_the_same_text(run: Path) -> None:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("lost_picture", ROOT / "tools" / "lost_picture.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    drawn = tool.picture(run)
    assert drawn == tool.picture(run) and drawn.startswith("<?xml")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert [one for one in texts if one in ("ranks", "node 0", "node 1", "holder 0")] == [
        "ranks", "node 0", "node 1", "holder 0"]
    assert "goes on after step 4" in drawn and "after step 4, from parity" in texts
    out = run / "out.svg"
    assert tool.main(out, run) == 0 and out.read_text() == drawn
    record = json.loads((run / "lost.json").read_text())
    (run / "lost.json").write_text(json.dumps(record | {"after": record["after"] | {"11": 9.0}}))
    assert tool.picture(run) != drawn  # it shows what is there
    said = tool._events(run, "node 0")
    assert [[one["event"] for one in some] for some in said] == [
        ["listening", "iteration", "iteration", "copied"], ["listening", "iteration", "copied"]]
    assert [len(some) for some in tool._events(run, "holder 0")] == [2, 3]
