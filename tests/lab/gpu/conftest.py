"""The network plugin, and NCCL's side of it, compiled once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.gpu import plugin
from lab.network import netns

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def no_namespace_of_killed_runs() -> None:
    for name in netns.names():
        match = re.fullmatch(r"flowcheck-gpu-t([0-9a-f]+)", name)
        if match and not os.path.exists(f"/proc/{int(match[1], 16)}"):
            netns.delete(name)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return plugin.build(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="session")
def compiled(library: Path) -> Callable[..., Path]:
    """net_driver.c as `name` beside the plugin, with more options."""

    def make(name: str, *options: str) -> Path:
        to = library.parent / name
        words = ["cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", *options, f"-I{plugin.HERE}/include",
                 f"-I{plugin.FRAMES}/include", str(HERE / "net_driver.c"), str(plugin.FRAMES / "src/codec.c"), "-o",
                 str(to), "-ldl"]
        subprocess.run(words, check=True)
        return to

    return make
