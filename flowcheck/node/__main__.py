"""The `flowcheck-node` command, also as `python -P -m flowcheck.node`."""

from flowcheck.interrupts import command
from flowcheck.node.allocator import keep_little
from flowcheck.node.ports.rights import set_aside


def main() -> None:
    keep_little()
    set_aside()
    command("flowcheck.node.cli")


if __name__ == "__main__":
    main()
