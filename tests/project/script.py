"""The scripts of tools/, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["ROOT", "script"]

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    """tools/NAME.py. It finds the others of that folder as it does where it is started."""
    folder = ROOT / "tools"
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module
