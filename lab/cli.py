"""`flowcheck lab`: options in, exit status out."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flowcheck.errors import UserError
from flowcheck.interrupts import handled
from flowcheck.tables import screen

__all__ = ["lab"]

lab = typer.Typer(
    no_args_is_help=True, help="Real training over mirrored RoCEv2 on this machine, no RDMA hardware (docs/use/lab.md)."
)

NameOption = Annotated[str, typer.Option("--name", help="Labs with different names do not meet.")]
RanksOption = Annotated[int, typer.Option("--ranks", min=2, max=16, help="Trainer processes.")]
MirrorOption = Annotated[
    str | None,
    typer.Option("--mirror", help="Ranks whose switch ports are mirrored, e.g. 0,1,2.", show_default="the first three"),
]
PeerOption = Annotated[
    str | None,
    typer.Option("--peer-mirror", help="Ranks whose ports a second node mirrors; each node asks the other for what its"
                 " own mirror has lost."),
]
SwitchOption = Annotated[
    Literal["tc", "ovs"], typer.Option("--switch", help="tc: Linux bridge and tc mirred; ovs: Open vSwitch.")
]
DirectionOption = Annotated[
    Literal["both", "ingress", "egress"], typer.Option("--direction", help="Of the mirrored ports.")
]


@lab.command()
def up(
    name: NameOption = "lab", ranks: RanksOption = 4, mirror: MirrorOption = None, switch: SwitchOption = "tc",
    direction: DirectionOption = "both",
) -> None:
    """Build the network and leave it there, mirroring; `lab run` of the same name then uses it."""
    from lab.network.fabric import Fabric
    from lab.shape import FabricConfig

    config = FabricConfig(name=name, ranks=ranks, switch=switch, mirrored=(_ranks(mirror, ranks),), direction=direction)
    fabric = Fabric(config, keep=True)
    with handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):  # taken down as after Ctrl-C
        try:
            fabric.up()
            fabric.start_mirror()
            fabric.detach()
        except BaseException:
            fabric.down()
            raise
    for role in config.roles:
        typer.echo(f"{config.namespace(role)}")
    typer.echo(f"look around: ip netns exec {config.namespace('r0')} ip addr")
    typer.echo(f"remove it:   flowcheck lab down --name {name}")


@lab.command()
def run(
    name: NameOption = "lab",
    ranks: RanksOption = 4,
    mirror: MirrorOption = None,
    peer_mirror: PeerOption = None,
    switch: SwitchOption = "tc",
    direction: DirectionOption = "both",
    model: Annotated[str, typer.Option("--model", help="gpt, conv or mlp.")] = "gpt",
    stages: Annotated[int, typer.Option("--stages", min=1, help="Pipeline stages; each a data-parallel group.")] = 1,
    shards: Annotated[
        int, typer.Option("--shards", min=1, help="fully_shard over replicas of so many shards; each shard a group.")
    ] = 1,
    reduce: Annotated[
        Literal["float32", "bfloat16"], typer.Option("--reduce", help="In which type shards are reduced.")
    ] = "float32",
    experts: Annotated[
        int, typer.Option("--experts", min=1, help="Layers of rank r are expert r modulo N's; each expert a group.")
    ] = 1,
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="Versions of the replica wanted.")] = 30,
    protocol: Annotated[Literal["LL", "LL128", "SIMPLE"], typer.Option("--protocol", help="NCCL's.")] = "LL128",
    algorithm: Annotated[Literal["ring", "tree"], typer.Option("--algorithm", help="Of AllReduce.")] = "ring",
    channels: Annotated[int, typer.Option("--channels", min=1, max=8, help="Connected channels.")] = 1,
    mtu: Annotated[int, typer.Option("--mtu", help="RoCE path MTU: 1024, 2048 or 4096.")] = 4096,
    optimizer: Annotated[str, typer.Option("--optimizer", help="sgd, adam or adamw.")] = "adamw",
    lr: Annotated[float, typer.Option("--lr", help="Learning rate.")] = 3e-4,
    clip: Annotated[float | None, typer.Option("--clip", help="Largest norm of the gradients.")] = None,
    accumulate: Annotated[int, typer.Option("--accumulate", min=1, help="Micro-batches per step.")] = 1,
    loss_scale: Annotated[float | None, typer.Option("--loss-scale", help="First scale of GradScaler.")] = None,
    schedule: Annotated[str, typer.Option("--schedule", help="constant, step, cosine or warmup.")] = "constant",
    training_loss: Annotated[float, typer.Option("--training-loss", help="Loss on rank 0's cable, 0 to 1.")] = 0,
    mirror_loss: Annotated[float, typer.Option("--mirror-loss", help="Loss of the first node's copies, 0 to 1.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of weights, data and losses.")] = 1,
    step_time: Annotated[
        int, typer.Option("--step-time", min=0, help="Iterations per arm of the step-time check; 0: none.")
    ] = 0,
    kill: Annotated[
        int | None, typer.Option("--kill", min=0, help="Kill this rank afterwards; the job goes on from the node, and"
                                 " is compared with a run that nobody disturbed.")
    ] = None,
    kill_at: Annotated[
        Literal["forward", "backward", "allreduce", "optimizer", "boundary"],
        typer.Option("--kill-at", help="The instant of an iteration."),
    ] = "backward",
    protect: Annotated[
        str | None, typer.Option("--protect", help="K+M: K pipeline stages with a node each, and M holders of their"
                                 " parity. Afterwards M of these members are killed, then the job, which goes on from"
                                 " parity, and is compared with a run that nobody disturbed.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=3, help="With --protect: all members, K + M.", show_default="K + M")
    ] = None,
    api: Annotated[
        bool, typer.Option("--api", help="Nodes serve versions, metrics and their status page, inside the lab.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Logs, hashes, checkpoints.")] = Path("out/lab"),
) -> None:
    """Train, mirror, follow; compare the replica of every iteration with the trainers' own state, bit for bit."""
    from lab.experiment import LabOptions, run_lab
    from lab.fault import Fault
    from lab.jobs import Training
    from lab.network.impair import Impairment
    from lab.shape import FabricConfig
    from lab.softroce.settings import Settings

    stages, holders = _members(protect, nodes, stages)
    if holders and (shards > 1 or experts > 1 or kill is not None or peer_mirror is not None):
        raise UserError("of pipeline stages alone, and without --kill and --peer-mirror", where="--protect",
                        remedy="the command without these options")
    if holders and mirror is None:
        mirror = ",".join(map(str, range(ranks)))
    wires = [Impairment("r0", drop=training_loss, seed=seed)] if training_loss else []
    wires += [Impairment("mirror0", drop=mirror_loss, seed=seed)] if mirror_loss else []
    softroce: dict[str, Any] = {"protocol": protocol, "algorithm": algorithm, "channels": channels, "mtu": mtu}
    job = Training(
        model=model, ranks=ranks, stages=stages, accumulate=accumulate, optimizer={"name": optimizer, "lr": lr},
        clip=clip, loss_scale=loss_scale, schedule=schedule, softroce=softroce, seed=seed, shards=shards,
        reduce=reduce, experts=experts,
    )
    Settings.from_dict({"interface": "fab0", "address": "10.77.0.10", **softroce})  # before anything is built
    mirrored = _ranks(mirror, ranks)
    for group, called in enumerate(job.names):
        if not set(mirrored) & set(job.group(group)):
            raise UserError(
                f"no rank of {called} is mirrored", where="--mirror",
                remedy=f"one or more of {', '.join(map(str, job.group(group)))} besides",
            )
    sees = [tuple(r for r in mirrored if stages == 1 or r in job.group(stage)) for stage in range(stages)]
    groups = [tuple(job.group(stage)) if stages > 1 else tuple(range(ranks)) for stage in range(stages)]
    if peer_mirror is not None:
        if len(job.names) > 1:
            raise UserError("a job of several groups has no peers here", where="--peer-mirror",
                            remedy="--stages 1, --shards 1 and --experts 1")
        sees, groups = [*sees, _ranks(peer_mirror, ranks)], groups * 2
    config = FabricConfig(
        name=name, ranks=ranks, switch=switch, direction=direction, algorithm=algorithm, path_mtu=mtu,
        mirrored=tuple(sees), groups=tuple(groups), holders=holders,
        impairments=tuple(wires),
    )
    if kill is not None and (kill >= ranks or stages > 1 or experts > 1):
        why = f"rank {kill} is none of 0 to {ranks - 1}" if kill >= ranks else "stages, experts: no rank is killed"
        raise UserError(why, where="--kill", remedy="one of the ranks, and --stages 1 and --experts 1")
    fault = None if kill is None else Fault(kill, kill_at)
    raise typer.Exit(run_lab(LabOptions(config, job, out, iterations, step_time, fault, api), screen()))


@lab.command()
def soak(
    name: NameOption = "soak",
    ranks: RanksOption = 3,
    mirror: Annotated[str, typer.Option("--mirror", help="Ranks whose switch ports are mirrored.")] = "0,1",
    minutes: Annotated[float, typer.Option("--minutes", min=1, help="Of training.")] = 30.0,
    kill_seconds: Annotated[
        float, typer.Option("--kill-seconds", min=1, help="Between two ranks that are killed.")
    ] = 180.0,
    mirror_loss: Annotated[float, typer.Option("--mirror-loss", help="Loss of the copies, 0 to 1.")] = 0.001,
    model: Annotated[str, typer.Option("--model", help="gpt, conv or mlp.")] = "gpt",
    seed: Annotated[int, typer.Option("--seed", help="Of weights, data, losses, and of who dies.")] = 1,
    out: Annotated[Path, typer.Option("--out", help="Logs and hashes.")] = Path("out/soak"),
) -> None:
    """Train for long with a lossy mirror, kill ranks and the node, and account for every iteration; exit 1: something
    is unaccounted, differs, or grows."""
    from lab.jobs import Training
    from lab.network.fabric import Fabric
    from lab.network.impair import Impairment
    from lab.run import LabRun
    from lab.shape import FabricConfig
    from lab.soak import SETTINGS, Plan
    from lab.soak import soak as run_soak

    config = FabricConfig(name=name, ranks=ranks, mirrored=(_ranks(mirror, ranks),),
                          impairments=(Impairment("mirror0", drop=mirror_loss, seed=seed),))
    job = Training(model=model, ranks=ranks, seed=seed)
    with (
        handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP),  # taken down as after Ctrl-C
        Fabric.of(config) as fabric,
        LabRun(fabric, out, api=True, node_settings=SETTINGS) as lab_run,
    ):
        report = run_soak(lab_run, job, Plan(minutes, kill_seconds, seed), typer.echo)
        lab_run.finish_trainers()
    for line in report.lines():
        typer.echo(line)
    typer.echo("GOOD" if report.good else "NOT GOOD")
    raise typer.Exit(int(not report.good))


@lab.command()
def status() -> None:
    """Every lab of which anything is on this machine, and whether its mirror copies."""
    from lab.network.fabric import leftovers

    found = leftovers()
    for one in found:
        owner = f"process {one.owner}" if one.owner else "`lab up`" if one.kept else "nobody: `lab down` removes it"
        typer.echo(f"{one.name}: {len(one.roles)} namespaces ({', '.join(one.roles)}), belongs to {owner}")
        for line in one.mirrors():
            typer.echo(f"  {line}")
    if not found:
        typer.echo("no lab is on this machine")


@lab.command()
def down(
    name: NameOption = "lab",
    everything: Annotated[bool, typer.Option("--all", help="Every lab, whoever made it.")] = False,
) -> None:
    """Remove a lab and what runs in it: namespaces, interfaces, processes, state."""
    from lab.network import netns
    from lab.network.fabric import clear, leftovers

    netns.require()
    names = [one.name for one in leftovers()] if everything else [name]
    for one in names:
        typer.echo(f"{one}: {'removed' if clear(one) else 'nothing was there'}")


def _members(protect: str | None, nodes: int | None, stages: int) -> tuple[int, int]:
    """Pipeline stages, and holders of their parity."""
    if protect is None:
        if nodes is not None:
            raise UserError("says how many members a group with parity has", where="--nodes", remedy="--protect K+M")
        return stages, 0
    found = re.fullmatch(r"([1-9])\+([1-9])", protect)
    data, parity = (int(found[1]), int(found[2])) if found else (0, 0)
    if data < 2 or nodes not in (None, data + parity) or stages not in (1, data):
        raise UserError(f"{protect!r} with {nodes or 'all'} nodes and {stages} stages", where="--protect",
                        remedy="K+M, two or more stages K, and --nodes K + M or left out: --nodes 4 --protect 2+2")
    return data, parity


def _ranks(text: str | None, ranks: int) -> tuple[int, ...]:
    if text is None:
        return tuple(range(min(3, ranks)))
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UserError(f"{text!r} is not a list of ranks", where="--mirror", remedy="such as 0,1,2") from None
    for rank in found:
        if not 0 <= rank < ranks or found.count(rank) > 1:
            why = "named twice" if found.count(rank) > 1 else "none"
            raise UserError(f"rank {rank} is {why}; there are 0 to {ranks - 1}", where="--mirror", remedy="such as 0,1")
    return found
