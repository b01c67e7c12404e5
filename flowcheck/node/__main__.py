"""The `flowcheck-node` command, also as `python -P -m flowcheck.node`. Ctrl-C while it is being imported ends it in
silence, too."""

import sys


def main() -> None:
    try:
        from flowcheck.node.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
