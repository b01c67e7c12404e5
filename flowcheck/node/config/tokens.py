"""Files of tokens that node.toml names."""

from __future__ import annotations

import os
from pathlib import Path

from flowcheck.control.protocol import token_bytes
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.node.config.table import MOST_BYTES

__all__ = ["MOST_TOKENS", "read_token", "read_tokens", "text_of", "token_of"]

MOST_TOKENS = 2  # of a role


def read_token(path: str | os.PathLike[str]) -> str:
    """The first line of a file of tokens. Raises UserError or EnvironmentProblem."""
    return lines_of(Path(path))[0]


def read_tokens(path: str | os.PathLike[str]) -> tuple[bytes, ...]:
    """One token, or two while they are being replaced. Raises UserError or EnvironmentProblem."""
    path = Path(path)
    if path.exists() and not path.is_file():  # it is read again and again, by a thread that must not wait
        raise UserError("is no regular file", where=str(path), remedy="a file with a token in its first line")
    lines = lines_of(path)
    if len(lines) > MOST_TOKENS:
        raise UserError(f"has {len(lines)} lines, each of which would be let in", where=str(path),
                        remedy="the token, and in a second line the one that it replaces, for as long as that takes")
    return tuple(token_of(line, path) for line in lines)


def token_of(line: str, path: Path) -> bytes:
    """Raises UserError naming the file: there may be one for each role."""
    try:
        return token_bytes(line)
    except UserError as error:
        raise UserError(error.what, where=str(path), remedy=error.remedy) from None


def lines_of(path: Path) -> list[str]:
    """One at least."""
    try:
        lines = text_of(path).rstrip("\r\n").splitlines()
        if not lines:
            raise IndexError
    except (OSError, UnicodeDecodeError, IndexError) as error:
        reason = getattr(error, "strerror", None) or "is empty or no text"
        kind = UserError if isinstance(error, FileNotFoundError) else EnvironmentProblem
        raise kind(reason, where=str(path), remedy="a readable file with a token in its first line") from None
    return lines


def text_of(path: Path) -> str:
    """Of a small file: a device or a capture given by mistake must not fill the memory. A pipe into which nobody writes
    is empty, and not waited for; what a shell gives for `<(command)` is read."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        os.set_blocking(file.fileno(), True)
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UserError(f"has more than {MOST_BYTES} bytes", where=str(path), remedy="name the right file")
    return data.decode()
