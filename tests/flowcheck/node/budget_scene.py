"""What `flowcheck-node --check` would say of a machine that a test makes up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from flowcheck.node.check.budget import Budget, MachineFacts, budget
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.ports.captures import plan_captures

GB = 1 << 30
CONTROL = {"listen": "localhost:1", "token_file": "t"}
ROOMY = MachineFacts(
    available=200 * GB, huge_free=0, huge_by_node={}, cpus=frozenset(range(8)), speeds={}, rx_queues={},
    engine_nodes={}, node_cpus={},
)


def config(*captures: dict[str, Any], **others: Any) -> NodeConfig:
    return NodeConfig.model_validate({"control": CONTROL, "capture": list(captures), **others})


def made(facts: MachineFacts, *captures: dict[str, Any], at: tuple[int, ...] = (), **others: Any) -> Budget:
    """at: NUMA nodes of the captures' devices."""
    settings = config(*captures, **others)
    planned = plan_captures(settings, Path("/none such"))
    return budget(settings, [replace(one, node=node) for one, node in zip(planned, at, strict=True)] if at else planned,
                  facts)
