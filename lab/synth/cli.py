"""`flowcheck synth` and `flowcheck synth-job`: command line of the generator, mounted by flowcheck.cli.

Problems leave as FlowcheckError; the command line that mounts these maps them to exit codes.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from flowcheck.durable import write_atomic
from flowcheck.errors import UserError
from flowcheck.job.manifest import load_job
from lab.synth.connection import TransportOptions
from lab.synth.contents import load_parameters, save_parameters
from lab.synth.example import example_job
from lab.synth.generate import Synthesis, generate
from lab.synth.mirror import WRAPS, Mirror

__all__ = ["synth", "synth_job"]


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"{text!r} is not a list of whole numbers", where=option, remedy="write 0 or 0,2,5") from None


def synth(
    job: Annotated[Path, typer.Argument(help="job manifest (JSON)")],
    out: Annotated[list[Path], typer.Option(
        help="capture to write, .pcap or .pcapng; once for all ports together, or once per port")],
    iterations: Annotated[int, typer.Option(min=1, help="iterations to capture")] = 1,
    first_iteration: Annotated[int, typer.Option(min=0, help="the mirror starts there, in mid-stream")] = 0,
    ports: Annotated[str, typer.Option(help="ranks whose port is mirrored, such as 0 or 0,2")] = "0",
    direction: Annotated[str, typer.Option(help="in, out or both, seen from the mirrored host")] = "both",
    loss: Annotated[float, typer.Option(min=0, max=1, help="probability that the mirror loses a frame")] = 0,
    reorder: Annotated[float, typer.Option(min=0, max=1, help="... that a frame comes late")] = 0,
    duplicate: Annotated[float, typer.Option(min=0, max=1, help="... that a frame comes twice")] = 0,
    corrupt: Annotated[float, typer.Option(min=0, max=1, help="... that a payload bit flips")] = 0,
    retransmit: Annotated[float, typer.Option(min=0, max=1, help="probability that a message suffers a go-back-N")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="of data, addresses and faults")] = 0,
    init: Annotated[Path | None, typer.Option(help="initial weights (safetensors); default: by seed")] = None,
    save_init: Annotated[Path | None, typer.Option(help="write the initial weights here")] = None,
    truth: Annotated[Path | None, typer.Option(help="write the truth here (JSON)")] = None,
    truth_data: Annotated[Path | None, typer.Option(help="write the reduced buckets here (.npz)")] = None,
    vlan: Annotated[int | None, typer.Option(min=0, max=65535, help="802.1Q tag of every frame")] = None,
    first_psn: Annotated[int, typer.Option(min=0, max=0xFFFFFF, help="first PSN of every QP")] = 0,
    cut_ranks: Annotated[str, typer.Option(help="ranks whose NIC cuts plain WRITEs to one packet each")] = "",
    encapsulate: Annotated[
        str, typer.Option(help=f"how the mirror wraps its copies: {', '.join(filter(None, WRAPS))}")] = "",
    rewrite: Annotated[bool, typer.Option(help="the mirror changes VLAN tags, TTL and ECN")] = False,
) -> None:
    """Write captures with known truth, as mirrored ports of a job would deliver them."""
    if encapsulate not in WRAPS:
        raise UserError(
            f"{encapsulate!r} is not an encapsulation", where="--encapsulate", remedy=f"one of {', '.join(WRAPS[1:])}",
        )
    manifest = load_job(job, named="JOB")
    made = generate(
        manifest, iterations=iterations, ports=_numbers(ports, "--ports"), directions=direction, seed=seed,
        loss=loss, reorder=reorder, duplicate=duplicate, corrupt=corrupt, first_iteration=first_iteration,
        parameters=None if init is None else load_parameters(manifest, init),
        mirror=Mirror(encapsulate, rewrite=rewrite),
        transport=TransportOptions(
            vlan=vlan, first_psn=first_psn, retransmit=retransmit,
            cut_ranks=frozenset(_numbers(cut_ranks, "--cut-ranks")),
        ),
    )
    _write(made, out)
    if save_init is not None:
        save_parameters(manifest, made.parameters, save_init)
    if truth_data is not None:
        held = io.BytesIO()
        named: dict[str, Any] = {f"iteration{i}.bucket{b}": data for (i, b), data in made.reduced.items()}
        np.savez(held, **named)
        write_atomic(truth_data, held.getvalue())
    if truth is not None:
        write_atomic(truth, (json.dumps(made.truth, indent=1) + "\n").encode())
    for rank, packets in made.ports.items():
        typer.echo(f"port of rank {rank}: {len(packets)} frames, {sum(len(f) for _, f in packets)} bytes")


def _write(made: Synthesis, out: list[Path]) -> None:
    if len(out) == 1:
        made.write(out[0])
    elif len(out) == len(made.ports):
        made.write_ports(dict(zip(made.ports, out, strict=True)))
    else:
        raise UserError(
            f"{len(out)} captures for {len(made.ports)} ports", where="--out",
            remedy="give --out once for all ports together, or once per port in ascending order",
        )


def synth_job(
    out: Annotated[Path, typer.Option(help="job manifest to write (JSON)")],
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    channels: Annotated[int, typer.Option(min=1)] = 1,
    count: Annotated[str, typer.Option(help="elements of the buckets: 5000 or 700,300")] = "5000",
    protocol: Annotated[str, typer.Option(help="ll, ll128 or simple")] = "ll",
    algorithm: Annotated[str, typer.Option(help="ring or tree")] = "ring",
    version: Annotated[str, typer.Option(help="NCCL version")] = "2.27.7",
    dtype: Annotated[str, typer.Option(help="element type of the gradients")] = "float32",
    mtu: Annotated[int, typer.Option()] = 4096,
    qps: Annotated[int, typer.Option(min=1, help="QPs per connection")] = 1,
    split_data_on_qps: Annotated[bool, typer.Option(help="split every message over all QPs")] = False,
    adaptive_routing: Annotated[bool, typer.Option(help="WRITE and empty WRITE_WITH_IMM")] = False,
    ipv6: Annotated[bool, typer.Option()] = False,
    startup: Annotated[bool, typer.Option(help="with DDP's start-up broadcasts")] = True,
    optimizer: Annotated[str, typer.Option(help="sgd, adam or adamw")] = "sgd",
    lr: Annotated[float, typer.Option()] = 0.001,
    masters: Annotated[
        str, typer.Option(help="what the optimizer updates where --dtype has 16 bits: none, upcast or state")
    ] = "",
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write a complete manifest of a made-up DDP job to synthesise from, or to edit by hand."""
    counts = _numbers(count, "--count")
    if not counts or min(counts) < 1:
        raise UserError(f"{count!r} is not positive", where="--count", remedy="write 5000 or 700,300")
    job = example_job(
        ranks=ranks, channels=channels, count=counts, protocol=protocol, algorithm=algorithm, version=version,
        dtype=dtype, mtu=mtu, qps=qps, split_data_on_qps=split_data_on_qps, adaptive_routing=adaptive_routing,
        ipv6=ipv6, startup=startup, optimizer=optimizer, options={"lr": lr}, seed=seed, masters=masters,
    )
    write_atomic(out, job.to_json().encode())
