"""What /openapi.json says, route by route; and that its schemas refuse whatever is not as an answer is.

A schema that a typing error has made empty holds every answer to be good, so test_described.py, which holds answers
against them, would not notice. Here each field of a good answer is left out, and is made one of another type.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from flowcheck import __version__
from flowcheck.node.api.description import describe

ROOT = Path(__file__).resolve().parents[3]
OPEN = "/alive"

JSON, BYTES = "application/json", "application/octet-stream"
OBJECT = (JSON, {"type": "object"})
FILE = (BYTES, {"type": "string", "format": "binary"})
ID = {"path": {"id"}}
ID_AND_RANGE = ID | {"header": {"Range"}}
A_FILE = ({"200": FILE, "206": FILE, "404": "why", "416": "why", "503": "why"}, ID_AND_RANGE)
# By route: what each status is answered with (content and schema, or which of EXAMPLES its schema is for), parameters.
ROUTES: dict[str, tuple[dict[str, Any], dict[str, set[str]]]] = {
    OPEN: ({"200": OBJECT}, {}),
    "/openapi.json": ({"200": OBJECT}, {}),
    "/v1/status": ({"200": "newest"}, {}),
    "/v1/rewind": ({"200": "journals"}, {}),
    "/v1/versions": ({"200": "versions"}, {"query": {"step"}}),
    "/v1/versions/{id}/manifest.json": ({"200": OBJECT, "404": "why", "503": "unhashed"}, ID | {"query": {"release"}}),
    "/v1/versions/{id}/model.safetensors": A_FILE,
    "/v1/versions/{id}/optimizer.safetensors": A_FILE,
    "/v1/versions/{id}/user/{rank}": (
        {"200": FILE, "404": "why", "503": "why"}, {"path": {"id", "rank"}, "query": {"step"}}),
    "/v1/versions/{id}/log.bin": A_FILE,
    "/v1/pieces": ({"200": "pieces"}, {}),
    "/v1/pieces/{id}/stream.bin": A_FILE,
    "/": ({"200": ("text/html", {"type": "string"})}, {}),
    "/metrics": ({"200": ("text/plain", {"type": "string"}), "503": "why"}, {}),
    "/v1/node": ({"200": OBJECT, "503": "why"}, {}),
}
OFFER = {
    "id": "m" + "0" * 31, "tier": "memory", "run_id": "run", "epoch": 0, "step": 7, "shard": "0", "status": "verified",
    "nbytes": 24, "matches": 1, "start": "s", "attached": True, "user": [[0, 3]], "age_steps": 1, "age_seconds": 0.5,
    "oldest": 3, "users": [[3, 7, [[0, 3]]]],
}
STREAM = {"id": "r" + "0" * 31, "number": 0, "mark": "m", "nbytes": 24, "sha256": "0" * 64}
WITHHELD = [OFFER | {"why": "it is not confirmed"}]
EXAMPLES: dict[str, dict[str, Any]] = {
    "why": {"why": "it is gone"},
    "unhashed": {"why": "it is being hashed"},
    "newest": {"newest": [OFFER], "withheld": WITHHELD, "absent": ["disk"], "journals": []},
    "journals": {"journals": [{
        "run_id": "run", "epoch": 0, "shard": "0", "entries": 4, "entry_bytes": 8192, "holes": [[9, 11]],
        "steps": [{"first": 5, "last": 8, "kind": "makeable", "bytes": 24, "seconds": 0.5}]}]},
    "versions": {"versions": [OFFER], "withheld": WITHHELD, "absent": ["disk"], "statuses": "own",
                 "diverged": [{"run_id": "run", "epoch": 0, "shard": "0", "after": 3, "last": 6}], "later": [OFFER]},
    "pieces": {"versions": [OFFER], "streams": [STREAM], "absent": ["disk"]},
}


@pytest.fixture
def described() -> dict[str, Any]:
    return describe(OPEN)


def test_what_it_is(described: dict[str, Any]) -> None:
    assert described["openapi"] == "3.1.0"
    assert described["info"] == {"title": "FlowCheck node", "version": __version__}
    assert described["components"]["securitySchemes"] == {"reader": {"type": "http", "scheme": "bearer"}}
    assert set(described) == {"openapi", "info", "paths", "components"}
    assert set(described["components"]) == {"securitySchemes", "responses", "schemas"}
    assert set(described["paths"]) == set(ROUTES) and all(set(one) == {"get"} for one in described["paths"].values())


@pytest.mark.parametrize("path", ROUTES)
def test_each_route_has_its_statuses_and_parameters(described: dict[str, Any], path: str) -> None:
    statuses, parameters = ROUTES[path]
    operation = described["paths"][path]["get"]
    assert set(operation) == {"summary", "parameters", "responses", "security"}
    refused = {} if path == OPEN else {"401": "Refused", "403": "OfAnotherRole"}
    assert operation["security"] == ([] if path == OPEN else [{"reader": []}])
    assert set(operation["responses"]) == set(statuses) | set(refused)
    for status, name in refused.items():
        assert operation["responses"][status] == {"$ref": f"#/components/responses/{name}"}
        assert answer(described, described["components"]["responses"][name])[0] == JSON
    for status, expected in statuses.items():
        kind, schema = answer(described, operation["responses"][status])
        if isinstance(expected, str):
            assert kind == JSON
            jsonschema.validate(EXAMPLES[expected], schema | {"components": described["components"]})
        else:
            assert (kind, schema) == expected
    found: dict[str, set[str]] = {}
    for one in operation["parameters"]:
        found.setdefault(one["in"], set()).add(one["name"])
    assert found == parameters


def answer(described: dict[str, Any], response: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The one kind of content that a response has, and its schema."""
    assert set(response) == {"description", "content"}
    [(kind, content)] = response["content"].items()
    assert set(content) == {"schema"}
    return kind, content["schema"]


@pytest.mark.parametrize(("path", "status", "example"), [
    *[(path, status, one) for path, (statuses, _) in ROUTES.items() for status, one in statuses.items()
      if isinstance(one, str)],
    ("components", "Refused", "why"), ("components", "OfAnotherRole", "why"),
])
def test_a_schema_refuses_what_lacks_a_field_or_has_one_of_another_type(
    described: dict[str, Any], path: str, status: str, example: str
) -> None:
    responses = described["components"] if path == "components" else described["paths"][path]["get"]
    _, schema = answer(described, responses["responses"][status])
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema | {"components": described["components"]})
    assert validator.is_valid(EXAMPLES[example])
    spoilt = list(spoil(EXAMPLES[example]))
    assert spoilt and not [one for one in spoilt if validator.is_valid(one)]


def spoil(good: Any) -> Iterator[Any]:
    """Each time one thing of it is wrong: a field that is not there, or a value of another type."""
    yield [] if isinstance(good, dict) else {}
    if isinstance(good, dict):
        for name, value in good.items():
            yield {other: copy.deepcopy(kept) for other, kept in good.items() if other != name}
            yield from (good | {name: wrong} for wrong in spoil(value))
    elif isinstance(good, list):
        for number, value in enumerate(good):
            yield from ([*good[:number], wrong, *good[number + 1 :]] for wrong in spoil(value))


@pytest.mark.parametrize("change", [{"age_steps": None}, {"age_seconds": None}, {"user": []}, {"users": []}])
def test_what_an_offer_need_not_know(described: dict[str, Any], change: dict[str, Any]) -> None:
    jsonschema.validate(OFFER | change, described["components"]["schemas"]["Offer"])


def test_a_version_that_is_being_hashed_says_how_far(described: dict[str, Any]) -> None:
    _, schema = answer(described, described["paths"]["/v1/versions/{id}/manifest.json"]["get"]["responses"]["503"])
    jsonschema.validate({"why": "it is being hashed", "hashed": 8, "of": 24}, schema)
    for wrong in ({"hashed": "8"}, {"of": "24"}):
        assert not jsonschema.Draft202012Validator(schema).is_valid({"why": "it is being hashed"} | wrong)


def texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield from texts(value, name)
    elif isinstance(node, list):
        for value in node:
            yield from texts(value, key)
    elif key in ("summary", "description"):
        yield key, node


def test_everything_is_said_in_sentences_and_pages_that_are_named_are_there(described: dict[str, Any]) -> None:
    """Swagger and its like show them to people."""
    found = list(texts(described))
    assert len(found) > 40
    for key, text in found:
        assert re.fullmatch(r"[A-Z][^\n]*[.?]", text) and not text.isupper(), (key, text)
        for page in re.findall(r"docs/\S+\.md", text, re.IGNORECASE):
            assert (ROOT / page).is_file(), text
