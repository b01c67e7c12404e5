"""What trainer and node say to each other: protocol, payloads, checksums. Torch and the standard library."""
