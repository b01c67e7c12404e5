"""A headless Chromium that a program drives: for tests of the status page, and for its screenshots.

    with Browser() as browser:
        page = browser.page(width=390, height=844, dark=True)
        page.open(url, user="me", password=key)
        page.wait("document.querySelectorAll('section').length > 2")
        page.evaluate("document.title"), page.picture()

It speaks the DevTools protocol over two pipes, JSON with a zero byte after it, so nothing has to be installed but the
browser. FLOWCHECK_BROWSER names another than those of NAMES.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["Browser", "Page", "find"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 120.0
# The browser reads its descriptor 3 and writes its descriptor 4.
_BEGIN = """
import os, sys
high = [os.dup(os.dup(os.dup(os.dup(int(fd))))) for fd in sys.argv[1:3]]
for fd, place in zip(high, (3, 4)):
    os.dup2(fd, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """The browser's program, None: there is none."""
    return os.environ.get("FLOWCHECK_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """Ends with its `with`. Raises OSError if it cannot be started."""

    def __init__(self) -> None:
        program = find()
        if program is None:
            raise FileNotFoundError("no Chromium here: install Debian's chromium")
        self._home = tempfile.TemporaryDirectory(prefix="flowcheck-browser-", ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        words = [
            program, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
            "--disable-extensions", "--hide-scrollbars", f"--user-data-dir={self._home.name}", "about:blank",
        ]
        begin = [sys.executable, "-I", "-S", "-c", _BEGIN, str(to_read), str(to_write)]
        self._process = subprocess.Popen(
            [*begin, *words], pass_fds=[to_read, to_write], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env=os.environ | {"HOME": self._home.name},
        )
        os.close(to_read)
        os.close(to_write)
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._listeners: dict[tuple[str, str], Any] = {}
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        data = b""
        while part := os.read(self._from, 1 << 16):
            *messages, data = (data + part).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    with self._changed:
                        self._answers[message["id"]] = message
                        self._changed.notify_all()
                elif listener := self._listeners.get((message.get("sessionId", ""), message["method"])):
                    listener(message["params"])
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def post(self, method: str, session: str = "", **params: Any) -> int:
        """Sends a command and does not wait for its answer; its number."""
        with self._changed:
            self._number += 1
            number = self._number
            message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
            os.write(self._to, json.dumps(message).encode() + b"\0")
        return number

    def ask(self, method: str, session: str = "", **params: Any) -> Mapping[str, Any]:
        """A command's result. Raises RuntimeError if the browser refuses it, or does not answer."""
        number = self.post(method, session, **params)
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._answers or self._ended, SECONDS) or self._ended:
                raise RuntimeError(f"the browser does not answer {method}")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def listen(self, session: str, method: str, listener: Any) -> None:
        """listener(params): called for each event, on the thread that reads; it may post, but not ask."""
        self._listeners[session, method] = listener

    def page(self, width: int = 1200, height: int = 900, *, dark: bool = False) -> Page:
        """A new one, of that size."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        self.ask("Emulation.setDeviceMetricsOverride", session, width=width, height=height, deviceScaleFactor=1,
                 mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", session, features=[scheme])
        return page

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(30)
        os.close(self._to)
        os.close(self._from)
        self._home.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Page:
    """problems: what its console and its network complained of. asked: addresses that it fetched."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self._credentials = ("", "")
        self.problems: list[str] = []
        self.asked: list[str] = []
        for method, listener in (
            ("Runtime.exceptionThrown", lambda p: self.problems.append(json.dumps(p["exceptionDetails"])[:500])),
            ("Log.entryAdded", lambda p: self.problems.append(p["entry"]["text"])),
            ("Network.requestWillBeSent", lambda p: self.asked.append(p["request"]["url"])),
            ("Fetch.requestPaused", lambda p: browser.post("Fetch.continueRequest", session, requestId=p["requestId"])),
            ("Fetch.authRequired", self._log_in),
        ):
            browser.listen(session, method, listener)
        for domain in ("Page", "Runtime", "Log", "Network"):
            browser.ask(f"{domain}.enable", session)

    def _log_in(self, params: Mapping[str, Any]) -> None:
        user, password = self._credentials
        answer = {"response": "ProvideCredentials", "username": user, "password": password}
        self._browser.post("Fetch.continueWithAuth", self._session, requestId=params["requestId"],
                           authChallengeResponse=answer)

    def open(self, url: str, user: str = "", password: str = "") -> None:
        """user, password: for who asks a browser for them, once; it remembers them."""
        self._credentials = user, password
        self._browser.ask("Fetch.enable", self._session, handleAuthRequests=True)
        self._browser.ask("Page.navigate", self._session, url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
        self._browser.ask("Fetch.disable", self._session)

    def evaluate(self, expression: str) -> Any:
        result = self._browser.ask("Runtime.evaluate", self._session, expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:500])
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = SECONDS) -> None:
        """Until it is true; what cannot be asked yet is not. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {expression}; {self.problems[:3]}")
            time.sleep(0.05)

    def picture(self) -> bytes:
        """WebP of the whole page."""
        return base64.b64decode(self._browser.ask("Page.captureScreenshot", self._session, captureBeyondViewport=True,
                                                  format="webp", quality=80)["data"])

    def close(self) -> None:
        """Else its streams go on: a browser has six connections to a server, for all of its pages together."""
        self._browser.ask("Target.closeTarget", targetId=self._target)
