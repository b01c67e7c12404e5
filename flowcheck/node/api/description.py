"""The node's HTTP API in the words of OpenAPI 3.1, for whoever asks /openapi.json: routes.py has the routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flowcheck import __version__
from flowcheck.ask.logs import FILE as LOG_FILE
from flowcheck.checkpoint.coding.rebuilding import PIECES, STREAM
from flowcheck.control.version import MODEL, OPTIMIZER
from flowcheck.node.api.guard import REWIND

__all__ = ["describe"]

_WHY = {"type": "object", "required": ["why"], "properties": {"why": {"type": "string"}}}
_OFFER = {"$ref": "#/components/schemas/Offer"}
_WITHHELD = {
    "type": "array", "items": {"allOf": [_OFFER, _WHY]},
    "description": "Versions that are there and are not offered: not enough checksums of the trainer have matched, or"
                   " they have diverged.",
}
_STATUS = {
    "type": "string", "pattern": "^(verified|follows [0-9]+|unverified|diverged)$",
    "description": "Of this version alone. verified: its own checksums matched. follows N: those of step N did, and it"
                   " was made from that without a gap. unverified: nothing was compared since its chain began."
                   " diverged: a later checksum did not match.",
}
_DIVERGED = {
    "type": "array", "description": "Which versions may be wrong: of a run, epoch and shard those of the steps after"
                                    " `after` up to `last`, but for those that are verified. Whoever has copies of them"
                                    " drops them.",
    "items": {"type": "object", "required": ["run_id", "epoch", "shard", "after", "last"], "properties": {
        "run_id": {"type": "string"}, "epoch": {"type": "integer"}, "shard": {"type": "string"},
        "after": {"type": "integer", "minimum": -1}, "last": {"type": "integer"},
    }},
}
_MORE = {
    "statuses": {"const": "own", "description": "What is said of a version is of that version alone."},
    "diverged": _DIVERGED,
    "later": {"type": "array", "items": _OFFER, "description": "As `versions`, of tiers that the first release does not"
                                                               " know: bases of journals, and logs."},
}
_ABSENT = {"type": "array", "items": {"type": "string"}, "description": "Tiers that did not answer in time."}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[mcdpjsl][0-9a-f]{31}$"}}
_PIECE = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^r[0-9a-f]{31}$"}}
_RANGE = {"name": "Range", "in": "header", "schema": {"type": "string"}, "description": "One range of bytes."}
_RELEASE = {"name": "release", "in": "query", "schema": {"type": "string"},
            "description": "Nothing else of it is wanted: if it was pinned for this alone, it is let go again."}
_STEP = {"name": "step", "in": "query", "schema": {"type": "integer", "minimum": 0},
         "description": "Also what can be made of this step: it is made when its manifest is asked for."}
_LOG_STEP = {"name": "step", "in": "query", "schema": {"type": "integer", "minimum": 0},
             "description": "Of a log: which of its steps."}
_RANK = {"name": "rank", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}}
_USER = {
    "type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    "description": "Whose own states it has: first and last rank of each row of them.",
}
_USERS = {
    "type": "array",
    "items": {"type": "array", "minItems": 3, "items": False,
              "prefixItems": [{"type": "integer"}, {"type": "integer"}, {"type": "array", "items": _USER["items"]}]},
    "description": "Of a log: first and last step of each row of steps, and whose own states these have.",
}
_SPAN = {"type": "object", "required": ["first", "last", "kind", "bytes", "seconds"], "properties": {
    "first": {"type": "integer"}, "last": {"type": "integer"},
    "kind": {"enum": ["base", "makeable"], "description": "A base is there; others are made when they are asked for."},
    "bytes": {"type": "integer", "description": "Of one of these versions."},
    "seconds": {"type": "number", "description": "That making the last of them takes, about."},
}}
_JOURNALS = {"journals": {"type": "array", "items": {
    "type": "object",
    "required": ["run_id", "epoch", "shard", "steps", "holes", "entries", "entry_bytes"],
    "properties": {
        "run_id": {"type": "string"}, "epoch": {"type": "integer"}, "shard": {"type": "string"},
        "steps": {"type": "array", "items": _SPAN},
        "holes": {"type": "array", "description": "First and last iteration of each stretch that is missing between"
                                                  " others; an event `hole` says why.",
                  "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}},
        "entries": {"type": "integer", "description": "Iterations that are there."},
        "entry_bytes": {"type": "integer", "description": "Of the largest one."},
    },
}}}
_AGE = {
    "age_steps": {"type": ["integer", "null"], "description": "Steps that the trainers are known to have made since."},
    "age_seconds": {"type": ["number", "null"], "description": "Since it was published."},
    "oldest": {"type": ["integer", "null"], "description": "Of a log: the oldest step that can be made of it."},
}
_STREAM = {"type": "object", "required": ["id", "number", "mark", "nbytes", "sha256"], "properties": {
    "id": {"type": "string"}, "number": {"type": "integer"}, "mark": {"type": "string"}, "nbytes": {"type": "integer"},
    "sha256": {"type": "string"},
}}
_UNHASHED = {"type": "object", "required": ["why"], "properties": {
    "why": {"type": "string"},
    "hashed": {"type": "integer", "description": "Bytes of its tensors so far, where that is why."},
    "of": {"type": "integer"},
    "making": {"type": "boolean", "description": "The version itself is being made, of a journal."},
}}
_BYTES = {"type": "string", "format": "binary"}
REFUSED = {"401": "Refused", "403": "OfAnotherRole"}
_TEXT = {"type": "string"}
_TYPES = {"id": "string", "tier": "string", "run_id": "string", "epoch": "integer", "step": "integer",
          "shard": "string", "status": "string", "nbytes": "integer", "matches": "integer", "start": "string",
          "attached": "boolean"}


def describe(open_path: str) -> dict[str, Any]:
    """open_path: that of the one route that needs no key."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "FlowCheck node", "version": __version__},
        "paths": {
            open_path: _get("Does this process answer?", {"200": _answer("It does.", {"type": "object"})},
                            guarded=False),
            "/openapi.json": _get("This description.", {"200": _answer("OpenAPI 3.1.", {"type": "object"})}),
            "/v1/status": _get("The newest version of each run, shard and tier, and which steps journals have.",
                               {"200": _answer("What is newest.", _list("newest", _JOURNALS))}),
            REWIND: _get("Which steps the journals of this node have, or can make again.", {
                "200": _answer("By run and group.", {
                    "type": "object", "required": [*_JOURNALS], "properties": dict(_JOURNALS)}),
            }),
            **_versions(), **_pieces(), **_node(),
        },
        "components": {
            "securitySchemes": {"reader": {"type": "http", "scheme": "bearer"}},
            "responses": {
                "Refused": _answer("The key is missing or wrong.", _WHY),
                "OfAnotherRole": _answer("The key is of a role that this is not for, or the version is not offered"
                                         " yet.", _WHY),
            },
            "schemas": {"Offer": {
                "type": "object", "required": [*_TYPES, "user", "users", *_AGE],
                "properties": {name: {"type": kind} for name, kind in _TYPES.items()}
                | {"status": _STATUS, "user": _USER, "users": _USERS} | _AGE,
            }},
        },
    }


def _lost() -> dict[str, Any]:
    return {
        "404": _answer("There is no such version, or no longer.", _WHY),
        "503": _answer("As many versions of the replica are being read as may be; try again.", _WHY),
    }


def _file() -> Any:
    return _get(
        "A safetensors file.",
        {
            "200": _answer("The file.", _BYTES, "application/octet-stream"),
            "206": _answer("The range.", _BYTES, "application/octet-stream"),
            "416": _answer("There is no such range.", _WHY), **_lost(),
        },
        [_ID, _RANGE],
    )


def _versions() -> dict[str, Any]:
    file = _file()
    return {
        "/v1/versions": _get("Every version that can be had at this moment, of the run and line that live first.",
                             {"200": _answer("What there is.", _list("versions", _MORE))}, [_STEP]),
        "/v1/versions/{id}/manifest.json": _get(
            "A version's manifest. A version in memory is pinned from here on, for as long as it is read.",
            {
                "200": _answer("The manifest: docs/reference/checkpoint.md.", {"type": "object"}), **_lost(),
                "503": _answer("A version in memory is hashed when its manifest is first asked for, and a step of a"
                               " journal is made then, and that is"
                               " under way: ask again after Retry-After, `hashed` grows. Or, without `hashed`, as"
                               " many versions of the replica are being read as may be.", _UNHASHED),
            },
            [_ID, _RELEASE],
        ),
        f"/v1/versions/{{id}}/{MODEL}": file,
        f"/v1/versions/{{id}}/{OPTIMIZER}": file,
        "/v1/versions/{id}/user/{rank}": _get(
            "What a rank gave of itself: a safetensors file, whole.",
            {"200": _answer("The file.", _BYTES, "application/octet-stream"), **_lost()}, [_ID, _RANK, _LOG_STEP],
        ),
        f"/v1/versions/{{id}}/{LOG_FILE}": {**file, "get": {
            **file["get"], "summary": "Base and entries of a log, for the trainers who make its steps again.",
        }},
    }


def _pieces() -> dict[str, Any]:
    file = _file()
    return {
        PIECES: _get(
            "What this node has itself, for other members of a group with parity: whole versions, and streams of"
            " parity. `mark`: streams with the same one go together.",
            {"200": _answer("What there is.", {
                "type": "object", "required": ["versions", "streams", "absent"], "properties": {
                    "versions": {"type": "array", "items": _OFFER},
                    "streams": {"type": "array", "items": _STREAM}, "absent": _ABSENT,
                },
            })},
        ),
        f"{PIECES}/{{id}}/{STREAM}": {**file, "get": {
            **file["get"], "summary": "A stream of parity.", "parameters": [_PIECE, _RANGE],
        }},
    }


def _node() -> dict[str, Any]:
    return {
        "/": _get("A page for people: how the node is.", {"200": _answer("The page.", _TEXT, "text/html")}),
        "/metrics": _get("The node's metrics: docs/reference/metrics.md.", {
            "200": _answer("Prometheus' text form, or OpenMetrics for who accepts it.", _TEXT, "text/plain"),
            "503": _answer("The node has said nothing so far.", _WHY),
        }),
        "/v1/node": _get("How the node is: what metrics and page are made of.", {
            "200": _answer("Its newest document; to `Accept: text/event-stream` each new one, as server-sent"
                           " events.", {"type": "object"}),
            "503": _answer("The node has said nothing so far, or too many are watching.", _WHY),
        }),
    }


def _answer(text: str, schema: Mapping[str, Any] | None = None, kind: str = "application/json") -> dict[str, Any]:
    return {"description": text, **({"content": {kind: {"schema": schema}}} if schema else {})}


def _get(summary: str, answers: Mapping[str, Any], parameters: Sequence[Any] = (), guarded: bool = True) -> Any:
    refused = {status: {"$ref": f"#/components/responses/{name}"} for status, name in REFUSED.items() if guarded}
    return {"get": {
        "summary": summary, "parameters": list(parameters), "responses": {**answers, **refused},
        "security": [{"reader": []}] if guarded else [],
    }}


def _list(name: str, more: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    properties = {name: {"type": "array", "items": _OFFER}, "withheld": _WITHHELD, "absent": _ABSENT, **more}
    return {"type": "object", "required": [*properties], "properties": properties}
