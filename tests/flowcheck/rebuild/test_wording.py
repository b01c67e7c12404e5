"""What people read about a job's traffic, sentence by sentence."""

import pytest

from flowcheck.rebuild.iteration.wording import describe_disagreement, flow_name, refusal
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import example_job
from tests.flowcheck.fake_engine import FakeEngine

OURS, OTHER = 0, 2  # the flows with data


def example() -> tuple[JobPlan, FakeEngine]:
    plan = plan_job(example_job(count=20, startup=False, rebuild=False))
    return plan, FakeEngine(plan.engine)


def test_a_connection_has_a_name() -> None:
    job = example_job(ranks=3, channels=2, qps=2, seed=0)
    job.flows[4].qpns = [255, 4096]
    flow = job.flows[4]
    assert (flow.channel, flow.src, flow.dst) == (1, 1, 2)
    assert flow_name(job, 4) == "channel 1, rank 1 -> 2 (QP 0xff, 0x1000)"


SENTENCES = [
    ("payload length", 1024, 512, "a packet of 1024 payload bytes was due and 512 came"),
    ("opcode", 3, 10, "packet 3 of the message cannot have opcode 0xa"),
    ("RETH length", 4096, 64, "a write of 4096 bytes was due and one of 64 came"),
    ("RETH address", 4096, 255, "the write was due at address 0x1000 and went to 0xff"),
    ("immediate", 4096, 64, "the immediate should say 4096 bytes and says 64"),
    ("flag", 7, 8, "the payload's flags should say 7 and say 8"),
    ("CTS address", 4096, 255, "the receiver announced address 0x1000 and the write went to 0xff"),
    ("extra message", 0, 0, "the sender sent one message too many: the manifest's last call has ended"),
    ("repeated chunk", 0, 0, "one message too many: this message repeats the reduced chunk that its sender"),
    ("made anew", 0, 0, "a first packet of other contents came behind it: the connection was made anew"),
]


@pytest.mark.parametrize(("kind", "expected", "found", "text"), SENTENCES, ids=[kind for kind, *_ in SENTENCES])
def test_a_disagreement_is_told_with_its_values(kind: str, expected: int, found: int, text: str) -> None:
    plan, engine = example()
    engine.disagree(3, kind, OTHER, message=9, psn=1234, expected=expected, found=found)
    name = flow_name(plan.job, 1)
    said = describe_disagreement(plan, engine.disagreements()[0])
    assert said.startswith(f"{name}, iteration 3, message 9, PSN 1234: {text}")


@pytest.mark.parametrize("kind", ["extra message", "repeated chunk"])
def test_one_message_too_many_refuses_the_traffic(kind: str) -> None:
    plan, engine = example()
    assert refusal(plan, []) == ""
    engine.disagree(1, "flag", OURS)
    assert refusal(plan, engine.disagreements()) == ""
    for flow in (OTHER, OURS, OTHER):
        engine.disagree(1, kind, flow)
    said = refusal(plan, engine.disagreements())
    assert said.startswith(
        f"one message too many per operation on {flow_name(plan.job, 0)}; {flow_name(plan.job, 1)}: a modified NCCL"
    )
    assert said.endswith("or calls that the manifest does not list")


@pytest.mark.parametrize("kind", [kind for kind, *_ in SENTENCES if kind not in ("extra message", "repeated chunk")])
def test_other_disagreements_refuse_nothing(kind: str) -> None:
    plan, engine = example()
    engine.disagree(1, kind)
    assert refusal(plan, engine.disagreements()) == ""
