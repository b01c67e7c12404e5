"""The compiled binding, or one clear sentence where it was not built."""

from __future__ import annotations

try:
    from dataplane.pydpdk._dpdk import ffi, lib
except ImportError as exc:
    raise ImportError(
        f"the DPDK binding is not available ({exc}); install libdpdk-dev and pkg-config, then build again"
    ) from exc

_version = ffi.string(lib.rte_version()).decode()  # "DPDK 22.11.11"
_release = "{}.{:02}".format(*divmod(lib.fc_built_release(), 100))
if not _version.startswith(f"DPDK {_release}"):
    raise ImportError(
        f"the DPDK binding was built with DPDK {_release} and finds {_version}: structures differ between releases; "
        "build it again (make build), with PKG_CONFIG_PATH and the library of one and the same release"
    )

__all__ = ["ffi", "lib"]
