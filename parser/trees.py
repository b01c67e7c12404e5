"""The double binary tree: who is whose parent, and which channel uses which of the two trees (7.1).

Section numbers: reference nccl-wire.md. Pure functions, any thread.
"""

from __future__ import annotations

from parser.chunk_layout import UnsupportedCall

__all__ = ["tree_of", "tree_parent"]


def _binary_tree_up(nodes: int, node: int) -> int | None:
    if node == 0:
        return None
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return node ^ bit if up >= nodes else up


def tree_parent(nodes: int, tree: int, node: int) -> int | None:
    """Parent node in tree 0 or 1 of the double binary tree, None for the root (7.1)."""
    if tree == 0:
        return _binary_tree_up(nodes, node)
    if nodes % 2 == 0:
        up = _binary_tree_up(nodes, nodes - 1 - node)
        return None if up is None else nodes - 1 - up
    up = _binary_tree_up(nodes, (node - 1) % nodes)
    return None if up is None else (up + 1) % nodes


def tree_of(channels: int, channel: int) -> int:
    """Tree of a channel: the second half of a communicator's channels uses the second tree; a single one, the first.

    With an odd number of channels (some were clipped or copied, 7.1) the halves cannot be distinguished from the
    number alone, and a wrong tree would take partial sums for results.
    """
    if channels > 1 and channels % 2:
        raise UnsupportedCall(
            f"tree over {channels} channels: an odd number does not say which of them use the second tree"
        )
    return 1 if channels > 1 and channel >= channels // 2 else 0
