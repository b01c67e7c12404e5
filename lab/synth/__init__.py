"""Captures with known truth, made from a job manifest: NCCL's RoCEv2 traffic as mirrored ports see it.

    job = example_job(ranks=4, count=5000, protocol="ll")
    made = generate(job, iterations=3, ports=[0], directions="both", loss=0.01, seed=1)
    made.write("out.pcap"); made.truth; made.reduced[iteration, bucket]

Modules, each a step of the way: families (versions) < chunk_layout (channels) < schedule (messages) <
values, encode (bytes) < packets, connection (frames) < faults, mirror, truth < generate. Everything is written from
the reference documents and uses nothing of `parser`: each side checks the other.
"""

from lab.synth.connection import TransportOptions
from lab.synth.example import example_job, sharded_job
from lab.synth.generate import Synthesis, generate
from lab.synth.mirror import Mirror

__all__ = ["Mirror", "Synthesis", "TransportOptions", "example_job", "generate", "sharded_job"]
