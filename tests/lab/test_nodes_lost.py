"""Nodes are lost with all that they held, and the job goes on from parity: what is said of it, and the thing itself."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flowcheck.cli import app
from flowcheck.errors import UserError
from lab.compare import Row, Summary
from lab.jobs import Training
from lab.nodes_lost import LostNodes, lose_nodes, protected, say
from lab.run import LabRun

from .conftest import lab_of

VERSIONS = Summary(published=9, equal=9, differing=[], unpublished=[], before=2, tensors=90)
GOOD = LostNodes("2+2", ("node 0", "node 1"), died=24, step=20, recovered=("Recovered(step 20)", "Recovered(step 20)"),
                 back=3.5, whole=6.25, again=25, anew=2.5, losses={19: (3.0, 3.0), 20: (3.25, 3.25)}, differ=(),
                 tensors=440, versions=VERSIONS)


def said(outcome: LostNodes) -> tuple[bool, str]:
    out = io.StringIO()
    return say(outcome, Console(file=out, width=200)), out.getvalue()


def test_what_was_lost_and_both_times_are_said() -> None:
    equal, text = said(GOOD)
    assert equal and "parity 2+2; node 0 and node 1 killed -9" in text and "\nEQUAL: losses and all state" in text
    assert "3.5 s until training went on; 6.2 s until all members" in text and "step 25" in text
    assert [line for line in text.splitlines() if "goes on here" in line] == [
        "  20      3.250000      3.250000   <- goes on here"]


def test_the_losses_between_are_left_out_unless_they_differ() -> None:
    losses = {number: (float(number), float(number)) for number in range(17, 60)}
    _, text = said(replace(GOOD, losses=losses))
    shown = [int(line.split()[0]) for line in text.splitlines() if line[:4].strip().isdigit()]
    assert shown == [17, 18, 19, 20, 21, 22, 57, 58, 59] and "   .             .             ." in text
    _, text = said(replace(GOOD, losses=losses | {40: (40.0, 41.0)}, differ=(40,)))
    assert "  40     40.000000     41.000000   differs" in text


@pytest.mark.parametrize("worse", [
    {"differ": (20,)}, {"tensors": 0}, {"versions": replace(VERSIONS, differing=[Row(0, 21, "differs", "a.weight")])},
    {"versions": replace(VERSIONS, equal=0)},
], ids=["another tensor", "nothing compared", "another version", "no version"])
def test_anything_else_is_not_equal(worse: dict[str, object]) -> None:
    equal, text = said(replace(GOOD, **worse))  # type: ignore[arg-type]
    assert not equal and "NOT EQUAL" in text and "\nEQUAL" not in text


@pytest.mark.parametrize(("words", "why"), [
    ("--protect 2", "'2' with all nodes"), ("--protect 1+1", "'1+1' with all"),
    ("--protect 2+2 --nodes 3", "with 3 nodes"),
    ("--protect 2+2 --stages 4 --ranks 8", "4 stages"), ("--nodes 4", "how many members"),
    ("--protect 2+2 --kill 1", "of pipeline stages alone"), ("--protect 2+7", "2 nodes and 7 holders"),
])
def test_groups_that_cannot_be_are_refused(words: str, why: str) -> None:
    with pytest.raises(UserError, match=why.replace("+", r"\+")):
        app(f"lab run {words}".split(), standalone_mode=False)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("holders", [1, 2])
def test_nodes_are_lost(tmp_path: Path, holders: int) -> None:
    """As many members as parity allows; one of two nodes, and both."""
    job = Training(model="mlp", ranks=4, stages=2, dropout=0.2, noise=True)
    with lab_of(ranks=4, mirrored=((0, 1), (2, 3)), groups=((0, 1), (2, 3)), holders=holders) as fabric:
        with LabRun(fabric, tmp_path, api=True, node_settings=protected(fabric.config)) as run:
            run.start_nodes(job)
            run.start_holders()
            run.attach(job)
            run.train(8)
            outcome = lose_nodes(run, job)
            run.finish_trainers()
    assert outcome.equal, outcome
    assert 0 < outcome.step <= outcome.died and outcome.again > outcome.step
    made = [text for text in outcome.recovered if ", parity: " in text]
    assert len(made) == 2 * holders, outcome.recovered  # two ranks of each stage whose node was lost
    print(outcome)


@pytest.mark.root
@pytest.mark.slow
def test_the_command_waits_for_all_that_was_trained(lab_name: str, tmp_path: Path) -> None:
    """Until the nodes have a state the job trains on: its last iteration is not the last of those that were asked for.
    """
    words = f"--name {lab_name} --out {tmp_path / 'out'} --nodes 4 --protect 2+2 --model mlp --iterations 5"
    assert app(f"lab run {words}".split(), standalone_mode=False) == 0
