"""The job manifest: a job (model.py) as one JSON file.

Trainer hooks write it, a person can write it, `flowcheck learn` writes it from traffic. Standard library only.

    load_job(path) -> Job         reads and validates; raises UserError naming file and field
    job_from_dict(data) -> Job    the same of what json.loads gives
    job.to_json()                 writes the same form
    json_schema()                 the published schema
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from flowcheck.errors import UserError
from flowcheck.job.check import check
from flowcheck.job.form import Place, build, parse, schema
from flowcheck.job.model import Job

__all__ = ["job_from_dict", "json_schema", "load_job"]

# A manifest of 65536 ranks and 64 channels stays below; /dev/zero and a capture given by mistake do not.
FILE_LIMIT = 1 << 28


def load_job(path: str | os.PathLike[str], *, named: str = "--job") -> Job:
    """Read and validate a manifest. named: what names it, for a remedy. Raises UserError."""
    file = os.fsdecode(path)
    try:
        if Path(path).is_fifo():  # would be waited for
            raise OSError(errno.EINVAL, "it is a FIFO")
        with Path(path).open("rb") as stream:
            raw = stream.read(FILE_LIMIT + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UserError(
            f"cannot read the job manifest: {getattr(error, 'strerror', None) or error}", where=file,
            remedy=f"give the path of an existing, readable JSON file with {named}",
        ) from None
    if len(raw) > FILE_LIMIT:
        raise UserError(
            f"is larger than {FILE_LIMIT >> 20} MiB, and no job manifest is", where=file,
            remedy=f"check that {named} names the manifest and not a capture",
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"is not UTF-8 text (byte {error.start})", where=file,
            remedy="write the manifest as JSON in UTF-8",
        ) from None
    return job_from_dict(parse(text, file), where=file)


def job_from_dict(data: Any, *, where: str = "manifest") -> Job:
    """Build and validate from plain data (what json.loads gives). Raises UserError naming the field."""
    place = Place(where)
    job: Job = build(Job, data, place)
    check(job, place)
    return job


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of the manifest, derived from the dataclasses of model.py."""
    return schema(Job, "FlowCheck job manifest")


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=1))
