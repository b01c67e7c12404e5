"""`flowcheck plan capacity` as a person asks it: presets, figures, a topology, and what is refused."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path

import pytest
import typer

from flowcheck.cli import app
from flowcheck.errors import UserError

from ..asking import answer_of, asked, refused

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


def test_the_papers_example_meets_its_deadline_and_cannot_be_followed_today(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = answer_of(capsys, "capacity --model 175b")
    assert not found["good"] and "CANNOT be followed" in found["verdict"] and "deadline met" in found["verdict"]
    assert found["results"]["can be followed"] == "no" and found["results"]["data-parallel groups"] == 96
    assert found["results"]["nodes per leaf, at most"] == 4 and found["results"]["nodes, as many on each leaf"] == 96
    assert any("Calculon" in note for note in found["notes"]), "what the paper does not print is said"
    assert any("qualify.md" in note for note in found["notes"])


SMALL = "capacity --parameters 1e9 --dp 8 --gap-s 10 --port-gbps 100"
FOLLOWED = {
    "": True, "--layout ddp": True, "--layout ddp --experts 4": True, "--layout ddp --optimizer amsgrad": True,
    "--layout ddp --dtype bfloat16": False, "--layout ddp --optimizer fused-adam": False,
    "--shard 4": True, "--layout hsdp --shard 4 --dtype bfloat16": True, "--layout hsdp --shard 4 --experts 2": True,
    "--layout hsdp --shard 4 --optimizer other": False, "--layout fsdp2": False, "--layout deepspeed": False,
    "--layout megatron": False, "--layout megatron --shard 4": True, "--layout megatron --shard 4 --experts 2": False,
    "--layout megatron --shard 4 --optimizer fused-adam": False,
    "--direction egress --mirrors 4": False, "--direction egress --mirrors 4 --protocol ll128": True,
}


@pytest.mark.parametrize("options", FOLLOWED)
def test_it_begins_with_whether_the_job_can_be_followed(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/use/qualify.md and layouts.md, row by row. A node that is large enough for a job that it cannot follow is
    not green."""
    status, out = asked(capsys, f"{SMALL} {options} --json")
    found = json.loads(out)
    assert found["results"][0]["name"] == "can be followed" and found["results"][0]["source"]
    assert (found["results"][0]["value"] == "yes") == FOLLOWED[options] == found["good"] == (status == 0)
    assert FOLLOWED[options] or any(note.startswith("instead: ") for note in found["notes"])


def test_results_come_before_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = asked(capsys, SMALL)
    assert out.index("can be followed") < out.index("deadline kept by") < out.index("default: ")


@pytest.mark.parametrize(("text", "number"), [
    ("70B", 70e9), ("175b", 175e9), ("1.3T", 1.3e12), ("350M", 350e6), ("7e9", 7e9), ("7_000_000_000", 7e9),
])
def test_parameters_are_counted_as_people_count_them(
    text: str, number: float, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in (f"capacity --dp 8 --gap-s 100 --parameters {text}", f"loss --parameters {text}",
                 f"goodput --parameters {text}"):
        assert answer_of(capsys, line)["inputs"]["parameters"] == number, line


@pytest.mark.parametrize("text", ["70X", "B", "70BB", "1.2.3B", "", "7e", "\u0667B"])
def test_what_is_no_amount_is_refused_in_words(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"is not a number.*70B") as caught:
        app(["plan", "capacity", "--gap-s", "1", "--parameters", text], standalone_mode=False)
    assert caught.value.exit_code == 2


# -- monitor ports: the planner's rule --------------------------------------------------------------------------------

FAST = "capacity --parameters 1e9 --dp 8 --gap-s 10 --port-gbps 400 --monitor-gbps 400"


@pytest.mark.parametrize(("switch", "ports", "met"), [
    ("sonic", 6, True), ("sonic", 5, False), ("junos", 6, False), ("nxos", 6, False), ("eos", 6, False),
    ("tc", 6, True), ("cumulus", 48, False),
])
def test_ports_are_met_where_switch_plan_makes_a_plan(
    switch: str, ports: int, met: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Three NICs of 400 Gb/s in both directions, and monitor ports of 400: the sum fits, and a session does not."""
    found = answer_of(capsys, f"{FAST} --switch {switch} --node-ports {ports}")
    assert ("ports met" in found["verdict"]) == met == found["good"]
    file = topology(tmp_path, ranks=8, groups=1, speed=400)
    document = json.loads(file.read_text())
    document["leaves"][0] |= {"vendor": switch, "monitor_ports": [
        {"port": f"Ethernet{48 + number}", "node": "ck0", "speed_gbps": 400} for number in range(ports)
    ]}
    file.write_text(json.dumps(document))
    line = ["switch", "plan", str(file), "--out", str(tmp_path / "p"), "--redundancy", "3", "--direction", "both"]
    if met:
        app(line, standalone_mode=False)
    else:
        assert any("the ports would fit" in note for note in found["notes"])
        with pytest.raises(UserError):
            app(line, standalone_mode=False)


@pytest.mark.parametrize(("options", "change"), [
    ("--switch eos", "--direction egress --protocol ll128"), ("--switch eos", "--split-directions"),
    ("--switch eos", "--monitor-gbps 800"), ("--switch sonic --node-ports 4", "--mirrors 2"),
    ("--switch sonic --node-ports 4", "--node-ports 6"), ("--switch eos", "--peak-gbps 200"),
])
def test_a_change_that_is_named_makes_the_ports_fit(
    options: str, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer_of(capsys, f"{FAST} {options}")
    assert "ports MISSED" in found["verdict"]
    said = next(note for note in found["notes"] if "the ports would fit" in note)
    assert change.split(" --protocol")[0].removesuffix(" 200") in said
    assert "ports met" in answer_of(capsys, f"{FAST} {options} {change}")["verdict"]


def test_fewer_ports_are_an_answer_with_what_they_lose(capsys: pytest.CaptureFixture[str]) -> None:
    """Gradients are on the wire for a few percent of the time; what a slower port cannot send waits, or is lost."""
    found = answer_of(capsys, f"{FAST} --node-ports 6")
    results, rows = found["results"], found["tables"]["ports"]["rows"]
    filled = results["gradients are on the wire"] / 100
    assert 0.001 < filled < 0.05 and results["copies at the mean"] == pytest.approx(2400 * filled)
    by_ports = {row[0]: row[1:] for row in rows}
    assert list(by_ports) == [1, 2, 3, 4, 5, 6] and by_ports[6] == [400, 0, 0, 0, 0]
    seconds = filled * found["inputs"]["iteration-s"]
    peak, waits, lost, alone, together = by_ports[3]
    assert peak == 200 and lost == pytest.approx(50) and alone == pytest.approx(1) and together == 1
    assert waits == pytest.approx(1200e9 * seconds / 8 / 1e6)
    # a buffer of what waits loses nothing; half of it loses half as much, and bursts with pauses need less
    for buffer, more, share in ((waits, "", 0), (waits / 2, "", 25), (waits / 10 * 1.01, "--bursts 10", 0)):
        table = answer_of(capsys, f"{FAST} --node-ports 6 --buffer-mb {buffer} {more}")["tables"]["ports"]["rows"]
        assert table[2][3] == pytest.approx(share, abs=1e-6)
        assert (table[2][4] == 0) == (share == 0)
    # the rows' peak is what the planner takes, and not a little more
    for ports in (2, 3, 4):
        most = by_ports[ports][0]
        for load, word in ((most, "met"), (most * 1.01, "MISSED")):
            line = f"{FAST} --node-ports {ports} --peak-gbps {load}"
            assert f"ports {word}" in answer_of(capsys, line)["verdict"], (ports, load)


@pytest.mark.parametrize(("options", "said"), [
    ("--mirrors 8 --node-ports 16", "PCIe 5.0 lanes"), ("--mirrors 8", "GB/s of memory: 1,600"),
    ("--update-cores 500", "cores: "), ("--slots 400", "GB of memory: "),
])
def test_a_node_that_no_server_can_be_is_said(
    options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer_of(capsys, f"{FAST} {options} --parameters 30B")
    assert not found["good"] and "a server that exists MISSED" in found["verdict"] and said in found["verdict"]


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
    (f"{GIVEN} --mirrors 0", "--mirrors"),
    ("--parameters 1e9 --dp 600 --gap-s 9 --mirrors 129", "--mirrors"),
    (f"{GIVEN} --switch foo", "--switch"),
    (f"{GIVEN} --peak-gbps 101", "--peak-gbps"),
    (f"{GIVEN} --peak-gbps nan", "--peak-gbps"),
    (f"{GIVEN} --buffer-mb nan", "--buffer-mb"),
    (f"{GIVEN} --bursts 0", "--bursts"),
    (f"{GIVEN} --experts -1", "--experts"),
    (f"{GIVEN} --layout ddp --shard 2", "--layout"),
    (f"{GIVEN} --layout hsdp", "--shard"),
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
    assert "at most 8 GPUs each" in some
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
