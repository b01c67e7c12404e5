"""[output] and [store]: checkpoints in directories, and in a store of objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from flowcheck.control.address import credentials_in
from flowcheck.node.config.table import Table, wrong

__all__ = ["Output", "Store"]


class Output(Table):
    """every: write each K-th version to disk, 0 none. keep_hashes: SHA-256 of every version, as JSON lines.
    readable_by: who may read what is written here, and into a store that is a directory."""

    directory: Path = Path("out")
    readable_by: Literal["owner", "group", "all"] = "owner"
    every: Annotated[int, Field(ge=0)] = 0
    keep_hashes: Path | None = None
    status_file: Path | None = None


class Store(Table):
    """Versions in a store of objects. With neither keep nor keep_hours all of them stay.

    - url: of a directory or of anything that fsspec reaches; options: for its implementation.
    - every: write each K-th version there; 0: not by steps.
    - minutes: write the newest version whenever so many have passed; 0: not by time.
    - deltas: between two versions the gradients of the journal go there, of which each step can be made.
    - keep: so many newest versions stay.
    - keep_hours: versions that are not older stay.
    - keep_every: the first version in each stretch of so many steps stays; with deltas, what its first step is made of.
    - seconds: without a byte, after which the store counts as one that hangs.
    """

    url: Annotated[str, Field(min_length=1, max_length=2048)]
    every: Annotated[int, Field(ge=0)] = 0
    minutes: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    deltas: bool = False
    keep: Annotated[int, Field(ge=0)] = 0
    keep_hours: Annotated[float, Field(ge=0)] = 0.0
    keep_every: Annotated[int, Field(ge=0)] = 0
    seconds: Annotated[float, Field(ge=1, le=3600)] = 60.0
    options: dict[str, Any] = {}

    @field_validator("url")
    @classmethod
    def _whole(cls, url: str) -> str:
        scheme, found, rest = url.partition("://")
        if (found and not (scheme and rest)) or "::" in url:
            raise ValueError("PROTOCOL://PLACE, or a directory; chains (::) are not taken")
        if secret := credentials_in(url):
            raise ValueError(f"has {secret} in it: give what its library takes in store.options, or where the library"
                             " looks for it")
        return url

    @field_validator("options")
    @classmethod
    def _plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        """They travel to another process as JSON, which has no dates."""
        for name, value in options.items():
            try:
                text = json.dumps(value)
            except TypeError:
                raise ValueError(f"{name} has a date or a time in it: give it as text, in quotes") from None
            if secret := credentials_in(text):
                raise ValueError(f"{name} is a URL that has {secret} in it: give these as options of their own")
        return options

    @model_validator(mode="after")
    def _due(self) -> Self:
        if not self.every and not self.minutes:
            raise wrong("every", "0, and minutes, too: one of them says when a version is written")
        if self.keep_every and not (self.keep or self.keep_hours):
            raise wrong("keep_every", "all versions stay anyway: set keep or keep_hours, too")
        return self
