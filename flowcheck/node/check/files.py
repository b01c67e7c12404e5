"""Who may come in, and whether what a node writes can be written: at a start, and for --check.

    access = check_files(config, say)
"""

from __future__ import annotations

import os
from collections.abc import Callable

from flowcheck.checkpoint.objects import check_url
from flowcheck.control.tls import client_context
from flowcheck.durable import check_writable
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.protect.supervisor import check_copies
from flowcheck.node.tokens import Access
from flowcheck.node.versions.output import check_places

__all__ = ["check_files"]


def check_files(config: NodeConfig, say: Callable[..., None]) -> Access:
    """Who may come in. Raises UserError or EnvironmentProblem for a file that is not there or cannot be made."""
    access = Access(config, say)
    if config.tls is not None:
        client_context(config.tls.ca)
    if not os.access(config.replica.directory, os.W_OK | os.X_OK):  # a job would find out when it is too late
        raise EnvironmentProblem(
            "replica files cannot be made there", where=f"replica.directory {config.replica.directory}",
            remedy="an existing directory on tmpfs or hugetlbfs that the node may write to",
        )
    check_places(config.output)
    if config.store is not None:
        check_url(config.store.url)
    if config.journal is not None:
        check_writable(config.journal.directory, "a directory that the node may write to as journal.directory")
    if config.telemetry is not None and config.telemetry.directory is not None:
        check_writable(config.telemetry.directory,
                       "a directory that the node may write to as telemetry.directory, and free space")
    if config.protect is not None:
        check_copies(config)
    return access
