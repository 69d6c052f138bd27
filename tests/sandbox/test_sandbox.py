"""The restriction of the interpreter that runs agent code, on the real kernel."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from gvpo_trl import sandbox
from gvpo_trl.environments.appworld.engine import boot
from gvpo_trl.sandbox.self_test import attempts
from tests.environments.support import wait_until

WORKER = Path(__file__).with_name("sandbox_worker.py")
SUPPORT = sandbox.probe()
restrictable = pytest.mark.skipif(SUPPORT.level != "full", reason="; ".join(SUPPORT.missing))
USERS = ("root", "nobody") if SUPPORT.setuid else ("self",)
"""Who forks: root, whose interpreter becomes an ordinary user, and an ordinary user, whose interpreter stays one."""

CALL = """
import errno
def call(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""

FORBIDDEN = {
    "read the planted file": "open(planted).read()",
    "read it by a detour": "open('/proc/self/root' + planted).read()",
    "read it by its folder": "os.open('planted', os.O_RDONLY, dir_fd=os.open(folder, os.O_PATH))",
    "read it by a descriptor of its path": "open(f'/proc/self/fd/{os.open(planted, os.O_PATH)}').read()",
    "list its folder": "os.listdir(folder)",
    "read the parent's environment": "open(f'/proc/{parent}/environ').read()",
    "read the parent's memory": "open(f'/proc/{parent}/mem', 'rb')",
    "read its own environment": "open('/proc/self/environ').read()",
    "open its own memory": "open('/proc/self/mem', 'rb')",
    "list the parent's descriptors": "os.listdir(f'/proc/{parent}/fd')",
    "list its own descriptors": "os.listdir('/proc/self/fd')",
    "write here": "open(f'new-{os.getpid()}', 'w')",
    "write in /tmp": "import tempfile; tempfile.TemporaryFile(dir='/tmp')",
    "write to a file that is there": "open('victim', 'a')",
    "write to the null device": "open('/dev/null', 'w')",
    "write in a permitted folder": "open(f'permitted/new-{os.getpid()}', 'w')",
    "write to a permitted file": "open('permitted/text', 'a')",
    "truncate while opening": "os.open('victim', os.O_RDONLY | os.O_TRUNC)",
    "truncate": "os.truncate('victim', 0)",
    "a file in memory": "os.memfd_create('x')",
    "a folder": "os.mkdir(f'folder-{os.getpid()}')",
    "a pipe with a name": "os.mkfifo(f'pipe-{os.getpid()}')",
    "a link": "os.link(planted, f'link-{os.getpid()}')",
    "a symbolic link": "os.symlink(planted, f'symlink-{os.getpid()}')",
    "rename": "os.rename('renamed', 'renamed')",
    "delete": "os.unlink(f'deleted-{parent}')",
    "change a mode": "os.chmod(planted, 0o644)",
    "change an owner": "os.chown(planted, -1, -1)",
    "change a time": "os.utime(planted)",
    "change folder": "os.chdir('/')",
    "a Unix socket": "socket.socket(socket.AF_UNIX)",
    "a TCP socket": "socket.socket(socket.AF_INET)",
    "a UDP socket": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "a kernel socket": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "a pair of datagram sockets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "send to an address": "datagram.sendto(b'x', server)",
    "send a message to an address": "datagram.sendmsg([b'x'], [], 0, server)",
    "connect": "datagram.connect(server)",
    "fork": "os.fork() or os._exit(0)",
    "spawn": "os.waitpid(os.posix_spawn('/proc/self/exe', ['python', '-c', ''], {}), 0)",
    "exec": "try: os.execv('/nonexistent', ['x'])\nexcept FileNotFoundError: pass",
    "a thread": "threading.Thread(target=int).start()",
    "signal the parent": "os.kill(parent, 0)",
    "signal itself": "os.kill(os.getpid(), 0)",
    "signal its group": "os.killpg(0, 0)",
    "signal its thread": "signal.pthread_kill(threading.get_ident(), 0)",
    "a descriptor of the parent": "os.pidfd_open(parent)",
    "queue a signal": "call(libc.sigqueue(parent, 0, None))",
    "trace the parent": "call(libc.ptrace(0x4206, parent, None, None))",
    "copy the parent's memory": (
        "piece = ctypes.create_string_buffer(8)\n"
        "class Vector(ctypes.Structure): _fields_ = [('at', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
        "here = Vector(ctypes.addressof(piece), 8); there = Vector(id(None), 8)\n"
        "call(libc.process_vm_readv(parent, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))"
    ),
    "set a limit": "import resource as r; r.setrlimit(r.RLIMIT_CPU, r.getrlimit(r.RLIMIT_CPU))",
    "set a limit of its own by pid": "import resource as r; r.prlimit(0, r.RLIMIT_CPU, r.getrlimit(r.RLIMIT_CPU))",
    "read the parent's limit": "import resource as r; r.prlimit(parent, r.RLIMIT_CPU)",
    "become another user": "os.setresuid(os.getuid(), os.getuid(), os.getuid())",
    "prctl": "call(libc.prctl(4, 1, 0, 0, 0))",
    "unshare": "call(libc.unshare(0))",
    "new machine code": "mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)",
    "machine code made of data": (
        "page = mmap.mmap(-1, 4096); at = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "call(libc.mprotect(ctypes.c_void_p(at), 4096, 5))"
    ),
    "own a pipe's signals": "fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())",
    "choose a pipe's signal": "fcntl.fcntl(pipe, 10, 0)",
    "watch a folder": "fcntl.fcntl(os.open('permitted', os.O_RDONLY), fcntl.F_NOTIFY, 1)",
    "lease a file": "fcntl.fcntl(os.open('permitted/text', os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "ask a pipe for its signals": "fcntl.ioctl(pipe, 0x5452, b'\\0\\0\\0\\0')",
}
"""What works in any process and must be refused in a restricted one."""

OTHER_ERRORS = {"a thread": "RuntimeError: can't start new thread", "set a limit": "ValueError: not allowed to raise"}
"""Where Python turns the kernel's refusal into something else than a `PermissionError`."""

ALLOWED = {
    "print": "print('x', file=os.fdopen(os.dup(1), 'w'))",
    "data": (
        "import json, datetime, decimal, re, zoneinfo\n"
        "assert json.loads(json.dumps({'a': [1.5, None]})) == {'a': [1.5, None]}\n"
        "assert datetime.datetime.now().year > 2000 and datetime.datetime.now().astimezone().tzinfo\n"
        "assert str(decimal.Decimal(1) / 3).startswith('0.333') and re.sub('a+', 'b', 'caat') == 'cbt'"
    ),
    "read a permitted file": "assert open('permitted/text').read() == 'text'",
    "list a permitted folder": "assert 'text' in os.listdir('permitted')",
    "randomness": "import random, uuid; random.SystemRandom().random(), uuid.uuid4(); open('/dev/urandom').fileno()",
    "import": "import colours; assert colours.ONE_SIXTH",
    "import of machine code": "import _testbuffer",
    "recursion": "def f(): f()\ntry: f()\nexcept RecursionError: pass\nelse: assert False",
    "one object too large": "try: bytearray(1 << 40)\nexcept MemoryError: pass\nelse: assert False",
    "objects too many": (
        "rows = []\n"
        "try:\n    for _ in range(100): rows.append(bytearray(1 << 25))\n"
        "except MemoryError: assert len(rows) > 5\n"
        "else: assert False"
    ),
    "time-out of a loop": (
        "def ring(*_): raise TimeoutError\n"
        "signal.signal(signal.SIGALRM, ring); signal.alarm(1)\n"
        "try:\n    while True: sum(range(100))\n"
        "except TimeoutError: pass"
    ),
    "time-out of a sleep": (
        "import time\n"
        "def ring(*_): raise TimeoutError\n"
        "signal.signal(signal.SIGALRM, ring); signal.setitimer(signal.ITIMER_REAL, 0.05)\n"
        "try: time.sleep(50)\nexcept TimeoutError: pass\nelse: assert False"
    ),
    "asyncio": (
        "import asyncio\n"
        "async def both():\n"
        "    return await asyncio.gather(asyncio.sleep(0.01, 1), asyncio.wait_for(asyncio.sleep(0, 2), 9))\n"
        "loop = asyncio.new_event_loop()\n"
        "assert loop.run_until_complete(both()) == [1, 2]\n"
        "loop.close()"
    ),
    "locks": "lock = threading.Lock(); lock.acquire(); assert not lock.acquire(timeout=0.01)",
    "a pair of sockets": (
        "one, other = socket.socketpair(); one.settimeout(1); one.sendall(b'abc'); assert other.recv(3) == b'abc'\n"
        "import select; assert not select.select([other], [], [], 0)[0]; one.close(); other.close()"
    ),
    "its own limits": "import resource; assert resource.getrlimit(resource.RLIMIT_NOFILE)",
    "self-test": "found = sandbox.self_test(planted, layers, kept); assert not found, found",
}
"""What agent code may do, or the machinery around it does."""


@pytest.fixture(scope="module")
def folder():
    """A folder that every user can enter, with a planted file, a victim and a permitted folder, all nobody's."""
    path = Path(tempfile.mkdtemp(prefix="sandbox-"))
    (path / "permitted").mkdir()
    for name in ("planted", "victim", "renamed", "permitted/text"):
        (path / name).write_text("text")
    shutil.copy(Path(sysconfig.get_path("stdlib")) / "colorsys.py", path / "permitted" / "colours.py")
    if extension():
        shutil.copy(extension(), path / "permitted")
    for entry in (path, *path.rglob("*")):
        entry.chmod(0o755 if entry.is_dir() else 0o644)
        if SUPPORT.setuid:
            os.chown(entry, sandbox.NOBODY, sandbox.NOBODY)
    yield path
    shutil.rmtree(path)


def extension() -> Path | None:
    """A module in machine code of the standard library that nothing here imports; some Pythons come without."""
    spec = importlib.util.find_spec("_testbuffer")
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".so") else None


def run_worker(
    folder: Path, user: str, restricted: bool, snippets: dict[str, str], lacks=(), files: bool = True
) -> dict[str, str | None]:
    """What became of each piece of code; see the worker."""
    work = {"boot": boot.__file__, "user": user, "restricted": restricted, "folder": str(folder)}
    work |= {"lacks": lacks, "files": files}
    command = [sys.executable, "-I", "-B", str(WORKER)]
    text = json.dumps(work | {"snippets": snippets})
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def outcomes(folder):
    """(user, restricted) -> name of a piece of code -> what became of it. Each worker runs once."""
    ran = {}

    def run(user: str, restricted: bool) -> dict[str, str | None]:
        if (user, restricted) not in ran:
            snippets = {name: CALL + code for name, code in FORBIDDEN.items()}
            snippets["use an inherited descriptor"] = "os.pread(inherited, 1, 0)"
            snippets |= ALLOWED if restricted else {}
            ran[user, restricted] = run_worker(folder, user, restricted, snippets)
        return ran[user, restricted]

    return run


@restrictable
@pytest.mark.parametrize("name", FORBIDDEN)
@pytest.mark.parametrize("user", USERS)
def test_what_is_forbidden_is_refused_and_works_elsewhere(outcomes, user, name):
    assert outcomes(user, False)[name] is None
    assert (outcomes(user, True)[name] or "").startswith(OTHER_ERRORS.get(name, "PermissionError: [Errno"))


HIDDEN = {
    "look up": "os.stat(planted)",
    "look up without following links": "os.lstat(planted)",
    "look up in a folder": "os.stat('planted', dir_fd=os.dup(0), follow_symlinks=False)",
    "ask whether it exists": "assert os.access(planted, os.F_OK), 'No such file'",
    "ask pathlib whether it exists": "import pathlib; assert pathlib.Path(planted).exists(), 'No such file'",
    "ask os.path whether it exists": "assert os.path.exists(planted), 'No such file'",
    "ask for its size": "os.path.getsize(planted)",
    "ask for a time of access": "os.stat('permitted/text').st_atime_ns",
    "read a link": "os.readlink(planted)",
    "look up by the C library": (
        "number = {'x86_64': 262, 'aarch64': 79}[os.uname().machine]\n"
        "room = ctypes.create_string_buffer(256)\n"
        "assert 0 in [libc.syscall(number, -100, planted.encode(), room, f) for f in (0, 256, 4096)], 'No such file'"
    ),
}
"""What tells of a file without opening it, and finds none in a process that no file is left readable to."""
NOT_OPENED = {
    "read the planted file": "open(planted).read()",
    "read a permitted file": "open('permitted/text').read()",
    "list a permitted folder": "os.listdir('permitted')",
    "read a device": "open('/dev/null').read()",
}


@restrictable
@pytest.mark.parametrize("user", USERS)
def test_without_readable_files_nothing_opens_and_no_path_exists(folder, user):
    hidden = HIDDEN | NOT_OPENED
    snippets = hidden | {name: ALLOWED[name] for name in ("print", "recursion", "asyncio", "locks")}
    snippets["self-test"] = ALLOWED["self-test"].replace("kept)", "kept, files=False)")
    outcomes = run_worker(folder, user, True, snippets, files=False)
    for name in hidden:
        assert "No such file" in (outcomes[name] or ""), (name, outcomes[name])
    assert {name: outcomes[name] for name in snippets.keys() - hidden.keys() if outcomes[name]} == {}
    ordinary = run_worker(folder, user, False, hidden)
    ordinary.pop("look up in a folder"), ordinary.pop("read a link")
    assert set(ordinary.values()) == {None}


@restrictable
@pytest.mark.parametrize("user", USERS)
def test_the_self_test_finds_that_files_can_be_looked_up(folder, user):
    code = "found = sandbox.self_test(planted, layers, kept, files=False)\nassert not found, found"
    found = run_worker(folder, user, True, {"self-test": code})["self-test"]
    assert found is not None and f"look up {folder}/planted: worked" in found


@restrictable
def test_seccomp_alone_keeps_files_closed(folder):
    outcomes = run_worker(folder, USERS[-1], True, HIDDEN | NOT_OPENED, lacks=("landlock", "setuid"), files=False)
    assert all("No such file" in (outcome or "") for outcome in outcomes.values()), outcomes


READS = tuple(FORBIDDEN)[:11]
WRITES = tuple(FORBIDDEN)[11:17]
"""Of what is forbidden, what Landlock alone shuts, and what both do."""


@restrictable
def test_each_layer_holds_alone(folder):
    """A kernel that lacks the other one: nothing that a layer shuts leans on the other's being there."""
    snippets = {name: CALL + code for name, code in FORBIDDEN.items()} | {"layers": "raise ValueError(*layers)"}
    landlock = run_worker(folder, USERS[-1], True, snippets, lacks=("seccomp", "setuid"))
    assert landlock["layers"] == f"ValueError: ('rlimits', 'landlock-{SUPPORT.landlock_abi}')"
    for name in READS + WRITES:
        assert (landlock[name] or "").startswith("PermissionError"), name
    seccomp = run_worker(folder, USERS[-1], True, snippets, lacks=("landlock", "setuid"))
    assert seccomp["layers"] == "ValueError: ('rlimits', 'seccomp')"
    assert seccomp["read the planted file"] is None
    for name in FORBIDDEN.keys() - set(READS):
        assert (seccomp[name] or "").startswith(OTHER_ERRORS.get(name, "PermissionError")), name


@restrictable
@pytest.mark.parametrize("user", USERS)
def test_inherited_descriptors_are_closed(outcomes, user):
    assert outcomes(user, False)["use an inherited descriptor"] is None
    assert outcomes(user, True)["use an inherited descriptor"] == "OSError: [Errno 9] Bad file descriptor"


@restrictable
@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("user", USERS)
def test_what_agent_code_needs_works(outcomes, user, name):
    if name == "import of machine code" and extension() is None:
        pytest.skip("this Python comes without that module")
    assert outcomes(user, True)[name] is None


@restrictable
@pytest.mark.parametrize("user", USERS)
def test_the_self_test_finds_everything_where_nothing_is_shut(folder, user):
    code = "print(sandbox.self_test(planted, ('landlock-1', 'seccomp'), ()), file=open('findings', 'w'))"
    assert run_worker(folder, user, False, {"all": code}) == {"all": None}
    findings = (folder / "findings").read_text()
    (folder / "findings").unlink()
    for what, _, _ in attempts(f"{folder}/planted", 1):
        assert re.search(f"['\"]{re.escape(what)}: (worked|not refused, but )", findings), (what, findings)
    assert "descriptor 3 is open" in findings


@restrictable
@pytest.mark.parametrize("user", USERS)
def test_the_self_test_tries_only_what_a_layer_in_force_shuts_and_needs_the_planted_file(folder, user):
    no_layer = (
        "found = sandbox.self_test(planted, ('rlimits',), kept)\n"
        "assert all(line.startswith('descriptor') for line in found), found"
    )
    missing = (
        "found = sandbox.self_test(folder + '/nothing', layers, kept)\n"
        "assert len(found) == 1 and found[0].startswith(f'read {folder}/nothing: not refused, but'), found"
    )
    assert run_worker(folder, user, False, {"no layer": no_layer}) == {"no layer": None}
    assert run_worker(folder, user, True, {"missing": missing}) == {"missing": None}


LIVE = """
import os, runpy, sys, time
runpy.run_path(sys.argv[1])["load_package"]()
from gvpo_trl import sandbox
parent = os.getpid()
if (child := os.fork()) == 0:
    layers = sandbox.restrict(keep_fds=(1,), read_only=(), memory_bytes=0, parent=parent)
    print(os.getpid(), *layers, flush=True)
    time.sleep(60)
    os._exit(0)
os.waitpid(child, 0)
"""


@restrictable
def test_the_interpreter_has_no_identity_no_privilege_and_dies_with_its_host():
    command, groups = [sys.executable, "-I", "-c", LIVE, boot.__file__], [4242] if SUPPORT.setuid else None
    host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, extra_groups=groups)
    try:
        pid, *layers = host.stdout.readline().split()
        assert tuple(layers) == SUPPORT.layers
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        user, group = (sandbox.NOBODY, sandbox.NOBODY) if SUPPORT.setuid else (os.getuid(), os.getgid())
        assert status["Uid"].split() == [str(user)] * 4
        assert status["Gid"].split() == [str(group)] * 4
        assert not SUPPORT.setuid or status["Groups"].split() == []
        assert {int(status[f"Cap{kind}"], 16) for kind in ("Eff", "Prm", "Inh", "Amb")} == {0}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert Path(f"/proc/{pid}/environ").stat().st_uid == 0, "what can be dumped belongs to its user"
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert re.search(r"Max open files +64 +64 ", limits) and re.search(r"Max file size +0 +0 ", limits)
    finally:
        host.kill()
        host.wait()
        host.stdout.close()

    def ended() -> bool:
        try:
            return ") Z " in Path(f"/proc/{pid}/stat").read_text()
        except FileNotFoundError:
            return True

    assert wait_until(ended)


REFUSALS = {
    "the parent is gone": ("parent=1, read_only=[]", "ProcessLookupError: [Errno 3] the parent, process 1, is gone"),
    "one path": ("parent=os.getppid(), read_only='/usr'", "TypeError: read_only='/usr' must be a list of paths"),
    "threads": ("parent=os.getppid(), read_only=[]", "RuntimeError: the process to restrict has 2 threads"),
}


@restrictable
@pytest.mark.parametrize("name", REFUSALS)
def test_a_restriction_that_cannot_be_made_is_an_error(folder, name):
    arguments, message = REFUSALS[name]
    thread = "threading.Thread(target=signal.pause, daemon=True).start()\n" if name == "threads" else ""
    code = f"{thread}sandbox.restrict(keep_fds=(0, 1, 2, pipe), memory_bytes=0, {arguments})"
    assert (run_worker(folder, USERS[0], False, {name: code})[name] or "").startswith(message)
