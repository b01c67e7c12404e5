"""`flowcheck plan capacity` as a person asks it: presets, figures, a topology, and what is refused."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path

import pytest

from flowcheck.cli import app

from .asking import answer_of, asked, refused

GIVEN = "--parameters 1e9 --dp 4 --gap-s 1 --port-gbps 100"


def topology(folder: Path, *, ranks: int = 4, groups: int = 2, speed: int = 100, peak: int | None = None) -> Path:
    """A leaf, a node and the hosts of its own for each group."""
    leaves = [
        {
            "name": f"leaf{group}", "vendor": "eos",
            "ports": [
                {"port": f"Ethernet{rank + 1}", "rank": group * ranks + rank, "host": f"h{group}-{rank}",
                 "speed_gbps": speed, "peak_gbps": peak}
                for rank in range(ranks)
            ],
            "monitor_ports": [
                {"port": f"Ethernet{48 + number}", "node": f"ck{group}", "speed_gbps": 400} for number in range(2)
            ],
        }
        for group in range(groups)
    ]
    made = {
        "path_mtu": 1024, "leaves": leaves,
        "groups": [
            {"name": f"dp{group}", "ranks": [group * ranks + rank for rank in range(ranks)]} for group in range(groups)
        ],
    }
    file = folder / "topology.json"
    file.write_text(json.dumps(made))
    return file


def test_the_papers_example_meets_its_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_of(capsys, "capacity --model 175b")
    assert found["good"] and "deadline met" in found["verdict"]
    assert found["results"]["nodes per leaf, at most"] == 3 and found["results"]["nodes, as many on each leaf"] == 72
    assert any("Calculon" in note for note in found["notes"]), "what the paper does not print is said"
    assert any("qualify.md" in note for note in found["notes"]), "sharded layouts are not followed today"


def test_a_node_that_is_too_small_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"capacity {GIVEN} --update-cores 1 --update-gbs 10 --memory-gb 10 --cores 2 --node-ports 1"
    status, out = asked(capsys, line)
    words = " ".join(out.split())
    assert status == 1
    for what in ("deadline MISSED", "ports MISSED", "cores MISSED", "memory MISSED", "dropped by the switch"):
        assert what in words


def test_a_gap_is_what_the_allreduces_leave(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_of(capsys, f"capacity {GIVEN}")
    assert found["results"]["gap to the next allreduce"] == pytest.approx(1)
    assert found["inputs"]["iteration-s"] == pytest.approx(1 + found["results"]["allreduces, at link speed"])


def test_the_tables_fit_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for line in ("capacity", "capacity --figure 16"):
        _, out = asked(capsys, line)
        assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(("figure", "models"), [
    (10, ["BERT, 110M", "RoBERTa, 330M", "GPT-3, 1.3B", "Llama2-7B"]),
    (16, ["175B on 1536 GPUs", "530B on 2240 GPUs", "1T on 3072 GPUs", "405B on 16384 GPUs"]),
])
def test_figures_have_the_papers_models(capsys: pytest.CaptureFixture[str], figure: int, models: list[str]) -> None:
    found = answer_of(capsys, f"capacity --figure {figure}")
    rows = found["tables"]["models"]["rows"]
    assert [row[0] for row in rows] == models
    assert found["verdict"] and found["inputs"]["slots"] == 3


@pytest.mark.parametrize(
    ("figure", "word"), [(10, "receive"), (15, "bucket by bucket"), (16, "gap between allreduces")]
)
def test_figures_are_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path, figure: int, word: str) -> None:
    pytest.importorskip("matplotlib", reason="extra `plan`")
    asked(capsys, f"capacity --figure {figure} --plot {tmp_path / 'f.svg'}")
    text = (tmp_path / "f.svg").read_text()
    assert f"Figure {figure}" in text and word in text


def test_a_topology_gives_the_same_nodes_as_switch_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, out = topology(tmp_path), tmp_path / "plan.json"
    app(["switch", "plan", str(file), "--out", str(out)], standalone_mode=False)
    planned = json.loads(out.read_text())
    capsys.readouterr()
    found = answer_of(capsys, f"capacity --parameters 1e9 --pp 2 --dp 4 --gap-s 1 --topology {file}")
    assert {row[0]: row[1] for row in found["tables"]["leaves"]["rows"]} == planned["nodes_per_leaf"]
    assert found["inputs"]["direction"] == planned["groups"][0]["direction"]
    assert found["inputs"]["mirrors"] == max(len(group["ranks"]) for group in planned["groups"])
    assert found["inputs"]["mtu"] == 1024 and found["results"]["nodes"] == 2
    monitor = {row[0]: row[3] for row in found["tables"]["leaves"]["rows"]}
    assert sum(monitor.values()) == len(planned["sessions"])


def test_a_known_load_is_believed_as_switch_plan_believes_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = topology(tmp_path, speed=200, peak=50)
    found = answer_of(capsys, f"capacity --parameters 1e9 --pp 2 --dp 4 --gap-s 1 --topology {file}")
    assert found["good"] and found["results"]["copies at the peak"] == 300
    assert found["inputs"]["port-gbps"] == 200


def test_a_topology_of_another_job_is_refused(tmp_path: Path) -> None:
    file = topology(tmp_path)
    line = f"capacity --parameters 1e9 --gap-s 1 --topology {file}"
    assert "group dp0 has 4 ranks, the job's groups have 8" in refused(f"{line} --pp 2 --dp 8").message()
    assert "2 groups, the job has 1" in refused(f"{line} --dp 4").message()
    error = refused(f"{line} --pp 2 --dp 4 --mirrors 2")
    assert error.where == "--mirrors" and "leave it out" in error.remedy
    small = topology(tmp_path, speed=1600)
    assert refused(f"capacity --parameters 1e9 --gap-s 1 --pp 2 --dp 4 --topology {small}").remedy
    absent = refused(f"capacity --parameters 1e9 --gap-s 1 --topology {tmp_path / 'absent.yaml'}")
    assert absent.exit_code == 2 and "absent.yaml" in absent.message()


@pytest.mark.parametrize(("line", "where"), [
    ("--model 176b", "--model"),
    ("--parameters 1e9 --dp 4", "--iteration-s"),
    (f"{GIVEN} --bucket-mb 1e-9", "--bucket-mb"),
    (f"{GIVEN} --mfu 0.5", "--mfu"),
    ("--model 175b --iteration-s 9 --tokens 1e6", "--tokens"),
    ("--parameters 1e9 --iteration-s 1 --gap-s 1", "--gap-s"),
    ("--parameters 1e9 --gap-s 0", "--gap-s"),
    ("--parameters 1e9 --dp 1 --gap-s 1", "--dp"),
    ("--parameters 1e9 --dp 6 --shard 4 --gap-s 1", "--shard"),
    ("--model 175b --mfu 1.5", "--mfu"),
    ("--model 175b --iteration-s 0.01", "--iteration-s"),
    ("--model 175b --mirrors 25", "--mirrors"),
    ("--model 175b --leaf-ports 66", "--leaf-ports"),
    ("--model 175b --leaf-gpus 0", "--leaf-gpus"),
    ("--model 175b --mtu 1500", "--mtu"),
    ("--model 175b --place-cores 0", "--place-cores"),
    ("--model 175b --place-gbs 0", "--place-gbs"),
    ("--model 175b --memory-gb -1", "--memory-gb"),
    ("--parameters 1e300 --gap-s 1", "--parameters"),
    ("--parameters 1e16 --gap-s 1", "--parameters"),
    ("--model 175b --channels 100000", "--channels"),
    ("--model 175b --channels 65", "--channels"),
    (f"--model 175b --channels {'9' * 400}", "--channels"),
    (f"--model 175b --dp {'9' * 400}", "--dp"),
    ("--model 175b --dp 100000", "--tp x --pp x --dp"),
    (f"--model 175b --place-cores {'9' * 400}", "--place-cores"),
    ("--model 175b --slots 1000000", "--slots"),
    ("--model 175b --cores 0", "--cores"),
    ("--model 175b --kernel-ns -1", "--kernel-ns"),
    ("--model 175b --kernel-ns nan", "--kernel-ns"),
    ("--model 175b --kernel-ns inf", "--kernel-ns"),
    ("--model 175b --cores -4", "--cores"),
    ("--model 175b --place-gbs 1e-300", "--place-gbs"),
    ("--model 175b --receive-mpps 1e-300", "--receive-mpps"),
    ("--model 175b --monitor-gbps 1e-300", "--monitor-gbps"),
    ("--model 175b --node-ports 100000", "--leaf-ports"),
    ("--figure 11", "--figure"),
    ("--figure 10 --model bert", "--model"),
])
def test_what_makes_no_sense_is_refused_with_place_and_remedy(line: str, where: str) -> None:
    error = refused(f"capacity {line}")
    assert error.where == where and error.remedy and error.exit_code == 2


def test_the_speed_of_the_memory_is_an_input(capsys: pytest.CaptureFixture[str]) -> None:
    free = answer_of(capsys, f"capacity {GIVEN}")
    assert "copy-gbs" not in free["inputs"] and any("--copy-gbs" in note for note in free["notes"])
    found = answer_of(capsys, f"capacity {GIVEN} --copy-gbs 1")
    stages = {row[0]: row[1] for row in found["tables"]["stages"]["rows"]}
    assert not found["good"] and stages["all bytes, by memory"] > 28
    assert stages["bucket by bucket"] == pytest.approx(stages["all bytes, by memory"])
    assert found["inputs"]["copy-gbs"] == 1 and not any("--copy-gbs" in note for note in found["notes"])
    assert refused(f"capacity {GIVEN} --copy-gbs 0").where == "--copy-gbs"


def test_a_remedy_can_be_followed(tmp_path: Path) -> None:
    """Of too many monitor ports no leaf has 0 GPUs; a folder is a mistake of who asks, and not of the machine."""
    many, some = (refused(f"capacity --model 175b --node-ports {ports}").remedy for ports in (100_000, 30))
    assert "GPUs each" not in many and "--node-ports" in many
    assert "at most 38 GPUs each" in some
    (deep := tmp_path / "deep.json").write_text("[" * 100_000)
    for other in (deep, "/dev/zero"):  # neither may end in a traceback, nor fill the memory
        error = refused(f"capacity --model 175b --bench {other}")
        assert error.where == str(other) and "flowcheck bench" in error.remedy
    folder = refused(f"capacity --model 175b --bench {tmp_path}")
    assert folder.exit_code == 2 and folder.where == str(tmp_path) and "flowcheck bench" in folder.remedy


@pytest.mark.parametrize(("content", "said"), [
    (b"\xff\xfe\x80random", "not text: byte 0 is not UTF-8"), (b"", "the document is empty"),
    (b"# nothing\n", "the document is empty"), (b"[1, 2]", "the document holds a list and no keys"),
    (b"leaves: [{}]\ngroups: []\n", "name: is missing"),
])
def test_a_file_that_is_no_topology_is_said_in_words(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "fabric.yaml").write_bytes(content)
    error = refused(f"capacity --parameters 1e9 --gap-s 1 --topology {tmp_path / 'fabric.yaml'}")
    assert said in error.what and error.where == str(tmp_path / "fabric.yaml") and error.remedy


def test_a_version_of_nccl_that_was_never_read_is_refused() -> None:
    error = refused("capacity --model 175b --nccl-version 2.99.1")
    assert error.where == "--nccl-version" and "2.99.1" in error.what
    assert refused("capacity --model 175b --algorithm tree --channels 3").where == "--channels"


@pytest.mark.parametrize(("options", "flows"), [
    ("--mirrors 1 --node-ports 1", 4), ("--mirrors 3 --node-ports 2", 8), ("--mirrors 3 --node-ports 3", 4),
    ("--mirrors 1 --node-ports 1 --direction ingress --channels 3", 3),
    ("--mirrors 1 --node-ports 1 --algorithm tree", 12), ("--mirrors 1 --node-ports 1 --groups-per-node 2", 8),
    ("--flows 9", 9),
])
def test_how_many_flows_take_turns_is_an_input(capsys: pytest.CaptureFixture[str], options: str, flows: int) -> None:
    """Two channels but where it is said otherwise."""
    assert answer_of(capsys, f"capacity {GIVEN} {options}")["inputs"]["flows"] == flows
    assert refused(f"capacity {GIVEN} --flows 0").where == "--flows"


def test_where_versions_lie_is_an_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = {
        "parse.16flows.huge": 9.0, "place.simple.4096": 20.0, "place.simple.4096.again": 8.0,
        "place.simple.4096.icrc": 13.0, "ingest.4096.copy": 12.0, "adam.200.1t.torch-cuda-foreach": 40.0,
        "adam.200.1t.torch-cuda-foreach.shared": 25.0,
    }
    file = tmp_path / "bench.json"
    file.write_text(json.dumps([{"name": name, "value": value} for name, value in names.items()]))
    found = {
        pages: answer_of(capsys, f"capacity {GIVEN} --bench {file} {option}")["inputs"]
        for pages, option in (("", ""), ("shared", "--replica-pages shared"), ("huge", "--replica-pages huge"))
    }
    assert found[""]["update-gbs"] == found["shared"]["update-gbs"] == 25 and found["huge"]["update-gbs"] == 40
    assert found[""]["replica-pages"] == "shared"


def test_what_the_kernel_does_with_a_packet_is_done_by_the_same_cores(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"capacity {GIVEN} --mirrors 1 --node-ports 1 --receive-mpps 1"
    free, taken = (answer_of(capsys, f"{line} {more}") for more in ("", "--kernel-ns 2000"))
    assert free["inputs"]["kernel-ns"] == 0 and taken["inputs"]["kernel-ns"] == 2000
    packets, seconds = (free["results"][name] for name in ("packets of a mirrored port", "allreduces, at link speed"))
    more = taken["results"]["cores of a node"] - free["results"]["cores of a node"]
    assert more == ceil(packets * 3e-6 / seconds) - ceil(packets * 1e-6 / seconds) > 1
    few = {name: answer_of(capsys, f"{line} --cores 2 {option}")["tables"]["stages"]["rows"][-1][1]
           for name, option in (("free", ""), ("taken", "--kernel-ns 2000"))}
    assert few["taken"] > few["free"]
