"""Programs in the sandbox: what they may do, and what every kind of isolation keeps them from."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forethought.errors import ForethoughtError, IsolationError, ParameterError
from forethought.sandbox import sandbox
from forethought.sandbox.sandbox import SAFE, Isolation, Sandbox, SandboxResult, why_not

MEBIBYTE = 2**20


@pytest.fixture(scope="module", params=SAFE)
def kind(request: pytest.FixtureRequest) -> Isolation:
    why = why_not(request.param)
    if why is not None:
        pytest.skip(f"no {request.param} on this machine: {why}")
    return request.param


@pytest.fixture(scope="module")
def box(kind: Isolation) -> Sandbox:
    return of_kind(kind, time_limit=20.0)


def of_kind(kind: Isolation, **limits: float) -> Sandbox:
    """A sandbox with this kind of isolation, whatever the machine allows."""
    made = Sandbox(unsafe=True, **limits)
    made.isolation = kind
    return made


REFUSED = {"EPERM", "EACCES", "ENOENT", "EROFS"}


def attempted(box: Sandbox, statements: Sequence[str], before: str = "") -> dict[str, str]:
    """The name of the error that each statement fails with, all of them in one program."""
    source = (
        f"import errno, fcntl, os, resource, socket, subprocess, multiprocessing\n{before}\n"
        f"for statement in {list(statements)!r}:\n"
        "    try: exec(statement)\n"
        "    except OSError as error: print(errno.errorcode[error.errno])\n"
        "    else: print('nothing')"
    )
    result = box.run(source)
    assert result.status == "ok", result
    return dict(zip(statements, result.stdout.split(), strict=True))


def refused(box: Sandbox, *statements: str, before: str = "") -> None:
    """Every statement is refused by the operating system."""
    found = attempted(box, statements, before)
    assert {name: raised for name, raised in found.items() if raised not in REFUSED} == {}


# ---- what a program may do -----------------------------------------------------------------------


def test_a_program_reads_its_input_and_its_output_comes_back(box: Sandbox) -> None:
    result = box.run("import sys\nprint(input()[::-1])\nprint('ä', file=sys.stderr)", "olleh\nmore")
    assert (result.status, result.exit_code) == ("ok", 0)
    assert (result.stdout, result.stderr) == ("hello\n", "ä\n")
    assert result.seconds < 20.0


def test_an_exception_comes_back_as_its_traceback_in_the_program_alone(box: Sandbox) -> None:
    result = box.run("def divide():\n    1 / 0\n\ndivide()\n")
    assert (result.status, result.exit_code) == ("error", 1)
    assert result.stderr.splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "program.py", line 4, in <module>',
        "    divide()",
    ]
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "sandbox_process" not in result.stderr


@pytest.mark.parametrize(
    ("source", "status", "code"),
    [
        ("import sys; sys.exit(5)", "error", 5),
        ("import sys; sys.exit()", "ok", 0),
        ("import sys; sys.exit('bye')", "error", 1),
        ("import os; os._exit(3)", "error", 3),
        ("def (", "error", 1),
        ("print(1)\0", "error", 1),
        ("", "ok", 0),
        ("import ctypes; ctypes.string_at(0)", "error", -signal.SIGSEGV),
        ("import os; os.abort()", "error", -signal.SIGABRT),
    ],
)
def test_how_a_program_ends_is_told(box: Sandbox, source: str, status: str, code: int) -> None:
    result = box.run(source)
    assert (result.status, result.exit_code) == (status, code)


@pytest.mark.parametrize(
    "source",
    [
        "import ctypes, decimal, hashlib, json, sqlite3, ssl, zlib",
        "import threading; t = threading.Thread(target=print); t.start(); t.join()",
        "import asyncio; asyncio.run(asyncio.sleep(0.001))",
        "import tempfile; f = tempfile.TemporaryFile(); f.write(b'x'); f.flush()",
        "open('a', 'w').write('x'); assert open('a').read() == 'x'\n"
        "import os; os.rename('a', 'b'); assert os.listdir('.') == ['b']; os.unlink('b')",
        "open('/dev/null', 'w').write('x'); assert open('/dev/null').read() == ''",
        "import os; assert len(os.urandom(8)) == 8 and os.cpu_count()",
        "import signal, os; signal.signal(10, lambda *_: print(1)); os.kill(os.getpid(), 10)",
        "import random, time; time.sleep(0.001); random.random()",
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nassert A(1).x == 1",
        "import pickle\nclass A: pass\npickle.loads(pickle.dumps(A()))",
    ],
)
def test_the_standard_library_works(box: Sandbox, source: str) -> None:
    result = box.run(source)
    assert result.status == "ok", result


def test_hashes_of_texts_are_the_same_in_every_run(box: Sandbox) -> None:
    assert box.run("print({'a', 'b', 'c'})").stdout == box.run("print({'a', 'b', 'c'})").stdout


# ---- other processes -----------------------------------------------------------------------------


def test_a_program_starts_no_other(box: Sandbox) -> None:
    refused(
        box,
        "while True: os.fork()",
        "if os.fork() == 0: os.setsid()",
        "os.posix_spawn('/bin/sh', ['sh'], {})",
        "subprocess.Popen(['sleep', '60'], start_new_session=True)",
        "subprocess.run('sleep 60 &', shell=True)",
        "multiprocessing.get_context('fork').Process(target=print).start()",
        "os.execv('/bin/sh', ['sh'])",
        "os.setsid()",
        "os.setpgid(0, 0)",
    )


def test_it_does_not_reach_its_parent(box: Sandbox) -> None:
    refused(
        box,
        "os.kill(os.getppid(), 9)",
        "os.kill(os.getppid(), 0)",
        "os.killpg(os.getpgid(os.getppid()), 9)",
        "os.kill(0, 9)",
        "os.kill(-1, 9)",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "os.pidfd_open(os.getppid())",
        "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
        "fcntl.fcntl(os.pipe()[0], 10, 9)",
        "fcntl.ioctl(os.pipe()[0], 0x8901, b'1234')",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    )


def test_it_reads_neither_memory_nor_variables_of_its_parent(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETHOUGHT_SECRET", "hunter2")
    shown = box.run("import os; print(dict(os.environ))")
    assert shown.status == "ok"
    assert "hunter2" not in shown.stdout
    files = ("environ", "mem", "maps", "cmdline", "fd/0")
    refused(box, *(f"open(f'/proc/{{os.getppid()}}/{file}', 'rb').read()" for file in files))


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86-64")
def test_system_calls_that_lead_outside_are_refused(box: Sandbox) -> None:
    """Such as ptrace, process_vm_readv, clone, socket, setuid, mount, bpf, io_uring_setup."""
    numbers = [101, 310, 311, 57, 58, 41, 42, 105, 160, 165, 272, 321, 425, 434, 438, 248, 298, 319]
    result = box.run(
        "import ctypes, os; c = ctypes.CDLL(None, use_errno=True)\n"
        f"for n in {numbers}: print(c.syscall(n, os.getppid(), 0, 0, 0, 0), ctypes.get_errno())\n"
        "print(c.syscall(56, 17, 0, 0, 0, 0), ctypes.get_errno())"  # a clone that is no thread
    )
    assert result.stdout == "-1 1\n" * (len(numbers) + 1)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="they are those of x86-64")
@pytest.mark.parametrize("code", ["b8 02000000 cd80 c3", "b8 39000040 0f05 c3"])
def test_other_kinds_of_system_calls_are_no_way_round(box: Sandbox, code: str) -> None:
    """fork by the interface of 32 bits (int 0x80), and by that of x32."""
    result = box.run(
        "import ctypes, mmap\n"
        "m = mmap.mmap(-1, 4096, prot=7)\n"
        f"m.write(bytes.fromhex({code!r}))\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "print(ctypes.CFUNCTYPE(ctypes.c_long)(at)())"
    )
    assert result.exit_code < 0 or result.stdout == "-1\n", result


# ---- network -------------------------------------------------------------------------------------


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def test_it_reaches_no_socket_of_this_machine(box: Sandbox, listening: socket.socket) -> None:
    address = listening.getsockname()
    refused(box, f"socket.create_connection({address!r}, timeout=1)")
    with pytest.raises(BlockingIOError):
        listening.accept()


def test_it_makes_no_socket_that_leads_outside(box: Sandbox) -> None:
    refused(
        box,
        "socket.socket()",
        "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "socket.socketpair()[0].connect('/run/any')",
        "socket.create_server(('127.0.0.1', 0))",
    )


# ---- files ---------------------------------------------------------------------------------------


def test_it_reaches_no_file_but_its_own(box: Sandbox, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    before = file.stat()
    refused(
        box,
        "open('/etc/passwd').read()",
        "os.listdir('/etc')",
        "open(FILE).read()",
        "open(FILE, 'r+').write('y')",
        "os.truncate(FILE, 0)",
        "os.unlink(FILE)",
        "os.rename(FILE, 'mine')",
        "os.link(FILE, 'mine')",
        "os.symlink(FILE, 'mine') or open('mine').read()",
        "os.chmod(FILE, 0o777)",
        "os.utime(FILE, (0, 0))",
        "os.setxattr(FILE, 'user.x', b'y')",
        "os.listdir(os.path.dirname(FILE))",
        "open(os.path.dirname(FILE) + '/new', 'w')",
        "os.mkdir(os.path.dirname(FILE) + '/new')",
        "open(PACKAGE).read()",
        "open(os.__file__, 'a')",
        "open(os.path.dirname(os.__file__) + '/new.py', 'w')",
        "open('/dev/mem', 'rb')",
        "open('/proc/self/mem', 'rb')",
        "os.mkdir('directory')",
        before=f"FILE, PACKAGE = {str(file)!r}, {sandbox.__file__!r}",
    )
    assert file.read_text() == "x"
    assert (file.stat().st_mode, file.stat().st_mtime) == (before.st_mode, before.st_mtime)
    assert os.listdir(tmp_path) == ["file"]


def test_the_owner_of_pythons_files_cannot_write_them_either(kind: Isolation) -> None:
    """As a container's superuser, who owns them and may not mount without a user namespace."""
    program = "import errno, os\ntry: open(os.__file__, 'a')\nexcept OSError as e: print(e.errno)"
    code = (
        "import ctypes, os, sys\n"
        "if len(sys.argv) == 1:\n"
        "    ctypes.CDLL(None).prctl(24, 21, 0, 0, 0)  # CAP_SYS_ADMIN is not gained by exec\n"
        "    os.execv(sys.executable, [sys.executable, '-c', os.environ['CODE'], 'again'])\n"
        "from forethought.sandbox.sandbox import Sandbox\n"
        f"box = Sandbox(unsafe=True); box.isolation = {kind!r}\n"
        f"print(box.run({program!r}).stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CODE": code},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert int(done.stdout) == (errno.EROFS if kind == "namespaces" else errno.EACCES)


def test_the_home_directory_is_not_there(box: Sandbox) -> None:
    """Of the way to Python's own files there may be the directories alone."""
    home = str(Path.home())
    result = box.run(
        "import os\n"
        f"try: print([e.name for e in os.scandir({home!r}) if not e.is_dir()])\n"
        "except OSError: print([])\n"
        f"try: open('{home}/new', 'w')\n"
        "except OSError: print('refused')"
    )
    assert result.stdout == "[]\nrefused\n"


def test_nothing_is_left_of_a_program(box: Sandbox, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    assert box.run("for i in range(9): open(str(i), 'w').write('x' * 999)").status == "ok"
    assert box.run("import os; print(os.listdir('.'))").stdout == "[]\n"
    assert os.listdir(tmp_path) == []


def test_of_open_files_it_has_the_three_streams_alone(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    with (tmp_path / "secret").open() as secret:
        os.set_inheritable(secret.fileno(), True)
        result = box.run(
            "import os\n"
            "for number in range(3, 64):\n"
            "    try: os.fstat(number)\n"
            "    except OSError: continue\n"
            "    print(number)"
        )
    assert (result.status, result.stdout) == ("ok", "")


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal\nfor s in (1, 2, 14, 15, 24): signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "input_ = 'a' * 40 + 'b'\nimport re; re.match('(a+)+$', input_)",
        "2 ** (10 ** 12)" if sys.maxsize < 0 else "sum(range(10 ** 12))",
    ],
    ids=["loop", "sleep", "signals", "thread", "regex", "in C"],
)
def test_a_program_that_does_not_end_is_ended(kind: Isolation, source: str) -> None:
    began = time.monotonic()
    result = of_kind(kind, time_limit=0.5).run(source)
    assert result.status == "timeout"
    assert "out of time" in result.stderr
    assert 0.5 <= result.seconds < 50.0  # and not 60
    assert time.monotonic() - began < 200.0


def test_memory_is_limited(box: Sandbox) -> None:
    assert box.run("bytearray(10 ** 10)").status == "memory"
    assert box.run("x = []\nwhile True: x.append(bytearray(10 ** 7))").status == "memory"
    assert box.run("import mmap; mmap.mmap(-1, 10 ** 10)").status == "error"
    survived = "try: bytearray(10 ** 10)\nexcept MemoryError: print('went on')"
    assert box.run(survived).stdout == "went on\n"


def test_a_limit_cannot_be_raised_from_inside(box: Sandbox) -> None:
    result = box.run("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))")
    assert "not allowed to raise maximum limit" in result.stderr


def test_of_huge_output_the_beginning_and_the_end_are_kept(kind: Isolation) -> None:
    result = of_kind(kind, output_limit=1000).run("print('begin' + 10 ** 6 * 'x' + 'end')")
    assert result.status == "ok"
    assert result.stdout.startswith("beginxx")
    assert result.stdout.endswith("xxend\n")
    assert "\n[999009 bytes left out]\n" in result.stdout
    assert len(result.stdout) < 1100


def test_endless_output_ends_the_program(kind: Isolation) -> None:
    result = of_kind(kind, disk_limit=MEBIBYTE).run("while True: print('x' * 1000)")
    assert result.status == "error"
    assert "File too large" in result.stderr
    assert len(result.stdout) < 70_000


@pytest.mark.parametrize(
    "source",
    [
        "f = open('a', 'wb')\nwhile True: f.write(bytes(10 ** 5)); f.flush()",
        "i = 0\nwhile True:\n    i += 1; open(str(i), 'wb').write(bytes(10 ** 5))",
        "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "import os\nwhile True: os.dup(0)",
    ],
    ids=["file", "files", "threads", "open files"],
)
def test_a_program_cannot_use_the_machine_up(kind: Isolation, source: str) -> None:
    result = of_kind(kind, disk_limit=MEBIBYTE, time_limit=20.0).run(source)
    assert result.status == "error", result
    assert result.stderr


@pytest.mark.slow
def test_all_attacks_at_once_leave_the_parent_alive(kind: Isolation) -> None:
    attacks = [
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "x = []\nwhile True: x.append(bytearray(10 ** 7))",
        "while True: print('x' * 10 ** 6)",
        "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "i = 0\nwhile True:\n    i += 1; open(str(i), 'w').close()",
        "import os\nwhile True:\n    try: os.kill(-1, 9)\n    except OSError: pass",
    ]
    box = of_kind(kind, time_limit=3.0)
    with ThreadPoolExecutor(24) as threads:
        results = list(threads.map(box.run, 8 * attacks))
    assert not [result for result in results if result.status == "ok"]
    assert box.run("print(1)").stdout == "1\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time_limit", 0),
        ("time_limit", float("nan")),
        ("time_limit", "10"),
        ("memory_limit", 1000),
        ("disk_limit", 0),
        ("output_limit", 0),
        ("max_running", 0),
        ("max_running", True),
    ],
)
def test_a_limit_out_of_its_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ParameterError, match=name):
        Sandbox(**{name: value})


# ---- many at once, and ends ----------------------------------------------------------------------


def test_no_more_programs_run_at_once_than_allowed(kind: Isolation) -> None:
    source = "import time; print(time.monotonic()); time.sleep(0.05); print(time.monotonic())"
    box = of_kind(kind, max_running=2)
    with ThreadPoolExecutor(6) as threads:
        results: list[SandboxResult] = list(threads.map(box.run, 6 * [source]))
    spans = [tuple(map(float, result.stdout.split())) for result in results]
    assert len(spans) == 6
    for begin, _ in spans:
        assert sum(first <= begin < last for first, last in spans) <= 2


def test_an_interrupt_ends_the_program_and_frees_its_place(
    kind: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = of_kind(kind, max_running=1)
    started: list[int] = []

    def interrupted(self: object, *_: object) -> None:
        started.append(self._popen.pid)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sandbox._Process, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            box.run("while True: pass")
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
    assert box.run("print(1)").stdout == "1\n"


def test_a_program_ends_with_a_parent_that_is_killed(kind: Isolation, tmp_path: Path) -> None:
    code = (
        "from forethought.sandbox.sandbox import Sandbox\n"
        f"box = Sandbox(unsafe=True, time_limit=600.0); box.isolation = {kind!r}\n"
        "print(flush=True)\n"
        "box.run('while True: pass')"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"\n"
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    child = _until(lambda: children.read_text().split())[0]
    _until(lambda: "Seccomp:\t2" in Path(f"/proc/{child}/status").read_text())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _until(lambda: not _is_alive(int(child)))


def _until(condition, seconds: float = 100.0):
    """The first true value of ``condition``."""
    ended, deadline = threading.Event(), time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        ended.wait(0.005)
    return found


def _is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


# ---- where it cannot be had ----------------------------------------------------------------------


def test_a_machine_without_isolation_is_refused_with_what_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "why_not", lambda kind: f"{kind} is forbidden")
    with pytest.raises(IsolationError, match=r"landlock is forbidden.*--unsafe-code"):
        Sandbox()


def test_unsafe_takes_the_best_that_there_is_and_says_so(monkeypatch, caplog) -> None:
    monkeypatch.setattr(sandbox, "why_not", lambda kind: None if kind == "none" else "forbidden")
    box = Sandbox(unsafe=True, time_limit=0.5)
    assert box.isolation == "none"
    assert "not isolated" in caplog.text
    assert box.run("import os; os.mkdir('d'); print(1)").stdout == "1\n"
    assert box.run("while True: pass").status == "timeout"
    assert box.run("bytearray(10 ** 10)").status == "memory"
    monkeypatch.undo()
    assert Sandbox(unsafe=True).isolation == sandbox.find_isolation(unsafe=True)


def test_a_kind_that_does_not_isolate_is_found_out(monkeypatch) -> None:
    started = sandbox._popen

    def without(settings, streams):
        return started({**settings, "isolation": "none"}, streams)

    monkeypatch.setattr(sandbox, "_popen", without)
    for kind in SAFE:
        assert "able to break it (AssertionError: a socket)" in (why_not(kind) or "")


def test_a_kernel_that_refuses_is_told_as_the_cause(monkeypatch, tmp_path: Path) -> None:
    broken = tmp_path / "process.py"
    text = Path(sandbox._SCRIPT).read_text()
    broken.write_text(
        text.replace(
            "    machine = os.uname()", "    raise OSError(38, 'no')\n    machine = os.uname()"
        )
    )
    monkeypatch.setattr(sandbox, "_SCRIPT", str(broken))
    assert why_not("landlock") == "no"
    with pytest.raises(ForethoughtError, match="cannot start a program: no"):
        of_kind("landlock").run("print(1)")
