"""The process that keeps copies of other nodes' versions: started, watched and ended by the node (child.py).

    child = copying(config, key, address, say)        in the node
    child.order(other_tokens(config, key))            another key from now on

It has the cores that no capture is pinned to, at a lower priority. The process itself: worker.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.control.proof import node_key
from flowcheck.control.tls import client_context, server_context
from flowcheck.durable import check_writable
from flowcheck.errors import EnvironmentProblem, FlowcheckError
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.config.protect import Protect
from flowcheck.node.config.tokens import read_token, read_tokens
from flowcheck.node.process.child import ChildProcess
from flowcheck.node.protect.border import (
    PROGRAM,
    CopierSettings,
    OtherTokens,
    ParitySettings,
    RegistrySettings,
    Rules,
)
from flowcheck.node.protect.registry_etcd import check_endpoints
from flowcheck.node.tokens import PEER
from updater.reader import not_mine

__all__ = ["check_copies", "copying", "other_tokens"]

PLACE = "a directory that the node may write to as protect.directory, on tmpfs, and free space"


def copying(config: NodeConfig, key: str, address: str, say: Callable[..., None]) -> ChildProcess:
    """config: with `protect`. key: that this node shows to others. address: of its own API. say: events. Raises
    UserError or EnvironmentProblem: a token cannot be read."""
    protect, directory = config.protect, config.copies
    assert protect is not None and directory is not None
    return ChildProcess(PROGRAM, CopierSettings(
        directory=directory, key=key, keys=_keys(config), token=_token(config), ca=_ca(config),
        sources=tuple(protect.addresses), journal=tuple(protect.journals), own=config.advertise or address,
        rate=(protect.mb_per_second or 0) << 20, cores=tuple(sorted(os.sched_getaffinity(0) - config.pinned)),
        rules=Rules(protect.every, protect.keep, protect.memory_mb << 20, protect.seconds),
        registry=_registry(config, protect, address) if config.nodes.registry else None, parity=_rounds(config),
    ), say)


def other_tokens(config: NodeConfig, key: str) -> OtherTokens:
    """key: that this node shows from now on."""
    try:
        return OtherTokens(key=key, keys=_keys(config), token=_token(config))
    except FlowcheckError:  # it was read a moment ago; if it cannot be now, what was stays
        return OtherTokens(key=key)


def _registry(config: NodeConfig, protect: Protect, address: str) -> RegistrySettings:
    assert config.placement is not None
    nodes = config.nodes
    certificate = nodes.registry_cert, nodes.registry_key
    return RegistrySettings(
        endpoints=tuple(nodes.registry), cluster=nodes.cluster, ca=str(nodes.registry_ca),
        cert=(str(certificate[0]), str(certificate[1])) if certificate[0] else None,
        user=nodes.registry_user, password=str(nodes.registry_password_file or ""),
        replicas=protect.states, grace=protect.grace, address=config.advertise or address,
        follows=config.follows, standby=protect.standby, own=protect.own,
        code=protect.code if protect.placed else None, kept=config.placement,
        replace=tuple(protect.replace), replace_seconds=protect.replace_seconds, directory=config.replica.directory,
        site=Site(config.name, nodes.host, nodes.leaf, nodes.rack),
    )


def _ca(config: NodeConfig) -> str:
    return str(config.tls.ca) if config.tls is not None else ""


def _token(config: NodeConfig) -> str:
    """That journals are asked for with; "": none is kept. Raises UserError or EnvironmentProblem."""
    assert config.protect is not None
    return config.token("peer").decode() if config.protect.journal else ""


def _keys(config: NodeConfig) -> tuple[str, ...]:
    """Of each token of nodes that is accepted. Raises UserError or EnvironmentProblem."""
    return tuple(node_key(token).hex() for token in read_tokens(config.token_files[PEER]))


def _rounds(config: NodeConfig) -> ParitySettings | None:
    """A member's part in a group with parity; which one, if the registry does not say it."""
    protect = config.protect
    if protect is None or protect.code is None or config.parity is None:
        return None
    return ParitySettings(code=protect.code, number=config.member, members=tuple(protect.members),
                          data=tuple(protect.group[: protect.code[0]]), directory=config.parity)


def check_copies(config: NodeConfig) -> Path:
    """Where they lie. Raises EnvironmentProblem or UserError: it cannot be written to, or nobody could be asked."""
    directory = config.copies
    assert config.protect is not None and directory is not None
    if config.nodes.registry:
        check_endpoints(config.nodes.registry)
        if config.nodes.registry_password_file is not None:
            read_token(config.nodes.registry_password_file)
        if config.nodes.registry_cert is not None and config.nodes.registry_key is not None:
            server_context(config.nodes.registry_cert, config.nodes.registry_key)
    if config.tls is not None:
        client_context(config.tls.ca)
    for place in filter(None, (directory, config.parity)):
        check_writable(place, PLACE)
        found = place.lstat()  # where it lies everybody may make one
        if why := "is a link" if stat.S_ISLNK(found.st_mode) else not_mine(found, 0o002):
            raise EnvironmentProblem(why, where=str(place), remedy="remove it, or run the node as that user")
    return directory
