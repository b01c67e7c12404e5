"""The process that keeps copies of other nodes' versions: started, watched and ended by the node (child.py).

    copying = Copying(config, key, address, say)      key: that this node shows to others; address: of its own API
    copying.tell(key)                                 another one from now on

It has the cores that no capture is pinned to, at a lower priority. The process itself: worker.py.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowcheck.control.proof import node_key
from flowcheck.control.tls import client_context, server_context
from flowcheck.durable import check_writable
from flowcheck.errors import EnvironmentProblem, FlowcheckError, UserError
from flowcheck.node.child import Beside
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.config.tokens import read_token, read_tokens
from flowcheck.node.protect.registry_etcd import check_endpoints
from flowcheck.node.tokens import PEER
from updater.reader import not_mine

__all__ = ["Copying", "check_copies"]


PLACE = "a directory that the node may write to as protect.directory, on tmpfs, and free space"


class Copying(Beside):
    """config: with `protect`."""

    def __init__(self, config: NodeConfig, key: str, address: str, say: Callable[..., None]) -> None:
        protect, nodes, directory = config.protect, config.nodes, config.copies
        assert protect is not None and directory is not None
        registry = {
            "endpoints": list(nodes.registry), "cluster": nodes.cluster, "ca": nodes.registry_ca,
            "cert": [str(nodes.registry_cert), str(nodes.registry_key)] if nodes.registry_cert else None,
            "user": nodes.registry_user, "password": str(nodes.registry_password_file or ""),
            "replicas": protect.states, "grace": protect.grace, "address": config.advertise or address,
            "follows": bool(config.capture), "standby": protect.standby, "own": protect.own,
            "code": protect.code if protect.placed else None, "kept": str(config.placement),
            "replace": list(protect.replace), "replace_seconds": protect.replace_seconds,
            "directory": str(config.replica.directory),
            "site": {"name": config.name, "host": nodes.host, "leaf": nodes.leaf, "rack": nodes.rack},
        }
        super().__init__("flowcheck.node.protect.worker", "keeps copies of other nodes' versions", {
            "directory": str(directory), "key": key, "keys": _keys(config),
            "ca": config.tls.ca if config.tls is not None else "",
            "sources": protect.addresses, "journal": protect.journals, "token": self._token(config),
            "own": config.advertise or address, "rate": (protect.mb_per_second or 0) << 20,
            "cores": sorted(os.sched_getaffinity(0) - config.pinned),
            "rules": {"every": protect.every, "keep": protect.keep, "most": protect.memory_mb << 20,
                      "seconds": protect.seconds},
            "registry": registry if nodes.registry else None, "parity": _rounds(config),
        }, say)

        self._config = config

    def tell(self, key: str) -> None:
        said: dict[str, Any] = {"key": key}
        with contextlib.suppress(FlowcheckError):  # it was read a moment ago; if it cannot be now, what was stays
            said |= {"keys": _keys(self._config), "token": self._token(self._config)}
        self.order(said)

    @staticmethod
    def _token(config: NodeConfig) -> str:
        """That journals are asked for with; "": none is kept. Raises UserError or EnvironmentProblem."""
        assert config.protect is not None
        return config.token("peer").decode() if config.protect.journal else ""

    def _tell(self, event: str, name: str, said: Mapping[str, Any]) -> None:
        match event:
            case "copied":
                self.well()
                self._say("copied", name=name, source=said["source"], step=said["step"], bytes=said["bytes"],
                          seconds=said["seconds"], path=said["path"])
            case "uncopied":
                self._say("uncopied", name=name, source=said["source"], why=said["why"])
            case "protected":
                self.well()
                self._say("protected", name=name, epoch=said["epoch"], step=said["step"], shards=said["shards"],
                          stream=said["stream"], bytes=said["bytes"], padded=said["padded"], seconds=said["seconds"],
                          path=said["path"])
            case "unprotected":
                self._say("unprotected", name=name, why=said["why"])
            case "redone":
                self._say("redone", name=name, source=said["source"], step=said["step"], base=said["base"],
                          seconds=said["seconds"], why=said["why"], path=said["path"])
            case "unjournaled":
                self._say("unjournaled", name=name, source=said["source"], why=said["why"])
            case "registered":
                self._say("registered", members=said["members"], root=said["root"], epoch=said["epoch"])
            case "unsigned":
                self._say("unsigned", keys=said["keys"], count=said["count"], why=said["why"])
            case "unregistered":
                self._say("unregistered", why=said["why"], epoch=said["epoch"], copies=said["copies"])
            case "placed":
                self._say("placed", epoch=said["epoch"], members=said["members"], copies=said["copies"],
                          holders=said["holders"], alone=said["alone"], together=said["together"],
                          parity=said["parity"])
            case "recovering":
                self._say("recovering", epoch=said["epoch"], lost=said["lost"], asked=said["asked"],
                          steps=said["steps"], void=said["void"])
            case "replacing":
                self._say("replacing", lost=said["lost"], recovery=said["recovery"])
            case "fallback":
                self._say("fallback", run_id=said["run_id"], shards=said["shards"], step=said["step"], why=said["why"])
            case "restored":
                self._say("restored", epoch=said["epoch"], since=said["since"])
            case "removed":
                self._say("removed", name=name, run_id=said["run_id"], step=said["step"], path=said["path"],
                          why=said["why"])
            case "problem":
                self._say("problem", name=name, why=said["why"])


def _keys(config: NodeConfig) -> list[str]:
    """Of each token of nodes that is accepted. Raises UserError or EnvironmentProblem."""
    return [node_key(token).hex() for token in read_tokens(config.token_files[PEER])]


def _rounds(config: NodeConfig) -> dict[str, Any] | None:
    """A member's part in a group with parity; which one, if the registry does not say it."""
    protect = config.protect
    if protect is None or protect.code is None:
        return None
    return {"code": protect.code, "number": config.member, "members": protect.members,
            "data": protect.group[: protect.code[0]], "directory": str(config.parity)}


def check_copies(config: NodeConfig) -> Path:
    """Where they lie. Raises EnvironmentProblem or UserError: it cannot be written to, or nobody could be asked."""
    directory = config.copies
    assert config.protect is not None and directory is not None
    if config.api is not None and config.api.address in config.protect.addresses:
        raise UserError(f"{config.api.listen} is this node itself", where="protect.copies",
                        remedy="those of other nodes")
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
