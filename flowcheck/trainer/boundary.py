"""What C does of a boundary (src/boundary.c), where it can be compiled: one call in place of one for each tensor.

    looks = library()                               None: it is not here, and Python does the same
    looks.gradients(parameters)                     (gradients, versions): objects or None; int64 each, -1 of None
    looks.same_gradients(parameters, *those)        are they the same objects, as often written to?
    looks.versions(tensors)                         int64 each
    looks.look(groups, members)                     (versions of all members together, a byte for each: requires_grad);
                                                    None: the optimizer's groups have other members
    looks.same_options(groups, those)               those: keys and values besides "params", by identity
    looks.window(state, parameters, places)         (objects, numbers) of parameters and their optimizer state
    looks.same_window(state, parameters, places, *those)    0: the same; 1: other memory, 2: objects, 3: written to
    looks.sample(...)                               the sample of a step record, as text (sample.py); None: ask Python
    looks.same_memory(address, bytes, ...)          of each pair: are these bytes there?
    looks.open_outbox(descriptor)                   include/outbox.h

places: a bytearray of 8 bytes for each parameter, first all ones (`places_of`): where in the dict it was found last.
Given parameters are torch.nn.Parameter itself (`suits`), of which torch's class says all. Lists are lists. The library
is of one version of Python, and needs its headers to be compiled. Standard library and torch.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import logging
import sysconfig
from collections.abc import Iterable, Iterator, Sized
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flowcheck.control.compiled import FLAGS, Library
from flowcheck.errors import EnvironmentProblem

__all__ = ["hints", "library", "places_of", "suits"]

_log = logging.getLogger("flowcheck")
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_HERE = Path(__file__).parent


def _library() -> Library:
    return Library(
        "the library of boundaries", _HERE / f"boundary.library{importlib.machinery.EXTENSION_SUFFIXES[0]}",
        _HERE / "src" / "boundary.c", _HERE / "include", "leave it: Python does the same, which takes longer",
        (*FLAGS, f"-I{sysconfig.get_paths()['include']}"),
    )


@cache
def library() -> Any:
    """The module; None: it cannot be had, which is said once. The first call takes seconds where it has to
    be compiled."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None  # it counts on the GIL
    try:
        path = str(_library().path())
        loader = importlib.machinery.ExtensionFileLoader("boundary", path)
        spec = importlib.util.spec_from_file_location("boundary", path, loader=loader)
        assert spec is not None
        found: Any = importlib.util.module_from_spec(spec)
        loader.exec_module(found)
        base: Any = torch._C.TensorBase
        found.begin(base._version, base.grad, base.requires_grad, base.dtype, base.data_ptr, base.numel, torch.Tensor,
                    _points_inside())
    except (EnvironmentProblem, ImportError, OSError, AttributeError, TypeError) as error:
        what = error.message() if isinstance(error, EnvironmentProblem) else str(error)
        _log.info("flowcheck: boundaries are looked at by Python, which takes longer: %s", what)
        return None
    return found


def hints(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Where each of these is, and its own part: for `sample`, to fetch them ahead."""
    inside = _points_inside()
    return ((id(one), _word(id(one) + 2 * _POINTER) if inside else 0) for one in tensors)


@cache
def _points_inside() -> bool:
    """Is a tensor's third word, in this torch, the address of its own part, of whose first words one is that of its
    memory? Tried with three tensors, two of which have the same. What is read so is fetched ahead, never believed."""
    tensors = [torch.zeros(2), torch.zeros(2)]
    tensors.append(tensors[0].detach())
    inner = [_word(id(one) + 2 * _POINTER) for one in tensors]
    if any(one < 1 << 16 or one % _POINTER for one in inner) or len(set(inner)) < 3:
        return False
    words = [[_word(one + _POINTER * at) for at in range(6)] for one in inner]
    return len({one[0] for one in words}) == 1 and any(a == c != b for a, b, c in list(zip(*words, strict=True))[2:])


def _word(address: int) -> int:
    return int(ctypes.c_size_t.from_address(address).value)


def suits(tensors: Iterable[Any]) -> bool:
    """May `library` be given these?"""
    return all(type(one) is torch.nn.Parameter for one in tensors)


def places_of(parameters: Sized) -> bytearray:
    return bytearray(b"\xff" * 8 * len(parameters))
