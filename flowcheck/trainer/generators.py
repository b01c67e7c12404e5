"""The state of a process's random generators: taken at each boundary, so in microseconds, and as bytes.

    taken = Generators(devices)
    taken.state()                    python's `random`, numpy's global one if numpy is imported, torch's
    restore_rng(state)               so that what follows draws the same numbers

Python and numpy make hundreds of numbers of a state each time that they are asked. Where the memory that holds it has
not changed since then, neither has the state, and they are not asked again. That memory is the object's own (the words
and their index in python's; in numpy's the number kept of a pair, and which generator it has) and, of numpy's, the
words of its generator. Whether it is so in this interpreter is tried: where it is not, they are asked each time. While
nothing has changed the state is the same object. Torch and the standard library; the training thread.
"""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from collections.abc import Collection, Mapping
from typing import Any

import torch

from flowcheck.errors import UserError
from flowcheck.trainer.looks import looks_at

__all__ = ["Generators", "restore_rng", "rng_state"]

_HEAD = object.__basicsize__  # of every object: its count of references changes all the time
_WORDS = 624  # of 32 bits, in python's and in numpy's; an index follows them


class Generators:
    """devices: types, each of which torch has a module for."""

    def __init__(self, devices: Collection[str] = ()) -> None:
        self._devices = devices
        self._python: tuple[Any, Any] = (None, None)  # memory, and the state that it had
        self._numpy: tuple[Any, Any] = (None, None)
        self._tried: bool | None = None  # does numpy's memory show each change
        self._looks = looks_at()
        self._last: dict[str, Any] = {}
        self._held: tuple[Any, ...] | None = None  # whose memory that is of, and addresses and bytes of it

    def state(self) -> dict[str, Any]:
        """For `restore_rng`. Nobody may write to it."""
        state = torch.default_generator.get_state()
        if self._held is not None and self._unchanged(state, *self._held):
            return self._last
        numpy: Any = sys.modules.get("numpy")
        out: dict[str, Any] = {"python": self._of_python(), "torch": _bytes(state)}
        if numpy is not None:
            out["numpy"] = self._of_numpy(numpy)
        for device in self._devices:
            module = torch.get_device_module(device)
            # Of all devices of this process where torch can tell them apart: one rank may use several.
            every = getattr(module, "get_rng_state_all", None)
            out[f"device {device}"] = [*map(_bytes, every() if every is not None else [module.get_rng_state()])]
        self._last, self._held = out, None if self._devices else self._memory(numpy)
        return out

    def _unchanged(
        self, state: torch.Tensor, numpy: Any, python: Any, other: Any, gauss: Any, memory: list[Any]
    ) -> bool:
        return (
            python.gauss_next is gauss and getattr(random.getstate, "__self__", None) is python
            and sys.modules.get("numpy") is numpy
            and (numpy is None or getattr(numpy.random.get_state, "__self__", None) is other)
            and bool(self._looks.same_memory(state.data_ptr(), self._last["torch"], *memory))
        )

    def _memory(self, numpy: Any) -> tuple[Any, ...] | None:
        """What `_unchanged` compares; None: somewhere it would not show each change."""
        if self._python[0] is None or (numpy is not None and self._numpy[0] is None):
            return None
        python = getattr(random.getstate, "__self__", None)
        memory: list[Any] = [id(python) + _HEAD, self._python[0][1]]
        other: Any = None
        if numpy is not None:
            other = getattr(numpy.random.get_state, "__self__", None)
            _, inside, words = self._numpy[0]
            memory += [id(other) + _HEAD, inside, other._bit_generator.ctypes.state_address, words]
        return numpy, python, other, getattr(python, "gauss_next", None), memory

    def _of_python(self) -> Any:
        one = getattr(random.getstate, "__self__", None)
        memory = (id(one), _inside(one), getattr(one, "gauss_next", None)) if type(one) is random.Random else None
        if memory is not None and memory == self._python[0]:
            return self._python[1]
        version, numbers, gauss = random.getstate()
        words = array("I", numbers).tobytes()
        state = (version, words, gauss)
        shown = memory is not None and words[: 4 * _WORDS] in memory[1] and words[4 * _WORDS :] in memory[1]
        self._python = (memory if shown else None), state
        return state

    def _of_numpy(self, numpy: Any) -> Any:
        one = getattr(numpy.random.get_state, "__self__", None)
        if self._tried is None:
            self._tried = _shows_changes(numpy, one)
        memory = _numpys(one) if self._tried else None
        if memory is not None and memory == self._numpy[0]:
            return self._numpy[1]
        name, keys, *rest = numpy.random.get_state()
        state = (str(name), keys.tobytes(), *rest)
        self._numpy = memory, state
        return state


def rng_state(devices: Collection[str] = ()) -> dict[str, Any]:
    """Of this process, once."""
    return Generators(devices).state()


def _inside(one: Any) -> bytes:
    """The memory of an object itself, without its head."""
    return ctypes.string_at(id(one) + _HEAD, type(one).__basicsize__ - _HEAD)


def _numpys(one: Any) -> tuple[int, bytes, bytes] | None:
    """The memory of a RandomState, and of its generator's words; None: it has another one than it begins with."""
    generator: Any = getattr(one, "_bit_generator", None)
    if type(generator).__name__ != "MT19937":
        return None
    return id(one), _inside(one), ctypes.string_at(generator.ctypes.state_address, 4 * (_WORDS + 1))


def _bytes(state: torch.Tensor) -> bytes:
    """Of a tensor of bytes."""
    here = state.cpu()
    return ctypes.string_at(here.data_ptr(), here.numel())


def _tensor(state: torch.Tensor | bytes) -> torch.Tensor:
    """As `_bytes` took it. Before, tensors were kept."""
    return torch.frombuffer(bytearray(state), dtype=torch.uint8) if isinstance(state, bytes) else state


def _shows_changes(numpy: Any, one: Any) -> bool:
    """Is all that numpy's global generator says of its state in `_numpys`? Tried with another one of its kind."""
    if type(one) is not numpy.random.RandomState:
        return False
    try:
        other = numpy.random.RandomState(1)
        keys = other.get_state()[1]
        seen = [_numpys(other)]
        for place, paired, pair in ((623, 0, 0.0), (624, 0, 0.0), (624, 1, 0.0), (624, 1, 0.7310585786300049)):
            other.set_state(("MT19937", keys, place, paired, pair))
            seen.append(_numpys(other))
        last = seen[-1]
        return last is not None and len({*seen}) == len(seen) - 1 and last[2][: 4 * _WORDS] == keys.tobytes()
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


def restore_rng(state: Mapping[str, Any]) -> None:
    """What `rng_state` gave, after it was kept, in a process that has the same kinds of devices. Raises UserError; then
    some generators may be set and others not."""
    try:
        version, words, gauss = state["python"]
        if isinstance(words, bytes):  # before, they were kept as numbers
            words = tuple(array("I", words))
        random.setstate((version, words, gauss))
        torch.set_rng_state(_tensor(state["torch"]))
        if "numpy" in state:
            name, keys, *rest = state["numpy"]
            if (numpy := sys.modules.get("numpy")) is None:
                raise ValueError("numpy's had one, and numpy is not imported here yet")
            words = numpy.frombuffer(keys, numpy.uint32) if isinstance(keys, bytes) else keys.numpy()
            numpy.random.set_state((name, words, *rest))
        for what, states in state.items():
            if what.startswith("device "):
                _restore_devices(what.removeprefix("device "), [*map(_tensor, states)])
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"the state of random numbers does not fit this process: {type(error).__name__}: {error}",
                        where="recover", remedy="the same packages and devices, or seeds of your own") from None


def _restore_devices(device: str, states: list[torch.Tensor]) -> None:
    module = torch.get_device_module(device)
    if not hasattr(module, "set_rng_state_all"):
        module.set_rng_state(states[0])
    elif len(states) != module.device_count():
        raise ValueError(f"{len(states)} {device} devices had one, here are {module.device_count()}")
    else:
        module.set_rng_state_all(states)
