"""What is there in a registry that anybody can write to: what was signed for this place, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.control.address import host_and_port
from flowcheck.control.proof import node_key
from flowcheck.node.protect.placement import Decided, Have, Member
from flowcheck.node.protect.registry import HAVE, LEASE_SECONDS, MEMBERS, PLACEMENT, ROOT, Shared
from flowcheck.node.protect.signing import Signed

OLD, NEW, OTHER = (node_key(text) for text in (b"the nodes' token", b"the one that replaces it", b"another token"))
KEYS = (MEMBERS + "a", HAVE + "a", ROOT, PLACEMENT)


class Scene:
    """A member `a` that is root and has decided something, and `b`, which reads. at: seconds."""

    def __init__(self) -> None:
        self.at = 0.0
        self.shared = Shared(lambda: self.at)
        self.said: list[dict[str, Any]] = []
        self.a, self.b = self.member(), self.member()
        self.a.renew({MEMBERS + "a": "here", HAVE + "a": "this"})
        assert self.a.elect("a")
        assert self.a.decide(PLACEMENT, "so it is", self.a.read()[ROOT])
        assert {key: entry.value for key, entry in self.b.read().items()} == {
            MEMBERS + "a": "here", HAVE + "a": "this", ROOT: "a", PLACEMENT: "so it is"}

    def member(self, *keys: bytes, cluster: str = "c") -> Signed:
        return Signed(self.shared.session(), cluster, lambda: list(keys or (OLD,)),
                      lambda event, **fields: self.said.append({"event": event, **fields}))

    def lies(self, key: str) -> str:
        return self.shared.session().read()[key].value

    def write(self, key: str, value: str, by: str = "own") -> None:
        """As whoever can write there. by: whose lease: the "own" one that the key has, "no" one, or "another"."""
        session = self.shared.session()
        session.keep()
        owner = {"own": self.shared.keys[key][1], "no": None, "another": session}[by]
        self.shared.put(key, value, owner)


def of_another_token(scene: Scene, key: str) -> tuple[str, str]:
    text = json.loads(scene.lies(key))
    return scene.member(OTHER)._sealed(key, "evil", text["lease"]), "own"


def of_another_cluster(scene: Scene, key: str) -> tuple[str, str]:
    return scene.member(cluster="other")._sealed(key, "evil", json.loads(scene.lies(key))["lease"]), "own"


def of_another_key(scene: Scene, key: str) -> tuple[str, str]:
    return scene.lies(next(one for one in KEYS if one != key and (one == PLACEMENT) == (key == PLACEMENT))
                      if key != PLACEMENT else ROOT), "own"


def changed(scene: Scene, key: str) -> tuple[str, str]:
    return json.dumps({**json.loads(scene.lies(key)), "text": "evil"}), "own"


def renumbered(scene: Scene, key: str) -> tuple[str, str]:
    return json.dumps({**json.loads(scene.lies(key)), "number": 99}), "own"


def unsigned(scene: Scene, key: str) -> tuple[str, str]:
    return "evil", "own"


def under_another_lease(scene: Scene, key: str) -> tuple[str, str]:
    return scene.lies(key), "another"


def under_no_lease(scene: Scene, key: str) -> tuple[str, str]:
    return (scene.lies(key), "no") if key != PLACEMENT else (scene.lies(ROOT), "no")


WAYS = (of_another_token, of_another_cluster, of_another_key, changed, renumbered, unsigned, under_another_lease,
        under_no_lease)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_nobody_has_signed_for_this_place_is_not_there(
    key: str, way: Callable[[Scene, str], tuple[str, str]]
) -> None:
    scene = Scene()
    scene.write(key, *way(scene, key))
    for _ in range(3):
        assert key not in scene.b.read() and len(scene.b.read()) == len(KEYS) - 1
    (event,) = scene.said
    assert (event["event"], event["keys"], event["count"]) == ("unsigned", [key], 1)
    assert "tokens.peer" in event["why"]


@pytest.mark.parametrize("key", KEYS[:2])
def test_an_older_value_of_the_same_lease_is_not_there_again(key: str) -> None:
    scene = Scene()
    before = scene.lies(key)
    scene.a.renew({key: "newer"})
    assert scene.b.read()[key].value == "newer"
    for _ in range(3):
        scene.write(key, before)
        assert key not in scene.b.read()
        del scene.shared.keys[key]
        assert key not in scene.b.read()
        scene.a.renew({MEMBERS + "more": "x"})  # its lease lives
        scene.shared.put(key, before, scene.shared.keys[MEMBERS + "more"][1])
        assert key not in scene.b.read()
    scene.a.renew({key: "newer"})  # its owner puts it back
    assert scene.b.read()[key].value == "newer"


def test_a_member_that_comes_back_counts_from_the_beginning() -> None:
    scene = Scene()
    for text in ("1", "2", "3"):
        scene.a.renew({MEMBERS + "a": text})
        scene.b.read()
    scene.at += LEASE_SECONDS + 1
    again = scene.member()
    again.renew({MEMBERS + "a": "back"})
    assert scene.b.read()[MEMBERS + "a"].value == "back" and scene.said == []


def test_tokens_are_replaced_one_node_after_the_other() -> None:
    """The new one in a second line at first, then in the first, then alone: everybody sees everybody all the time."""
    scene = Scene()
    for own in ((OLD, NEW), (NEW, OLD)):
        member = scene.member(*own)
        member.renew({MEMBERS + "m": "x"})
        for others in ((OLD,), (OLD, NEW), (NEW, OLD), (NEW,)):
            assert scene.member(*others).read()[MEMBERS + "m"].value == "x"
        member.close()
    scene.member(OTHER).renew({MEMBERS + "m": "x"})
    assert MEMBERS + "m" not in scene.b.read()


def test_nothing_is_written_where_nothing_has_changed() -> None:
    scene = Scene()
    before = scene.shared.keys[MEMBERS + "a"][0]
    sealed = before.value
    scene.a.renew({MEMBERS + "a": "here"})
    assert scene.lies(MEMBERS + "a") == sealed


ODD = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                   lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
                       st.sampled_from(["lease", "number", "macs", "text", "address", "epoch", "copies", "members",
                                        "holders", "own"]) | st.text(max_size=4), inner, max_size=5), max_leaves=12)


@given(value=ODD.map(json.dumps) | st.text(), key=st.sampled_from([*KEYS, MEMBERS + "\0", "members/\u0667"]))
def test_odd_values_are_as_if_they_were_not_there(value: str, key: str) -> None:
    """And none is a traceback, nor a member, nor a decision."""
    scene = Scene()
    scene.shared.put(key, value, None)
    assert key not in scene.b.read()
    assert Member.of("evil", value) is None or host_and_port(json.loads(value)["address"]) is not None
    assert Have.of(value).epoch >= 0 and Decided.of(value).epoch >= 0


@pytest.mark.parametrize("address", [
    "10.0.0.2:\u0667\u0660\u0667\u0661", "10.0.0.2:0", "10.0.0.2:65536", "10.0.0.2:-1", "10.0.0.2:+71", "10.0.0.2: 71",
    "10.0.0.2\0:71", "a b:71", "user@10.0.0.2:71", "http://10.0.0.2:71", "10.0.0.2:71/x", ":71", "h", "[::1:71",
    "h,i:71", "x" * 254 + ":71", "\ud800:71", 71, None, ["10.0.0.2:71"], {"host": "h"}, "[h]:71", "h:71\n", "\u2025:7",
])
def test_a_member_at_what_is_no_address_is_none(address: Any) -> None:
    assert host_and_port(address) is None
    assert Member.of("evil", json.dumps({"address": address})) is None


@given(text=st.text() | st.builds("{}:{}".format, st.text(max_size=8), st.text(max_size=6) | st.integers()))
def test_an_address_is_a_name_and_a_port_or_none(text: str) -> None:
    if (found := host_and_port(text)) is not None:
        host, port = found
        assert 0 < port < 65536 and host and host.isprintable() and not {*host} & {*" /@[]\\\0"}
        assert text.rpartition(":")[2].isascii()


@pytest.mark.parametrize("name", ["", "a/b", "a" * 33, "\u0667", "a\0", "a b"])
def test_a_member_has_a_name_that_a_node_can_have(name: str) -> None:
    good = json.dumps({"address": "h:1"})
    assert Member.of("a.b-c_9", good) == Member(Site("a.b-c_9"), "h:1") and Member.of(name, good) is None


@pytest.mark.parametrize("more", [{"host": "x" * 65}, {"leaf": "\0"}, {"rack": 3}, {"follows": "yes"}, {"parity": 1}])
def test_a_member_says_of_itself_what_a_node_can_say(more: dict[str, Any]) -> None:
    assert Member.of("a", json.dumps({"address": "h:1", **more})) is None


@pytest.mark.parametrize("epoch", ["7", "\u0667", 7.0, True, -1, 1 << 53, None])
def test_an_epoch_is_a_number(epoch: Any) -> None:
    assert Have.of(json.dumps({"epoch": epoch, "copies": []})) == Have()
    assert Decided.of(json.dumps({"epoch": epoch, "members": {}, "holders": {}})).epoch == 0
