from collections.abc import Collection
from typing import NamedTuple

class Found(NamedTuple):
    elements: int
    squares: float
    change: float
    largest: float
    zeros: int
    nans: int
    infs: int
    first_nan: int
    first_inf: int

class Parts:
    count: int
    tensors: int
    def __init__(self, spans: list[tuple[int, str, int, int, int]], tensors: int) -> None: ...
    def gradients(self, address: int, leave: Collection[int] = ...) -> None: ...
    def weights(self, before: list[int], after: list[int]) -> None: ...
    def found(self) -> list[Found]: ...

class Measurer:
    def __init__(self, threads: int, kernel: str = ...) -> None: ...
    def begin(self, parts: Parts, keep: object = ...) -> int: ...
    def wait(self, ticket: int, seconds: float = ...) -> bool: ...
    def close(self) -> None: ...
