"""The compiled binding, or one clear sentence where it was not built."""

from __future__ import annotations

try:
    from dataplane.pydpdk._dpdk import ffi, lib
except ImportError as exc:
    raise ImportError(
        f"the DPDK binding is not available ({exc}); install libdpdk-dev and pkg-config, then build again"
    ) from exc

__all__ = ["ffi", "lib"]
