"""What is measured of gradients, for metrics and files (docs/use/operating.md)."""
