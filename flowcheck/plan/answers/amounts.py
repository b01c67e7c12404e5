"""Numbers as people write them where parameters are counted: 7e9, 70B, 1.3T, 350M."""

from __future__ import annotations

import re

import typer

__all__ = ["amount"]

FACTORS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
NUMBER = re.compile(
    r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|[+-]?inf)\s*([kmbgt]?)\s*", re.IGNORECASE | re.ASCII
)


def amount(text: str) -> float:
    """The number that is meant. K, M, B (or G) and T are thousands, millions, billions (10^9) and trillions (10^12).

    Raises typer.BadParameter for what is not a number: it reads an option.
    """
    found = NUMBER.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text[:40]!r} is not a number: write 7e9, 70B, 1.3T or 350M")
    return float(found[1].replace("_", "")) * FACTORS.get(found[2].lower(), 1.0)
