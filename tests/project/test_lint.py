"""Lint is a test: what `make lint` demands, the test suite demands too."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_module(name: str, *arguments: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed in this environment")
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{name} says:\n{done.stdout}{done.stderr}"


def test_ruff() -> None:
    run_module("ruff", "check", "--quiet", ".")


def test_mypy() -> None:
    run_module("mypy")
