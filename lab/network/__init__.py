"""The lab's network: namespaces, cables that impair, a leaf that mirrors (Linux bridge with tc, or Open vSwitch)."""
