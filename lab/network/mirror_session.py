"""The lab's mirror session: a topology of one leaf, planned, rendered, applied and read back by switch_configs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Self

from flowcheck.errors import EnvironmentProblem, UserError
from lab.shape import BRIDGE, MIRROR_MTU, FabricConfig
from switch_configs.errors import DeviceError, PlanError
from switch_configs.local import local_manager
from switch_configs.planning.planner import make_plan
from switch_configs.schema import Group, Leaf, MirrorPlan, MonitorPort, NicPort, SessionState, Topology

__all__ = ["Mirror"]

PORT_GBPS = 10.0  # veth has no speed; the plan's bandwidth sum wants one


class Mirror:
    """The session of one node. Several nodes are several sessions with numbers of their own."""

    def __init__(self, plan: MirrorPlan) -> None:
        self.plan = plan
        self._managers = [local_manager(one) for one in plan.sessions]

    @classmethod
    def planned(cls, config: FabricConfig, node: int, ovs_rundir: str | None) -> Self:
        """Raises UserError where the chosen ports can never be complete, in the planner's words."""
        group = config.group(node)
        leaf = Leaf(
            name="leaf", vendor=config.switch, netns=config.namespace("leaf"), session_number=1 + node,
            ports=[NicPort(port=f"p{r}", rank=r, host=f"r{r}", speed_gbps=PORT_GBPS) for r in group],
            monitor_ports=[MonitorPort(port=f"m{node}", node=f"node{node or ''}", speed_gbps=400, mtu=MIRROR_MTU)],
            bridge=BRIDGE if config.switch == "ovs" else None, ovs_rundir=ovs_rundir,
        )
        topology = Topology(
            leaves=[leaf], path_mtu=config.path_mtu,  # type: ignore[arg-type]
            session=f"flowcheck{node or ''}",
            groups=[Group(name=f"dp{node}", ranks=list(group), algorithm=config.algorithm,
                          mirror=list(config.mirrored[node]))],
        )
        try:
            return cls(make_plan(topology, direction=config.direction))
        except PlanError as error:
            raise UserError(error.what, where=error.where or "mirror", remedy=error.remedy) from None

    def apply(self) -> None:
        for manager in self._managers:
            with _as_ours():
                manager.apply(manager.difference())

    def remove(self) -> None:
        for manager in self._managers:
            with _as_ours():
                manager.remove()

    def state(self) -> list[SessionState]:
        with _as_ours():
            return [manager.show().mine for manager in self._managers]

    def close(self) -> None:
        for manager in self._managers:
            manager.close()


@contextlib.contextmanager
def _as_ours() -> Iterator[None]:
    """switch_configs stands alone and has errors of its own; here they are the machine's or the user's."""
    try:
        yield
    except DeviceError as error:
        raise EnvironmentProblem(error.what, where=error.where, remedy=error.remedy) from None
    except PlanError as error:
        raise UserError(error.what, where=error.where, remedy=error.remedy) from None
