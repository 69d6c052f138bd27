"""The interpreter's calls, broken off by a time-out at every point there is."""

import subprocess
import sys
from pathlib import Path

import gvpo_trl

WORKER = """
import json, random, signal, socket, struct, sys, threading
sys.path.insert(0, sys.argv[1])
from gvpo_trl.environments.appworld.engine.agents.calls import Calls

class TimeIsUp(Exception):
    pass

def interrupt(number, frame):
    raise TimeIsUp

def answer_all():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    while True:
        length = world.recv(4, socket.MSG_WAITALL)
        call = json.loads(world.recv(struct.unpack(">I", length)[0], socket.MSG_WAITALL))
        reply = {"id": call["id"], "status": 200, "text": call["arguments"]["text"]}
        payload = json.dumps(reply).encode()
        world.sendall(struct.pack(">I", len(payload)) + payload)

agent, world = socket.socketpair()
threading.Thread(target=answer_all, daemon=True).start()
signal.signal(signal.SIGALRM, interrupt)
call, rng, broken = Calls(agent), random.Random(0), 0
for turn in range(3000):
    long = str(turn) * rng.choice([1, 100, 20_000])
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 1e-3))
        while True:
            assert call("app", "api", {"text": long})["text"] == long
    except TimeIsUp:
        broken += 1
    signal.setitimer(signal.ITIMER_REAL, 20)
    assert call("app", "api", {"text": f"after {turn}"})["text"] == f"after {turn}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
print(broken)
"""


def test_a_time_out_at_any_point_leaves_the_next_call_whole():
    root = Path(gvpo_trl.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", WORKER, root], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "3000\n"
