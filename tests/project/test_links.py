"""Links between the project's pages hold: the file is there, and so is the heading that an anchor names.

Also: every page of docs/ stands in its index, and a path of docs/ that code or prose names exists.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^ {0,3}(```+|~~~+)")
LINK = re.compile(r"\]\(([^()\s]+)\)")
NAMED = re.compile(r"(?<![\w/.-])docs/[\w/.-]*\.(?:md|json)\b")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def files(*patterns: str) -> list[Path]:
    """Of the checkout, committed or new; what git ignores is left out."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout", allow_module_level=True)
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run([*command, *patterns], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without blocks of code."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if fence:
            if mark and mark.group(1).startswith(fence) and line.strip() == mark.group(1):
                fence = ""
        elif mark:
            fence = mark.group(1)
        else:
            yield number, line


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the usual renderers make them."""
    made: set[str] = set()
    for _, line in prose(text):
        if heading := re.match(r"#{1,6} +(.*?)[ #]*$", line):
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.group(1)).lower()
            anchor = first = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            count = 0
            while anchor in made:
                anchor = f"{first}-{(count := count + 1)}"
            made.add(anchor)
    return made


def broken(page: Path) -> list[str]:
    """`line: target` of each link of `page` that leads nowhere. Links to other sites are not followed."""
    lost = []
    for number, line in prose(page.read_text()):
        for target in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if ELSEWHERE.match(target):
                continue
            name, _, anchor = target.partition("#")
            to = page.parent / name if name else page
            there = to.exists()
            if there and anchor:
                there = to.suffix == ".md" and anchor in anchors(to.read_text())
            if not there:
                lost.append(f"{number}: {target}")
    return lost


PAGES = files("*.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_every_page_stands_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    listed = {(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", index)}
    pages = {path for path in PAGES if path.is_relative_to(ROOT / "docs") and path.name != "README.md"}
    assert {path for path in pages if path not in listed and path.parent not in listed} == set()


def test_pages_that_code_and_prose_name_exist() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files("*.py", "*.pyx", "*.pxd", "*.h", "*.c", "*.toml", "*.md", "Makefile")
        for name in NAMED.findall(path.read_text())
        if not (ROOT / name).exists()
    }
    assert missing == set()


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A title: `code`, and more\n## Twice\n## Twice\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](there.md#a-title-code-and-more) [c](there.md#twice-1) [d](https://a.b/x) `[e](no.md)`\n"
        "```\n[f](no.md)\n```\n"
        "[g](no.md)\n[h](there.md#no-heading) and [i](there.md#twice-2)\n[j](#here)\n# Now here\n[k](#now-here)\n"
    )
    assert broken(page) == ["5: no.md", "6: there.md#no-heading", "6: there.md#twice-2", "7: #here"]


def test_what_contributing_names_is_there() -> None:
    """Whoever begins there would look for it."""
    named = re.findall(r"`((?:[a-z_]+/)+(?:\w[\w.]*)?)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 15 and [path for path in named if not (ROOT / path).exists()] == []
