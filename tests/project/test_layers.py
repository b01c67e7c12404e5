"""The layer rules of docs/understand/architecture.md hold, and the checker sees each forbidden way to break them."""

from pathlib import Path
from types import ModuleType

import pytest

from .script import ROOT, script


@pytest.fixture(scope="module")
def layers() -> ModuleType:
    return script("layers")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The smallest tree that keeps every rule, with one legal use of each kind."""
    files = {
        "dataplane/__init__.py": "import cffi\n",
        "dataplane/include/packetref.h": "#include <stdint.h>\n",
        "dataplane/src/rx.h": "",
        "dataplane/src/rx.c": '#include "packetref.h"\n#include "rx.h"\n#include <rte_ethdev.h>\n',
        "parser/__init__.py": "",
        "parser/lane.pxd": 'cdef extern from "packetref.h" nogil:\n    pass\n',
        "parser/lane.pyx": '"""import flowcheck in prose is no import"""\nfrom libc.string cimport memcpy\n',
        "parser/wire.py": "import math\n",
        "updater/__init__.py": "import torch\nfrom parser import wire\n",
        "flowcheck/__init__.py": "",
        "flowcheck/errors.py": "",
        "flowcheck/control/protocol.py": "",
        "flowcheck/job/manifest.py": "import json\nfrom flowcheck.errors import UserError\nimport torch\n",
        "flowcheck/cli.py": "import typer\nimport parser.wire, updater\nimport switch_configs\n",
        "lab/synth/__init__.py": "from flowcheck.job.manifest import Job\nfrom . import frames\n",
        "lab/synth/frames.py": "import struct\n",
        "switch_configs/__init__.py": "import jinja2\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_our_tree_keeps_the_rules(layers: ModuleType) -> None:
    assert layers.violations(ROOT) == []
    assert len(list(layers.references(ROOT))) > 30, "the checker sees hardly anything"


def test_legal_tree_is_accepted(layers: ModuleType, tree: Path) -> None:
    assert layers.violations(tree) == []


FORBIDDEN = {
    "cimport": (
        "parser/bad.pyx",
        "x = 1\nfrom updater.kernels cimport step\n",
        "parser/bad.pyx:2: uses updater.kernels",
    ),
    "plain cimport": ("parser/bad.pyx", "cimport numpy, updater.kernels\n", "uses updater.kernels"),
    "cimport in pxd": ("parser/bad.pxd", "from dataplane.ring cimport Ring\n", "uses dataplane.ring.Ring"),
    "cimport over lines": ("parser/bad.pyx", "from updater cimport (\n    a,\n    b,\n)\n", "uses updater.b"),
    "import in a function": ("parser/bad.pyx", "def f():\n    if x: import flowcheck\n", "uses flowcheck"),
    "include": ("parser/bad.pyx", 'include "../updater/common.pxi"\n', "uses updater/common.pxi"),
    "extern": ("dataplane/bad.pxd", 'cdef extern from "roce.h":\n    pass\n', "uses parser/include/roce.h"),
    "second header": ("parser/bad.pxd", 'cdef extern from "rx.h":\n    pass\n', "uses dataplane/src/rx.h"),
    "verbatim C": (
        "parser/bad.pyx",
        'cdef extern from *:\n    """\n    #include "rx.h"\n    """\n',
        "bad.pyx:3: uses",
    ),
    "C include": ("parser/src/bad.c", '#include "../../dataplane/src/rx.h"\n', "uses dataplane/src/rx.h"),
    "C include by name": ("dataplane/include/bad.h", '# include "roce.h"\n', "uses parser/include/roce.h"),
    "cffi text": (
        "dataplane/b.py",
        'SOURCE = """\n#include "roce.h"\n"""\n',
        "dataplane/b.py:2: uses parser/include",
    ),
    "python": (
        "parser/bad.py",
        "from flowcheck.errors import UserError\n",
        "uses flowcheck.errors.UserError",
    ),
    "relative": ("parser/sub/bad.py", "from ...flowcheck import errors\n", "uses flowcheck.errors"),
    "import_module": (
        "updater/bad.py",
        "import importlib\nimportlib.import_module('flowcheck.cli')\n",
        "flowcheck.cli",
    ),
    "alone": ("switch_configs/bad.py", "import flowcheck\n", "switch_configs may use nothing of ours"),
    "third party": ("parser/bad.py", "import torch\n", "parser may depend on"),
    "trainer side": ("flowcheck/job/check.py", "import numpy\n", "training environments"),
    "trainer side, ours": (
        "flowcheck/trainer/hooks.py",
        "from flowcheck import cli\n",
        "training environments",
    ),
    "a room further up": (
        "flowcheck/job/bad.py", "from flowcheck.control import protocol\n", "job may import errors",
    ),
    "a room nobody knows": (
        "flowcheck/attic/bad.py", "from flowcheck.errors import UserError\n", "attic is not a room",
    ),
    "synth": ("lab/synth/bad.py", "from parser import wire\n", "lab.synth.bad: reaches parser"),
    "softroce": (
        "lab/softroce/bad.py", "from parser import wire\n", "lab.softroce.bad: reaches parser",
    ),
    "synth by a detour": (
        "lab/synth/bad.py",
        "from flowcheck.cli import x\n",
        "lab.synth.bad -> flowcheck.cli -> parser.wire",
    ),
}


@pytest.mark.parametrize("case", FORBIDDEN, ids=str)
def test_forbidden_use_is_reported(layers: ModuleType, tree: Path, case: str) -> None:
    (tree / "parser/include").mkdir()
    (tree / "parser/include/roce.h").write_text("")
    (tree / "updater/common.pxi").write_text("")
    name, text, expected = FORBIDDEN[case]
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text(text)
    assert expected in "\n".join(layers.violations(tree))


def test_public_names_for_type_checkers_are_no_use(layers: ModuleType, tree: Path) -> None:
    """Of flowcheck itself alone, and only where nothing is imported."""
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flowcheck.cli import app\n"
    (tree / "flowcheck").mkdir(exist_ok=True)
    (tree / "flowcheck/__init__.py").write_text(text)
    assert layers.violations(tree) == []
    (tree / "flowcheck/__init__.py").write_text(text + "else:\n    from flowcheck.cli import app\n")
    assert "__init__.py:5: uses flowcheck.cli.app: training environments" in "\n".join(layers.violations(tree))
    (tree / "flowcheck/__init__.py").write_text("")
    (tree / "flowcheck/job").mkdir(exist_ok=True)
    (tree / "flowcheck/job/bad.py").write_text(text)
    assert "job may import errors" in "\n".join(layers.violations(tree))


def test_generated_c_is_not_read(layers: ModuleType, tree: Path) -> None:
    (tree / "parser/lane.c").write_text('/* Generated by Cython 3 */\n#include "../dataplane/src/rx.h"\n')
    assert layers.violations(tree) == []
