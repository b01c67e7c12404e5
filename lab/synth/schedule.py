"""What every rank sends, in which order: messages of one collective per connection.

    Operation --chunks()--> loops of chunks --messages()--> {(channel, src, dst): [Message]}

A message names the elements it carries and which stage of the reduction their values are, never the values:
`values.Stages` has those. `source` of a message is
    ring AllReduce, ReduceScatter   contributions summed so far minus one (0 = raw .. n-1 = reduced)
    tree AllReduce                  the rank whose subtree sum it is; the root's is the result
    AllGather, Broadcast            0: final data
Source: reference nccl-wire.md 2.2, 2.7, 7.1, 7.2, 8. Pure functions; any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lab.synth.chunk_layout import Chunk, Operation, chunks, first_slice, steps_per_chunk

__all__ = ["Message", "Tree", "message_bytes", "messages", "tree_of"]

Connection = tuple[int, int, int]


class Message(NamedTuple):
    """One isend: elements [start, start+elements) of the tensor, at `steps` steps of the connection."""

    start: int
    elements: int
    source: int
    reduced: bool
    steps: int


class Tree(NamedTuple):
    """A binary tree over the ranks: parent (-1 at the root) and children of every rank."""

    parent: list[int]
    children: list[list[int]]


def messages(op: Operation) -> dict[Connection, list[Message]]:
    """Messages of an operation per connection (channel, src, dst), in issue order.

    AllGather elements are bytes of the gathered tensor (block of rank q at q*count), ReduceScatter
    elements those of the input tensor laid out alike.
    """
    found: dict[Connection, list[Message]] = {}
    for channel, loops in chunks(op).items():
        if op.algorithm == "tree":
            _tree(op, channel, loops, found)
            continue
        ring = op.rings[channel]
        send = {
            "AllReduce": _allreduce, "AllGather": _allgather,
            "Broadcast": _broadcast, "ReduceScatter": _reducescatter,
        }[op.op]
        for index, rank in enumerate(ring):
            whole = [chunk for loop in loops for chunk in send(op, ring, index, loop)]
            sent = [piece for chunk in whole for piece in _slices(op, chunk)]
            if sent:
                found[channel, rank, ring[(index + 1) % op.ranks]] = sent
    return found


def _slices(op: Operation, chunk: Message) -> Iterator[Message]:
    """A chunk as messages: one, or for the SIMPLE rings of four steps two slices, the second maybe empty."""
    steps = steps_per_chunk(op)
    if steps == 1:
        yield chunk
        return
    first = first_slice(op, chunk.elements)
    yield chunk._replace(elements=first, steps=steps // 2)
    yield chunk._replace(start=chunk.start + first, elements=chunk.elements - first, steps=steps // 2)


def _allreduce(op: Operation, ring: tuple[int, ...], index: int, loop: list[Chunk]) -> Iterator[Message]:
    n = op.ranks
    for k in range(2 * (n - 1)):
        start, count = loop[(index - 1 - k) % n]
        yield Message(start, count, min(k, n - 1), k >= n - 1, 1)


def _allgather(op: Operation, ring: tuple[int, ...], index: int, loop: list[Chunk]) -> Iterator[Message]:
    ((start, count),) = loop
    for distance in range(op.ranks - 1):
        block = ring[(index - distance) % op.ranks]
        yield Message(block * op.count + start, count, 0, True, 1)


def _reducescatter(op: Operation, ring: tuple[int, ...], index: int, loop: list[Chunk]) -> Iterator[Message]:
    ((start, count),) = loop
    for k in range(op.ranks - 1):
        block = ring[(index - 1 - k) % op.ranks]
        yield Message(block * op.count + start, count, k, False, 1)


def _broadcast(op: Operation, ring: tuple[int, ...], index: int, loop: list[Chunk]) -> Iterator[Message]:
    if ring[(index + 1) % op.ranks] == op.root:
        return
    ((start, count),) = loop
    yield Message(start, count, 0, True, 1)


# -- tree -------------------------------------------------------------------------------------------


def tree_of(ranks: int, channel: int, channels: int) -> Tree:
    """The tree of a channel: the first half of the channels use tree 0, the others tree 1 (7.1).

    Tree 1 is tree 0 with the ranks mirrored, or shifted by one where their number is odd.
    """
    second = channel >= (channels + 1) // 2

    def place(node: int) -> int:
        return node if not second else ranks - 1 - node if ranks % 2 == 0 else (node + 1) % ranks

    parent = [-1] * ranks
    children: list[list[int]] = [[] for _ in range(ranks)]
    for node in range(1, ranks):
        low = node & -node
        up = (node ^ low) | (low << 1)
        up = place(up if up < ranks else node ^ low)
        parent[place(node)] = up
        children[up].append(place(node))
    return Tree(parent, children)


def _tree(op: Operation, channel: int, loops: list[list[Chunk]], found: dict[Connection, list[Message]]) -> None:
    tree = tree_of(op.ranks, channel, op.channels)
    root = tree.parent.index(-1)
    for rank in range(op.ranks):
        if tree.parent[rank] >= 0:
            found[channel, rank, tree.parent[rank]] = [Message(s, c, rank, False, 1) for ((s, c),) in loops]
        for child in tree.children[rank]:
            found[channel, rank, child] = [Message(s, c, root, True, 1) for ((s, c),) in loops]


# -- bytes ------------------------------------------------------------------------------------------


def message_bytes(op: Operation, message: Message, step: int) -> int:
    """Bytes of a message on the wire (4.1 to 4.3)."""
    data = message.elements * op.size
    if op.protocol == "ll":
        if step & 0x7FFFFFF8 == 0x7FFFFFF8:
            return op.buffers["ll"] // 8
        return 2 * -(-data // 8) * 8
    if op.protocol == "ll128":
        return 2048 * -(-data // 1920)
    return data
