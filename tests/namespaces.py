"""Tests that make network namespaces are skipped, with the reason, where this machine allows none."""

from __future__ import annotations

import pytest

from flowcheck.errors import EnvironmentProblem
from lab.network import netns


def need_namespaces() -> None:
    try:
        netns.require()
    except EnvironmentProblem as problem:
        pytest.skip(problem.what)
