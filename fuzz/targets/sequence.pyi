from collections.abc import Iterator

from targets.jobs import FuzzJob

JOBS: list[FuzzJob]

class Program:
    @property
    def packets(self) -> int: ...
    @property
    def tainted(self) -> bool: ...
    def runs(self) -> Iterator[tuple[int, int, int, str | None]]: ...

def decode(data: bytes) -> tuple[FuzzJob, bool, Program] | None: ...
