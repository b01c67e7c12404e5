"""What a replay decides between its iterations: what is published, written, adopted and removed.

The engine says what a test has set; replica, files and report are real. Nothing here needs DPDK.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flowcheck.checkpoint.directory import load_step
from flowcheck.errors import UserError
from flowcheck.offline.gradients import read_gradients
from flowcheck.rebuild.version.events import Lost
from lab.synth import example_job, sharded_job
from tests.flowcheck.by_hand import Replayed, begin_session

Begin = Callable[..., Replayed]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Begin:
    return functools.partial(begin_session, monkeypatch, tmp_path)

# -- what is published and written ------------------------------------------------------------------------


def test_every_iteration_is_published_and_the_last_one_is_written(begin: Begin) -> None:
    replayed = begin()
    assert replayed.close(0, 1, 2)
    assert replayed.clauses() == [[], [], []]
    assert replayed.steps() == [] and not (replayed.out / ".unconfirmed").exists()
    report, failure = replayed.finish()
    assert failure == "" and report["ok"] and replayed.steps() == [3]
    path = str(replayed.out / "step-000003")
    assert report["checkpoint"] == {"step": 3, "path": path, "status": "unverified"}
    assert (report["run_id"], report["totals"]["iterations_asked"]) == ("synth-0", None)
    assert not (replayed.out / ".unconfirmed").exists()


@pytest.mark.parametrize(("every", "steps"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_a_checkpoint_every_so_many_steps(begin: Begin, every: int, steps: list[int]) -> None:
    """And the last one in any case."""
    replayed = begin(every=every)
    replayed.close(0, 1, 2, 3, 4)
    replayed.finish()
    assert replayed.steps() == steps


def test_the_last_checkpoint_is_written_once(begin: Begin) -> None:
    replayed = begin(every=3)
    replayed.close(0, 1, 2)
    written = (replayed.out / "step-000003").stat().st_ino
    report, _ = replayed.finish()
    assert (replayed.out / "step-000003").stat().st_ino == written and report["checkpoint"]["step"] == 3


def test_as_many_iterations_as_were_asked_for(begin: Begin) -> None:
    replayed = begin(iterations=3)
    assert replayed.close(0) and replayed.close(1)
    assert not replayed.close(2)
    report, failure = replayed.finish()
    assert failure == "" and report["totals"]["iterations_asked"] == 3


def test_without_a_number_there_is_no_end(begin: Begin) -> None:
    assert begin().close(*range(20))


# -- until the manifest is confirmed ------------------------------------------------------------------------


def test_checkpoints_wait_aside_until_one_steady_iteration_went_through(begin: Begin) -> None:
    replayed = begin(every=1)
    replayed.close(0)
    assert replayed.steps() == [] and replayed.aside() == ["step-000001"]
    assert replayed.session.report.checkpoint.path == str(replayed.out / "step-000001")
    replayed.close(1)
    assert replayed.steps() == [1, 2] and not (replayed.out / ".unconfirmed").exists()


def test_captures_that_begin_later_are_confirmed_by_their_second_iteration(begin: Begin) -> None:
    first = begin(every=1)
    first.close(0, 1)
    first.finish()
    replayed = begin(every=1, init=first.out / "step-000002", into="later")
    replayed.close(2)
    assert replayed.clauses() == [[]] and replayed.aside() == ["step-000003"]
    replayed.close(3)
    assert replayed.steps() == [3, 4] and replayed.aside() == []


def test_an_incomplete_iteration_confirms_nothing(begin: Begin) -> None:
    replayed = begin(every=1)
    replayed.close(0, 1, without=(1,))
    assert replayed.aside() == ["step-000001"]
    replayed.close(2)
    assert replayed.steps() == [1]


def test_one_iteration_alone_is_confirmed_by_the_end(begin: Begin) -> None:
    replayed = begin(every=1)
    replayed.close(0)
    report, failure = replayed.finish()
    assert failure == "" and replayed.steps() == [1] and report["checkpoint"]["step"] == 1


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize(("iteration", "kept"), [(0, False), (1, False), (2, True)])
def test_a_disagreement_before_the_manifest_is_confirmed_throws_away(
    begin: Begin, iteration: int, kept: bool, every: int
) -> None:
    """Until one steady iteration is over it is the manifest that is wrong, and what agreed before agreed by chance.
    With every=0 nothing waits aside, and nothing is written at the end either."""
    replayed = begin(every=every)
    replayed.close(0)
    replayed.engine.disagree(iteration)
    report, failure = replayed.finish()
    assert replayed.steps() == ([1] if kept else []) and replayed.aside() == []
    assert (report["checkpoint"] is not None) == kept
    assert failure.startswith("the traffic is not what the manifest says: channel 0, rank 0 -> 1")


def test_what_was_refuted_comes_back_with_no_later_iteration(begin: Begin) -> None:
    replayed = begin(every=1)
    replayed.close(0)
    replayed.engine.disagree(1)
    replayed.close(1, 2)
    assert replayed.clauses() == [[], ["anchored"], ["previous"]]
    assert replayed.aside() == [] and replayed.steps() == [] and replayed.session.report.checkpoint is None
    report, _ = replayed.finish()
    assert replayed.steps() == [] and report["checkpoint"] is None


def test_a_disagreement_later_on_leaves_what_stood_before(begin: Begin) -> None:
    replayed = begin(every=1)
    replayed.close(0, 1, 2)
    replayed.engine.disagree(3)
    replayed.close(3)
    report, failure = replayed.finish()
    assert replayed.clauses()[3] == ["anchored"] and replayed.steps() == [1, 2, 3]
    assert report["checkpoint"]["step"] == 3 and failure == "1 of 4 iterations are incomplete, the first is 3"
    assert len(report["notes"]) == 1 and report["notes"][0].startswith("channel 0, rank 0 -> 1")


def test_refused_traffic_offers_nothing(begin: Begin) -> None:
    replayed = begin(every=1)
    replayed.close(0)
    replayed.engine.disagree(5, "extra message")
    replayed.close(1)
    assert replayed.steps() == [] and replayed.aside() == ["step-000001"]
    report, failure = replayed.finish()
    assert replayed.aside() == []
    assert failure.startswith("one message too many per operation on channel 0, rank 0 -> 1")
    assert f"refused: {failure}; nothing is offered as a checkpoint" in report["notes"]
    assert replayed.steps() == [] and report["checkpoint"] is None
    assert replayed.clauses() == [[], ["supported"]]


def test_refused_at_the_end(begin: Begin) -> None:
    """A clear-to-send that names another rank may come after the last iteration that was judged."""
    replayed = begin(every=1)
    replayed.close(0)
    replayed.engine.tags = {0: 1, 1: 0}
    report, failure = replayed.finish()
    assert "calls its sender rank 1" in failure and report["checkpoint"] is None
    assert replayed.steps() == [] and replayed.aside() == []


@pytest.mark.parametrize("every", [0, 1])
def test_what_was_written_before_the_traffic_was_refused_is_withdrawn(begin: Begin, every: int) -> None:
    """The manifest was confirmed by then; what refutes it refutes every version that was built with it."""
    replayed = begin(every=every)
    replayed.close(0, 1, 2)
    assert replayed.steps() == ([1, 2, 3] if every else [])
    replayed.engine.tags = {0: 1, 1: 0}
    replayed.close(3)
    report, failure = replayed.finish()
    assert "calls its sender rank 1" in failure and report["checkpoint"] is None
    assert replayed.steps() == [] and replayed.aside() == []


def test_only_what_this_replay_has_written_is_withdrawn(begin: Begin) -> None:
    replayed = begin(every=2)
    other = replayed.out / "step-000007"
    other.mkdir(parents=True)
    replayed.close(0, 1, 2)
    replayed.engine.tags = {0: 1, 1: 0}
    replayed.finish()
    assert replayed.steps() == [7]


def test_what_a_refused_replay_had_replaced_is_offered_again(begin: Begin) -> None:
    """An earlier replay of the same run has written the same steps."""
    earlier = begin(every=1)
    earlier.close(0, 1, 2)
    assert earlier.finish()[1] == "" and earlier.steps() == [1, 2, 3]
    held = {path.name: load_step(path).manifest["manifest_sha256"] for path in earlier.out.glob("step-*")}
    job = example_job(count=[20, 9], options={"lr": 0.125})
    job.run_id = earlier.session.plan.job.run_id
    replayed = begin(job, every=1)
    replayed.close(0, 1, 2)
    changed = {path.name: load_step(path).manifest["manifest_sha256"] for path in replayed.out.glob("step-*")}
    assert changed.keys() == held.keys() and not set(changed.values()) & set(held.values())
    replayed.engine.tags = {0: 1, 1: 0}
    report, failure = replayed.finish()
    assert failure and report["checkpoint"] is None
    assert {path.name: load_step(path).manifest["manifest_sha256"] for path in replayed.out.glob("step-*")} == held
    assert sorted(path.name for path in replayed.out.iterdir()) == ["report.json", *sorted(held)]


def test_a_directory_of_somebody_else_stays_where_a_step_would_lie(begin: Begin) -> None:
    replayed = begin(every=1)
    (replayed.out / "step-000001").mkdir(parents=True)
    (replayed.out / "step-000001" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="left alone"):
        replayed.close(0, 1, 2)
    assert (replayed.out / "step-000001" / "thesis.txt").read_text() == "mine"


def test_gathered_parameters_of_refused_traffic_are_withdrawn(begin: Begin) -> None:
    replayed = begin(sharded_job(count=[20, 9]), every=1, weights=False)
    replayed.close(0, 1, 2)
    assert len(list(replayed.out.glob("parameters-*"))) == 3
    replayed.engine.disagree(5, "extra message")
    report, _ = replayed.finish()
    assert list(replayed.out.glob("parameters-*")) == [] and report["parameter_checkpoint"] is None


def test_at_most_eight_disagreements_are_told(begin: Begin) -> None:
    replayed = begin()
    replayed.close(0)
    for iteration in range(10, 20):
        replayed.engine.disagree(iteration)
    report, _ = replayed.finish()
    assert [f"iteration {n}" in note for n, note in zip(range(10, 18), report["notes"], strict=True)] == [True] * 8


def test_gradients_are_kept_where_that_is_asked_for_and_withdrawn_with_the_checkpoints(begin: Begin) -> None:
    """Of an iteration that lacks an element of each tensor none."""
    plain = begin(into="plain")
    plain.close(0)
    assert not list(plain.out.glob("gradients-*"))
    replayed = begin(gradients=True)
    names = [entry.name for entry in replayed.session.plan.job.model]
    replayed.close(3, 4, 5, without=(4,))
    paths = {number: replayed.out / f"gradients-00000{number}.safetensors" for number in (3, 4, 5)}
    assert sorted(replayed.out.glob("gradients-*")) == sorted(paths.values())
    assert {number: sorted(read_gradients(path)) for number, path in paths.items()} == {
        3: sorted(names), 4: [], 5: sorted(names)}
    replayed.engine.tags = {0: 1, 1: 0}
    replayed.finish()
    assert not list(replayed.out.glob("gradients-*"))


# -- the chain ----------------------------------------------------------------------------------------------


def test_nothing_is_built_upon_an_iteration_that_is_missing(begin: Begin) -> None:
    replayed = begin(every=1)
    replayed.close(0, 1, 2, 3, 4, without=(2,))
    assert replayed.clauses() == [[], [], ["covered"], ["previous"], ["previous"]]
    report, failure = replayed.finish()
    assert replayed.steps() == [1, 2] and failure == "1 of 5 iterations are incomplete, the first is 2"
    assert report["checkpoint"]["step"] == 2


def test_why_no_version_was_built_any_more_is_told(begin: Begin) -> None:
    replayed = begin()
    replayed.close(0, 1)
    assert replayed.take([Lost("the updater gave up")])
    report, failure = replayed.finish()
    assert failure == report["failure"] == "the updater gave up" and not report["ok"]


def test_weights_that_no_broadcast_brought_are_no_checkpoint(begin: Begin) -> None:
    """The gradients are judged all the same."""
    replayed = begin(weights=False)
    replayed.close(0, 1)
    assert replayed.clauses() == [[], []]
    report, failure = replayed.finish()
    assert failure.startswith("no checkpoint: no initial weights: no --init, and 'layer0.weight' is in no complete")
    assert report["checkpoint"] is None and replayed.steps() == []


def test_without_weights_the_chain_breaks_as_well(begin: Begin) -> None:
    replayed = begin(weights=False)
    replayed.close(0, 1, 2, without=(0,))
    assert replayed.clauses() == [["covered"], ["previous"], ["previous"]]


def test_gradients_alone_are_all_that_is_asked_without_an_optimizer(begin: Begin) -> None:
    job = example_job(count=[20, 9])
    job.optimizer = None
    replayed = begin(job)
    replayed.close(0, 1)
    report, failure = replayed.finish()
    assert failure == "" and report["ok"] and report["checkpoint"] is None


@pytest.mark.parametrize(
    ("begins", "clauses", "step"),
    [
        (0, [[], []], 4),
        (1, [["previous"], []], 3),
        (2, [[], []], 4),
        (3, [["previous"], ["previous"]], None),
    ],
)
def test_weights_of_step_2(begin: Begin, begins: int, clauses: list[list[str]], step: int | None) -> None:
    """Captures that begin with the communicator go on from any step; those that begin later need just theirs."""
    first = begin(every=1)
    first.close(0, 1)
    replayed = begin(example_job(count=[20, 9], startup=False), init=first.out / "step-000002", into="later")
    replayed.close(begins, begins + 1)
    assert replayed.clauses() == clauses
    report, failure = replayed.finish()
    assert replayed.steps() == ([step] if step else []) and (report["checkpoint"] is None) == (step is None)
    reason = f"iteration {begins} could not be published: previous: the iteration before was not published"
    assert failure.startswith(reason) if clauses[0] else failure == ""


def test_iterations_that_passed_unseen_break_the_chain(begin: Begin) -> None:
    replayed = begin(weights=False)
    replayed.close(0)
    replayed.skip(1, 1500)
    assert replayed.session.report.notes == [
        "iterations 1 to 1500 passed while the mirror was down: no packet of them is in the captures"
    ]
    replayed.close(1501)
    assert replayed.clauses() == [[], ["previous"]]


def test_the_state_of_each_capture_is_judged(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = begin(streams=3)
    asked = []
    monkeypatch.setattr(
        replayed.session.arenas.scheduler, "state",
        lambda stream, iteration: asked.append((stream, iteration)) or ["past", "behind", "ended"][stream])
    replayed.close(0)
    (_, reason), = replayed.session.report.iterations[0].verdict.failing
    assert reason == "b.pcapng is behind" and asked == [(0, 0), (1, 0), (2, 0)]


def test_icrc_that_was_not_checked_is_a_mark_everywhere(begin: Begin) -> None:
    replayed = begin(icrc=False)
    replayed.close(0)
    report, _ = replayed.finish()
    assert "icrc off" in report["unproven"] and report["iterations"][0]["verdict"]["unproven"] == ["icrc off"]
    assert "icrc off" in json.loads((replayed.out / "step-000001" / "manifest.json").read_text())["unproven"]


# -- gathered parameters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "steps"), [(0, [4]), (1, [0, 1, 3, 4]), (2, [0, 4]), (3, [0, 3, 4])])
def test_gathered_parameters_need_no_iteration_before_them(begin: Begin, every: int, steps: list[int]) -> None:
    replayed = begin(sharded_job(), every=every)
    replayed.close(0, 1, 2, 3, 4, without=(2,))
    assert replayed.clauses() == [[], [], ["covered"], [], []]
    report, failure = replayed.finish()
    names = sorted(path.name for path in replayed.out.glob("*-0*"))
    assert names == [f"parameters-{step:06}" for step in steps]
    path = str(replayed.out / "parameters-000004")
    assert report["parameter_checkpoint"] == {"step": 4, "path": path, "status": "unverified", "dtype": "bfloat16"}
    assert failure == "1 of 5 iterations are incomplete, the first is 2" and report["checkpoint"] is None
    assert {flow["role"] for flow in report["flows"]} == {"parameters", "control"}


@pytest.mark.parametrize(("every", "aside"), [(0, []), (1, ["parameters-000000"])])
def test_gathered_parameters_wait_aside_as_well(begin: Begin, every: int, aside: list[str]) -> None:
    """With every=0 nothing waits aside, and nothing is written at the end either."""
    replayed = begin(sharded_job(), every=every)
    replayed.close(0)
    assert replayed.aside() == aside
    replayed.engine.disagree(0)
    report, _ = replayed.finish()
    assert report["parameter_checkpoint"] is None and replayed.aside() == []
    assert not list(replayed.out.glob("parameters-*"))


def test_iterations_that_passed_unseen_take_nothing_from_gathered_parameters(begin: Begin) -> None:
    replayed = begin(sharded_job())
    replayed.close(0)
    replayed.skip(1, 1500)
    replayed.close(1501)
    assert replayed.clauses() == [[], []]
