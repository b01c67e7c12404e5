"""Where the checkpoints of a replay lie before anybody may rely on them.

They wait aside in DIR/.unconfirmed until one steady iteration has gone through: before that, a manifest that is wrong
may still have agreed by chance. What they replace waits in DIR/.replaced until the end: traffic that refutes the
manifest later takes them back.

    offer = Offer(out)
    path = offer.take(path)        a checkpoint was written below offer.aside: where it will be found
    offer.confirm(sound)           the traffic has confirmed the manifest, or refuted it
    offer.clear()                  the end
"""

from __future__ import annotations

from pathlib import Path

from flowcheck.checkpoint.directory import check_replaceable
from flowcheck.durable import adopt, make_directory, remove_tree, reporting

__all__ = ["Offer"]


class Offer:
    """Checkpoints of one replay into `out`. aside: where they are written. confirmed: does the manifest describe this
    traffic? Every call raises EnvironmentProblem where files cannot be moved."""

    def __init__(self, out: Path) -> None:
        self.aside, self.confirmed = out / ".unconfirmed", False
        self._out, self._replaced = out, out / ".replaced"
        self._offered: set[Path] = set()  # checkpoints of this replay that lie where people look for them

    def take(self, path: Path) -> Path:
        """Where a checkpoint that was written aside is found in the end."""
        if self.confirmed:
            self._place(path)
            remove_tree(self.aside)
        return self._out / path.name

    def confirm(self, sound: bool) -> None:
        """Move what was written aside into place; or throw it away, and what is in place already as well."""
        self.confirmed = sound
        if sound:
            for path in sorted(self.aside.glob("*-*")):
                self._place(path)
        else:
            for path in self._offered:
                held = self._replaced / path.name
                if held.is_dir():
                    adopt(held, path)
                else:
                    remove_tree(path)
        remove_tree(self.aside)

    def clear(self) -> None:
        """Nothing waits any more: also what a replay that was killed has left."""
        remove_tree(self.aside)
        remove_tree(self._replaced)

    def _place(self, path: Path) -> None:
        """Give a checkpoint its place; what an earlier replay has put there is kept for now."""
        final = self._out / path.name
        check_replaceable(final)
        adopt(path, final)
        if path.exists() and final not in self._offered:
            with reporting(path):
                make_directory(self._replaced)
            adopt(path, self._replaced / path.name)
        self._offered.add(final)
