"""Connections by NCCL's log and the kernel's queue pairs: both ends' halves become the job's, without channels.

Logs are re-created in the formats of NCCL's sources (nccl_text.py), the kernel's list as iproute2 says it (test_rdma).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.node.groups.checks import union
from flowcheck.trainer.nccl.connections import describe
from flowcheck.trainer.nccl.log import Log, parse_log
from flowcheck.trainer.nccl.rdma import Gid, KernelQueuePair
from lab.synth import example_job

from ..job.nccl_text import VERSIONS, Shape, text


def job_of(ranks: int = 3, version: str = "2.19.4", **more: Any) -> Job:
    return example_job(**{"ranks": ranks, "channels": 2, "protocol": "ll", "version": version} | more)


class Process:
    """Rank `rank` of a job: its NCCL log, and the kernel's list of its queue pairs."""

    def __init__(self, job: Job, rank: int, version: str = "2.19.4", **environment: int) -> None:
        c = job.communicator
        sends = [flow for flow in job.flows if flow.src == rank]
        shape = Shape(
            rank=rank, rings=tuple(tuple(c.ring(channel)) for channel in range(c.channels)), nodes=c.ranks,
            trees=((-1, -1, -1, -1),), queue_pairs=tuple((flow.cts_qpns[0], flow.src_addr) for flow in sends),
            environment=tuple(environment.items()),
        )
        self.rank, self.ranks, self.version = rank, c.ranks, version
        self.text = text(shape, version)
        self.kernel = [KernelQueuePair("mlx5_0", 1, flow.cts_qpns[0], flow.qpns[0], "RC", "RTS", 7) for flow in sends]
        self.kernel += [KernelQueuePair("mlx5_0", 1, flow.qpns[0], flow.cts_qpns[0], "RC", "RTS", 7)
                        for flow in job.flows if flow.dst == rank]
        self.gids: list[Gid] = []

    @property
    def log(self) -> Log:
        return parse_log(self.text.splitlines(keepends=True))

    def describe(self) -> dict[str, Any]:
        log = self.log
        return describe(log, log.communicator(ranks=self.ranks, rank=self.rank), self.kernel, self.gids, self.version)


def told(flows: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {(one["src"], one["dst"], one["src_addr"], one["dst_addr"], *one["qpns"], *one["cts_qpns"]) for one in flows}


def true(job: Job) -> set[tuple[Any, ...]]:
    return told([vars(flow) for flow in job.flows])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_both_ends_together_name_every_connection(ranks: int, version: str) -> None:
    job = job_of(ranks, version)
    found = [Process(job, rank, version).describe() for rank in range(ranks)]
    flows = union([one["flows"] for one in found])
    assert told(flows) == true(job) and all("channel" not in flow for flow in flows)
    assert found[0]["communicator"] == {
        "ranks": ranks, "nccl_version": version, "channels": 2, "rings": [list(range(ranks))] * 2, "mtu": 4096,
        "buffer_bytes": {"ll": 524288, "ll128": 4915200, "simple": 4194304}, "adaptive_routing": False,
        "ar_threshold": 8192,
    }
    assert all(one["communicator"] == {**found[0]["communicator"], "rings": []} for one in found[1:])


def test_settings_of_the_environment() -> None:
    process = Process(job_of(), 0, NCCL_BUFFSIZE=1 << 20, NCCL_IB_ADAPTIVE_ROUTING=1, NCCL_IB_AR_THRESHOLD=0)
    made = process.describe()["communicator"]
    assert (made["buffer_bytes"]["simple"], made["adaptive_routing"], made["ar_threshold"]) == (1 << 20, True, 0)


def test_what_only_one_end_names_is_left_out() -> None:
    """A queue pair of another communicator, whose peer is no neighbour; a loopback; a port without an address."""
    job = job_of()
    processes = [Process(job, rank) for rank in range(3)]
    processes[0].kernel += [
        KernelQueuePair("mlx5_0", 1, 900, 901, "RC", "RTS", 7), KernelQueuePair("mlx5_0", 1, 902, 902, "RC", "RTS", 7),
        KernelQueuePair("mlx5_7", 1, 903, 904, "RC", "RTS", 7),
    ]
    assert told(union([one.describe()["flows"] for one in processes])) == true(job)
    with pytest.raises(UserError, match="no connection has been named by both of its ends"):
        union([processes[0].describe()["flows"]])


def test_queue_pairs_between_the_same_ranks_are_kept() -> None:
    """Whose they are is decided on the wire."""
    job = job_of(2)
    processes = [Process(job, rank) for rank in range(2)]
    processes[0].kernel.append(KernelQueuePair("mlx5_0", 1, 900, 901, "RC", "RTS", 7))
    processes[1].text = processes[1].text.replace(b"qpn %d " % job.flows[-1].cts_qpns[0], b"qpn 901 ")
    processes[1].kernel.append(KernelQueuePair("mlx5_0", 1, 901, 900, "RC", "RTS", 7))
    flows = union([one.describe()["flows"] for one in processes])
    assert any((one["qpns"], one["cts_qpns"]) == ([900], [901]) for one in flows)


def test_the_address_of_a_port_that_only_receives() -> None:
    """By the entry of the GID table that NCCL took on others."""
    process = Process(job_of(2), 1)
    process.kernel.append(KernelQueuePair("mlx5_1", 1, 900, 901, "RC", "RTS", 7))
    process.gids = [Gid("mlx5_1", 1, 1, "10.9.9.9"), Gid("mlx5_1", 1, 3, "10.0.0.9")]
    (one,) = [flow for flow in process.describe()["flows"] if flow["qpns"] == [900]]
    assert (one["dst_addr"], one["src_addr"], one["src"]) == ("10.0.0.9", "", 0)


def test_what_is_missing_is_named() -> None:
    def why(**changes: Any) -> str:
        process = Process(job_of(2), 0)
        process.__dict__ |= changes
        with pytest.raises(UserError) as refused:
            process.describe()
        assert "topology=" in refused.value.remedy
        return refused.value.what

    whole = Process(job_of(2), 0).text
    assert "is of NCCL 2.19.4, and torch has NCCL 2.27.7" in why(version="2.27.7")
    without = b"".join(line for line in whole.splitlines(keepends=True) if b"NCCL version" not in line)
    assert "does not say NCCL's version" in why(text=without, version="")
    assert "path MTUs []" in why(text=whole.replace(b"mtu 5", b"mtu 9"))
    assert "was split off another" in why(text=whole.replace(b"commId 0x9c41f00dbeef0001", b"parent 0x1"))
    cut = b"".join(line for line in whole.splitlines(keepends=True) if b"Channel 01/02" not in line)
    assert "does not have the whole rings" in why(text=cut)
    lines = whole.splitlines(keepends=True)
    rings = b"".join(line for line in lines if b"Ring 01" not in line and b"coll ch" not in line)
    assert "has 1 rings for 2 channels" in why(text=rings)
    assert "have no queue pair in common" in why(kernel=[])
    assert "several queue pairs for a connection" in why(text=Process(job_of(2), 0, NCCL_IB_QPS_PER_CONNECTION=4).text)
    odd = Process(job_of(2), 0, NCCL_IB_AR_THRESHOLD=1).text.replace(b"environment to 1.", b"environment to one.")
    assert "NCCL_IB_AR_THRESHOLD as 'one'" in why(text=odd)


def test_ends_that_contradict() -> None:
    job = job_of(2)
    flows = [Process(job, rank).describe()["flows"] for rank in range(2)]
    flows[0][0]["dst_addr"] = "10.9.9.9"
    with pytest.raises(UserError, match="say different dst_addr"):
        union(flows)


def test_a_job_is_found_on_the_wire_by_what_logs_and_kernel_say() -> None:
    """From the texts of three processes and the packets of a running job to the job's own connections."""
    from flowcheck.job.form import Place
    from flowcheck.learning.running import settle, withheld_of

    from ..learning.test_assignment import is_true, observed
    from ..learning.test_assignment import told as uneven
    from ..learning.test_running import late

    job = uneven(ranks=3)
    found = [Process(job, rank).describe() for rank in range(3)]
    described = replace(job, flows=[])
    withheld = withheld_of(described, union([one["flows"] for one in found]), Place("flows"))
    made = settle(described, withheld, observed(late(job, 4)))
    assert not isinstance(made, str) and is_true(made, job) and len(made.flows) == len(job.flows)
