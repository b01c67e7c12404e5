"""The status page in a real browser, over real HTTP: what it shows, on a desk and on a phone, live, and whatever names
and sentences it is given."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flowcheck.node.status.counters import Tally
from flowcheck.node.tokens import HTTP_ROLES, keys_of

ROOT = Path(__file__).resolve().parents[3]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Node:
    """A node's page. document: what the node says at the moment; still: it says nothing new."""

    def __init__(self, browser: Any, address: str, key: str, example: dict[str, Any]) -> None:
        self.browser, self.address, self.key = browser, address, key
        self.example = self.document = example
        self.still = False
        self.serving: Any = None
        self.token = b""
        self.pages: list[Any] = []

    def page(self, width: int = 1200, *, dark: bool = False) -> Any:
        page = self.browser.page(width, 900, dark=dark)
        self.pages.append(page)
        page.open(f"http://{self.address}/", "anybody", self.key)
        page.wait("document.querySelector('#name').textContent.includes('node ')")
        return page

    def say(self) -> dict[str, Any]:
        return self.document if self.still else self.document | {"time": time.time()}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    browser, screenshots = tool("browser"), tool("screenshots")
    if browser.find() is None:
        pytest.skip("no Chromium is installed (Debian: chromium)")
    said: list[Node] = []
    example = screenshots.example(time.time())
    folder = tmp_path_factory.mktemp("none")
    with screenshots.served(lambda: said[0].say() if said else example, folder) as (address, key, serving):
        with browser.Browser() as one:
            said.append(Node(one, address, key, example))
            said[0].serving, said[0].token = serving, screenshots.TOKEN
            yield said[0]


@pytest.fixture
def node(running: Node) -> Iterator[Node]:
    running.document, running.still = copy.deepcopy(running.example), False
    yield running
    while running.pages:
        running.pages.pop().close()


def text(page: Any, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({selector!r}).textContent"))


def test_what_somebody_on_call_looks_at(node: Node) -> None:
    page = node.page()
    page.wait("document.querySelectorAll('[data-iteration]').length === 24")
    group = text(page, "[data-group=dp0]")
    for part in ("Group dp0 gpt-13b-0412, epoch 2", "last complete step4,142", "statusverified", "connected4 of 4",
                 "not published2", "fullest ring1.9 %", "arenas2 of 4"):
        assert part in group, part
    assert "lost 612" in group and "2.4 kB" in group  # missing by cause; healed by the trainers
    assert "0000:81:00.0" in text(page, "#ports") and "unknown 12" in text(page, "#ports")
    page.wait("document.querySelector('#versions').textContent.includes('none')")
    assert "65 s" in text(page, "#failures") and not page.evaluate("document.querySelector('#failures').hidden")
    events = text(page, "#events")
    assert events.index("patched") < events.index("stale") < events.index("job_recovered")  # the newest first
    assert "until the trainers have sent their own state" in events
    page.wait("document.querySelector('#fresh').textContent.startsWith('live, version')")
    assert page.evaluate("document.title") == "leaf-3: FlowCheck node"
    assert page.problems == [] and {url.split("/", 3)[2] for url in page.asked} == {node.address}


def test_shadow_mode(node: Node) -> None:
    """How many checksums have matched of how many; what is withheld; and what it means that none are asked for."""
    page = node.page()
    page.wait("document.querySelector('[data-group=dp0]').textContent.includes('checksums matched3 of 3')")
    page.wait("document.querySelector('#versions').textContent.includes('none')")
    assert "api.shadow" not in text(page, "#versions")
    group = node.document["groups"][0]
    group["since"], group["matches"] = {"withheld": time.time() - 5}, 1
    page.wait("document.querySelector('[data-group=dp0]').textContent.includes('checksums matched1 of 3')")
    page.wait("document.querySelector('.banner').textContent.includes('not offered for recovery yet')")
    page.evaluate("""versions = {versions: [], absent: [],
        withheld: [{shard: 'dp0', tier: 'memory', why: '<b>a</b> reason'}]}; list()""")
    assert text(page, "#withheld") == "dp0, memory: <b>a</b> reason"
    node.document["shadow"] = 0
    page.wait("document.querySelector('#name') && told.shadow === 0")
    page.evaluate("versions = {versions: [], absent: []}; list()")
    assert "Shadow mode is off (api.shadow = 0)" in text(page, "#versions")


def test_the_timeline_is_to_scale(node: Node) -> None:
    """Stages follow each other; the deadline stands where the next iteration begins; a late one passes it."""
    page = node.page()
    page.wait("document.querySelectorAll('[data-iteration]').length === 24")
    rows = page.evaluate("""Object.fromEntries([...document.querySelectorAll('[data-iteration]')].map((g) => [
        g.dataset.iteration, {
          bars: [...g.querySelectorAll('rect')].map((r) => ['fill', 'x', 'width'].map((name) => r.getAttribute(name))),
          deadline: +(g.querySelector('line') || {getAttribute: () => -1}).getAttribute('x1'),
          note: g.lastChild.textContent, tip: g.querySelector('title').textContent }]))""")
    told = {row["iteration"]: row for row in node.document["groups"][0]["rows"]}
    for number in (4126, 4127):
        bars = [(fill, float(x), float(width)) for fill, x, width in rows[str(number)]["bars"]]
        times = told[number]["times"]
        assert [fill for fill, _, _ in bars] == [
            f"var(--{name})" for name in ("receive", "place", "record", "update", "publish")]
        begin, per_ms = bars[0][1], bars[0][2] / times["last"]
        for (_, x, width), (start, end) in zip(bars, [(0, "last"), ("last", "covered"), ("covered", "record"),
                                                      ("record", "applied"), ("applied", "published")], strict=True):
            assert x == pytest.approx(begin + per_ms * (times[start] if start else 0), abs=0.01)
            assert x + width == pytest.approx(begin + per_ms * times[end], abs=0.01)
        assert rows[str(number)]["deadline"] == pytest.approx(begin + per_ms * times["next"], abs=0.01)
    assert rows["4127"]["note"] == "published late" and rows["4126"]["note"] == "published"
    assert len(rows["4131"]["bars"]) == 3 and rows["4131"]["note"] == "not published, missing lost 306"
    assert "bucket 3 lacks 306 elements" in rows["4131"]["tip"]
    assert rows["4120"]["note"].startswith("published, healed: peer")


def test_what_is_wrong_stands_at_the_top_with_what_to_do(node: Node) -> None:
    page = node.page()
    page.wait("document.querySelector('.banner')")
    assert "port 0000:c1:00.0: no packet for" in text(page, ".banner") and "switch verify" in text(page, ".banner")
    group = node.document["groups"][0]
    group["since"] = {"silent": time.time() - 5, "behind": time.time()}
    group["status"], node.document["connected"] = "diverged", {"dp0": 3}
    page.wait("document.querySelector('.banner').textContent.includes('5 things are wrong')")
    said = text(page, ".banner")
    for part in ("brings nothing of this job", "Versions are late", "did not match", "3 of 4 ranks"):
        assert part in said, part
    assert page.evaluate("document.querySelector('.banner').className") == "banner bad"
    node.document["captures"].pop()
    group["since"], group["status"], node.document["connected"] = {}, "verified", {"dp0": 4}
    page.wait("document.querySelector('.banner').textContent === 'Every group has its versions.'")
    assert page.evaluate("document.querySelector('.banner').className") == "banner good"


def test_a_full_disk_is_not_green(node: Node) -> None:
    """As the node has it, until a checkpoint is written."""
    tally = Tally("leaf-3")
    tally.hear("problem", {"name": "dp0", "step": 7, "why": "/out: <b>No space</b> left on device"})
    node.document["captures"].pop()
    node.document["wrong"] = json.loads(json.dumps(tally.document()["wrong"]))
    page = node.page()
    page.wait("document.querySelector('.banner').textContent.includes('Something is wrong')")
    assert "group dp0: no checkpoint can be written: /out: <b>No space</b> left on" in text(page, ".banner")
    assert page.evaluate("document.querySelector('.banner').className") == "banner bad"
    tally.hear("written", {"name": "dp0", "step": 8, "path": "/out"})
    node.document["wrong"] = json.loads(json.dumps(tally.document()["wrong"]))
    page.wait("document.querySelector('.banner').textContent === 'Every group has its versions.'")


def test_a_switchs_own_frames_are_no_mirror(node: Node) -> None:
    """LLDP comes ten times a second on a port that brings nothing of the job any more, or never did."""
    port, page = node.document["captures"][1], node.page()
    port["last"], port["last_claimed"] = time.time() + 60, time.time() - 95
    page.wait("document.querySelector('.banner').textContent.includes('no packet of a job that is followed for')")
    port["last_claimed"] = 0.0
    page.wait("document.querySelector('.banner').textContent.includes('no packet of a job that is followed ever')")
    node.document["captures"][0] |= {"last": port["last"], "last_claimed": 0.0}  # no job at all
    page.wait("document.querySelector('.banner').textContent === 'Every group has its versions.'")


def test_it_is_live(node: Node) -> None:
    page = node.page()
    page.wait("document.querySelector('[data-group=dp0]').textContent.includes('4,142')")
    node.document["groups"][0]["step"] = 777_123
    page.wait("document.querySelector('[data-group=dp0]').textContent.includes('777,123')")
    assert page.evaluate("performance.getEntriesByType('navigation').length") == 1


def test_a_node_that_says_nothing_any_more_is_said(node: Node) -> None:
    """The process that answers lives on: what it shows is old, and must not look well."""
    page = node.page()
    page.wait("document.querySelector('#fresh').textContent.startsWith('live')")
    node.document["time"], node.still = time.time(), True
    page.wait("document.querySelector('.banner').textContent.includes('says nothing any more')")
    assert text(page, "#fresh").startswith("nothing heard for")
    node.still = False
    page.wait("document.querySelector('#fresh').textContent.startsWith('live')")


def test_a_token_that_is_accepted_no_more_is_said(node: Node) -> None:
    """The node answers, with 401: it is not the node that is silent. Loaded anew, the page asks for the new one."""
    page = node.page()
    page.wait("document.querySelector('#fresh').textContent.startsWith('live')")
    try:
        node.serving.renew(keys_of(dict.fromkeys(HTTP_ROLES, (b"another token",)), False))
        page.wait("document.querySelector('.banner').textContent.includes('The token is not accepted any more')")
        assert "Reload the page" in text(page, ".banner") and "Is flowcheck-node running" not in text(page, ".banner")
    finally:
        node.serving.renew(keys_of(dict.fromkeys(HTTP_ROLES, (node.token,)), False))
    page.open(f"http://{node.address}/", "anybody", node.key)
    page.wait("document.querySelector('#fresh').textContent.startsWith('live, version')")
    page.wait("!document.querySelector('.banner').textContent.includes('token')")


def test_an_address_with_name_and_token(node: Node) -> None:
    page = node.browser.page()
    node.pages.append(page)
    page.open(f"http://anybody:{node.key}@{node.address}/")
    page.wait("document.querySelector('#fresh').textContent.startsWith('live, version')")
    page.wait("document.querySelector('#versions').textContent.includes('none')")


def test_a_node_whose_clock_goes_back_is_still_heard(node: Node) -> None:
    page = node.page()
    page.wait("document.querySelector('#fresh').textContent.startsWith('live')")
    node.still, node.document["time"] = True, time.time() - 3600  # a time that the page has not seen
    node.document["groups"][0]["step"] = 777_123
    page.wait("document.querySelector('[data-group=dp0]').textContent.includes('777,123')")


def test_a_job_that_is_refused_or_has_no_version_is_not_well(node: Node) -> None:
    """As the node has it: nobody is attached, nothing else holds."""
    tally = Tally("leaf-3")
    tally.hear("refused", {"name": "dp0", "rank": 1, "why": "no such optimizer"})
    node.document["groups"] = json.loads(json.dumps(tally.document()["groups"]))
    node.document["captures"].pop()
    page = node.page()
    page.wait("document.querySelector('.banner').textContent.includes('2 things are wrong')")
    said = text(page, ".banner")
    assert "group dp0: what a rank sent was refused. since" in said and "there is no version so far" in said
    assert page.evaluate("document.querySelector('.banner').className") == "banner bad"
    node.document["groups"][0]["refused"] = 0.0
    page.wait("document.querySelector('.banner').className === 'banner warn'")
    node.document["groups"][0]["kept"] = {"job": "run", "step": 4}
    page.wait("document.querySelector('.banner').textContent === 'Every group has its versions.'")


def test_a_node_without_a_port_waits_for_no_job(node: Node) -> None:
    node.document["groups"], node.document["captures"] = [], []
    page = node.page()
    page.wait("document.querySelector('.banner').textContent.startsWith('This node has no mirror port')")
    assert page.evaluate("document.querySelector('.banner').className.trim()") == "banner"


def test_names_and_sentences_are_never_code(node: Node) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    group = node.document["groups"][0]
    group["name"], group["job"], group["missing"] = evil, evil, {evil: 3}
    group["rows"][-1]["why"] = evil
    node.document["events"].append({"event": evil, "time": 1.0, "text": evil, "name": evil})
    node.document["captures"][0]["device"] = evil
    page = node.page()
    page.wait("document.querySelector('#events').textContent.includes('owned')")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.evaluate("document.querySelectorAll('script').length") == 1
    assert page.evaluate("document.title") == "leaf-3: FlowCheck node" and page.problems == []


def test_a_phone_shows_all_of_it_without_scrolling_sideways(node: Node) -> None:
    page = node.page(360)
    page.wait("document.querySelectorAll('[data-iteration]').length === 16")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("document.querySelector('svg').getBoundingClientRect().right") <= 360


def test_a_port_that_brings_nothing_is_seen_on_a_phone_without_scrolling(node: Node) -> None:
    page = node.page(360)
    page.wait("document.querySelectorAll('#ports tr').length === 3")
    rows = page.evaluate("""[...document.querySelectorAll('#ports tr')].slice(1).map((row) => [
        row.cells[0].textContent, row.cells[1].textContent, row.cells[1].firstChild.className,
        row.cells[1].getBoundingClientRect().right <= 360])""")
    assert [(device, kind, seen) for device, _, kind, seen in rows] == [
        ("0000:81:00.0", "", True), ("0000:c1:00.0", "bad", True)]
    assert rows[1][1].endswith(" ago")


def test_every_cell_of_every_table_is_seen_on_a_phone_with_its_columns_name(node: Node) -> None:
    """No table is wider than the screen: what a version is, and what a port has lost, needs no finger."""
    node.document["captures"][0] |= {"lost": {"ring_full": 61_222}, "last_lost": time.time()}
    page = node.page(360)
    page.wait("document.querySelectorAll('#ports tr').length === 3")
    page.evaluate("""versions = {absent: [], versions: [{step: 4142, tier: 'memory', status: 'unverified', nbytes: 4e9,
        run_id: 'a-run-with-a-name-that-is-longer-than-most-0412', epoch: 2, shard: 'pp0.shard1'}]}; list()""")
    cells = page.evaluate("""[...document.querySelectorAll('#ports td, #versions td, #failures td')].map((cell) => {
        const at = cell.getBoundingClientRect(), head = getComputedStyle(cell, '::before').content;
        return [cell.textContent, head.replaceAll('"', ''), at.left >= 0 && at.right <= 360 && at.width > 20]; })""")
    assert [text for text, _, seen in cells if not seen] == [] and all(head for _, head, _ in cells)
    assert {"status": "unverified", "kept in": "memory"}.items() <= {head: text for text, head, _ in cells}.items()
    assert page.evaluate("document.querySelector('#versions').scrollWidth <= 360")


def test_what_was_lost_once_is_red_while_it_is_news(node: Node) -> None:
    """Packets that a port lost an hour ago are counted, with the time, and no more than that; so are iterations."""
    group, port = node.document["groups"][0], node.document["captures"][0]
    for age, kind in ((5, "bad"), (3600, "")):
        port |= {"lost": {"ring_full": 61_222}, "last_lost": time.time() - age}
        page = node.page()
        page.wait("document.querySelector('#ports').textContent.includes('61,222')")
        assert page.evaluate("document.querySelector('#ports td.wrap span').className") == kind
        assert ("none since" in text(page, "#ports")) == (not kind)
    assert page.evaluate("document.querySelectorAll('[data-group=dp0] dd.warn').length") == 2  # of the last iterations
    for row in group["rows"]:
        row |= {"published": True, "missing": {}}
    page.wait("document.querySelectorAll('[data-group=dp0] dd.warn').length === 0")
    assert "not published2" in text(page, "[data-group=dp0]")


def test_light_and_dark(node: Node) -> None:
    shades = []
    for dark in (False, True):
        page = node.page(dark=dark)
        colours = page.evaluate("((style) => [style.backgroundColor, style.color])(getComputedStyle(document.body))")
        shades.append([sum(map(int, one[4:-1].split(","))) for one in colours])
    (light_back, light_text), (dark_back, dark_text) = shades
    assert light_back > 600 > 200 > light_text and dark_back < 150 < 500 < dark_text


def test_no_job_so_far(node: Node) -> None:
    node.document["groups"], node.document["events"] = [], []
    node.document["captures"] = node.document["captures"][:1]
    page = node.page()
    page.wait("document.querySelector('.banner').textContent.startsWith('No job has come so far')")
