"""The captures of a node, from DPDK's start on: opened with the rights of that moment, started with the first job.

    captures = OpenCaptures(config, say)      DPDK and each capture; then rights are given back (rights.py)
    captures.port                             what groups have of them
    captures.watch(say)                       who hears of the node's own drops
    captures.start()                          receive and place; nothing is begun twice
    captures.look()                           again and again: drops, and whether each can go on
    captures.stop(), captures.close()

Main thread, but `start`: whoever brings the first job, behind a lock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from dataplane.live import LiveSource, check_cores, start_eal
from dataplane.pydpdk.errors import DpdkError
from flowcheck.errors import EnvironmentProblem, FlowcheckError, UserError
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.ports.captures import naming, plan_captures
from flowcheck.node.ports.drops import Drops
from flowcheck.node.ports.port import Port
from flowcheck.node.ports.rights import Rights
from flowcheck.rebuild.calibration import settle, settle_updates

__all__ = ["OpenCaptures", "dpdk_errors"]


class OpenCaptures:
    """say: what the machine places and updates by. planned, sources: of each capture. started: they receive."""

    def __init__(self, config: NodeConfig, say: Callable[..., None]) -> None:
        self.planned = planned = plan_captures(config)
        self.sources: list[LiveSource] = []
        self._drops: list[Drops] = []
        self.started = False
        self._receiving = 0  # captures that do
        self._rights = rights = Rights(one.live.port.driver for one in planned)
        with ExitStack() as undo:
            begin: Callable[..., Any] = partial(rights.call, start_eal) if rights.opens_with_dpdk else start_eal
            eal = undo.enter_context(begin(*(one.live for one in planned), huge=config.huge))
            say("placing", text=str(settle(max(one.live.path_mtu or 1024 for one in planned), eal.huge)))
            say("updating", text=str(settle_updates()))
            for one in planned:
                with naming(one):
                    check_cores(one.settings.place_cores)  # those of `cores` are looked at by the source
                    source = rights.call(LiveSource, eal, one.live)
                    undo.callback(rights.call, source.close)
                    self.sources.append(source)
                    if one.live.port.interface:  # its driver sets the interface's flags then
                        rights.call(source.start_port)
            rights.give_back()
            self.port = Port(planned, self.sources)
            self._undo = undo.pop_all()

    def watch(self, say: Callable[..., None]) -> None:
        self._drops = [Drops(one, partial(self.port.drops_of, i), say) for i, one in enumerate(self.planned)]

    def start(self) -> None:
        """Receive and place. Raises EnvironmentProblem: a later trainer may try again."""
        if self.started:
            return
        try:
            self.port.placers.start()
        except OSError as error:
            raise EnvironmentProblem(
                f"a placing thread cannot be pinned: {error.strerror}", where="capture.place_cores",
                remedy="cores that this process may use, or none",
            ) from None
        try:
            with dpdk_errors():
                both = list(zip(self.planned, self.sources, strict=True))
                for one, source in both:  # what may fail comes first
                    with naming(one):
                        self._rights.call(source.start_port)
                for one, source in both[self._receiving :]:  # those before came up in an earlier attempt
                    with naming(one):
                        source.start()
                    self._receiving += 1
        except BaseException:
            self.port.placers.stop()  # the next one who comes would have a second set of them on the same rings
            raise
        self.started = True

    def look(self) -> None:
        """Raises what ended one: its interface is gone, say."""
        for drops in self._drops:
            drops.look()
        if not self.started:
            return
        for one, source in zip(self.planned, self.sources, strict=True):
            with naming(one):
                if source.error is not None:
                    raise source.error

    def stop(self, say: Callable[..., None]) -> None:
        """say: what each has brought."""
        self.port.placers.stop()
        for source in self.sources:
            source.stop()
        for source in self.sources:
            say("capture", text=source.summary())

    def close(self) -> None:
        self._undo.close()


@contextmanager
def dpdk_errors() -> Iterator[None]:
    try:
        yield
    except DpdkError as error:
        raise EnvironmentProblem(error.what, remedy=error.remedy) from None
    except ValueError as error:
        if isinstance(error, FlowcheckError):
            raise
        raise UserError(str(error), where="capture", remedy="docs/use/settings.md has every key") from None
