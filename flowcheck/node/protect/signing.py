"""A registry in which nothing is there but what somebody has signed who knows the nodes' token.

    registry = Signed(Etcd(...), "my cluster", keys, say)       keys(): of each token that is accepted (proof.node_key)

Whoever can write to etcd can write anything. So every value lies there in an envelope:

    {"lease": 7587, "number": 12, "macs": ["9f...", ...], "text": "..."}

A mac is HMAC-SHA256, with a key that is derived from a nodes' token, over cluster, key, lease, number and text; there
is one for each token that this node accepts, so that tokens can be replaced one node after the other. A value is
there if one of the macs is right and the lease is the one that its key has in the registry: what was copied from
another key or another cluster is not. `number` grows with each change of a key, and of one lease no value with a
smaller number than one that was read is there again. A root's decision has no lease; an older one has a smaller epoch,
which no member goes back to.

What is not there is counted and named in `unsigned`, once. Somebody without the token can so take values away, and put
values back that were there: etcd lets whoever may write choose the number of a lease, so also the last ones of a member
that is gone. He cannot add one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping, Sequence

from flowcheck.node.protect.registry import HAVE, MEMBERS, PLACEMENT, ROOT, Entry, Registry

__all__ = ["Signed"]

MOST = 4 << 20  # characters of a value; etcd itself takes no more than 1.5 MiB
MOST_MACS = 4
MOST_KEYS = 4096  # of which the greatest number is kept: the last ones that were read
NAMED = 8  # keys that an event names
SHORT = 80  # characters of such a key
WHY = ("not signed with a token of these nodes (tokens.peer), so it is as if it were not there: a node of an earlier"
       " release, one with another token, or somebody who can write to the registry and has none. Update that node, or"
       " give it the token; delete what is of no node of yours")


class Signed:
    """One member's registry. keys(): newest first, one at least. say(event, **fields). One thread."""

    def __init__(
        self, registry: Registry, cluster: str, keys: Callable[[], Sequence[bytes]], say: Callable[..., None]
    ) -> None:
        self._registry, self._cluster, self._keys, self._say = registry, cluster, keys, say
        self._lease = 0
        self._own: dict[str, tuple[tuple[object, ...], int, str]] = {}  # key -> what it was made of, number, envelope
        self._read: dict[str, tuple[int, int]] = {}  # key -> lease and the greatest number
        self._unsigned: frozenset[str] = frozenset()

    def keep(self) -> int:
        self._lease = self._registry.keep()
        return self._lease

    def put(self, keys: Mapping[str, str]) -> None:
        self._registry.put({key: self._sealed(key, text, self._lease) for key, text in keys.items()})

    def renew(self, keys: Mapping[str, str]) -> None:
        self.keep()
        self.put(keys)

    def read(self) -> Mapping[str, Entry]:
        found: dict[str, Entry] = {}
        unsigned = set()
        for key, entry in self._registry.read().items():
            if key not in (ROOT, PLACEMENT) and not key.startswith((MEMBERS, HAVE)):
                continue  # nothing is ever made of it
            if (text := self._opened(key, entry)) is None:
                unsigned.add(key)
            else:
                found[key] = Entry(text, entry.created, entry.lease)
        for key in list(self._read)[:-MOST_KEYS]:
            del self._read[key]
        if unsigned and not self._unsigned:
            self._say("unsigned", keys=[ascii(key[:SHORT])[1:-1] for key in sorted(unsigned)[:NAMED]],
                      count=len(unsigned), why=WHY)
        self._unsigned = frozenset(unsigned)
        return found

    def elect(self, name: str) -> bool:
        return self._registry.elect(self._sealed(ROOT, name, self._lease))

    def decide(self, key: str, value: str, root: Entry) -> bool:
        return self._registry.decide(key, self._sealed(key, value, 0), root)

    def close(self) -> None:
        self._registry.close()

    # -- envelopes --

    def _sealed(self, key: str, text: str, lease: int) -> str:
        """The same again as long as nothing changes: the registry is written to only then."""
        keys = list(self._keys())[:MOST_MACS]
        of = text, lease, *keys
        before, number, sealed = self._own.get(key, ((), 0, ""))
        if before != of:
            number += 1
            macs = [_mac(one, self._cluster, key, lease, number, text) for one in keys]
            sealed = json.dumps({"lease": lease, "number": number, "macs": macs, "text": text}, sort_keys=True)
            self._own[key] = of, number, sealed
        return sealed

    def _opened(self, key: str, entry: Entry) -> str | None:
        """None: nobody has signed it who may, or it is not what was signed any more."""
        said = _envelope(entry.value)
        if said is None or said[0] != entry.lease or (key != PLACEMENT) != bool(entry.lease):
            return None
        lease, number, macs, text = said
        wanted = [_mac(one, self._cluster, key, lease, number, text) for one in self._keys()]
        if not any(hmac.compare_digest(mac, one) for mac in macs for one in wanted):
            return None
        before = self._read.get(key)
        if lease and before is not None and before[0] == lease and number < before[1]:
            return None
        self._read.pop(key, None)
        self._read[key] = lease, number  # also while the key is gone: it may come back as it was before
        return text


def _envelope(value: str) -> tuple[int, int, list[str], str] | None:
    if len(value) > MOST:
        return None
    try:
        said = json.loads(value)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.keys() != {"lease", "number", "macs", "text"}:
        return None
    lease, number, macs, text = said["lease"], said["number"], said["macs"], said["text"]
    sound = type(lease) is int and type(number) is int and isinstance(text, str) and isinstance(macs, list)
    if not sound or len(macs) > MOST_MACS or not all(isinstance(one, str) and one.isascii() for one in macs):
        return None
    return lease, number, macs, text


def _mac(key: bytes, cluster: str, name: str, lease: int, number: int, text: str) -> str:
    said = json.dumps(["flowcheck registry 1", cluster, name, lease, number, text])  # one text for each of these
    return hmac.new(key, said.encode(), hashlib.sha256).hexdigest()
