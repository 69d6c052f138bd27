"""Attempts at the machine and at what else runs on it: processes, memory, descriptors, output, sockets, signals."""

from tests.environments.attacks import Attack, Sign

PROCESSES = {
    "forks": (
        "for i in range(20):\n    if posix.fork() == 0:\n        posix.mkdir(f'{LOOT}/{i}')\n        posix._exit(0)"
    ),
    "forks of the C library": "if libc.fork() == 0:\n    posix.mkdir(f'{LOOT}/x')\n    posix._exit(0)",
    "a clone": (
        "number = {'x86_64': 56, 'aarch64': 220}[posix.uname().machine]\n"
        "if libc.syscall(number, 17, 0, 0, 0, 0) == 0:\n    posix.mkdir(f'{LOOT}/x')\n    posix._exit(0)"
    ),
    "a spawned program": "posix.posix_spawn('/bin/mkdir', ['mkdir', f'{LOOT}/x'], {})",
    "a program in its place": "posix.execv('/bin/mkdir', ['mkdir', f'{LOOT}/x'])",
    "a program by a shell": "libc.system(f'mkdir {LOOT}/x'.encode())",
}

RESOURCES = {
    "more memory than allowed": "piece = __import__('mmap').mmap(-1, 1 << 31)\nprint('WORKED')",
    "a file in memory": "fd = posix.memfd_create('x')\nposix.write(fd, b'x' * (1 << 20))\nprint('WORKED')",
    "a file in shared memory": (
        "path = f'/dev/shm/gvpo-{posix.getpid()}'\nfd = posix.open(path, 0o102, 0o600)\nposix.unlink(path)\n"
        "posix.write(fd, b'x' * (1 << 20))\nprint('WORKED')"
    ),
    "descriptors": "fds = [posix.dup(0) for _ in range(300)]\nprint('WORKED')",
    "descriptors by pairs of sockets": "pairs = [socket.socketpair() for _ in range(150)]\nprint('WORKED')",
    "higher limits": (
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "print('WORKED')"
    ),
    "a better place in the queue": "posix.nice(1)\nprint('WORKED')",
}

OUTPUT = {
    "a long text": ("print('x' * 2_000_000)", Sign.TEXT),
    "many texts": ("for _ in range(3_000):\n    print('x' * 1_000)", Sign.TEXT),
    "a long text in an error": ("raise Exception('x' * 2_000_000)", Sign.TEXT),
    "a long text to the log": (
        "for fd in (1, 2):\n    put(fd, b'output: a long text to the log' * 100_000)",
        Sign.LOG,
    ),
    "a file as long as it likes": ("fd = posix.open(f'{LOOT}/x', 0o101)\nput(fd, b'x' * 3_000_000)", Sign.LOOT),
}

SOCKETS = {
    "TCP": "s = socket.create_connection(('127.0.0.1', PORT), 5)\ns.sendall(ME)",
    "UDP": "s = socket.socket(type=socket.SOCK_DGRAM)\ns.sendto(ME, ('127.0.0.1', PORT))",
    "a Unix socket": "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\ns.sendto(ME, ADDRESS)",
    "an abstract Unix socket": (
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\ns.sendto(ME, f'\\0gvpo-{TRAINER}')"
    ),
    "an inherited pair": (
        "one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\none.sendto(ME, ADDRESS)"
    ),
    "the C library": (
        "fd = libc.socket(1, 2, 0)\nassert fd >= 0, ctypes.get_errno()\n"
        "where = (1).to_bytes(2, 'little') + ADDRESS.encode() + b'\\0'\n"
        "libc.sendto(fd, ME, len(ME), 0, where, len(where))"
    ),
    "an HTTP client": (
        "urllib = __import__('urllib.request').request\n"
        "request = urllib.Request(f'http://127.0.0.1:{PORT}/', headers={'X': ME.decode()})\n"
        "try:\n    urllib.urlopen(request, timeout=2)\n"
        "except Exception as error:\n    print(str(error))"
    ),
}

SIGNALS = {
    "kill": "posix.kill(VICTIM, 9)\npassing(0.2)",
    "a group": "posix.killpg(posix.getpgid(VICTIM), 0)\nposix.kill(VICTIM, 15)\npassing(0.2)",
    "the C library": "assert libc.kill(VICTIM, 15) == 0, ctypes.get_errno()\npassing(0.2)",
    "a queued signal": "assert libc.sigqueue(VICTIM, 15, None) == 0, ctypes.get_errno()\npassing(0.2)",
    "a descriptor of a process": (
        "fd = posix.pidfd_open(VICTIM)\nassert libc.syscall(424, fd, 9, 0, 0) == 0\npassing(0.2)"
    ),
    "a thread's signal": (
        "number = {'x86_64': 234, 'aarch64': 131}[posix.uname().machine]\n"
        "assert libc.syscall(number, VICTIM, VICTIM, 9) == 0, ctypes.get_errno()\npassing(0.2)"
    ),
    "a trace": (
        "assert libc.ptrace(16, VICTIM, None, None) == 0, ctypes.get_errno()\nposix.waitpid(VICTIM, 0x40000000)\n"
        "libc.ptrace(8, VICTIM, None, None)\npassing(0.2)"
    ),
    "a socket's owner": (
        "one, other = socket.socketpair()\nfcntl = __import__('fcntl')\nfcntl.fcntl(one, fcntl.F_SETOWN, VICTIM)\n"
        "fcntl.fcntl(one, 10, 9)\nfcntl.fcntl(one, fcntl.F_SETFL, fcntl.fcntl(one, fcntl.F_GETFL) | 0o20000)\n"
        "posix.write(other.fileno(), b'x')\npassing(0.2)"
    ),
}

ATTACKS = [
    *[Attack(kind="processes", name=name, code=code, sign=Sign.LOOT, wait_s=1.5) for name, code in PROCESSES.items()],
    *[Attack(kind="resources", name=name, code=code, sign=Sign.SAID) for name, code in RESOURCES.items()],
    *[Attack(kind="output", name=name, code=code, sign=sign) for name, (code, sign) in OUTPUT.items()],
    *[
        Attack(kind="sockets", name=name, code=f"ME = b'sockets: {name}'\n{code}", sign=Sign.HEARD, wait_s=0.2)
        for name, code in SOCKETS.items()
    ],
    *[Attack(kind="signals", name=name, code=code, sign=Sign.VICTIM) for name, code in SIGNALS.items()],
]
