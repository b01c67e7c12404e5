"""The `flowcheck` command, also as `python -m flowcheck`."""

from flowcheck.interrupts import command


def main() -> None:
    command("flowcheck.cli")


if __name__ == "__main__":
    main()
