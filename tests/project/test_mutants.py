"""The list of modules in which deliberate mistakes are tried names what is there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_module_and_every_test_file_of_the_list_is_there() -> None:
    """A file that was renamed would be found out only when it has its turn, long after the run began."""
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    listed = {*module.MODULES, *(test for tests in module.MODULES.values() for test in tests)}
    assert len(module.MODULES) > 40 and not [path for path in sorted(listed) if not (ROOT / path).is_file()]
