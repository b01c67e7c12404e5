"""Captures through DPDK, for whoever looks at every packet once: inspect and learning. Main thread.

    with capture_errors():                       of files and of DPDK, as flowcheck shows them
        infos = [scan(path) for path in paths]
        with Eal.start(...) as eal:
            observe(eal, infos, Observer())
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from parser.observer import Observer

from dataplane.capture import PcapSource
from dataplane.pcapfile import CaptureFileError, PcapInfo
from dataplane.pydpdk.eal import Eal
from dataplane.pydpdk.errors import DpdkError
from flowcheck.errors import EnvironmentProblem, UserError

__all__ = ["IDLE_SECONDS", "capture_errors", "observe"]

IDLE_SECONDS = 0.0005  # between two looks at an empty ring, while the rx thread works


def observe(eal: Eal, infos: Sequence[PcapInfo], observer: Observer) -> None:
    """Give every packet of the files to the observer, one file after the other. Raises what a source failed with."""
    for number, info in enumerate(infos):
        with PcapSource(eal, info.path, stream=number, info=info) as source:
            source.start()
            while not observer.drained(source.ring_address):
                if not observer.drain(source.ring_address):
                    time.sleep(IDLE_SECONDS)
            if source.error is not None:
                raise source.error


@contextmanager
def capture_errors() -> Iterator[None]:
    """Raises UserError for a file that is not a capture, EnvironmentProblem where DPDK refuses."""
    try:
        yield
    except CaptureFileError as error:
        raise UserError(error.what, where=f"{error.path}: at byte {error.offset}", remedy=error.remedy) from None
    except DpdkError as error:
        raise EnvironmentProblem(error.what, remedy=error.remedy) from None
