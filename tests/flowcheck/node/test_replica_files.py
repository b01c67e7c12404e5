"""Which replica file of a group is served, what an earlier process left, and what may go."""

from __future__ import annotations

import os
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.job.model import BucketSlice
from flowcheck.node.versions import replica_files
from flowcheck.node.versions.replica_files import LeftoverReplica, ReplicaFiles
from updater.errors import ReplicaError
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.reader import Reader
from updater.replica import Replica
from updater.store import Store


def replica(path: Path, run_id: str, step: int, verified: bool = False, start: str = "") -> Path:
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 0.5})])
    made = Replica({"w": torch.ones(3)}, spec, path=path, run_id=run_id, step=step, start=start)
    if verified:
        made.mark_verified()
    made.close()
    return path


def names(folder: Path) -> list[str]:
    """Of replicas. The folders of what ranks give beside them: those of no replica are not there."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".user")


def test_each_state_gets_a_file_of_its_own(tmp_path) -> None:
    served = ReplicaFiles(tmp_path, "node", "a")
    assert served.path() == tmp_path / "flowcheck-node-a-1.replica"
    assert served.path() == tmp_path / "flowcheck-node-a-2.replica"


@pytest.mark.parametrize(("there", "number"), [
    (["flowcheck-n-g-3.replica", "flowcheck-n-g-12.replica", "flowcheck-n-g-9.replica"], 13),  # as numbers, not text
    (["flowcheck-n-h-7.replica", "flowcheck-m-g-7.replica", "flowcheck-n-g-h-7.replica"], 1),  # other groups, nodes
    (["flowcheck-n-g-x.replica", "flowcheck-n-g-.replica", "flowcheck-n-g-4.replica.new", "flowcheck-n-g-5"], 1),
])
def test_numbers_go_on_after_those_of_earlier_processes(tmp_path, there: list[str], number: int) -> None:
    for name in there:
        (tmp_path / name).touch()
    assert ReplicaFiles(tmp_path, "n", "g").path().name == f"flowcheck-n-g-{number}.replica"


def test_files_of_other_groups_of_this_node(tmp_path) -> None:
    others = ["flowcheck-n--3.replica", "flowcheck-n-g.h-1.replica", "flowcheck-n-h-12.replica"]
    for name in (*others, "flowcheck-n-g-3.replica", "flowcheck-m-h-1.replica", "flowcheck-n-g-h-7.replica",
                 "flowcheck-n-h-x.replica", "flowcheck-n-h-1.user"):
        (tmp_path / name).touch()
    assert [path.name for path in ReplicaFiles(tmp_path, "n", "g").of_others()] == others
    assert [path.name for path in ReplicaFiles(tmp_path, "n", "").of_others()] == [
        "flowcheck-n-g-3.replica", *others[1:]]


def test_a_name_begins_without_what_ranks_gave_in_an_earlier_start(tmp_path) -> None:
    """Before its first version a replica has no file, and its folder is there already. One that is taken up again has
    both, and keeps them."""
    others = ["flowcheck-n-h-7.user", "flowcheck-n-g-x.user", "flowcheck-n-g-h-7.user"]  # groups and nodes
    for name in ("flowcheck-n-g-3.user", *others):
        (tmp_path / name / "step-000110").mkdir(parents=True)
    files = ReplicaFiles(tmp_path, "n", "g")
    assert files.path().name == "flowcheck-n-g-4.replica"
    left = replica(tmp_path / "flowcheck-n-g-2.replica", "run", 5, start="one")
    left.with_suffix(".user").mkdir()
    files.resume(left)
    files.stands("run", 0, 5)
    assert left.with_suffix(".user").exists() and not (tmp_path / "flowcheck-n-g-3.user").exists()
    assert all((tmp_path / name).exists() for name in others)


def test_what_earlier_processes_left_is_found(tmp_path) -> None:
    replica(tmp_path / "flowcheck-n-g-9.replica", "first", 5)
    replica(tmp_path / "flowcheck-n-g-10.replica", "second", 9, verified=True)
    replica(tmp_path / "flowcheck-n-other-5.replica", "not ours", 1)
    (tmp_path / "flowcheck-n-g-1.replica").write_bytes(b"torn")
    assert ReplicaFiles(tmp_path, "n", "g").found() == [
        LeftoverReplica(tmp_path / "flowcheck-n-g-9.replica", "first", 5),
        LeftoverReplica(tmp_path / "flowcheck-n-g-10.replica", "second", 9, 0, 9, matches=1),
    ]


def test_when_the_newest_file_holds_a_version_older_ones_of_the_run_go(tmp_path) -> None:
    others = ["flowcheck-n-g-x.replica", "flowcheck-n-h-1.replica", "flowcheck-n-g-1.replica.new"]
    for name in ["flowcheck-n-g-1.replica", *others]:  # the first is torn: it holds nothing
        (tmp_path / name).touch()
    replica(tmp_path / "flowcheck-n-g-7.replica", "run", 5)
    served = ReplicaFiles(tmp_path, "n", "g")
    replica(served.path(), "run", 6)
    newest = replica(served.path(), "run", 6)
    assert served.stands("run", 0, 6) == []
    assert names(tmp_path) == sorted([*others, "flowcheck-n-g-9.replica"])
    assert served.stands("run", 0, 6) == [] and newest.exists()


RUNS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans()), max_size=5)


@settings(deadline=None, max_examples=60)
@given(runs=RUNS, step=st.integers(0, 9))
def test_good_versions_of_other_runs_stay_until_it_is_settled(runs: list[tuple[str, int, bool]], step: int) -> None:
    """Whatever earlier runs left, of at most two of them; the newest verified one is always among those."""
    with tempfile.TemporaryDirectory() as folder:
        left = [
            replica(Path(folder) / f"flowcheck-n-g-{number}.replica", *run) for number, run in enumerate(runs, 1)
        ]
        served = ReplicaFiles(Path(folder), "n", "g")
        own = replica(served.path(), "a", step)
        gone = served.stands("a", 0, step)
        others = [i for i, run in enumerate(runs) if run[0] != "a" or run[1] > step]
        sound = [i for i in others if runs[i][2]] or others
        stay = {i for i, path in enumerate(left) if path.exists()}
        assert stay <= set(sound) and own.exists() and len(stay) <= 2
        if sound:
            assert sound[-1] in stay and max(runs[i][1] for i in sound) == max(runs[i][1] for i in stay)
        assert [kept.path for kept in gone] == [left[i] for i in others if i not in stay]
        assert [kept.path for kept in served.settle()] == [left[i] for i in sorted(stay)]
        assert names(Path(folder)) == [own.name]


def test_what_is_discarded_is_the_served_file_alone(tmp_path) -> None:
    (tmp_path / "flowcheck-n-h-1.replica").touch()
    other = replica(tmp_path / "flowcheck-n-g-1.replica", "other", 3)
    served = ReplicaFiles(tmp_path, "n", "g")
    served.discard()
    replica(served.path(), "run", 0)
    served.stands("run", 0, 0)
    served.discard()
    served.discard()
    assert names(tmp_path) == [other.name, "flowcheck-n-h-1.replica"]


def test_a_file_that_somebody_else_removed_is_no_matter(tmp_path, monkeypatch) -> None:
    served = ReplicaFiles(tmp_path, "n", "g")
    gone = tmp_path / "flowcheck-n-g-1.replica"
    monkeypatch.setattr(served, "_files", lambda: [gone])  # it was there a moment ago
    assert served.settle() == []


def test_the_newest_file_of_a_start_of_the_job_may_be_taken_up(tmp_path) -> None:
    files = ReplicaFiles(tmp_path, "n", "g")
    for start, step in (("one", 9), ("one", 6), ("two", 7), ("", 8), ("one", 5)):
        replica(files.path(), "run", step, start=start)
    again = ReplicaFiles(tmp_path, "n", "g")
    left = again.left("one")
    assert left == LeftoverReplica(tmp_path / "flowcheck-n-g-5.replica", "run", 5, start="one")
    assert again.left("") is None and again.left("three") is None, "a file that says nothing is nobody's"


def test_what_is_taken_up_stays_and_is_the_one_that_is_served(tmp_path) -> None:
    first = ReplicaFiles(tmp_path, "n", "g")
    left = replica(first.path(), "run", 5, start="one")
    older = replica(first.path(), "run", 4, start="zero")
    second = ReplicaFiles(tmp_path, "n", "g")
    second.resume(left)
    assert second.named == left and second.stands("run", 0, 5) == []
    assert left.exists() and not older.exists()
    second.discard()
    assert not left.exists() and second.path().name == "flowcheck-n-g-3.replica"


# -- files of others -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("other", "mode", "why"), [
    (True, 0o600, "belongs to user 12345, and this process runs as 0"), (False, 0o622, "may be written to by others"),
])
@pytest.mark.skipif(os.geteuid() != 0, reason="files can be given to another user by root only")
def test_what_another_user_put_there_is_neither_read_nor_removed(tmp_path, other: bool, mode: int, why: str) -> None:
    """Everybody may make a file in /dev/shm, and call it as the node's: further than all others, and verified."""
    mine = replica(tmp_path / "flowcheck-n-g-1.replica", "mine", 5, verified=True)
    foreign = replica(tmp_path / "flowcheck-n-g-7.replica", "foreign", 1_000_000, verified=True, start="one")
    foreign.chmod(mode)
    if other:
        os.chown(foreign, 12345, -1)
    files = ReplicaFiles(tmp_path, "n", "g")
    assert list(files.foreign) == [foreign] and files.foreign[foreign].startswith(why)
    assert [found.path for found in files.found()] == [mine] and files.left("one") is None
    now = replica(files.path(), "now", 6)
    assert now.name == "flowcheck-n-g-8.replica"
    files.stands("now", 0, 6)
    assert files.settle() == [LeftoverReplica(mine, "mine", 5, 0, 5, matches=1)]
    assert names(tmp_path) == [foreign.name, now.name]
    with pytest.raises(ReplicaError, match=why), closing(Reader(foreign, mine=True)):
        pass
    with closing(Reader(foreign)) as reader:
        assert reader.run_id == "foreign", "a person may look at it"


def test_a_link_is_nobodys_replica(tmp_path) -> None:
    elsewhere = replica(tmp_path / "elsewhere", "run", 5)
    (tmp_path / "flowcheck-n-g-1.replica").symlink_to(elsewhere)
    files = ReplicaFiles(tmp_path, "n", "g")
    assert files.foreign == {tmp_path / "flowcheck-n-g-1.replica": "is a link"} and files.found() == []
    with pytest.raises(ReplicaError, match="symbolic link"), closing(Reader(*files.foreign, mine=True)):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="files can be given to another user by root only")
def test_nothing_of_another_users_file_is_mapped(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """He may make it shorter at any moment, which ends whoever looks at what is mapped."""
    foreign = replica(tmp_path / "flowcheck-n-g-1.replica", "run", 5)
    os.chown(foreign, 12345, -1)
    mapped: list[object] = []
    monkeypatch.setattr(Store, "_map", lambda *given: mapped.append(given))
    with pytest.raises(ReplicaError, match="belongs to user 12345"):
        Reader(foreign, mine=True)
    assert not mapped


def test_a_file_that_cannot_be_removed_ends_nothing(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = replica(tmp_path / "flowcheck-n-g-1.replica", "run", 5)
    files = ReplicaFiles(tmp_path, "n", "g")
    replica(files.path(), "run", 6)

    def refuses(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", refuses)
    assert files.stands("run", 0, 6) == [] and left.exists()


# -- what goes, and what goes with it ------------------------------------------------------------------------------


def counted(path: Path, run_id: str, step: int, matches: int) -> Path:
    """A run that goes on with the count of the start before: nothing of this start was compared yet."""
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 0.5})])
    with closing(Replica({"w": torch.ones(3)}, spec, path=path, run_id=run_id, step=step - 1, slots=4)) as made:
        slot = made.build(step, Layout([[BucketSlice("w", 0, 3)]], {"w": (3,)}, [3]))
        slot.apply(0, torch.ones(3))
        made.publish(slot, "unverified", (), matches)
    return path


@pytest.mark.parametrize(("needs", "stay"), [((), {1}), ((0,), {1}), ((1,), {1, 5}), ((2,), {1, 4}), ((3,), {1, 4}),
                                            ((4,), {1})])
def test_of_what_may_be_offered_the_newest_stays_too(tmp_path, needs: tuple[int, ...], stay: set[int]) -> None:
    """Beside what was verified, which is the first one alone."""
    replica(tmp_path / "flowcheck-n-g-1.replica", "a", 90, verified=True)
    for number, matches in ((2, 0), (3, 3), (4, 3), (5, 1)):
        counted(tmp_path / f"flowcheck-n-g-{number}.replica", f"run {number}", 50, matches)
    files = ReplicaFiles(tmp_path, "n", "g", *needs)
    replica(files.path(), "now", 5)
    gone = files.stands("now", 0, 5)
    assert names(tmp_path) == [f"flowcheck-n-g-{number}.replica" for number in sorted(stay | {6})]
    assert [kept.run_id for kept in gone] == [f"run {number}" for number in (2, 3, 4, 5) if number not in stay]


@pytest.mark.parametrize("how", ["stands", "settle", "discard"])
def test_what_ranks_gave_goes_with_its_replica(tmp_path, how: str) -> None:
    left = replica(tmp_path / "flowcheck-n-g-1.replica", "run", 4)
    files = ReplicaFiles(tmp_path, "n", "g")
    own = replica(files.path(), "run", 5)
    for path in (left, own, tmp_path / "flowcheck-n-h-1.replica"):
        path.with_suffix(".user").joinpath("step-000004").mkdir(parents=True)  # of its own it has the first
    if how == "settle":
        files._served = own
        assert [kept.path for kept in files.settle()] == [left]
    else:
        files.stands("run", 0, 5)
    if how == "discard":
        files.discard()
    stays = [] if how == "discard" else [own.name, own.with_suffix(".user").name]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*stays, "flowcheck-n-h-1.user"])


def test_a_file_of_number_0_is_one_of_ours(tmp_path) -> None:
    zero = replica(tmp_path / "flowcheck-n-g-0.replica", "run", 3)
    files = ReplicaFiles(tmp_path, "n", "g")
    assert [found.path for found in files.found()] == [zero] and files.path().name == "flowcheck-n-g-1.replica"
    zero.chmod(0o622)
    assert list(ReplicaFiles(tmp_path, "n", "g").foreign) == [zero] and files.found() == []


def test_a_file_that_becomes_anothers_while_it_is_looked_at_is_not_read(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica(tmp_path / "flowcheck-n-g-1.replica", "run", 3).chmod(0o622)
    files = ReplicaFiles(tmp_path, "n", "g")
    monkeypatch.setattr(replica_files, "_not_mine", lambda path: "")  # as it was a moment before
    assert files.found() == []


def test_a_newer_start_has_no_name_before_it_is_given_one(tmp_path) -> None:
    files = ReplicaFiles(tmp_path, "n", "g")
    assert files.named is None
    first = files.path()
    assert files.named == first
    files.restarted()
    assert files.named is None
    files.resume(first)
    assert files.named == first


def test_a_version_of_another_epoch_or_a_later_step_is_another_runs(tmp_path) -> None:
    """It may be what somebody waits for; what is older, and of this start, is of no use any more."""
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 0.5})])
    for number, epoch, step in ((1, 1, 5), (2, 1, 6), (3, 1, 7), (4, 0, 5)):
        with closing(Replica({"w": torch.ones(3)}, spec, path=tmp_path / f"flowcheck-n-g-{number}.replica",
                             run_id="run", epoch=epoch, step=step)):
            pass
    files = ReplicaFiles(tmp_path, "n", "g")
    replica(files.path(), "run", 6)
    assert files.stands("run", 1, 6) == []
    assert names(tmp_path) == [f"flowcheck-n-g-{number}.replica" for number in (3, 4, 5)]


def test_a_name_with_more_digits_than_anybody_counts_is_nobodys(tmp_path: Path) -> None:
    """It would be the number that the next one comes after, and a name too long for a file."""
    (tmp_path / f"flowcheck-n-g-{'9' * 200}.replica").touch()
    assert ReplicaFiles(tmp_path, "n", "g").path().name == "flowcheck-n-g-1.replica"
