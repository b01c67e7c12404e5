"""Every two rows of the table of NCCL versions are told apart by traffic, or it is written here why they cannot be.

Traffic is that of lab.synth, whose own table was written apart from the parser's.
"""

import random
from copy import deepcopy
from functools import cache
from itertools import permutations

import pytest
from parser.machine import Engine
from parser.observer import Observer

from flowcheck.job.model import Job
from flowcheck.learning.messages import observed_flows
from flowcheck.rebuild.iteration.rank_confirmation import other_version
from flowcheck.rebuild.plan import plan_job
from lab.synth import Synthesis, example_job, generate
from lab.synth.families import family_of
from parser.nccl import CTS_ELEMENTS, TABLE, Nccl, span
from tests.flowcheck.altered import destination, opcode, sealed

PAIRS = list(permutations(TABLE, 2))
#: Rows alike in what every packet of a kind says: form of the clear-to-send and byte order of the immediate.
ALIKE = [(a, b) for a, b in PAIRS if (a.cts, a.big_endian) == (b.cts, b.big_endian)]
#: Of those, the ones that no job's traffic tells apart, by their first versions. Why: the same calls in the same
#: packets. What differs is the record of the queue pair handshake, which is no part of the traffic of queue pairs.
THE_SAME = {(16, 19)}
ALL_CUT_ALIKE = {"count": 4096, "protocol": "simple"}
#: Jobs whose traffic tells such rows apart: by pairs, by the parts of channels.
TELLING = (
    {"count": 40_000, "protocol": "simple"},
    {"count": 5_000, "protocol": "ll", "channels": 4},
    {"count": 50_000, "protocol": "ll", "channels": 4},
    {"count": 70_000, "protocol": "simple", "channels": 4},
)


def names(pair: object) -> str:
    return pair.versions if isinstance(pair, Nccl) else str(pair)


@cache
def traffic(version: str, **options: object) -> tuple[Job, Synthesis]:
    job = example_job(ranks=2, startup=False, rebuild=False, version=version, **options)  # type: ignore[arg-type]
    return job, generate(job, iterations=1)


def followed(seen: Nccl, said: Nccl, **options: object) -> tuple[str, list[str]]:
    """Traffic of one row with a manifest of another: why the version is refuted, and what disagreed."""
    job, made = traffic(seen.example, **options)
    job = deepcopy(job)
    job.communicator.nccl_version = said.example
    plan = plan_job(job)
    engine = Engine(plan.engine)
    for _, frame in made.packets:
        engine.feed(0, frame)
    disagreements = engine.disagreements()
    return other_version(plan, engine.cts_forms(), disagreements), [d["kind"] for d in disagreements]


@pytest.mark.parametrize("row", TABLE, ids=names)
def test_a_row_agrees_with_its_own_traffic(row: Nccl) -> None:
    for options in (ALL_CUT_ALIKE, *TELLING):
        assert followed(row, row, **options) == ("", [])


@pytest.mark.parametrize(("seen", "said"), PAIRS, ids=names)
def test_form_and_order_tell_rows_apart(seen: Nccl, said: Nccl) -> None:
    """Of a call that every version cuts alike: nothing else could disagree."""
    why, kinds = followed(seen, said, **ALL_CUT_ALIKE)
    rows = [row for row in TABLE if row.cts == seen.cts or seen.cts == said.cts]
    rows = [row for row in rows if row.big_endian == seen.big_endian or seen.big_endian == said.big_endian]
    assert why == "" if (seen, said) in ALIKE else f", as of NCCL {span(rows)};" in why
    assert set(kinds) == ({"immediate"} if seen.big_endian != said.big_endian else set())


@pytest.mark.parametrize(("seen", "said"), ALIKE, ids=names)
def test_calls_tell_the_other_rows_apart(seen: Nccl, said: Nccl) -> None:
    """By sizes, or by large messages that leave as pairs. A pair that fails here needs a job in TELLING, or its reason
    in THE_SAME."""
    told = any(followed(seen, said, **options)[1] for options in TELLING)
    assert told != (tuple(sorted((seen.first, said.first))) in THE_SAME)


@pytest.mark.parametrize("row", TABLE, ids=names)
def test_a_clear_to_send_can_be_read_as_its_own_form_alone(row: Nccl) -> None:
    """Of a merged NIC, whose ports all have memory keys, in place of zeros that another form would not have: by the
    state machine, by an observer of counts, and by learning."""
    job, made = traffic(row.example, count=100_000, protocol="ll")
    control = {spec.qpn for spec in plan_job(job).engine.flows if not spec.data}
    fields = family_of(row.example).cts_fields
    keys = range(fields["rkey"][0] + 4, fields["rkey"][0] + 4 * row.cts.keys, 4)
    engine, counts, starts = Engine(plan_job(job).engine), Observer(), Observer(messages=True)
    number, chance = 0, random.Random(1)
    for _, frame in made.packets:
        if destination(frame) not in control or opcode(frame) != 10:
            continue
        number += 1
        for at in keys:  # a key of a real NIC is its table's index, and eight bits of its owner's choice
            key = chance.randrange(1 << 8, 1 << 32).to_bytes(4, "little")
            frame = sealed(frame[: 70 + at] + key + frame[70 + at + 4 :])
        engine.feed(0, frame)
        counts.add(frame)
        starts.add(frame)
    assert number > 10
    assert engine.cts_forms() == {form: number * (form == row.cts) for form in CTS_ELEMENTS}
    layouts = [flow["cts"]["layouts"] for flow in counts.report()["flows"]]
    assert [set(layout) for layout in layouts] == [{row.cts.versions}] * len(control)
    assert sum(sum(layout.values()) for layout in layouts) == number
    data, announcing = observed_flows(starts.flow_list(), starts.start_records())
    assert data == [] and [flow.layout for flow in announcing] == [row.cts.versions] * len(control)
