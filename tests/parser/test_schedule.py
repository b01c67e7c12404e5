"""What an engine is made of is checked once: nothing is written outside a region, however a packet reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parser.machine import Engine

from flowcheck.rebuild.plan import plan_job
from lab.synth import example_job
from lab.synth.example import sharded_job
from parser.engine_config import EngineConfig

from .test_trusted_again import back, iterations, stray, traffic

GRADIENTS = plan_job(example_job(count=[4000, 2000], protocol="ll", startup=False, rebuild=False)).engine
GATHERED = plan_job(sharded_job(count=(2500, 700), ranks=4)).engine


def moved(config: EngineConfig, by: int) -> EngineConfig:
    """Every call's tensor begins so many bytes later."""
    edges = [replace(edge, calls=tuple(replace(call, base=call.base + by) for call in edge.calls))
             for edge in config.edges]
    return replace(config, edges=tuple(edges))


def over(config: EngineConfig, used: int) -> EngineConfig:
    return replace(config, edges=(replace(config.edges[0], used=used), *config.edges[1:]))


@pytest.mark.parametrize(("config", "what"), [
    (replace(GRADIENTS, gradient_bytes=4 * 6000 - 8), "of a region of 23992"),
    (moved(GRADIENTS, -8), "a call ends at byte"), (moved(GRADIENTS, 4), "not on a cell of 8 bytes"),
    (moved(GRADIENTS, 1 << 20), "a call ends at byte"), (moved(GATHERED, 1 << 20), "a call ends at byte"),
    (over(GRADIENTS, 2), "messages over 2 of 1 QPs"), (over(GRADIENTS, 0), "messages over 0 of 1 QPs"),
    (replace(GRADIENTS, flows=(replace(GRADIENTS.flows[0], src_addr=bytes(16)), *GRADIENTS.flows[1:])), "16 and 4"),
    (replace(GRADIENTS, mtu=128), "MTU 128"), (replace(GRADIENTS, mtu=8192), "MTU 8192"),
])
def test_what_contradicts_itself_is_no_engine(config: EngineConfig, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Engine(config)


def test_the_blocks_of_all_ranks_lie_in_the_region() -> None:
    """The last group of 700 elements, in blocks of which the fourth rank's is the last."""
    Engine(replace(GATHERED, gradient_bytes=6464))
    with pytest.raises(ValueError, match="a call ends at byte 6462 of a region of 6456"):
        Engine(replace(GATHERED, gradient_bytes=6456))


@pytest.mark.parametrize(("count", "again"), [
    ((4000, 9000, 4000, 9000), False), ((4000, 9000) * 3, False), ((4000, 9000, 4000), True),
    ((4000, 9000, 9000, 4000, 9000), True),
])
def test_where_half_an_iteration_is_like_the_other_a_flow_stays_lost(count: tuple[int, ...], again: bool) -> None:
    """Read as a circle: what comes out the same when it is turned cannot tell by how much it was turned."""
    job, plan, made = traffic("ll", count)
    qpn = job.flows[0].qpns[0]
    parts = iterations(made, qpn)
    parts[2][0].insert(0, stray(parts[2][0][0]))
    assert (back(plan, qpn, parts)[0].stop < 1 << 60) is again
