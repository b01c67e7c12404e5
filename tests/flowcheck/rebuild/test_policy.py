"""Who waits for whom, and what is known in each of the three ways to follow."""

from __future__ import annotations

from flowcheck.rebuild.version.policy import Policy


def test_captures_wait_and_have_an_end_and_nobody_sends_a_record() -> None:
    assert Policy.offline() == Policy(sources_wait=True, trainers=False, record_seconds=0.0, endless=False)


def test_a_port_waits_for_nobody_and_its_trainers_send_records() -> None:
    for seconds in (0.5, 7.0):
        assert Policy.live(seconds) == Policy(sources_wait=False, trainers=True, record_seconds=seconds, endless=True)


def test_without_trainers_no_record_is_waited_for() -> None:
    assert Policy.unattended() == Policy(sources_wait=False, trainers=False, record_seconds=0.0, endless=True)
