"""`flowcheck.protect` and `flowcheck.restore_shard`: parity by hand. Both names leave with the next version.

    written = protect(nodes, out, token=secret, parity=2)             OUT/step-000041.parity/
    path = restore_shard(written.path, nodes, out, token=secret, shard="stage1")      a checkpoint directory of it

Nodes do both by themselves, with [protect] of node.toml (docs/use/protect.md). Each call warns of that. Any thread; one
at a time for a directory.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from flowcheck.ask.client import NodeClient, order_of, reader_key
from flowcheck.ask.offer import PARITY
from flowcheck.ask.receiving import SECONDS, AskError
from flowcheck.ask.sources import addresses, choose, look
from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.coding.parity import (
    OTHER,
    Padded,
    Protected,
    Source,
    bytes_of,
    decode,
    encode,
    pieces_in,
    source_of,
)
from flowcheck.checkpoint.directory import Meta, step_path, tensor_sha256, write_step
from flowcheck.checkpoint.identity import Identity, check_directory, folder_of
from flowcheck.checkpoint.users import file_of, read_user
from flowcheck.control.protocol import token_bytes
from flowcheck.control.tensors import TensorSpec
from flowcheck.control.tls import client_context
from flowcheck.control.version import MODEL, OPTIMIZER, Version
from flowcheck.durable import make_directory, partial_name, private, reporting
from flowcheck.errors import EnvironmentProblem, UserError

__all__ = ["protect", "restore_shard"]


def protect(
    nodes: str | Sequence[str], out: str | os.PathLike[str], *, token: str, parity: int = 1,
    run_id: str | None = None, shards: Sequence[str] | None = None, step: int | None = None, seconds: float = SECONDS,
    ca: str = "",
) -> Protected:
    """Parity of the newest step that every shard has; one of that step that is there already is replaced.

    nodes: HOST:PORT of the `api.listen` of the nodes that hold the shards. parity: how many shards may be lost.
    run_id: None: the only one. shards: names, in the order of the streams; None: all that the nodes have, sorted.
    step: this one and no other. seconds: that a node may be silent. ca: as of `fetch`.
    Raises UserError; EnvironmentProblem: a shard that nobody has, a node that ends the round, a disk.
    """
    _leaves("protect", "nodes write parity by themselves, with [protect] of node.toml")
    folder, asked = folder_of(out), _asked(nodes, token, seconds, ca)
    names = list(shards) if shards is not None else _shards(asked, run_id)
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"{len(names)} shards, which are to be different and two at least", where="shards",
                        remedy="a job of one shard is protected by a second node that mirrors it, or by output.every")
    code = Code(len(names), parity)
    found = [look(asked, run_id, name) for name in names]
    key = choose([one.versions for one in found], step=step)
    if key is None:
        which = "no step" if step is None else f"step {step} not"
        raise EnvironmentProblem(f"{which} of every shard is there: {', '.join(map(repr, names))}", where="protect",
                                 remedy=OTHER)
    with ExitStack() as stack:
        sources = [source_of(stack, one, key) for one in found]
        return encode(sources, code, folder / f"step-{key[1]:06d}.parity", range(len(names), len(names) + parity))


def restore_shard(
    path: str | os.PathLike[str], nodes: str | Sequence[str], out: str | os.PathLike[str], *, token: str, shard: str,
    seconds: float = SECONDS, ca: str = "",
) -> Path:
    """One shard from parity and the shards that nodes still have: a checkpoint directory, OUT/step-000041.

    path: of `protect`. nodes, token, seconds, ca: as there; nodes that are gone may be named. shard: the lost one's.

    Raises UserError: no such shard, too few of the others, or something else in its place, which is left alone;
    EnvironmentProblem: a tensor that is not what its manifest says, a node that failed, a disk.
    """
    _leaves("restore_shard", "nodes with [protect] offer a lost shard, which flowcheck.fetch takes")
    folder, kept = folder_of(out), Protected.read(path)
    lost = next((number for number, one in enumerate(kept.versions) if one.shard == shard), None)
    if lost is None:
        raise UserError(f"has no shard {shard!r}, only {', '.join(repr(one.shard) for one in kept.versions)}",
                        where=str(path), remedy="one of them")
    version, asked = kept.versions[lost], _asked(nodes, token, seconds, ca)
    with reporting(folder):
        check_directory(step_path(folder, version.step), Identity.of(version))
    with ExitStack() as stack:
        streams: dict[int, Padded] = {}
        for number, one in enumerate(kept.versions):
            source = _like(stack, asked, one) if number != lost else None
            if source is not None:
                streams[number] = Padded(bytes_of(*source))
        for number in kept.sums:
            if len(streams) < kept.code.data and kept.stream(number).is_file():
                streams[number] = Padded(pieces_in(stack.enter_context(kept.stream(number).open("rb"))))
        aside = partial_name(folder / f"{shard or 'shard'}.stream")
        with reporting(folder, aside=aside):
            make_directory(folder)
            try:
                aside.unlink(missing_ok=True)  # of an earlier process that had our pid
                with open(aside, "x+b", opener=private) as file:
                    decode(kept, lost, streams, file.write)
                return _checkpoint(version, aside, folder, lambda: {
                    rank: read_user(file_of(kept.of_shard(lost), rank)) for rank in kept.users[lost]})
            finally:
                aside.unlink(missing_ok=True)


def _leaves(name: str, instead: str) -> None:
    what = f"flowcheck.{name} leaves with the next version: {instead} (docs/use/protect.md)"
    warnings.warn(what, FutureWarning, stacklevel=3)  # of the caller's line


def _asked(nodes: str | Sequence[str], token: str, seconds: float, ca: str) -> list[NodeClient]:
    key, tls = reader_key(token_bytes(token)), client_context(ca) if ca else None
    return [NodeClient(address, key, seconds, tls) for address in addresses(nodes)]


def _shards(nodes: Sequence[NodeClient], run_id: str | None) -> list[str]:
    found: set[str] = set()
    absent: list[AskError] = []
    for node in nodes:
        try:
            with closing(node):
                found |= {offer.shard for offer in node.offers() if run_id in (None, offer.run_id)}
        except AskError as error:
            absent.append(error)  # where there are shards, `look` names who is absent
    if absent and not found:
        raise EnvironmentProblem(
            f"no shard was found: {'; '.join(f'{error.where}: {error.what}' for error in absent)}", where="protect",
            remedy="; ".join(dict.fromkeys(filter(None, (error.remedy for error in absent)))) or "start the nodes",
        )
    return sorted(found)


def _like(stack: ExitStack, nodes: Sequence[NodeClient], wanted: Version) -> Source | None:
    """A place that has the very bytes of a version, by its hashes."""
    for node, offer in look(nodes, wanted.run_id, wanted.shard).places:
        if (offer.epoch, offer.step) == (wanted.epoch, wanted.step) and offer.tier != PARITY:  # made of what is lost
            own = stack.enter_context(closing(node.again()))
            try:
                version = own.version(offer)
            except AskError:
                continue
            if version.files == wanted.files:
                return own, offer, version
    return None


def _checkpoint(version: Version, stream: Path, out: Path, users: Callable[[], Mapping[int, bytes]]) -> Path:
    """From the bytes of all tensors, one after another: every hash is checked, then it is written as any version."""
    files: dict[str, dict[str, torch.Tensor]] = {}
    with stream.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0) if version.nbytes else mmap.mmap(-1, 1)
        at = 0
        for name in (MODEL, OPTIMIZER):
            found = {}
            for tensor in order_of(version, name):
                digest = version.files[name][tensor]
                found[tensor] = _view(memory, at, digest.spec)
                at += digest.spec.nbytes
                if tensor_sha256(found[tensor]) != digest.sha256:
                    raise EnvironmentProblem(
                        f"tensor {tensor!r} of shard {version.shard!r} does not come out as its manifest says (SHA-256"
                        " differs): the parity was changed", where=str(out), remedy=OTHER,
                    )
            files[name] = {tensor: found[tensor] for tensor in version.files[name]}
        state: dict[str, dict[str, torch.Tensor | float | int]] = {}
        for name, value in files[OPTIMIZER].items():
            parameter, _, part = name.removeprefix("state.").rpartition(".")
            state.setdefault(parameter, {})[part] = value
        return write_step(out, version.step, files[MODEL], state, Meta.of(version), users,
                          lambda path: check_directory(path, Identity.of(version)))


def _view(memory: mmap.mmap, at: int, spec: TensorSpec) -> torch.Tensor:
    """A tensor of the bytes from `at` on; a copy where its elements would lie askew."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    count = spec.nbytes // dtype.itemsize
    if not count:
        return torch.empty(spec.shape, dtype=dtype)
    if at % dtype.itemsize:
        return torch.frombuffer(bytearray(memory[at : at + spec.nbytes]), dtype=dtype).reshape(spec.shape)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=at).reshape(spec.shape)
