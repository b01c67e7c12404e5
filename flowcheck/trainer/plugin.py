"""Where NCCL's profiler plugin is: built with the installation, or compiled when it is first used.

    plugin_path() -> Path

It is 600 lines of C; flowcheck/control/compiled.py says how it is compiled, and where it lies then. The standard
library only.
"""

from __future__ import annotations

from pathlib import Path

from flowcheck.control.compiled import Library

__all__ = ["PLUGIN", "plugin_path"]

_HERE = Path(__file__).parent
PLUGIN = Library(
    "NCCL's profiler plugin", _HERE / "nccl_profiler.plugin.so", _HERE / "src" / "nccl_profiler.c", _HERE / "include",
    "give attach() topology= and collectives=",
)


def plugin_path() -> Path:
    """Raises EnvironmentProblem if it is missing and cannot be made."""
    return PLUGIN.path()
