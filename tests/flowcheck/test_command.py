"""What holds of every command: one exit status for a file that is not there, and completion in the shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowcheck.cli import app
from flowcheck.errors import UserError

ROOT = Path(__file__).parents[2]
CAPTURE, JOB = str(ROOT / "pcaps" / "ring2-ll.pcap"), str(ROOT / "pcaps" / "ring2-ll.job.json")
MISSING = [
    "inspect ABSENT",
    "replay ABSENT --job JOB --out OUT",
    "replay CAPTURE --job ABSENT --out OUT",
    "replay CAPTURE --job JOB --init ABSENT --out OUT",
    "learn ABSENT --out OUT",
    "learn CAPTURE --nccl-log ABSENT --out OUT",
    "learn CAPTURE --job ABSENT --out OUT",
    "synth ABSENT --out OUT",
    "synth JOB --init ABSENT --out OUT",
    "switch plan ABSENT --out OUT",
    "switch diff ABSENT",
    "switch apply ABSENT",
    "switch show ABSENT",
    "switch remove ABSENT",
    "switch verify ABSENT CAPTURE",
    "rehearse --config ABSENT",
]


NO_LAB = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lab":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
from flowcheck.cli import main
sys.argv[0] = "flowcheck"
main()
"""


@pytest.mark.parametrize("line", ["lab up --name x", "lab --help", "synth ABSENT", "bench parse"])
def test_a_command_of_the_lab_says_how_to_get_it_where_it_is_not_installed(line: str) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", NO_LAB, *line.split()], capture_output=True, text=True)
    assert done.returncode == 3 and "FLOWCHECK_BUILD=lab" in done.stderr and "Traceback" not in done.stderr


def test_the_other_commands_do_not_need_the_lab() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", NO_LAB, "inspect", CAPTURE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", MISSING)
def test_a_file_that_is_not_there_is_a_wrong_request_of_every_command(line: str, tmp_path: Path) -> None:
    absent = tmp_path / "absent.pcap"
    words = {"ABSENT": str(absent), "CAPTURE": CAPTURE, "JOB": JOB, "OUT": str(tmp_path / "out")}
    with pytest.raises(UserError) as caught:
        app([words.get(word, word) for word in line.split()], standalone_mode=False)
    assert caught.value.exit_code == 2 and str(absent) in caught.value.message()


@pytest.mark.parametrize(("line", "instead"), [
    ("protect step --nodes h:1", "[protect]"), ("restore-shard", "flowcheck.fetch"), ("plan verify --out x", "tests/"),
])
def test_a_command_that_is_gone_says_what_there_is_instead(line: str, instead: str) -> None:
    with pytest.raises(UserError) as caught:
        app(line.split(), standalone_mode=False, prog_name="flowcheck")
    assert instead in caught.value.remedy and line.split()[0] in caught.value.where


def test_every_state_of_a_flow_is_documented() -> None:
    states = ("UNSEEN", "MID_STREAM", "COUNTED", "ANCHORED", "ADRIFT", "ON_TRIAL", "LOST")
    text = (ROOT / "docs" / "reference" / "report.md").read_text()
    assert all(f"| `{state}` |" in text for state in states)


def test_the_shell_completes_commands() -> None:
    asked = {"_FLOWCHECK_COMPLETE": "complete_bash", "COMP_WORDS": "flowcheck rep", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['flowcheck']; from flowcheck.cli import main; main()"
    done = subprocess.run([sys.executable, "-P", "-c", code], env={**os.environ, **asked},
                          capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["replay"], done.stderr


def test_commands_do_not_wait_for_torch() -> None:
    """It takes more than a second to load. What needs it loads it then."""
    done = subprocess.run([sys.executable, "-P", "-c", "import sys, flowcheck.cli; print('torch' in sys.modules)"],
                          capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")
