"""A trainer's process ends while its attachment is open: threads are over before the interpreter is, and a process that
was forked leaves its parent's connection alone."""

from __future__ import annotations

import subprocess
import sys

from ..hand_node import LONGEST, TOKEN, HandNode, Peer

TRAINER = f"""
import atexit, os, sys, threading
atexit.register(lambda: print(*(one.name for one in threading.enumerate()), flush=True))  # first of all: so it is last
from flowcheck.control.protocol import Bye
from flowcheck.trainer.connection.sender import Sender
from flowcheck.trainer.starts import Identity
sender = Sender((sys.argv[1], int(sys.argv[2])), {TOKEN!r}, Identity("run", 0, 0, 1, ""), list, print, None)
sender.start()
while not sender.connected:
    sender.tried.wait(1)
"""


def trainer(hand_node: HandNode, text: str) -> tuple[subprocess.Popen[str], Peer]:
    """It, and its connection."""
    command = [sys.executable, "-P", "-c", TRAINER + text, hand_node.address[0], str(hand_node.address[1])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True), hand_node.welcome()


def over(process: subprocess.Popen[str]) -> str:
    said = process.communicate(timeout=LONGEST)[0]
    assert process.returncode == 0
    return said


def test_no_thread_is_left_when_the_interpreter_goes(hand_node: HandNode) -> None:
    """A thread that comes back from torch after that would abort the process."""
    process, peer = trainer(hand_node, "")
    assert peer.ended()
    peer.close()
    assert over(process) == "MainThread\n"


def test_what_was_put_goes_out_before_a_process_ends(hand_node: HandNode) -> None:
    """More than any socket takes at once, of an attachment that nobody has closed; and no goodbye, for the script may
    have failed."""
    process, peer = trainer(hand_node, """
import torch
from flowcheck.control.protocol import Record
for number in range(64):
    sender.put(Record(number), {"buffer.x": torch.zeros(1 << 18)})
""")
    found = [peer.receive() for _ in range(64)]
    assert [(one["type"], one["iteration"], len(data) >> 20) for one, data in found] == [
        ("record", number, 1) for number in range(64)]
    assert peer.ended()
    peer.close()
    assert over(process) == "MainThread\n"


def test_a_node_that_hangs_does_not_hold_a_process_up(hand_node: HandNode) -> None:
    """It reads nothing, and ends nothing."""
    process, peer = trainer(hand_node, """
import torch
from flowcheck.control.protocol import Record
from flowcheck.trainer.connection import sender as sending
sending.LEAVE_SECONDS = 0.2
for number in range(64):
    sender.put(Record(number), {"buffer.x": torch.zeros(1 << 18)})
""")
    assert over(process) == "MainThread\n"
    assert peer.rest() != ["record"] * 64


def test_one_that_was_closed_has_nothing_left_to_end(hand_node: HandNode) -> None:
    """A process that attaches again and again does not keep what it had."""
    process, peer = trainer(hand_node, """
import gc, weakref
sender.close(Bye(), 240)  # which the node answers by ending the connection
one = weakref.ref(sender)
del sender
gc.collect()
print(one())
""")
    assert peer.expect("bye") == {} and peer.ended()
    peer.close()
    assert over(process) == "None\nMainThread\n"


def test_a_forked_process_that_ends_leaves_the_connection_alone(hand_node: HandNode) -> None:
    process, peer = trainer(hand_node, "if os.fork() == 0: sys.exit(0)\nos.wait()\nsender.close(Bye(), 240)\n")
    assert peer.expect("bye") == {} and peer.ended()
    peer.close()
    assert over(process) == "MainThread\nMainThread\n"  # the child's is said by its copy
