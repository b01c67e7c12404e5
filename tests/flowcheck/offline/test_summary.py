"""The summary of a replay, word for word: made-up reports, and the whole text that a terminal shows of them.

Blanks at the end of a line do not count. Why a replay did not do all that was asked is in test_session_report.py, too.
"""

from __future__ import annotations

import io
import textwrap
from typing import Any

import pytest
from rich.console import Console

from flowcheck.offline.report import (
    BroadcastReport,
    CaptureReport,
    CheckpointReport,
    FlowReport,
    IterationReport,
    Report,
)
from flowcheck.offline.summary import print_summary
from flowcheck.rebuild.iteration.verdict import Clause, Verdict


def text(report: Report, width: int = 100, **terminal: Any) -> str:
    stream = io.StringIO()
    print_summary(report, Console(file=stream, width=width, **terminal or {"color_system": None}))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def lines(report: Report, width: int = 100) -> list[str]:
    return text(report, width).splitlines()


def iteration(
    number: int, *failing: tuple[Clause, str], complete: bool | None = None, marks: tuple[str, ...] = ()
) -> IterationReport:
    complete = not failing if complete is None else complete
    return IterationReport(number, [], Verdict(number, complete, not failing, failing, marks))


def flow(**changes: Any) -> FlowReport:
    usual: dict[str, Any] = {
        "role": "gradients", "src": 0, "dst": 1, "channel": 0, "src_addr": "10.0.0.1", "dst_addr": "10.0.0.2",
        "qpns": [0x12E2], "packets": 90, "missing": 0, "duplicates": 0, "retransmissions": 0, "icrc_wrong": 0,
        "state": "ALLGATHER",
    }
    return FlowReport(**usual | changes)


def expected(written: str) -> str:
    return textwrap.dedent(written).lstrip("\n")


LOST = (Clause.COVERED, "bucket 0: 4 of 10 elements, missing by cause: lost 6")
BEHIND = (Clause.PREVIOUS, "iteration 0 was not published")


# -- whole summaries ----------------------------------------------------------------------------------------


def test_of_a_replay_that_went_well() -> None:
    report = Report(iterations_asked=2, iterations=[iteration(0), iteration(1)], seconds=2.0)
    report.captures = [CaptureReport("a.pcapng", 1896, 2_000_000_000, "pcapng"), CaptureReport("b", 104, 500_000_000)]
    report.flows = [flow(), flow(src=1, dst=0, channel=3, src_addr="10.0.0.2", dst_addr="10.0.0.1", qpns=[7])]
    report.broadcasts = [BroadcastReport(["w", "b"], 20000, 20000, True, "0123456789abcdef0123")]
    report.drops = {"control": 0}
    report.stages = {"receive": 0.5, "place": 1.256}
    report.checkpoint = CheckpointReport(2, "out/step-000002", "verified")
    assert text(report) == expected("""
        COMPLETE  2 of 2 iterations complete
        capture       a.pcapng: pcapng, 1,896 packets, 2.0 GB
        capture       b: 104 packets, 500.0 MB
        flow        channel  QP      role       state      packets  missing  dup  retrans  bad icrc
        ───────────────────────────────────────────────────────────────────────────────────────────
        rank 0 > 1  0        0x12e2  gradients  ALLGATHER       90        0    0        0         0
        rank 1 > 0  3        0x7     gradients  ALLGATHER       90        0    0        0         0

        parameters    2 tensors from a broadcast, 20,000 of 20,000 bytes, sha256 0123456789abcdef…
        time          receive 0.50 s, place 1.26 s
        throughput    1,000 packets/s, 10.000 Gbit/s over 2.00 s
        checkpoint    step 2, verified: out/step-000002
    """)


def test_of_a_replay_with_losses() -> None:
    report = Report(iterations_asked=9, seconds=0.5)
    report.iterations = [
        iteration(7, LOST, BEHIND, marks=("icrc off",)), iteration(8, BEHIND, complete=True, marks=("channels",)),
    ]
    report.captures = [CaptureReport("/data/[red]odd, name.pcap", 1_000_000, 999, "pcap")]
    report.flows = [
        flow(packets=1234567, missing=6, duplicates=5, retransmissions=4, icrc_wrong=3000, state="LOST"),
        flow(role="other", src=None, dst=1, channel=None, qpns=[1, 2, 3], detail="[b]odd"),
        flow(role="other", src=0, dst=None, channel=None, qpns=[], state=""),
        flow(role="control", qpns=[0x20, 0x21], state=""),
    ]
    report.broadcasts = [BroadcastReport(["w"], 20000, 4096, False, None)]
    report.drops = {"icrc": 3, "late": 0, "not_roce": 12000, "control": 3}
    report.trust = ["the job: learnt"]
    report.notes = ["the capture ends inside iteration 9", "[i]and so on"]
    assert text(report) == expected("""
        INCOMPLETE  1 of 9 iterations complete, 7 never seen  UNPROVEN (channels, icrc off, the job: learnt)
        capture       /data/[red]odd, name.pcap: pcap, 1,000,000 packets, 999 B
                                                                                                         bad
        flow                 channel  QP      role       state        packets  missing  dup  retrans    icrc
        ────────────────────────────────────────────────────────────────────────────────────────────────────
        rank 0 > 1           0        0x12e2  gradients  LOST       1,234,567        6    5        4   3,000
        10.0.0.1 > 10.0.0.2           0x1+2   other      ALLGATHER         90        0    0        0       0
        10.0.0.1 > 10.0.0.2                   other                        90        0    0        0       0
        rank 0 > 1           0        0x20+1  control                      90        0    0        0       0

        flow          10.0.0.1 > 10.0.0.2: [b]odd
        parameters    1 tensors from a broadcast, 4,096 of 20,000 bytes, INCOMPLETE
        iteration 7   covered: bucket 0: 4 of 10 elements, missing by cause: lost 6; previous: iteration 0
                      was not published
        iteration 8   previous: iteration 0 was not published
        not placed    not_roce 12,000, icrc 3, control 3
        throughput    2,000,000 packets/s, 0.000 Gbit/s over 0.50 s
        note          the capture ends inside iteration 9
        note          [i]and so on
        checkpoint    none was written
    """)


def test_of_a_narrow_terminal() -> None:
    """Nothing is cut: words that are longer than the line go on in the next, clear of the labels."""
    mark = "order-of-roundings-that-nobody-compared"
    report = Report(iterations=[iteration(0, marks=(mark,)), iteration(100, LOST)])
    report.captures = [CaptureReport("/data/2-nodes/0123456789.pcapng", 1896, 1000, "pcapng")]
    report.notes = ["the capture ends inside iteration 3"]
    assert text(report, 36) == expected("""
        INCOMPLETE  1 of 2 iterations
        complete  UNPROVEN
        (order-of-roundings-that-nobody-comp
        ared)
        capture       /data/2-nodes/01234567
                      89.pcapng: pcapng,
                      1,896 packets, 1.0 kB
        iteration 100  covered: bucket 0: 4
                       of 10 elements,
                       missing by cause:
                       lost 6
        note          the capture ends
                      inside iteration 3
        checkpoint    none was written
    """)


def test_of_a_wide_terminal() -> None:
    """Lines of more than 160 columns are not read."""
    report = Report(iterations=[iteration(0, marks=tuple(f"a mark of ours, number {i}" for i in range(9)))])
    report.notes = ["word " * 60]
    shown = lines(report, 300)
    assert len(shown[0]) <= 160 < len(shown[0] + " " + shown[1].split()[0])
    assert shown[2:] == [
        "note          " + " ".join(["word"] * 29), " " * 14 + " ".join(["word"] * 29), " " * 14 + "word word",
        "checkpoint    none was written",
    ]


def test_of_a_terminal_with_colours() -> None:
    """The verdict is green or red and what is unproven is yellow, both bold; the counts between them are neither."""
    bold, green, red, yellow, plain, end = "\x1b[1m", "\x1b[1;32m", "\x1b[1;31m", "\x1b[1;33m", "\x1b[39m", "\x1b[0m"
    terminal = {"force_terminal": True, "color_system": "standard"}
    report = Report(iterations=[iteration(0, marks=("icrc off",))])
    head, last = text(report, **terminal).splitlines()
    assert head == (
        f"{green}COMPLETE{end}{plain}  1 of 1 iterations complete{end}{yellow}  UNPROVEN (icrc off){end}"
    )
    assert last == f"{bold}checkpoint  {end}{bold}  {end}none was written"
    report = Report(iterations_asked=1)
    assert text(report, **terminal).splitlines()[0] == (
        f"{red}INCOMPLETE{end}{plain}  0 of 1 iterations complete{end}{plain}, 1 never seen{end}"
    )


# -- its parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "words"), [
    (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (10**6, "1.0 MB"),
    (999_900_000, "999.9 MB"),
    (10**9, "1.0 GB"), (12_345_000_000_000, "12.3 TB"),
])
def test_how_large_a_capture_is(size: int, words: str) -> None:
    assert lines(Report(captures=[CaptureReport("a", 5, size)]))[1] == f"capture       a: 5 packets, {words}"


def test_the_first_twelve_flows_that_were_seen() -> None:
    unseen = [flow(packets=0, qpns=[at]) for at in (100, 101)]
    flows = [flow(qpns=[at], detail=f"odd {at}") for at in range(1, 13)]
    shown = lines(Report(flows=unseen + flows))
    assert [line.split()[5] for line in shown[3:15]] == [f"{at:#x}" for at in range(1, 13)]
    assert shown[15:] == [
        "", *(f"flow          10.0.0.1 > 10.0.0.2: odd {at}" for at in range(1, 13)), "checkpoint    none was written",
    ]
    shown = lines(Report(flows=[*flows, flow(qpns=[13], detail="odd 13"), flow(qpns=[14])]))
    assert shown[15:] == [
        "", *(f"flow          10.0.0.1 > 10.0.0.2: odd {at}" for at in range(1, 13)),
        "              and 2 more flows in the report", "checkpoint    none was written",
    ]


def test_flows_of_the_manifest_that_no_capture_has() -> None:
    """Of three flows two captures carry one, and the acknowledgements of another."""
    absent = flow(qpns=[1], packets=0, detail="no packet of it is in the captures")
    shown = lines(Report(flows=[flow(qpns=[2]), flow(qpns=[2]), absent, flow(qpns=[3], packets=0)]))
    assert shown[5:-1] == ["", "              1 of 3 flows of the manifest are not in the captures"]
    shown = lines(Report(flows=[flow(qpns=[2]), flow(qpns=[3], packets=0)]))
    assert len(shown) == 6 and shown[4] == ""


def test_the_first_six_iterations_that_were_not_published() -> None:
    iterations = [iteration(0), *(iteration(number, BEHIND) for number in range(97, 103))]
    each = [
        "iteration 97  previous: iteration 0 was not published",
        "iteration 98  previous: iteration 0 was not published",
        "iteration 99  previous: iteration 0 was not published",
        "iteration 100  previous: iteration 0 was not published",
        "iteration 101  previous: iteration 0 was not published",
        "iteration 102  previous: iteration 0 was not published",
    ]
    assert lines(Report(iterations=iterations))[1:-1] == each
    iterations += [iteration(number, LOST) for number in range(103, 106)]
    assert lines(Report(iterations=iterations))[1:-1] == [*each, "              and 3 more iterations in the report"]


def test_reasons_of_more_than_300_characters_are_cut_and_that_is_said() -> None:
    def shown(size: int) -> list[str]:
        why = (Clause.ANCHORED, "x" * (size - len("anchored: ")))
        return lines(Report(iterations=[iteration(0, why)]), 160)[1:-1]

    rest = " " * 14
    whole = ["iteration 0   anchored:", rest + "x" * 146, rest + "x" * 144]
    assert shown(300) == whole
    assert shown(301) == [*whole[:2], rest + "x" * 144 + "…", rest + "(all of it in the report)"]


@pytest.mark.parametrize(("checkpoint", "gathered", "shown"), [
    (None, None, ["checkpoint    none was written"]),
    (CheckpointReport(4, "out/step-000004", "unverified"), None,
     ["checkpoint    step 4, unverified (no trainer checksum was compared): out/step-000004"]),
    (CheckpointReport(4, "[b]out/step-000004", "verified"), None,
     ["checkpoint    step 4, verified: [b]out/step-000004"]),
    (None, CheckpointReport(5, "out/parameters-000005", "unverified", "bfloat16"),
     ["gathered      step 5, parameters only, bfloat16, no optimizer state: out/parameters-000005",
      "checkpoint    none was written"]),
])
def test_the_checkpoint(
    checkpoint: CheckpointReport | None, gathered: CheckpointReport | None, shown: list[str]
) -> None:
    assert lines(Report(checkpoint=checkpoint, parameter_checkpoint=gathered))[1:] == shown


def test_throughput() -> None:
    report = Report(captures=[CaptureReport("a", 3_000, 2_000_000_000), CaptureReport("b", 2_000, 500_000_000)])
    assert lines(report)[3:] == ["checkpoint    none was written"], "no time is known"
    report.seconds = 4.0
    assert lines(report)[3] == "throughput    1,250 packets/s, 5.000 Gbit/s over 4.00 s"
