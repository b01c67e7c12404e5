"""`flowcheck plan holders`: who keeps whose copies or parity, over leaves, and what may be lost.

    sites, follows = read_sites("holders.toml")
    answer(sites, replicas=2)             copies; or code=(2, 2): parity, of what those have that follow a shard

The placement is the product's own (flowcheck/checkpoint/coding/holders.py), the probabilities are placement.py's.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from pathlib import Path

from flowcheck.checkpoint.coding.holders import Site, code_groups, place_across, together
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.plan.answers.answer import Answer, Grid, Inputs, Value, need, need_at_most
from flowcheck.plan.holders.placement import code_survival, survival, union_bound

__all__ = ["answer", "read_sites"]

MOST_SITES = 4096
MOST_SETS = 200_000  # of leaves, that are tried one by one
LABELS = ("name", "host", "leaf", "rack")
LEAVES = ("leaves lost at once", "sets", "states lost in")
FOLLOWS = "follows"
FORM = 'a table [[holder]] for each, with name = "...", and host, leaf and rack where they are known'


def read_sites(path: Path) -> tuple[list[Site], list[int]]:
    """And the numbers of those that follow a shard. Raises UserError or EnvironmentProblem."""
    try:
        listed = tomllib.loads(path.read_text(encoding="utf-8")).get("holder")
    except FileNotFoundError:
        raise UserError("is not there", where=str(path), remedy=FORM) from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot be read: {error.strerror}", where=str(path), remedy="a readable file"
                                 ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"is not TOML: {error}", where=str(path), remedy=FORM) from None
    listed = listed if isinstance(listed, list) and all(isinstance(one, dict) for one in listed) else []
    need(bool(listed), "has no [[holder]]", str(path), FORM)
    sites, follows = [], []
    for at, one in enumerate(listed):
        where = f"{path}: holder[{at}]"
        told = one.pop(FOLLOWS, False)
        need(type(told) is bool, f"{FOLLOWS} is not true or false", where, "true for a node that follows a shard")
        if told:
            follows.append(at)
        for key, value in one.items():
            need(key in LABELS, f"{key} is not a key", where, f"one of {', '.join((*LABELS, FOLLOWS))}")
            need(isinstance(value, str) and bool(value), f"{key} is not a text", where, FORM)
        need("name" in one, "has no name", where, FORM)
        sites.append(Site(**one))
    need_at_most(len(sites), MOST_SITES, str(path), "no job has so many holders")
    return sites, follows


def answer(
    sites: Sequence[Site], replicas: int = 0, code: tuple[int, int] | None = None, follows: Sequence[int] = (),
) -> Answer:
    """Of copies (replicas, the local one counts) or of parity (code: data and parity; follows: who has the data, if
    that is known: one group). good: the loss of any one leaf takes nobody's state, or no leaf is known. Raises
    UserError."""
    inputs, names = Inputs(), [site.name for site in sites]
    inputs.note("holders", len(sites), "", "the file")
    if code is None:
        inputs.note("replicas", replicas)
        placement = place_across(sites, replicas)
        sets = [tuple(sorted(one)) for one in placement.fatal_sets()]
        survives: Callable[[Collection[int]], bool] = placement.survives
        rows: list[list[Value]] = [
            [names[at], sites[at].leaf, ", ".join(names[one] for one in holders[1:]) or "-",
             ", ".join(names[one] for one in placement.kept_by(at)) or "-"]
            for at, holders in enumerate(placement.holders)
        ]
        grid = Grid("holders", f"Who keeps what ({placement.strategy})", ("holder", "leaf", "its copies", "keeps of"),
                    rows, "Gemini, Algorithm 1, dealt across leaves")
        chances: list[list[Value]] = [
            [k, union_bound(placement, k), survival(placement, k)] for k in range(1, min(len(sites), replicas + 2) + 1)
        ]
        columns: tuple[str, ...] = ("lost at once", "bound (Corollary 1)", "exact")
    else:
        inputs.note("data", code[0])
        inputs.note("parity", code[1])
        groups = code_groups(sites, *code, follows)
        sets = []
        survives = lambda lost: all(len(set(one.members) & set(lost)) <= one.parity for one in groups)  # noqa: E731
        rows = [[at, f"{one.data} + {one.parity}", ", ".join(names[member] for member in sorted(one.members))]
                for at, one in enumerate(groups)]
        grid = Grid("groups", "Code groups", ("group", "data + parity", "holders"), rows, "dealt across leaves")
        chances = [[k, code_survival(groups, k)] for k in range(1, min(len(sites), code[1] + 2) + 1)]
        columns = ("lost at once", "exact")
    leaves, tried = _leaves(sites, survives)
    grids = [grid, Grid("survival", "Probability that everything is still there, any holders alike", columns, chances)]
    if tried:
        grids.append(Grid("leaves", "Every set of leaves", LEAVES, tried))
    one_leaf = bool(tried) and bool(tried[0][2])
    shared = together(sets, sites) if code is None else []
    notes = [f"{', '.join(names[one] for one in members)} need each other, and two of them are in one leaf: it has "
             "more holders than any groups of these sizes can keep apart" for members in shared[:5]]
    verdict = "No leaf is known, so any two holders may be lost together." if not leaves else (
        f"The loss of one of {len(leaves)} leaves takes somebody's state: {tried[0][2]} of them do." if one_leaf else
        f"Any one of {len(leaves)} leaves may be lost.")
    return Answer("holders", "Who keeps what of whom, and what may be lost?", inputs, [], grids, verdict, not one_leaf,
                  notes)


def _leaves(
    sites: Sequence[Site], survives: Callable[[Collection[int]], bool]
) -> tuple[list[str], list[list[Value]]]:
    """Leaves, and for one, two and three of them lost at once: how many sets there are, and in how many a state is
    lost. As far as they can all be tried."""
    leaves = sorted({site.leaf for site in sites} - {""})
    rows: list[list[Value]] = []
    for count in range(1, min(3, len(leaves)) + 1):
        total = math.comb(len(leaves), count)
        if total > MOST_SETS:
            break
        bad = sum(not survives({at for at, site in enumerate(sites) if site.leaf in gone})
                  for gone in combinations(leaves, count))
        rows.append([count, total, bad])
    return leaves, rows
