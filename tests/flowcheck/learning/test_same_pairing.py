"""`inspect` and learning look at the same packets and name the same connections."""

import pytest
from parser.observer import Observer

from flowcheck.learning.connections import Connection, connections
from lab.synth import Synthesis, example_job, generate
from parser.findings import interpret


def both(made: Synthesis) -> tuple[dict, list[Connection]]:
    counts, messages = Observer(), Observer(messages=True)
    for timestamp, frame in made.packets:
        counts.add(frame, timestamp)
        messages.add(frame, timestamp)
    return interpret(counts.report()), connections(messages.flow_list(), messages.start_records())


def inspected(seen: dict) -> dict[tuple[str, str, int], int]:
    """QP of clear-to-send by data flow, as inspect has it."""
    return {
        (c["source"], c["destination"], c["data_qp"]): seen["flows"][c["clear_to_send_flow"]]["dest_qp"]
        for c in seen["connections"] if c["clear_to_send_flow"] is not None
    }


def paired(learnt: list[Connection]) -> dict[tuple[str, str, int], int]:
    """The same as learning has it."""
    return {(f.src, f.dst, f.qpn): c.cts_qpns[0] for c in learnt if c.cts_flows for f in c.flows}


def test_one_direction_has_no_clear_to_send() -> None:
    seen, learnt = both(generate(example_job(count=[9000, 31]), iterations=2, directions="out"))
    assert learnt and not any(c.cts_flows for c in learnt if c.src == "10.0.0.1")
    assert not any(c["clear_to_send_flow"] is not None for c in seen["connections"] if c["source"] == "10.0.0.1")


@pytest.mark.parametrize("protocol", ["ll", "simple"])
@pytest.mark.parametrize("options", [
    {"channels": 3}, {"ranks": 4, "channels": 2}, {"qps": 4}, {"qps": 4, "split_data_on_qps": True}, {"ipv6": True},
    {"adaptive_routing": True}, {"ranks": 4, "algorithm": "tree"},
])
def test_the_same_connections(options: dict, protocol: str) -> None:
    """inspect lists flows of which both directions were captured: each has the cts flow that learning gives it."""
    seen, learnt = both(generate(example_job(count=[9000, 31], protocol=protocol, **options), iterations=2))
    assert inspected(seen).items() <= paired(learnt).items()
    for c in learnt:
        assert c.cts_flows and any((f.src, f.dst, f.qpn) in inspected(seen) for f in c.flows)


def test_what_two_announce_is_nobodys_for_both() -> None:
    """Two jobs with the same keys and addresses: only the port pairs what is left."""
    one, other = (generate(example_job(count=[5000], protocol="simple", seed=seed)) for seed in (1, 2))
    one.ports[0] = sorted(one.ports[0] + other.ports[0])
    seen, learnt = both(one)
    assert learnt and all("several flows of clear-to-send" in c.unsure for c in learnt)
    assert {c["paired_by"] for c in seen["connections"]} == {c.paired_by for c in learnt} == {"UDP source port"}
    for c in learnt:
        first = c.flows[0]
        assert inspected(seen)[first.src, first.dst, first.qpn] == c.cts_qpns[0]
