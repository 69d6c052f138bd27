"""Attempts of an agent to lose its own row, and with it a bad reward: deaths, odd values, messages, forged answers.

A fault in a step or in the score that agent code caused counts as an attempt that worked. Some attempts have no
control, because they do no harm anywhere; the tests keep it that way.
"""

from tests.environments.attacks import Attack, Sign

SOLVED = ("exec(SOLUTION)",)
"""Steps that earn the reward which an attempt then tries to lose."""

DEATHS = {
    "a signal": ("posix.kill(posix.getpid(), 9)", "process"),
    "a signal of its thread": ("signal.pthread_kill(__import__('_thread').get_ident(), 9)", "process"),
    "a limit on its time": ("resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass", "process"),
    "a filter that kills": ("libc.prctl(22, 1, 0, 0, 0)\nposix.getpid()\nposix.getcwd()", "open"),
    "its sockets closed": ("[posix.close(fd) for fd in pipes]\nwhile True: pass", "open"),
    "its sockets shut": ("[libc.shutdown(fd, 2) for fd in pipes]\nwhile True: pass", "open"),
    "other sockets in their place": (
        "pair = socket.socketpair()\n[posix.dup2(pair[0].fileno(), fd) for fd in pipes]\nwhile True: pass",
        "open",
    ),
    "its sockets swapped": (
        "kept = posix.dup(pipes[0])\nposix.dup2(pipes[1], pipes[0])\nposix.dup2(kept, pipes[1])",
        None,
    ),
    "its sockets closed and gone": ("[posix.close(fd) for fd in pipes]\nposix._exit(0)", None),
    "a stop": ("posix.kill(posix.getpid(), 19)", None),
    "a crash": ("ctypes.string_at(0)", None),
    "an exit with the machinery's status": ("posix._exit(70)", "process"),
    "a call of another architecture": ("libc.syscall(0x40000000 | 39)", None),
    "a file beyond the limit": ("signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\nposix.write(2, b'x')", None),
    "a broken pipe": (
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\none, other = socket.socketpair()\nother.close()\n"
        "posix.write(one.fileno(), b'x')",
        None,
    ),
    "a timer between steps": (
        "signal.setitimer(signal.ITIMER_PROF, 1000)\nsignal.setitimer(signal.ITIMER_VIRTUAL, 0.01)",
        None,
    ),
}
"""How an interpreter can end, and in which control that makes the row unscorable. Our side kills an interpreter that
closed its sockets. That counts as the agent's doing, like an exit, and not as a kill by the kernel."""

ANSWERS = {"NaN": "float('nan')", "infinity": "1e308 * 10", "a surrogate": "'\\ud800'", "digits": "'9' * 5_000"}
LOGS = {
    "bytes": ("title=b'\\xff'", "open"),
    "a tuple as a key": ("title={(1, 2): 1}", "open"),
    "a surrogate": ("title='\\ud800'", None),
    "an object": ("title=object()", None),
    "a set of sets": ("title={frozenset({1})}", None),
    "a nest": ("title=(lambda n, d=[]: [d := [d] for _ in range(n)][-1])(400)", None),
    "a name that is none": ("**{'\\ud800': 1}", None),
}
STATES = {
    "an amount without end": (
        "token = login('venmo')\n"
        "other = apis.venmo.search_users(query='', access_token=token)[-1]['email']\n"
        "apis.venmo.create_payment_request(user_email=other, amount=float('inf'), access_token=token)",
        "open",
    ),
    "notes without end": (
        "token = login('simple_note')\n"
        "for i in range(10):\n"
        "    apis.simple_note.create_note(title=str(i), content='\\x01' * 100_000, access_token=token)",
        None,
    ),
}

ODD = {"kind": "int", "value": float("inf"), "text": "", "module": "", "name": ""}
MESSAGES = {
    "no JSON": "frame(b'\\xff')",
    "a nest without end": "frame(b'[' * 900_000)",
    "a list": "frame([1])",
    "no names": "frame({'id': 1})",
    "names that are none": "frame(message({'a': 1}, ['b'], {}))",
    "an infinite number": "frame(message('spotify', 'x', {}, float('inf')))",
    "too many digits": "frame(b'{\"id\": ' + b'9' * 5_000 + b'}')",
    "a key that none can be": "frame(message('spotify', 'x', {'$dict': [[{}, 1]]}))",
    "an infinite object": f"frame(message('spotify', 'x', {{'a': {{'$object': {ODD}}}}}))".replace(
        "inf,", "float('inf'),"
    ),
    "a type that none can be": (
        "frame(message('spotify', 'x', {'a': {'$object': {'text': 'x', 'module': 'x', 'name': '\\0'}}}))"
    ),
    "two calls at once": "frame(message('spotify', 'show_genres', {})) * 2",
    "what the trainer says": "frame({'op': 'finish'})",
    "answers that nobody reads": "frame(message('api_docs', 'show_api_descriptions', {'app_name': 'spotify'})) * 100",
}
"""Messages to the world that no API call makes. In the control the world does not expect them."""
UNEXPECTED = {
    "names without end": "for _ in range(5):\n    ask('a' * 14_000_000, 'b', {'self': 1})",
    "half a message": "put(pipes[1], b'\\0\\0')",
    "a length beyond the limit": "put(pipes[1], b'\\xff' * 4)",
    "nests of every depth": (
        "for opening, closing in ((b'[', b']'), (b'{\"a\":', b'}')):\n"
        "    for depth in [*range(50, 480, 30), *range(480, 495)]:\n"
        "        raw = frame(message('simple_note', 'create_note', {'title': 'X', 'access_token': 'x'}))\n"
        "        put(pipes[1], frame(raw[4:].replace(b'\"X\"', opening * depth + b'1' + closing * depth)))\n"
        "        take_frame(pipes[1])"
    ),
    "random states that are none": (
        "for state in (1, [1, 2, 3], [3, [], None], [3, 'abc', None], [3, [2**70] * 625, None], [None] * 3, {}):\n"
        "    ask('spotify', 'show_genres', {}, 1, state)\n"
        "ask('spotify', 'show_genres', {}, 1, [3, [0] * 624 + [624], float('inf')])\nlogin('venmo')"
    ),
    "calls between steps": (
        "m = frame(message('spotify', 'show_genres', {}))\n"
        "def ring(*_):\n    put(pipes[1], m)\n"
        "real = signal.alarm\n"
        "def alarm(seconds):\n"
        "    real(seconds)\n"
        "    if not seconds:\n"
        "        signal.signal(signal.SIGALRM, ring)\n        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)\n"
        "signal.alarm = alarm"
    ),
}

NODES = "frame(message('simple_note', 'create_note', {'title': 1, 'junk': [{'': 0}] * 1080}))"
FLOODS = {
    "a log that takes minutes to write": (
        (
            f"slow = {NODES}",
            *[
                "end = clock.clock_gettime(clock.CLOCK_MONOTONIC) + 3\n"
                "while clock.clock_gettime(clock.CLOCK_MONOTONIC) < end:\n"
                "    put(pipes[1], slow)\n    take_frame(pipes[1])"
            ]
            * 10,
        ),
        Sign.LOST,
    ),
    "values without end in a call": (
        "raw = frame(message('simple_note', 'create_note', {'title': 'x', 'junk': 'X', 'access_token': 'x'}))\n"
        "put(pipes[1], frame(raw[4:].replace(b'\"X\"', b'[' + b'{},' * 300_000 + b'1]')))\n"
        "take_frame(pipes[1])\nprint('WORKED')",
        Sign.SAID,
    ),
    "an argument without end": (
        "ask('simple_note', 'create_note', {'title': 'x', 'content': 'x' * 4_000_000})\nprint('WORKED')",
        Sign.SAID,
    ),
    "arguments without end": (
        (*["for _ in range(17):\n    ask('x', 'y', {'content': 'x' * 1_000_000})"] * 4, "print('WORKED')"),
        Sign.SAID,
    ),
    "changes without end": (
        (
            "token = login('simple_note')\n"
            "note = apis.simple_note.create_note(title='x', content='x' * 1_000_000, access_token=token)\n"
            "more = {'append_or_prepend': 'append', 'added_content': 'y', 'access_token': token}\n"
            "more['note_id'] = note['note_id']",
            *["for _ in range(14):\n    assert ask('simple_note', 'add_content_to_note', more)['status'] == 200"] * 5,
            "print('WORKED')",
        ),
        Sign.SAID,
    ),
    "a search without end": (
        "token = login('simple_note')\n"
        "apis.simple_note.create_note(title='x', content='a or ' * 150_000, access_token=token)\n"
        "apis.simple_note.search_notes(query='\"' + 'a ' * 4_000 + '\"', access_token=token)",
        Sign.LOST,
    ),
    "a comparison without end": (
        "token, random = login('todoist'), __import__('random')\n"
        "signs = [chr(i) for i in (*range(48, 123), *range(0x100, 0x132))]\n"
        "for i in range(4):\n"
        "    name = str(i) + ''.join(random.choices(signs, k=300_000))\n"
        "    apis.todoist.create_label(name=name, access_token=token)\n"
        "query = ''.join(random.choices('abcdefghijklmnopqrstuvwxyz', k=60_000))\n"
        "while True:\n"
        "    try:\n        apis.todoist.search_labels(query=query, access_token=token)\n"
        "    except Exception:\n        pass",
        Sign.LOST,
    ),
}

FORGED = """
real = system.modules["gvpo_trl.environments.appworld.wire.frames"].send
def forging(raw=None, twice=False, **parts):
    def send(sock, message, *limit):
        system.modules["gvpo_trl.environments.appworld.wire.frames"].send = real
        ok = {"text": "ok", "verdict": None, "ended": False, "logged": {"input": "x", "output": "x"}, "counted": True}
        ok |= {"completed": False, "api_calls": [], "api_errors": [], "nonce": message.get("nonce")}
        data = raw if raw is not None else frame(ok | parts)
        put(pipes[0], data * (1 + twice))
        if len(data) < 4:
            passing(100)
    system.modules["gvpo_trl.environments.appworld.wire.frames"].send = send
"""
NEST = "(lambda d=[]: [d := [d] for _ in range({depth})][-1])()"
REPLIES = {
    "garbage": ("forging(b'\\xff' * 100)", "process"),
    "no JSON": ("forging(frame(b'x'))", "process"),
    "values without end": (
        "forging(frame(b'{\"text\": \"x\", \"verdict\": [' + b'{},' * 500_000 + b'1]}'))",
        "process",
    ),
    "a frame without end": ("forging(b'\\x00\\xff\\xff\\xff' + b'x' * 20_000_000)", "process"),
    "a nest": ("forging(frame(b'[' * 100_000))", "process"),
    "too many digits": ("forging(frame(b'{\"text\": ' + b'9' * 5_000 + b'}'))", "process"),
    "a fault of ours": ("forging(fault='the world is gone')", "process"),
    "no text": ("forging(text=None)", "process"),
    "an unknown verdict": ("forging(verdict=['api'])", "process"),
    "calls that are none": ("forging(api_calls=1)", "process"),
    "completed": ("forging(completed=True, finished=True, api_calls=['supervisor.complete_task'])", "process"),
    "passed": ("forging(passed=['everything'], failed=[], completed=True)", "process"),
    "a log that cannot be written": ("forging(logged={'input': '\\ud800', 'output': '\\ud800'})", "open"),
    "no log": ("forging(logged=[])", None),
    "a log without end": ("forging(logged={'input': 'x' * 900_000, 'output': 'x' * 900_000})", None),
    "a text without end": ("forging(text='x' * 900_000)", "process"),
    "an opening": ("forging(opened=True, layers=[], leaks=['everything'])", None),
    "an opening alone": ("forging(frame({'opened': True, 'layers': [], 'leaks': ['everything']}))", "process"),
    "twice": ("forging(twice=True)", None),
    "nothing": ("forging(b'')", None),
    "half": ("forging(b'\\0\\0')", None),
    **{f"a nest of {depth}": (f"forging(text={NEST.format(depth=depth)})", "process") for depth in (900, 960, 980)},
    **{
        f"a nest of {depth} in the log": (
            f"forging(logged={{'input': {NEST.format(depth=depth)}, 'output': ''}})",
            None,
        )
        for depth in (900, 950, 970)
    },
}
"""What an interpreter can answer in place of the result of a step, and the control in which the trainer takes it for
a fault of ours or for the truth."""

REPLY_SIGNS = {"completed": Sign.COMPLETED, "passed": Sign.COMPLETED, "a text without end": Sign.TEXT}

ATTACKS = [
    *[
        Attack(kind="deaths", name=name, code=(code, "1"), sign=Sign.LOST, control=control)
        for name, (code, control) in DEATHS.items()
    ],
    *[
        Attack(
            kind="answers",
            name=name,
            code=f"apis.supervisor.complete_task(answer={value})",
            honest=("apis.supervisor.complete_task(answer='x')",),
            sign=Sign.LOST,
            control="open",
        )
        for name, value in ANSWERS.items()
    ],
    *[
        Attack(
            kind="logs",
            name=name,
            code=f"apis.simple_note.create_note({arguments}, content='x', access_token='x')",
            honest=SOLVED,
            sign=Sign.LOST,
            control=control,
        )
        for name, (arguments, control) in LOGS.items()
    ],
    *[
        Attack(kind="states", name=name, code=code, sign=Sign.LOST, control=control)
        for name, (code, control) in STATES.items()
    ],
    *[
        Attack(
            kind="messages", name=name, code=f"put(pipes[1], {m}, False)\npassing(0.3)", sign=Sign.LOST, control="open"
        )
        for name, m in MESSAGES.items()
    ],
    *[
        Attack(kind="messages", name=name, code=code, sign=Sign.LOST, control=None)
        for name, code in UNEXPECTED.items()
    ],
    *[Attack(kind="floods", name=name, code=code, sign=sign, control="open") for name, (code, sign) in FLOODS.items()],
    *[
        Attack(
            kind="replies",
            name=name,
            code=(FORGED + code, "print(1)"),
            honest=() if name in ("completed", "passed") else SOLVED,
            sign=REPLY_SIGNS.get(name, Sign.LOST),
            control=control,
        )
        for name, (code, control) in REPLIES.items()
    ],
]
