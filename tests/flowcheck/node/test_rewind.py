"""Any step that a journal reaches, as a user gets it: from the process that answers the API, which has it made."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flowcheck
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.control import Api

from ..hand_api import TOKEN
from .kept_scene import Kept, bases, config_of, hashes_in, kept

Journal = Callable[..., Kept]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[str]:
    """Its address. It may be started before there is a journal."""
    config = config_of(tmp_path).model_copy(update={"api": Api(listen="127.0.0.1:0")})
    with contextlib.closing(Serving(config, TOKEN.encode(), lambda *_, **__: None)) as node:
        yield str(node.address)


def rewind(api: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> dict[str, list[dict[str, object]]]:
    from flowcheck.node.versions.journal.rewind import run

    assert run(api, TOKEN, None, "", 60.0, as_json=True) == 0
    found: dict[str, list[dict[str, object]]] = json.loads(capsys.readouterr().out)
    return found


def test_a_step_that_is_in_no_slot_is_made_and_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, api: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with kept(monkeypatch, tmp_path, keep=10) as at:
        at.run(12)
        at.until(lambda: len(bases(at)) >= 1)
        first = bases(at)[0]
        taken = flowcheck.fetch(api, tmp_path / "got", token=TOKEN, step=first + 3)
        assert taken.source.endswith(", journal") and taken.status in ("unverified", f"follows {first}")
        assert hashes_in(taken.path) == at.truth[first + 3]
        recovered = flowcheck.recover(api, token=TOKEN, step=first + 3, together=False)
        assert recovered.step == first + 3 and recovered.source.endswith(", journal")
        found = rewind(api, capsys, tmp_path)
        kinds = {(one["kind"], one["first"], one["last"]) for one in found["steps"]}
        assert ("base", first, first) in kinds and ("makeable", first + 1, 17) in kinds
        assert {one["first"] for one in found["steps"] if one["kind"] == "slot"} == set(at.session.replica.steps)  # type: ignore[union-attr]
        assert not found["holes"] and not found["absent"]
        with pytest.raises(EnvironmentProblem, match="step 99 is not there"):
            flowcheck.fetch(api, tmp_path / "none", token=TOKEN, step=99)
