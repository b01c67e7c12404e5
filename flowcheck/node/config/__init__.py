"""Settings of a node, one module for each table of node.toml (docs/use/node.md has every key)."""
