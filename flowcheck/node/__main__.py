"""The `flowcheck-node` command, also as `python -P -m flowcheck.node`."""

from flowcheck.interrupts import command


def main() -> None:
    command("flowcheck.node.cli")


if __name__ == "__main__":
    main()
