"""What a node and a holder of the lab are started with: node.toml."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowcheck.job.model import LOG
from lab.jobs import Training
from lab.shape import FabricConfig

__all__ = ["addresses", "apis", "holder_toml", "node_toml"]

CONTROL_PORT, API_PORT = 7070, 7071
PEERING = {"peer_iterations": 8, "peer_seconds": 5.0}  # nodes that share a core are not in step
Settings = Mapping[str, Mapping[str, Any]]  # per table of node.toml, added to ours


def addresses(config: FabricConfig) -> list[str]:
    """Where nodes listen to trainers."""
    return [f"{host}:{CONTROL_PORT}" for host in config.hosts[: config.nodes]]


def apis(config: FabricConfig) -> list[str]:
    """Where nodes, and then holders, are asked for versions."""
    return [f"{host}:{API_PORT}" for host in config.hosts]


def node_toml(
    config: FabricConfig, job: Training, node: int, directory: Path, token: Path, shared: Path, settings: Settings,
    api: bool,
) -> str:
    """directory: what this node writes. shared: where replicas lie. api: it serves its versions."""
    others = [host for number, host in enumerate(config.hosts[: config.nodes]) if number != node]
    tables: dict[str, dict[str, Any]] = {
        "": {"name": f"{config.name}.{node}" if others else config.name,
             "groups": len(job.names) if config.nodes == 1 else 1},
        "nodes": {"addresses": config.hosts},
        "control": {"listen": addresses(config)[node], "token_file": str(token),
                    "insecure": True},  # the lab's own network
        # Ordinary memory: several nodes and tests would take the machine's few huge pages from each other.
        "capture": {"device": "af_packet:mir0", "path_mtu": job.softroce.get("mtu", 4096), "huge": False},
        "replica": {"directory": str(shared), "keep": False},
        "output": {"directory": str(directory / "steps"), "keep_hashes": str(directory / "hashes.jsonl")},
    }
    if others:
        tables |= {"common": {"nodes": others}} if job.stages > 1 else {
            "replica": tables["replica"] | PEERING | {"peers": others}}
    if job.kind == LOG:
        tables["journal"] = {"directory": str(directory / "journal"), "megabytes": 512}
        tables["replica"] = tables["replica"] | {"slots": 4}
    if api:
        tables["api"] = {"listen": apis(config)[node], "insecure": True}
    for table, values in settings.items():
        tables[table] = {**tables.get(table, {}), **values}
    return _toml(tables)


def holder_toml(config: FabricConfig, number: int, token: Path, shared: Path, settings: Settings) -> str:
    """Of a node without a mirror port, which keeps what others make."""
    return _toml({
        "": {"name": f"{config.name}.holder{number}"}, "tokens": {"reader": str(token), "peer": str(token)},
        "nodes": {"addresses": config.hosts},
        "api": {"listen": apis(config)[config.nodes + number], "insecure": True},
        "protect": {"directory": str(shared), **settings.get("protect", {})},
    })


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The table "" first."""
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]"] if table else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"
