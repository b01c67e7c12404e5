"""`python -m flowcheck` is the `flowcheck` command."""

from flowcheck.cli import main

main()
