"""A gang of four ranks for all tests here, made once; the programs of the ranks import each other by file name."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from gang import Gang  # noqa: E402

from lab.network.fabric import Fabric  # noqa: E402
from lab.shape import FabricConfig  # noqa: E402
from tests.namespaces import need_namespaces  # noqa: E402


@pytest.fixture(scope="session")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    need_namespaces()
    with Fabric(FabricConfig(name=f"s{os.getpid():x}", ranks=4, mirrored=())) as fabric:
        yield Gang(fabric, 4, tmp_path_factory.mktemp("gang"))
