"""`python -m flowcheck.run script.py args`: a training script, prepared for `flowcheck.attach`.

    python -m flowcheck.run script.py --lr 0.1          as `python script.py --lr 0.1`
    python -m flowcheck.run -m package.train --lr 0.1   as `python -m package.train --lr 0.1`
    torchrun --nproc-per-node 8 -m flowcheck.run script.py

It calls `flowcheck.prepare()`, says on standard error what that set, and runs the script as the main program: its
arguments, exit status and tracebacks are its own. The script attaches.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from types import ModuleType

from flowcheck.trainer.nccl.prepare import prepare

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """arguments: the script with its own, or "-m", a module and its own. Returns when the script has ended."""
    module = arguments[:1] == ["-m"]
    rest = arguments[1:] if module else arguments
    if not rest or (rest[0].startswith("-") and not module):
        sys.exit("usage: python -m flowcheck.run [-m] script.py [ARGUMENTS]")
    for line in str(prepare()).splitlines():
        print(f"flowcheck: {line}", file=sys.stderr)
    sys.argv = rest
    if module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    try:
        with io.open_code(os.path.abspath(rest[0])) as stream:
            text = stream.read()
    except OSError as error:
        sys.exit(f"flowcheck: cannot run {rest[0]}: {error.strerror}")
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(rest[0]))
    script = ModuleType("__main__")
    script.__file__, script.__builtins__ = rest[0], __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = script  # not taken back: threads and exit handlers of the script use it
    exec(compile(text, rest[0], "exec"), script.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
