"""`python -P -m flowcheck.node` is the `flowcheck-node` command."""

from flowcheck.node.cli import main

main()
