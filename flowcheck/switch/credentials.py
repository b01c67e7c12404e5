"""Where the switch's user and password come from; neither is ever an option, so neither is in a shell history.

    user       --user, or FLOWCHECK_SWITCH_USER_<LEAF>, FLOWCHECK_SWITCH_USER, or the login name
    password   FLOWCHECK_SWITCH_PASSWORD_<LEAF>, FLOWCHECK_SWITCH_PASSWORD, or the keyring's entry
               "flowcheck-switch" of user@leaf (package keyring, if installed); none: --key, then keys of the SSH agent
"""

from __future__ import annotations

import getpass
import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from flowcheck.errors import EnvironmentProblem
from switch_configs.transport import Credentials

__all__ = ["find"]

SERVICE = "flowcheck-switch"


def find(
    leaf: str, user: str | None, known_hosts: Path | None, key_file: Path | None, env: Mapping[str, str] = os.environ
) -> Credentials:
    suffix = re.sub(r"[^A-Z0-9]", "_", leaf.upper())

    def variable(what: str) -> str | None:
        return env.get(f"FLOWCHECK_SWITCH_{what}_{suffix}") or env.get(f"FLOWCHECK_SWITCH_{what}")

    name = user or variable("USER") or _login_name()
    password = variable("PASSWORD")
    if password is None and key_file is None:
        password = _from_keyring(f"{name}@{leaf}")
    return Credentials(name, password, key_file, known_hosts)


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        raise EnvironmentProblem("this account has no name to log in with", remedy="give --user") from None


def _from_keyring(account: str) -> str | None:
    try:
        keyring = importlib.import_module("keyring")
    except ImportError:
        return None
    try:
        found = keyring.get_password(SERVICE, account)
    except Exception:  # a locked or absent backend; the agent is asked next
        return None
    return found if isinstance(found, str) else None
