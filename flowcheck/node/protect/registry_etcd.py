"""The registry in etcd (registry.py), over its HTTP gateway with etcd3gw.

    registry = Etcd(["http://10.0.0.1:2379", ...], "my cluster")

Keys lie below /flowcheck/CLUSTER/. Reads are linearizable: on the smaller side of a split they are refused, as writes
are. An endpoint that does not answer within a second is left for the next one, and one that answers byte by byte after
three; that one is asked nothing more until its answer has ended. More than MOST_ANSWER bytes are not an answer:
whoever may write there may have written gigabytes. etcd from 3.4 on.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from flowcheck.control.address import host_and_port, odd_port
from flowcheck.errors import EnvironmentProblem, UserError, installing
from flowcheck.node.protect.registry import LEASE_SECONDS, ROOT, Entry, RegistryError

if TYPE_CHECKING:
    import requests
    from etcd3gw.client import Etcd3Client
    from etcd3gw.lease import Lease

__all__ = ["Etcd", "check_endpoints", "endpoint_of"]

SECONDS = 1.0  # for an answer
ANSWERS = 3  # times that, for an answer of which bytes come all the time
MOST_ANSWER = 32 << 20  # bytes: what thousands of members say
PIECE = 1 << 16
MOST_SAID = 1000  # characters of why
NO_LEASE = 0  # of a key that stays whoever is there: no member's
API = "/v3/"
T = TypeVar("T")


def check_endpoints(endpoints: Sequence[str]) -> None:
    """Raises UserError: one is not a URL; EnvironmentProblem: the client is not installed."""
    for one in endpoints:
        endpoint_of(one)
    try:
        import etcd3gw  # noqa: F401
    except ImportError as error:
        raise EnvironmentProblem(f"{error.name} is not installed, and etcd is asked with it", where="nodes.registry",
                                 remedy=f"{installing(error)}, or protect.copies without a registry"
                                 ) from None


def endpoint_of(text: str) -> tuple[str, str, int]:
    """Scheme, host and port. Raises UserError, which shows nothing of a user or a password that may stand in it."""
    scheme, _, rest = text.partition("://")
    place = host_and_port(rest.removesuffix("/"), brackets=True)
    if "@" in text:
        raise UserError("an endpoint of etcd has a user or a password in it", where="nodes.registry",
                        remedy="nodes.registry_user and nodes.registry_password_file")
    if scheme.lower() not in ("http", "https") or place is None:
        raise UserError(f"{text!r} {odd_port(rest) or 'is not an endpoint of etcd'}", where="nodes.registry",
                        remedy="http://HOST:PORT or https://HOST:PORT")
    return (scheme.lower(), *place)


class Etcd:
    """ca: what the endpoints' certificates are held against, a PEM file; "": this machine's authorities. cert: of this
    client and its key, PEM files. login: user, and what says the password when it is asked for."""

    def __init__(
        self, endpoints: Sequence[str], cluster: str, ca: str = "", seconds: float = SECONDS,
        cert: tuple[str, str] | None = None, login: tuple[str, Callable[[], str]] | None = None,
    ) -> None:
        check_endpoints(endpoints)
        from etcd3gw.client import Etcd3Client

        self._clients: list[Etcd3Client] = []
        for one in endpoints:
            scheme, host, port = endpoint_of(one)
            self._clients.append(Etcd3Client(host, port, scheme, ca_cert=ca or None, timeout=seconds, api_path=API,
                                             cert_cert=cert[0] if cert else None, cert_key=cert[1] if cert else None))
            # The environment's proxies, authorities and .netrc would go before what the settings say.
            self._clients[-1].session.trust_env = False
            self._clients[-1].session.hooks["response"].append(_bounded)
        self._login = login
        self._known: set[int] = set()  # clients that are logged in
        self._prefix = f"/flowcheck/{quote(cluster, safe='')}/"
        self._most = ANSWERS * seconds
        self._unanswered: dict[int, Future[Any]] = {}  # by client
        self._lease: int | None = None
        self._put: dict[str, str] = {}  # own keys, as they are there

    def keep(self) -> int:
        if self._lease is not None and self._ask(lambda client: int(self._of(client).refresh())) <= 0:
            self._lease, self._put = None, {}
        if self._lease is None:
            self._lease, self._put = self._ask(lambda client: int(client.lease(LEASE_SECONDS).id)), {}
        return self._lease

    def put(self, keys: Mapping[str, str]) -> None:
        for key, value in keys.items():
            if self._put.get(key) != value:
                self._renew(key, value)
                self._put[key] = value

    def renew(self, keys: Mapping[str, str]) -> None:
        self.keep()
        self.put(keys)

    def _renew(self, key: str, value: str) -> None:
        name = self._prefix + key
        if key not in self._put:
            if self._ask(lambda client: client.create(name, value, self._of(client))):
                return
            if self._owner(key) not in (None, NO_LEASE, self._lease):
                raise RegistryError(f"{key} is somebody else's", where=self._where,
                                    remedy="a name of its own for each node")
        self._ask(lambda client: client.put(name, value, self._of(client)))

    def read(self) -> Mapping[str, Entry]:
        def entries(client: Etcd3Client) -> dict[str, Entry]:
            return {
                about["key"].decode(errors="replace").removeprefix(self._prefix): Entry(  # whose bytes it may be
                    value.decode(errors="replace"), int(about["create_revision"]), int(about.get("lease", NO_LEASE)))
                for value, about in client.get_prefix(self._prefix)
            }

        found = self._ask(entries)
        self._put = {key: value for key, value in self._put.items() if key in found and found[key].value == value}
        return found

    def elect(self, name: str) -> bool:
        if self._lease is None:
            return False
        return self._ask(lambda client: client.create(self._prefix + ROOT, name, self._of(client)))

    def decide(self, key: str, value: str, root: Entry) -> bool:
        from etcd3gw.utils import _encode

        return self._ask(lambda client: bool(client.transaction({
            "compare": [{"key": _encode(self._prefix + ROOT), "result": "EQUAL", "target": "CREATE",
                         "create_revision": root.created}],
            "success": [{"request_put": {"key": _encode(self._prefix + key), "value": _encode(value)}}],
            "failure": [],
        }).get("succeeded", False)))

    def close(self) -> None:
        if self._lease is not None:
            try:
                self._clients[0].post(self._clients[0].get_url("/lease/revoke"), json={"ID": self._lease})
            except Exception:
                pass  # it runs out
            self._lease = None

    # -- --

    @property
    def _where(self) -> str:
        return ", ".join(client.base_url for client in self._clients)

    def _of(self, client: Etcd3Client) -> Lease:
        """The lease, over one endpoint."""
        from etcd3gw.lease import Lease

        assert self._lease is not None
        return Lease(self._lease, client)

    def _owner(self, key: str) -> int | None:
        def owner(client: Etcd3Client) -> int | None:
            found = client.get(self._prefix + key, metadata=True)
            return int(found[0][1].get("lease", 0)) if found else None

        return self._ask(owner)

    def _as_user(self, call: Callable[[Any], T]) -> Callable[[Any], T]:
        """Logged in before, where there is a user; and once more where it is refused: a login lasts some minutes."""
        if self._login is None:
            return call
        user, password = self._login

        def enter(client: Etcd3Client) -> None:
            client.session.auth = None
            said = client.post(client.get_url("/auth/authenticate"), json={"name": user, "password": password()})
            token = str(said["token"])

            def show(request: Any) -> Any:
                request.headers["Authorization"] = token
                return request

            client.session.auth = show
            self._known.add(id(client))

        def asked(client: Etcd3Client) -> T:
            from etcd3gw.exceptions import ConnectionFailedError, ConnectionTimeoutError

            if id(client) in self._known:
                try:
                    return call(client)
                except (ConnectionFailedError, ConnectionTimeoutError):
                    raise
                except Exception:  # whatever it was, it was not done
                    self._known.discard(id(client))
            enter(client)
            return call(client)

        return asked

    def _ask(self, call: Callable[[Any], T]) -> T:
        """The answer of the first endpoint that gives one, which is asked first from then on. Raises RegistryError."""
        why = ""
        for _ in self._clients:
            client = self._clients[0]
            before = self._unanswered.get(id(client))
            try:
                if before is not None and not before.done():
                    raise TimeoutError("an earlier answer has not ended")
                asked = self._unanswered[id(client)] = _begun(self._as_user(call), client)
                return asked.result(self._most)
            except Exception as error:  # of whatever library it is: nothing here may end the node
                why = why or _said(error)
            self._clients.append(self._clients.pop(0))
        raise RegistryError(f"etcd does not answer ({' '.join(why.split())[:200]})", where=self._where)


class _Failed(Exception):
    """What an endpoint was asked for did not come: why."""


def _said(error: BaseException) -> str:
    if isinstance(error, _Failed):
        return str(error)
    return f"{type(error).__name__} {getattr(error, 'detail_text', None) or error}"[:MOST_SAID]


def _bounded(response: requests.Response, **_: Any) -> None:
    """requests itself would take whatever comes."""
    import requests

    taken = io.BytesIO()
    for piece in response.raw.stream(PIECE, decode_content=True):
        if taken.tell() + len(piece) > MOST_ANSWER:
            response.raw.close()
            raise requests.exceptions.ConnectionError(f"an answer of more than {MOST_ANSWER >> 20} MiB")
        taken.write(piece)
    taken.seek(0)
    response.raw = taken


def _begun(call: Callable[[Any], T], client: Etcd3Client) -> Future[T]:
    """On a thread of its own, which nobody waits for at the end."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call(client))
        except BaseException as error:
            answer.set_exception(_Failed(_said(error)))  # its own frames would keep what has come

    threading.Thread(target=work, name="flowcheck etcd", daemon=True).start()
    return answer
