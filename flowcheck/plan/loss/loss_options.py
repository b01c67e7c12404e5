"""The options of `flowcheck plan loss`, as a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from flowcheck.plan.answers.amounts import amount

__all__ = ["LossOptions"]


@dataclass(frozen=True)
class LossOptions:
    """None: not given."""

    ranks: Annotated[int | None, typer.Option("--ranks", help="Hosts of the data-parallel group.")] = None
    mirrors: Annotated[int | None, typer.Option("--mirrors", help="Mirrored ports (hosts) of the group.")] = None
    loss: Annotated[float | None, typer.Option("--loss", help="Probability that the mirror loses a copy.")] = None
    packets: Annotated[
        float | None,
        typer.Option("--packets", help="Reduced packets of an iteration. Default: from --parameters.", parser=amount,
                     metavar="NUMBER"),
    ] = None
    parameters: Annotated[
        float | None,
        typer.Option("--parameters", help="Of the group's model: 7e9, 70B.", parser=amount, metavar="NUMBER"),
    ] = None
    direction: Annotated[
        Literal["ingress", "egress", "both"] | None, typer.Option("--direction", help="What is copied of a port.")
    ] = None
    algorithm: Annotated[Literal["ring", "tree"] | None, typer.Option("--algorithm", help="NCCL's.")] = None
    positions: Annotated[
        str | None, typer.Option("--positions", help="Ring positions of the ports, such as 0,2,5. Default: the worst.")
    ] = None
    protocol: Annotated[Literal["ll", "ll128", "simple"] | None, typer.Option("--protocol", help="NCCL's.")] = None
    mtu: Annotated[int | None, typer.Option("--mtu", help="RDMA path MTU.")] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option("--dtype", help="Of the gradients.")
    ] = None
    optimizer: Annotated[
        Literal["adam", "adamw", "amsgrad", "sgd", "momentum"] | None,
        typer.Option("--optimizer", help="What a loss costs."),
    ] = None
    wanted: Annotated[
        float | None, typer.Option("--wanted", help="Share of iterations that may stay incomplete.")
    ] = None
    iteration_s: Annotated[float | None, typer.Option("--iteration-s", help="Seconds of an iteration.")] = None
    iterations: Annotated[int | None, typer.Option("--iterations", help="So many are watched.")] = None
