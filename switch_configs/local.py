"""Software switches from Python: a plan applied in its network namespaces while a block runs.

    with mirrored(make_plan(topology)) as states:      leaves are tc or ovs, each with its netns, bridge, ovs_rundir
        ...                                            the mirror copies here
                                                       and is gone here, also after an exception

The laboratory and tests use it; operators use `flowcheck switch`. Needs the rights that tc and ovs-vsctl need.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from switch_configs.errors import PlanError
from switch_configs.manage import Manager
from switch_configs.planning.platform_rules import check_plan
from switch_configs.schema import MirrorPlan, MirrorSession, SessionState
from switch_configs.transport import LocalTransport, is_local

__all__ = ["local_manager", "mirrored"]


def local_manager(session: MirrorSession) -> Manager:
    """Show, difference, apply and remove one session of a software switch on this machine."""
    if not is_local(session.vendor):
        raise PlanError(f"{session.vendor} is not a software switch", where=session.leaf, remedy="use flowcheck switch")
    return Manager(session, lambda: LocalTransport(session))


@contextmanager
def mirrored(plan: MirrorPlan) -> Iterator[list[SessionState]]:
    """Apply every session and yield their states; remove them in reverse order at the end.

    Raises PlanError if something is in the way, DeviceError if a session does not become active; either way what
    was already applied is removed again.
    """
    check_plan(plan)
    with ExitStack() as undo:
        states = []
        for session in plan.sessions:
            manager = local_manager(session)
            undo.callback(manager.close)
            difference = manager.difference()
            states.append(manager.apply(difference))
            undo.callback(manager.remove, difference.port_before)
        yield states
