"""Pages say what docs/proven.toml says, and that says what the tree has."""

from __future__ import annotations

import ast
import datetime
import json
import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from switch_configs.schema import VENDORS
from updater.rounding_modes import RoundingMode

ROOT = Path(__file__).resolve().parents[2]
PROVEN: dict[str, Any] = runpy.run_path(str(ROOT / "tools/proven.py"))
STATED: dict[str, Any] = PROVEN["stated"]()
FACTS: dict[str, str] = PROVEN["facts"]()
BLOCK: re.Pattern[str] = PROVEN["BLOCK"]
TEXTS = {path: path.read_text() for path in PROVEN["pages"]()}
README = TEXTS[ROOT / "README.md"]

HARDWARE = r"GPUs?\b|\bCUDA\b|libnccl|\bNCCL\b|\bNICs?\b|\bswitch(?:es)?\b|\bhardware\b|\bH200\b|\bIntel\b"
UNSHOWN = (
    r"\bnot (?:been )?(?:yet )?(?:run|tried|proven|shown)\b|\bnever (?:been )?(?:run|ran|tried|seen)\b|"
    r"\bnobody (?:has|have) \w+|\bno .{0,40}\bhas (?:seen|run)\b|\bhas not (?:been the judge|tried)\b|"
    r"\bnothing here (?:was|has)\b|\bunproven\*? so far\b|\bnot tried\b|\bnot run\b"
)
SENTENCE = re.compile(r"(?<=[.|])\s+")


def outside(text: str) -> str:
    """A page without its blocks and without code."""
    return re.sub(r"^```.*?^```", "", BLOCK.sub("", text), flags=re.DOTALL | re.MULTILINE)


def unshown(text: str) -> list[str]:
    """Sentences outside of blocks that say of hardware what nobody has shown."""
    parts = SENTENCE.split(" ".join(re.sub(r"\n\s*\n|\n(?=[|#-])", ". ", outside(text)).split()))
    return [one for one in parts if re.search(UNSHOWN, one, re.IGNORECASE) and re.search(HARDWARE, one)]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_are_what_the_file_and_the_planner_say(page: Path) -> None:
    assert PROVEN["written"](page, TEXTS[page]) == TEXTS[page], "python -P tools/proven.py writes it"


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_marks_are_whole_and_begin_no_line_of_text(page: Path) -> None:
    text = TEXTS[page]
    assert text.count("<!-- proven: ") == text.count("<!-- end -->") == len(BLOCK.findall(text))
    assert re.findall(r"^\s*<!-- (?:proven: \w+|end) -->.+$", text, re.MULTILINE) == []


def test_all_that_the_file_says_is_said_by_a_page() -> None:
    named = Counter(name for text in TEXTS.values() for _, name, _, _ in BLOCK.findall(text))
    assert set(STATED["pages"]) | set(PROVEN["TABLES"]) == set(named)


@pytest.mark.parametrize("page", [page for page in TEXTS if page.parent.name != "decisions"],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_what_no_hardware_has_shown_is_said_by_the_file_alone(page: Path) -> None:
    """Such sentences stood in fourteen pages, and those of six were not true any more."""
    assert unshown(TEXTS[page]) == []


@pytest.mark.parametrize("sentence", [
    "| [GPU demo](use/gpu-demo.md) | real NCCL on one GPU, its packets mirrored and followed; not run yet |",
    "Real libnccl **has not been the judge yet**: a recording plugin.", "That\n  has not been tried on a GPU yet.",
    "The orders of CUDA are *unproven* so far and every result says so", "nothing here was measured on Intel.",
    "no hardware switch has seen them.", "Nobody has seen this with a NIC.",
])
def test_such_a_sentence_is_found(sentence: str) -> None:
    assert unshown(f"# A page\n\n{sentence}\n") and not unshown(f"<!-- proven: x -->\n{sentence}\n<!-- end -->\n")


# -- the file beside the tree ------------------------------------------------------------------------------------------


SHOWN = sorted({test for one in (*STATED["proven"], *STATED["job"]) for test in one.get("tests", ())})


@pytest.mark.parametrize("test", SHOWN)
def test_what_shows_it_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    names = {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")}
    assert names and (not name or name in names)


def test_every_claim_has_a_test_and_a_day() -> None:
    assert all(one["tests"] and isinstance(one["since"], datetime.date) for one in STATED["proven"])


def test_facts_are_those_of_what_was_recorded() -> None:
    (vectors,) = (ROOT / "tests/golden").glob("cuda-*.json")
    made = json.loads(vectors.read_text())
    assert FACTS["gpu"] == made["name"] and made["torch"].startswith(f"{FACTS['cuda_torch']}.")
    assert RoundingMode("torch-cuda-foreach", made["torch"]).unproven == ""
    assert RoundingMode("torch-cuda-foreach", "2.10.0").unproven != ""
    demo = (ROOT / "docs/use/gpu-demo.md").read_text()
    assert re.search(rf"^{FACTS['gpu']}; torch {FACTS['cuda_torch']}\..*NCCL {FACTS['nccl']} ", demo, re.MULTILINE)
    assert PROVEN["NUMBERS"].index(FACTS["platforms"]) == len(VENDORS)


def test_ten_jobs_are_usual_and_each_has_a_verdict_that_something_shows() -> None:
    usual = [one for one in STATED["job"] if "usual" in one]
    assert len(usual) == 10 and {one["followed"] for one in usual} == {"yes", "parameters", "no"}
    assert all(one["tests"] and one["because"] for one in usual)
    rows = {one["job"]: one["live"] for one in STATED["job"] if "job" in one}
    for one in usual:
        if (live := rows.get(one.get("job", ""), "")) and one["followed"] != "parameters":
            assert live.startswith("refused") == (one["followed"] == "no"), one["job"]


# -- README ----------------------------------------------------------------------------------------------------------


def test_readme_says_for_whom_and_which_jobs_before_it_shows_anything() -> None:
    first = README.split("\n", 2)[2].split("\n\n")[0]
    assert "For whoever" in first and len(first.splitlines()) <= 3
    assert README.index("<!-- proven: count -->") < README.index("$ .venv/bin/flowcheck lab run")


def test_readmes_command_says_what_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    """As a reader would type it: options, defaults and wording of the command are those of the page."""
    from flowcheck.cli import app

    (shown,) = re.findall(r"```\n\$ flowcheck (plan goodput .*?)\n(.*?)\n```", README, re.DOTALL)
    app(shown[0].split(), standalone_mode=False)
    said = " ".join(capsys.readouterr().out.split())
    assert shown[1] in said
    shares = re.findall(r"`([\w-]+)` \| (\d+\.\d\d) % \| [\d,]+ \|", README)
    assert len(shares) == len(STATED["beside"])
    for name, share in shares:
        assert re.search(rf"{name}\b.*?effective % {float(share):.4g}\b", said), (name, share)


def test_what_readme_concludes_is_what_the_figures_say() -> None:
    """Its words between the tables: which of two trains more, and costs less, in which case."""
    rows = [re.findall(r"([\d.]+) %, ([\d,]+) \$", line) for line in README.splitlines()]
    as_above, two, four, storage, *_, rare = [
        [(float(share), int(cost.replace(",", ""))) for share, cost in row] for row in rows if row
    ]
    flowcheck, copies, written, _, stopped = as_above
    assert 0 < copies[0] - flowcheck[0] < 0.5 and copies[1] < flowcheck[1], "train as much, and cost less"
    assert two[1][0] < two[0][0] and two[1][1] < two[0][1], "with two hosts FlowCheck trains more"
    assert four[1][0] < four[0][0] and four[1][1] > four[0][1], "with four it costs less, too"
    assert written[1] > flowcheck[1] and storage[2][1] < storage[0][1], "storage is too slow"
    assert rare[0][1] > 5 * max(cost for _, cost in rare[1:4]) and stopped[1] > flowcheck[1]
    cluster = STATED["planner"]["cluster"]
    hosts = cluster["gpus"] / 8
    assert cluster["node-failures"] == cluster["failures-per-day"] * cluster["nodes"] / hosts, "as often as hosts do"
