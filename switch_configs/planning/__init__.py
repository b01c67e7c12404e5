"""Which ports to mirror, and why: pure functions that ask no switch. LLDP dumps and a topology in, a plan out."""
