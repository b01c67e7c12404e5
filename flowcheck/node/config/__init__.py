"""Settings of a node, one module for each table of node.toml (docs/use/settings.md has every key)."""
