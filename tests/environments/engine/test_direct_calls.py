"""Apps called without threads: a step's time-out comes when they are done."""

import subprocess
import sys
from pathlib import Path

import pytest

import gvpo_trl

WORKER = """
import signal, sys, time
sys.path.insert(0, sys.argv[1])
from gvpo_trl.environments.appworld.engine.worlds import direct_calls

class TimeIsUp(Exception):
    pass

def interrupt(number, frame):
    raise TimeIsUp

def app(written):
    signal.raise_signal(signal.SIGALRM)
    written.append(1)
    portal.call(written.append, 2)  # an app that calls another one
    written.append(3)

signal.signal(signal.SIGALRM, interrupt)
portal, written = getattr(direct_calls, sys.argv[2])(), []
try:
    portal.call(app, written)
    written.append(4)
except TimeIsUp:
    written.append("time is up")
print(written, signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


@pytest.mark.parametrize(
    ("portal", "written"), [("UninterruptedPortal", "[1, 2, 3, 'time is up']"), ("Portal", "['time is up']")]
)
def test_a_time_out_waits_for_an_app_that_agent_code_calls(portal, written):
    root = Path(gvpo_trl.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", WORKER, root, portal], capture_output=True, text=True, timeout=60)
    assert run.stdout == f"{written} set()\n", run.stderr
