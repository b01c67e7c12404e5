"""`make mutants`: deliberate mistakes in the modules where silence is dangerous, and whether a test notices each.

    python tools/mutants.py                                  every module below, then the compiled sources
    python tools/mutants.py flowcheck/control/protocol.py ...         some of them
    python tools/mutants.py --tenths 3 ...                   three tenths of the mistakes, spread over all functions

mutmut makes the mistakes, one at a time, in a copy of the tree below build/mutants, and runs the unit tests that reach
the function. MODULES says which test files have to notice. Wording is left out: arguments of `raise`, lines of prose,
log lines. So are assertions, which no input can reach. A mistake that no test can notice, because the product does the
same with it, stands in tools/mutants_equivalent.toml with the reason. The exit status is 1 where a module has less than
90 % of the others killed.

docs/understand/testing.md explains the output, and the compiled modules (tools/mutants_compiled.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = ROOT / "build" / "mutants"
EQUIVALENT = ROOT / "tools" / "mutants_equivalent.toml"
COMPILED = ROOT / "tools" / "mutants_compiled.py"
LEAST = 0.9
NODE, FLOW, UPDATER = "tests/flowcheck/node", "tests/flowcheck", "tests/updater"

# module -> the test files that have to notice a mistake in it. None of them needs root or DPDK.
MODULES: dict[str, list[str]] = {
    "flowcheck/node/shadow.py": [f"{NODE}/test_shadow.py"],
    "flowcheck/checkpoint/coding/code.py": [f"{FLOW}/checkpoint/coding/test_code.py"],
    "flowcheck/checkpoint/coding/holders.py": [f"{FLOW}/checkpoint/coding/test_holders.py"],
    "flowcheck/checkpoint/coding/shape.py": [f"{FLOW}/checkpoint/coding/test_shape.py"],
    "flowcheck/checkpoint/copies.py": [f"{FLOW}/checkpoint/test_copies.py"],
    "flowcheck/checkpoint/coding/parity.py": [f"{FLOW}/checkpoint/test_parity.py"],
    "flowcheck/rebuild/verdict.py": [f"{FLOW}/rebuild/test_verdict.py"],
    "flowcheck/rebuild/collector.py": [f"{FLOW}/rebuild/test_collector.py"],
    "flowcheck/rebuild/rank_confirmation.py": [f"{FLOW}/rebuild/test_rank_confirmation.py"],
    "flowcheck/rebuild/scheduler.py": [
        *(f"{FLOW}/rebuild/test_scheduler{part}.py" for part in ("", "_run", "_rings", "_threads")),
        f"{FLOW}/rebuild/test_overload.py",
    ],
    "flowcheck/rebuild/follower.py": [
        f"{FLOW}/rebuild/test_follower.py", f"{FLOW}/rebuild/test_overload.py", f"{NODE}/test_live_session.py",
        f"{NODE}/test_live_partial.py",
    ],
    "flowcheck/rebuild/deadline.py": [f"{FLOW}/rebuild/test_deadline.py", f"{FLOW}/rebuild/test_overload.py"],
    "flowcheck/rebuild/timekeeper.py": [f"{FLOW}/rebuild/test_timekeeper.py", f"{FLOW}/rebuild/test_overload.py"],
    "flowcheck/rebuild/overload.py": [f"{FLOW}/rebuild/test_overload.py"],
    "flowcheck/rebuild/building.py": [
        f"{FLOW}/rebuild/test_building.py", f"{FLOW}/rebuild/test_version_builder.py", f"{NODE}/test_live_building.py",
    ],
    "flowcheck/rebuild/going_on.py": [
        f"{NODE}/test_{part}.py"
        for part in (
            "live_begin", "live_resumed", "live_partial", "live_session", "resync", "live_peers", "catching_up",
        )
    ],
    "flowcheck/rebuild/partial.py": [
        f"{FLOW}/rebuild/test_partial.py", f"{NODE}/test_live_partial.py", f"{NODE}/test_live_begin.py"
    ],
    "flowcheck/rebuild/healed.py": [f"{NODE}/test_live_peers.py"],
    "flowcheck/rebuild/given.py": [f"{FLOW}/rebuild/test_given.py"],
    "flowcheck/rebuild/holes.py": [f"{FLOW}/rebuild/test_holes.py"],
    "flowcheck/rebuild/merger.py": [f"{FLOW}/rebuild/test_merger.py"],
    "flowcheck/rebuild/intervals.py": [f"{FLOW}/rebuild/test_intervals.py"],
    "flowcheck/rebuild/stale.py": [f"{FLOW}/rebuild/test_stale.py"],
    "flowcheck/rebuild/records.py": [f"{NODE}/test_live_session.py", f"{NODE}/test_live_begin.py"],
    "flowcheck/job/clock.py": [f"{FLOW}/job/test_clock.py"],
    "flowcheck/rebuild/evidence.py": [
        f"{FLOW}/rebuild/test_{part}.py" for part in ("evidence", "collector", "building", "sixteen_alone")
    ],
    "flowcheck/rebuild/wording.py": [f"{FLOW}/rebuild/test_wording.py"],
    "flowcheck/rebuild/replica.py": [
        *(f"{FLOW}/rebuild/test_{part}.py" for part in ("replica", "masters", "sixteen_alone")),
        *(f"{NODE}/test_{part}.py" for part in ("live_begin", "live_partial", "resync", "catching_up")),
    ],
    "flowcheck/offline/session.py": [f"{FLOW}/offline/test_session.py", f"{FLOW}/offline/test_session_report.py"],
    "flowcheck/offline/offer.py": [f"{FLOW}/offline/test_offer.py", f"{FLOW}/offline/test_session.py"],
    "flowcheck/offline/summary.py": [
        f"{FLOW}/offline/test_summary.py", f"{FLOW}/offline/test_session_report.py", f"{FLOW}/offline/test_report.py",
    ],
    "flowcheck/control/messages.py": [
        f"{FLOW}/control/test_messages.py", f"{FLOW}/control/test_protocol.py",
        f"{FLOW}/control/test_protocol_opening.py", f"{NODE}/test_shelf.py",
    ],
    "flowcheck/control/protocol.py": [
        f"{FLOW}/control/test_protocol.py", f"{FLOW}/control/test_protocol_deadlines.py",
        f"{FLOW}/control/test_protocol_opening.py",
    ],
    "flowcheck/control/tls.py": [f"{FLOW}/control/test_tls.py"],
    "flowcheck/node/rights.py": [f"{NODE}/test_rights.py"],
    "flowcheck/node/moved.py": [f"{NODE}/test_moved.py"],
    "flowcheck/node/notify.py": [f"{NODE}/test_unit_file.py"],
    "flowcheck/node/tokens.py": [f"{NODE}/test_access.py"],
    "flowcheck/checkpoint/directory.py": [
        *(f"{FLOW}/checkpoint/test_{part}.py" for part in ("directory", "reading", "users", "fetch")),
        f"{NODE}/test_holdings.py",
    ],
    "flowcheck/checkpoint/fetch.py": [f"{FLOW}/checkpoint/test_fetch.py"],
    "flowcheck/checkpoint/paths.py": [f"{FLOW}/checkpoint/test_reading.py", f"{FLOW}/checkpoint/test_fetch.py"],
    "flowcheck/checkpoint/files.py": [f"{FLOW}/checkpoint/test_directory.py", f"{FLOW}/checkpoint/test_reading.py"],
    "flowcheck/checkpoint/state.py": [f"{FLOW}/checkpoint/test_{part}.py" for part in ("state", "users", "reading")],
    "flowcheck/checkpoint/replica.py": [f"{FLOW}/checkpoint/test_{part}.py" for part in ("open_replica", "reading")],
    "flowcheck/durable.py": [f"{FLOW}/test_durable.py"],
    "flowcheck/control/torch_state.py": [f"{FLOW}/checkpoint/test_state.py"],
    "flowcheck/control/checksum.py": [f"{FLOW}/control/test_checksum.py"],
    "flowcheck/control/tensors.py": [f"{FLOW}/control/test_tensors.py"],
    "flowcheck/control/version.py": [f"{FLOW}/control/test_version.py"],
    "flowcheck/control/ask.py": [f"{FLOW}/control/test_ask.py"],
    "flowcheck/control/receiving.py": [f"{FLOW}/control/test_ask.py", f"{FLOW}/control/test_receiving.py"],
    "flowcheck/control/into.py": [f"{FLOW}/trainer/test_recovery_into.py"],
    "flowcheck/control/sources.py": [
        f"{FLOW}/control/test_sources.py", f"{FLOW}/checkpoint/test_fetch.py",
    ],
    "flowcheck/control/user_state.py": [f"{FLOW}/control/test_user_state.py"],
    "flowcheck/trainer/user.py": [f"{FLOW}/trainer/test_user.py"],
    "flowcheck/checkpoint/users.py": [f"{FLOW}/checkpoint/test_users.py"],
    "flowcheck/node/user_states.py": [f"{NODE}/test_user_states.py"],
    "flowcheck/trainer/recovered.py": [f"{FLOW}/trainer/test_recovery.py", f"{FLOW}/trainer/test_hsdp.py"],
    "flowcheck/trainer/together.py": [f"{FLOW}/trainer/test_recovery{part}.py" for part in ("", "_together")],
    "flowcheck/trainer/recovery.py": [f"{FLOW}/trainer/test_recovery{part}.py" for part in ("", "_together")],
    "flowcheck/node/holdings.py": [f"{NODE}/test_holdings.py"],
    "flowcheck/node/sending.py": [f"{NODE}/test_sending.py"],
    "flowcheck/node/api.py": [f"{NODE}/test_api.py"],
    "flowcheck/node/told.py": [f"{NODE}/test_told.py"],
    "flowcheck/node/board.py": [f"{NODE}/test_board.py"],
    "flowcheck/node/tally.py": [f"{NODE}/test_tally.py"],
    "flowcheck/node/telling.py": [f"{NODE}/test_telling.py"],
    "flowcheck/node/metrics.py": [f"{NODE}/test_metrics.py"],
    "flowcheck/node/common.py": [f"{NODE}/test_common.py"],
    "flowcheck/node/neighbours.py": [f"{NODE}/test_neighbours.py"],
    "flowcheck/node/ledger.py": [f"{NODE}/test_ledger.py", f"{NODE}/test_group.py"],
    "flowcheck/node/listening.py": [f"{NODE}/test_listening.py", f"{NODE}/test_control_server.py"],
    "flowcheck/node/serving.py": [f"{NODE}/test_serving.py"],
    "flowcheck/node/store_shelf.py": [f"{NODE}/test_store_shelf.py"],
    "flowcheck/node/copier.py": [f"{NODE}/test_copier.py"],
    "flowcheck/checkpoint/coding/reduction.py": [f"{FLOW}/checkpoint/coding/test_reduction.py"],
    "flowcheck/node/rounds.py": [f"{NODE}/test_rounds.py"],
    "flowcheck/node/parity_shelf.py": [f"{NODE}/test_parity_shelf.py"],
    "flowcheck/checkpoint/coding/rebuilding.py": [f"{NODE}/test_parity_shelf.py"],
    "flowcheck/node/seat.py": [f"{NODE}/test_seat.py", f"{NODE}/test_root_steps.py"],
    "flowcheck/node/losses.py": [f"{NODE}/test_root_steps.py"],
    "flowcheck/node/decided.py": [f"{NODE}/test_seat.py", f"{NODE}/test_root_steps.py"],
    "flowcheck/node/replacing.py": [f"{NODE}/test_root_steps.py"],
    "flowcheck/node/redo.py": [f"{NODE}/test_redo.py"],
    "flowcheck/node/journal.py": [f"{NODE}/test_redo.py", f"{NODE}/test_journaling.py"],
    "flowcheck/node/journaling.py": [f"{NODE}/test_journaling.py"],
    "flowcheck/node/registry.py": [f"{NODE}/test_registry.py"],
    "flowcheck/node/etcd.py": [f"{NODE}/test_registry.py"],
    "flowcheck/node/persisting.py": [f"{NODE}/test_persisting.py"],
    "flowcheck/checkpoint/store.py": [f"{FLOW}/checkpoint/test_store.py"],
    "flowcheck/checkpoint/objects.py": [f"{FLOW}/checkpoint/test_objects.py"],
    "flowcheck/trainer/attachment.py": [
        *(f"{FLOW}/trainer/test_attachment{part}.py"
          for part in ("", "_arguments", "_state", "_records", "_ranges", "_nodes")),
        *(f"{FLOW}/trainer/test_{part}.py" for part in ("loop", "user", "parts", "sources")),
    ],
    "flowcheck/trainer/following.py": [
        *(f"{FLOW}/trainer/test_attachment{part}.py" for part in ("", "_state", "_records", "_ranges", "_nodes")),
        f"{FLOW}/trainer/test_parts.py", f"{FLOW}/trainer/test_user.py",
    ],
    "flowcheck/trainer/parts.py": [
        f"{FLOW}/trainer/test_parts.py", f"{FLOW}/trainer/test_description.py", f"{FLOW}/trainer/test_watch.py",
    ],
    "flowcheck/trainer/wrapped.py": [f"{FLOW}/trainer/test_parts.py", f"{FLOW}/trainer/test_hsdp.py"],
    "flowcheck/trainer/hsdp.py": [f"{FLOW}/trainer/test_hsdp.py"],
    "flowcheck/trainer/ranges.py": [f"{FLOW}/trainer/test_ranges.py", f"{FLOW}/trainer/test_attachment_ranges.py"],
    "flowcheck/trainer/sender.py": [f"{FLOW}/trainer/test_sender.py", f"{FLOW}/trainer/test_attachment_ranges.py"],
    "flowcheck/trainer/loop.py": [f"{FLOW}/trainer/test_loop.py"],
    "flowcheck/trainer/plugin.py": [f"{FLOW}/trainer/test_plugin.py"],
    "flowcheck/trainer/profiler.py": ["tests/attacks/test_profiler_ring.py"],
    "flowcheck/trainer/profiler_calls.py": [f"{FLOW}/trainer/test_profiler_calls.py"],
    "flowcheck/trainer/nccl_log.py": [f"{FLOW}/trainer/test_nccl_log.py"],
    "flowcheck/trainer/flight_recorder.py": [f"{FLOW}/trainer/test_flight_recorder.py"],
    "flowcheck/trainer/rdma.py": [f"{FLOW}/trainer/test_rdma.py"],
    "flowcheck/learning/assignment.py": [f"{FLOW}/learning/test_assignment.py", f"{FLOW}/learning/test_running.py"],
    "flowcheck/learning/running.py": [f"{FLOW}/learning/test_running.py"],
    "flowcheck/node/assigning.py": [f"{NODE}/test_assigning.py"],
    "dataplane/tap.py": ["tests/dataplane/test_tap.py"],
    "flowcheck/trainer/nccl_connections.py": [f"{FLOW}/trainer/test_nccl_connections.py"],
    "flowcheck/trainer/prepare.py": [f"{FLOW}/trainer/test_prepare.py"],
    "flowcheck/trainer/sources.py": [f"{FLOW}/trainer/test_sources.py"],
    "flowcheck/trainer/settings.py": [f"{FLOW}/trainer/test_sources.py"],
    "flowcheck/trainer/agreement.py": [f"{FLOW}/trainer/test_agreement.py"],
    "flowcheck/trainer/description.py": [
        f"{FLOW}/trainer/test_description.py", f"{FLOW}/trainer/test_watch.py", f"{FLOW}/rebuild/test_sixteen_alone.py",
    ],
    "flowcheck/node/control.py": [f"{NODE}/test_control.py", f"{NODE}/test_control_server.py"],
    "flowcheck/node/config.py": [f"{NODE}/test_config.py"],
    "flowcheck/node/captures.py": [f"{NODE}/test_captures.py", f"{NODE}/test_port.py"],
    "flowcheck/node/port.py": [f"{NODE}/test_port.py"],
    "flowcheck/node/peering.py": [f"{NODE}/test_peering.py"],
    "flowcheck/node/catching_up.py": [f"{NODE}/test_catching_up.py"],
    "flowcheck/node/peers.py": [f"{NODE}/test_peers.py"],
    "flowcheck/node/shelf.py": [f"{NODE}/test_shelf.py"],
    "flowcheck/node/parts.py": [f"{NODE}/test_parts.py"],
    "flowcheck/node/cli.py": [f"{NODE}/test_cli_command.py"],
    "flowcheck/node/service.py": [f"{NODE}/test_cli.py", f"{NODE}/test_cli_command.py"],
    "flowcheck/node/membership.py": [f"{NODE}/test_membership.py", f"{NODE}/test_group.py"],
    "flowcheck/node/standing.py": [
        f"{NODE}/test_{part}.py" for part in ("standing", "group", "group_ranges", "group_session")
    ],
    "flowcheck/node/group.py": [
        f"{NODE}/test_{part}.py" for part in ("group", "group_ranges", "group_session")
    ],
    "flowcheck/node/live.py": [
        *(f"{NODE}/test_live_{part}.py" for part in ("session", "partial", "begin", "resumed", "peers", "building")),
        f"{NODE}/test_resync.py", f"{NODE}/test_group_session.py",
        f"{FLOW}/rebuild/test_overload.py",
    ],
    "flowcheck/node/output.py": [f"{NODE}/test_output.py"],
    "flowcheck/node/saying.py": [f"{NODE}/test_saying.py"],
    "flowcheck/node/replica_files.py": [f"{NODE}/test_replica_files.py"],
    "flowcheck/node/budget.py": [f"{NODE}/test_budget.py"],
    "flowcheck/node/lines.py": [f"{NODE}/test_lines.py"],
    "flowcheck/node/resync.py": [f"{NODE}/test_resync.py", f"{NODE}/test_live_partial.py"],
    "flowcheck/node/runs.py": [f"{NODE}/test_runs.py", f"{NODE}/test_control.py"],
    "flowcheck/node/drops.py": [f"{NODE}/test_drops.py"],
    "flowcheck/node/silence.py": [f"{NODE}/test_silence.py", f"{NODE}/test_live_session.py"],
    "flowcheck/node/uploads.py": [f"{NODE}/test_asking.py", f"{NODE}/test_uploads.py"],
    "updater/layout.py": [f"{UPDATER}/test_layout.py"],
    "updater/optimizers.py": [f"{UPDATER}/test_optimizers.py"],
    "updater/rounding_modes.py": [f"{UPDATER}/test_rounding_modes.py", f"{UPDATER}/test_sixteen.py"],
    "updater/sixteen.py": [f"{UPDATER}/test_sixteen.py"],
    "updater/arrays.py": [f"{UPDATER}/test_{part}.py" for part in ("arrays", "replica_states", "sixteen")],
    "updater/found.py": [f"{UPDATER}/test_replica_states.py"],
    "updater/choosing.py": [f"{UPDATER}/test_choosing.py"],
    "updater/tuning.py": [f"{UPDATER}/test_tuning.py"],
    "updater/constants.py": [f"{UPDATER}/test_empty.py", f"{UPDATER}/test_step_values.py"],
    "updater/replica.py": [
        f"{UPDATER}/test_{part}.py"
        for part in ("replica", "replica_calls", "partial", "replica_states", "empty", "received")
    ],
    "updater/slot.py": [
        f"{UPDATER}/test_{part}.py" for part in ("slot", "replica", "partial", "replica_states", "apart", "received")
    ],
    "updater/remarks.py": [f"{UPDATER}/test_remarks.py"],
    "updater/store.py": [f"{UPDATER}/test_{part}.py" for part in ("store", "replica_calls", "remarks")],
    "updater/reader.py": [f"{UPDATER}/test_reader.py", f"{UPDATER}/test_remarks.py"],
    "updater/step.py": [f"{UPDATER}/test_step.py"],
    "updater/verify.py": [f"{UPDATER}/test_verify.py"],
}

# By line: what a person reads, which tests quote in part only; and assertions, which only a mistake of ours meets.
WORDING = [
    r"^\s*assert\b",
    r"^\s*raise\b",
    r"^\s*(where|remedy|help|description)=",
    r"^\s*f?\"[^\"]*\s[^\"]*\"",
    r"\b(UserError|RecordsError|EnvironmentProblem|UpdaterError)\(",
    r"\b_?log\.",
    r"\breturn \(?f?\"[^\"]*\s[^\"]*\"",
    r"\.add_argument\(|typer\.(Option|Argument)\(",
]
KILLED = {1, 3, -4, -6, -7, -8, -11}  # exit statuses of pytest, and the signals of a process that crashed
UNREACHED = {33, 5}  # of mutmut: no test reaches the function
TIMED_OUT = {24, 36, 152, 255, -24}


@dataclass
class Result:
    """One module. survivors: (mutmut's name, "was -> now") of each mistake that no test noticed."""

    module: str
    killed: int = 0
    timed_out: int = 0
    equivalent: int = 0
    survivors: list[tuple[str, str]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        noticed = self.killed + self.timed_out
        return noticed / (noticed + len(self.survivors)) if noticed else 0.0

    def __str__(self) -> str:
        total = self.killed + self.timed_out + len(self.survivors)
        return (
            f"{self.module:32} {self.rate:6.1%}  killed {self.killed + self.timed_out} of {total}"
            f" ({self.timed_out} by time), equivalent {self.equivalent}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Deliberate mistakes, and whether a test notices each.")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="such as updater/slot.py; all if none")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="mistakes tried at a time")
    parser.add_argument("--tenths", type=int, choices=range(1, 11), default=10, help="of all mistakes, how many")
    arguments = parser.parse_args()
    unknown = [module for module in arguments.modules if module not in MODULES]
    if unknown:
        parser.error(f"{unknown[0]} is not one of: {', '.join(MODULES)}")
    results = []
    for module in arguments.modules or MODULES:
        results.append(run(module, jobs=arguments.jobs, tenths=arguments.tenths))
        for name, change in results[-1].survivors:
            print(f"  survived {name}\n    {change}")
        print(results[-1], flush=True)
    if len(results) > 1:
        print("\n".join(["", *map(str, results)]), flush=True)
    few = any(result.rate < LEAST for result in results)
    if not arguments.modules:  # the compiled sources, too
        few |= subprocess.run([sys.executable, "-P", str(COMPILED)], check=False).returncode != 0
    return 1 if few else 0


def run(module: str, *, jobs: int, tenths: int = 10) -> Result:
    """Try the mistakes of one module. Raises SystemExit where its tests fail without any."""
    tried = f"*__mutmut_*[{'1470369258'[:tenths]}]"  # by the last digit of their numbers in the function
    scratch = SCRATCH / module.removesuffix(".py").replace("/", ".")
    shutil.rmtree(scratch, ignore_errors=True)
    _copy_tree(scratch, module.split("/")[0])
    missing = [test for test in MODULES[module] if not (scratch / test).exists()]
    if missing:
        raise SystemExit(f"{module}: its tests {', '.join(missing)} are not there")
    _configure(scratch, module)
    environment = os.environ | {"PYTHONPATH": str(scratch / "mutants"), "OMP_NUM_THREADS": "1"}
    # What takes seconds to import is imported once, and not anew for every mistake.
    start = "import numpy, torch, torch._dynamo; from mutmut.__main__ import cli; cli()"
    command = [sys.executable, "-P", "-c", start, "run", "--max-children", str(jobs), tried]
    log = scratch / "log"
    with log.open("w") as out:
        done = subprocess.run(command, cwd=scratch, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"{module}: mutmut ended with {done.returncode}; its last words, from {log}:\n"
                         + log.read_text()[-4000:])
    return report(scratch, module, tried)


def report(scratch: Path, module: str, tried: str) -> Result:
    """What is known of a module's mistakes after a run."""
    equivalent = {
        (entry["was"], now)
        for entry in tomllib.loads(EQUIVALENT.read_text()).get("equivalent", []) if entry["module"] == module
        for now in (entry["now"] if isinstance(entry["now"], list) else [entry["now"]])
    }
    result = Result(module)
    for name, status in _statuses(scratch, module).items():
        if not fnmatchcase(name, tried):
            continue
        if status is None:
            raise SystemExit(f"{module}: {name} was not tried; see {scratch / 'log'}")
        if status in KILLED:
            result.killed += 1
        elif status in TIMED_OUT:
            result.timed_out += 1
        else:
            was, now = _change(scratch, module, name)
            if (was, now) in equivalent:
                result.equivalent += 1
            else:
                mark = " (no test reaches it)" if status in UNREACHED else ""
                result.survivors.append((name, f"{was}  ->  {now}{mark}"))
    return result


def _statuses(scratch: Path, module: str) -> dict[str, int | None]:
    path = scratch / "mutants" / f"{module}.meta"
    found: dict[str, int | None] = json.loads(path.read_text())["exit_code_by_key"] if path.exists() else {}
    return found


def _change(scratch: Path, module: str, name: str) -> tuple[str, str]:
    """The lines that a mistake changes, joined by spaces: (before, after)."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    with contextlib.chdir(scratch):
        lines = get_diff_for_mutant(name, path=Path(module)).splitlines()
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    was, now = (" ".join(line[1:].strip() for line in changed if line[0] == sign) for sign in "-+")
    return was, now


def _copy_tree(scratch: Path, package: str) -> None:
    """What git knows and what was built, as it is now. Below mutants/ the module's package is mutmut's business."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )
    names = [Path(name) for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    built = [path.relative_to(ROOT) for top in _tops() for path in (ROOT / top).rglob("*.so")]
    for name in [*names, *built]:
        for target in (scratch / name, scratch / "mutants" / name):
            if name.parts[0] == package and target.is_relative_to(scratch / "mutants"):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


def _tops() -> list[str]:
    return sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


def _configure(scratch: Path, module: str) -> None:
    """mutmut reads its settings from the copy's pyproject.toml."""
    settings = {
        "source_paths": [module.split("/")[0]],
        "only_mutate": [module],
        "do_not_mutate_patterns": WORDING,
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-m", "not slow and not root"],
        "pytest_add_cli_args_test_selection": MODULES[module],
        "process_isolation": "forkserver",
        "timeout_multiplier": 10.0,
        "use_git_change_detection": False,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    text = (ROOT / "pyproject.toml").read_text() + "\n[tool.mutmut]\n" + "\n".join(lines) + "\n"
    (scratch / "pyproject.toml").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
