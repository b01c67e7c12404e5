"""The `flowcheck` command, also as `python -m flowcheck`."""

import sys

from flowcheck.errors import missing_module
from flowcheck.interrupts import command


def main() -> None:
    try:
        command("flowcheck.cli")
    except ModuleNotFoundError as error:  # an installation that lacks what commands need
        problem = missing_module(error, "this command")
        print(problem.message(), file=sys.stderr)
        sys.exit(problem.exit_code)


if __name__ == "__main__":
    main()
