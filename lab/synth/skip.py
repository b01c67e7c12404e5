"""Getting to iteration 10 million without playing ten million iterations.

What a steady iteration adds to a connection's counters repeats with a short period: SIMPLE rings round the
step up to 4, and messages go round the QPs. So one period is played and counted, and its sum is added as
often as needed. The 8 steps in 2^31 in which LL sends whole slots (nccl-wire.md 4.1) break the period; they
are played.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lab.synth.connection import Connection

__all__ = ["skip"]

_ROUNDING_PERIODS = 12  # of a map of the residues mod 4 onto themselves: 1, 2, 3 or 4 iterations
_WINDOW, _WINDOW_EVERY = 0x7FFFFFF8, 1 << 31


def skip(
    play: Callable[[int], None], connections: Mapping[tuple[int, int, int], Connection], iteration: int,
    stop: int,
) -> int:
    """Count some of the steady iterations [iteration, stop) silently; how many (at least one)."""
    queues = max((len(connection.flow.qpns) for connection in connections.values()), default=1)
    period = _ROUNDING_PERIODS * queues
    if stop - iteration < 2 * period + 4:
        play(iteration)
        return 1
    for settle in range(4):  # from any residue into the cycle of the rounding
        play(iteration + settle)
    before = {key: connection.counters for key, connection in connections.items()}
    for k in range(period):
        play(iteration + 4 + k)
    played = 4 + period
    times = (stop - iteration - played) // period
    for key, connection in connections.items():
        start, step = before[key][0], connection.step
        if step == start:
            continue
        window = _WINDOW + max(0, -(-(start - _WINDOW - 7) // _WINDOW_EVERY)) * _WINDOW_EVERY
        if window <= step:
            return played
        times = min(times, (window - step) // (step - start))
    for key, connection in connections.items():
        pairs = zip(connection.counters, before[key], strict=True)
        connection.counters = [now + times * (now - then) for now, then in pairs]
    return played + times * period
