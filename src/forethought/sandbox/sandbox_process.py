"""The process of the sandbox: it gives up what it may do, and then runs one program.

Run by its path with settings as JSON in its argument; see ``sandbox`` for the other side, and for
what each kind of isolation guarantees. It imports nothing of the package, needs no privileges, and
starts no other program: the interpreter that has isolated itself executes the source.

The order is that of what each step still needs: a user namespace first, since it gives the rights
to mount; then limits, capabilities, Landlock (files), and the system call filter last.
"""

from __future__ import annotations

import ctypes
import json
import linecache
import os
import resource
import signal
import struct
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from typing import Any

MEMORY_EXIT = 77
"""Exit code of a program that an uncaught ``MemoryError`` has ended."""
_NAME = "program.py"
_NOBODY = 65534
_MAX_THREADS = 64
_MAX_FILES = 64

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    """``result`` of a C function; raises ``OSError`` for -1."""
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def _prctl(option: int, *values: int) -> int:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return _checked(_libc.prctl(option, *padded), f"prctl({option})")


def _syscall(what: str, number: int, *values: Any) -> int:
    return _checked(int(_libc.syscall(ctypes.c_long(number), *values)), what)


# ---- namespaces: a file system of its own --------------------------------------------------------

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MOUNT_SETATTR, _MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 442, 1, 2
_AT_RECURSIVE, _MNT_DETACH = 0x8000, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_HOME = "tmp"


def enter_namespaces(readable: Sequence[str], directory: str, size: int) -> None:
    """Give up the machine's file system, network and users.

    A file system in memory remains, with ``readable``, read-only, and an empty ``/tmp``.

    Args:
        readable: directories and devices, as absolute paths.
        directory: an empty one, on which the new file system is mounted.
        size: bytes of all files in ``/tmp`` together.
    """
    is_superuser = _separate()
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    options = f"size={size},nr_inodes=1024,mode=755"
    _mount("tmpfs", directory, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path in readable:
        _bind(directory, path)
    home = f"{directory}/{_HOME}"
    os.mkdir(home)
    os.chmod(home, 0o777)
    os.chdir(directory)
    _syscall("pivot_root", _PIVOT_ROOT[os.uname().machine], b".", b".")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir(f"/{_HOME}")
    if is_superuser:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        _unshare(_CLONE_NEWUSER)


def _separate() -> bool:
    """Enter namespaces in which this process may mount; whether it is the machine's superuser."""
    namespaces = _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        try:
            _unshare(namespaces)
        except PermissionError:
            pass  # a container's root
        else:
            return True
    _unshare(namespaces | _CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    return False


def _unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def _bind(root: str, path: str) -> None:
    """Show a directory or a device within ``root``, read-only; a link stays a link."""
    real = os.path.realpath(path)
    target = f"{root}{real}"
    if real != path:
        os.makedirs(f"{root}{os.path.dirname(path)}", exist_ok=True)
        if not os.path.lexists(f"{root}{path}"):
            os.symlink(real, f"{root}{path}")
    if os.path.lexists(target):
        return  # it is part of another one, which is there already
    if os.path.isdir(real):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(real, target, None, _MS_BIND | _MS_REC)
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    where = os.fsencode(target)
    _syscall("mount_setattr", _MOUNT_SETATTR, -100, where, _AT_RECURSIVE, attributes, 32)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    encoded_options = None if options is None else options.encode()
    result = _libc.mount(*texts, ctypes.c_ulong(flags), encoded_options)
    _checked(result, f"mount on {target}")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


# ---- Landlock: access to files of the machine's file system --------------------------------------

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION, _RULE_PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE = 1, 2, 4, 8, 32
_MAKE_REG, _TRUNCATE = 1 << 8, 1 << 14
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of rights over files, by version of the interface; 16 from the fifth."""
_TCP_RIGHTS, _SCOPES = 3, 3


def restrict_files(readable: Sequence[str], writable: str) -> None:
    """Allow reading ``readable``, and files directly in the directory ``writable``.

    Raises:
        OSError: the kernel has no Landlock.
    """
    version = _syscall("Landlock", _LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)
    handled = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    fields = [handled, _TCP_RIGHTS if version >= 4 else 0, _SCOPES if version >= 6 else 0]
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = struct.pack("QQQ", *fields)[:size]
    rules = _syscall("Landlock", _LANDLOCK_CREATE_RULESET, attributes, size, 0)
    for path in readable:
        rights = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE | _WRITE_FILE
        _allow(rules, path, rights)
    rights = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE
    _allow(rules, writable, rights & handled)
    _syscall("Landlock", _LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH)
    rule = struct.pack("=Qi", rights, descriptor)
    _syscall("Landlock", _LANDLOCK_ADD_RULE, rules, _RULE_PATH_BENEATH, rule, 0)
    os.close(descriptor)


# ---- capabilities and system calls ---------------------------------------------------------------

_CAPABILITY_VERSION = 0x20080522
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2


def drop_privileges() -> None:
    """Give up all capabilities, and the way to get new ones."""
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _checked(_libc.capset(header, struct.pack("6I", *[0] * 6)), "capset")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


_ALLOWED = """
read 0 63; write 1 64; readv 19 65; writev 20 66; futex 202 98; mmap 9 222; munmap 11 215;
mremap 25 216; mprotect 10 226; madvise 28 233; brk 12 214; msync 26 227; lseek 8 62; close 3 57;
newfstatat 262 79; fstat 5 80; stat 4 -; lstat 6 -; statx 332 291; openat 257 56; open 2 -;
creat 85 -; pread64 17 67; pwrite64 18 68; preadv 295 69; pwritev 296 70; preadv2 327 286;
pwritev2 328 287; close_range 436 436; statfs 137 43; fstatfs 138 44; access 21 -;
faccessat 269 48; faccessat2 439 439; readlink 89 -; readlinkat 267 78; getcwd 79 17; chdir 80 49;
fchdir 81 50; getdents64 217 61; getdents 78 -; rename 82 -; renameat 264 38; renameat2 316 276;
unlink 87 -; unlinkat 263 35; ftruncate 77 46; fallocate 285 47; fadvise64 221 223; fsync 74 82;
fdatasync 75 83; flock 73 32; dup 32 23; dup2 33 -; dup3 292 24; pipe 22 -; pipe2 293 59;
sendfile 40 71; copy_file_range 326 285; umask 95 166; select 23 -; pselect6 270 72; poll 7 -;
ppoll 271 73; epoll_create 213 -; epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -;
epoll_pwait 281 22; epoll_pwait2 441 441; eventfd2 290 19; timerfd_create 283 85;
timerfd_settime 286 86; timerfd_gettime 287 87; rt_sigaction 13 134; rt_sigprocmask 14 135;
rt_sigreturn 15 139; rt_sigpending 127 136; rt_sigtimedwait 128 137; rt_sigsuspend 130 133;
sigaltstack 131 132; pause 34 -; alarm 37 -; setitimer 38 103; getitimer 36 102;
restart_syscall 219 128; nanosleep 35 101; clock_nanosleep 230 115; clock_gettime 228 113;
clock_getres 229 114; gettimeofday 96 169; time 201 -; times 100 153; getpid 39 172;
getppid 110 173; gettid 186 178; getpgid 121 155; getpgrp 111 -; getsid 124 156; getuid 102 174;
geteuid 107 175; getgid 104 176; getegid 108 177; getresuid 118 148; getresgid 120 150;
getgroups 115 158; uname 63 160; sysinfo 99 179; getrusage 98 165; getrlimit 97 163;
getpriority 140 141; getcpu 309 168; sched_yield 24 124; sched_getaffinity 204 123;
sched_getparam 143 121; sched_getscheduler 145 120; sched_get_priority_max 146 125;
sched_get_priority_min 147 126; set_tid_address 218 96; set_robust_list 273 99;
get_robust_list 274 100; rseq 334 293; arch_prctl 158 -; getrandom 318 278; wait4 61 260;
waitid 247 95; exit 60 93; exit_group 231 94; recvfrom 45 207; sendto 44 206; recvmsg 47 212;
sendmsg 46 211; shutdown 48 210; getsockname 51 204; getpeername 52 205; getsockopt 55 209
"""
"""System calls that need no look at their arguments: name, number on x86-64, number on ARM64."""
_EXAMINED = {
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "clone": (56, 220),
    "prlimit64": (302, 261),
    "prctl": (157, 167),
    "socketpair": (53, 199),
}
_CLONE3 = 435
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD, _JUMP_IF_EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_EPERM, _ENOSYS = 1, 38
_ALL = 0xFFFFFFFF
_CLONE_THREAD, _NEW_NAMESPACES = 0x10000, 0x7E020000

Condition = tuple[int, int, Sequence[int]]
"""Number of an argument, mask, and the values that its low 32 bits may have under the mask."""


def _conditions(name: str) -> list[Condition]:
    """The conditions for the arguments of a system call.

    ``fcntl`` may not choose who gets the signals of a file (``F_SETOWN``), which would be a way to
    kill others, nor ``ioctl`` (``FIOSETOWN``), which could also type into a terminal. A ``clone``
    makes a thread. Signals go to the process itself. A limit can be read. A pair of sockets is a
    stream, since a datagram could be sent to any socket by its address.
    """
    pid = os.getpid()
    by_name: dict[str, list[Condition]] = {
        "fcntl": [(1, _ALL, (*range(8), 36, 37, 38, 1030, 1032))],
        "ioctl": [(1, _ALL, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))],
        "kill": [(0, _ALL, (pid,))],
        "tgkill": [(0, _ALL, (pid,))],
        "clone": [(0, _CLONE_THREAD | _NEW_NAMESPACES, (_CLONE_THREAD,))],
        "prlimit64": [(0, _ALL, (0, pid)), (2, _ALL, (0,))],
        "prctl": [(0, _ALL, (15, 16))],
        "socketpair": [(0, _ALL, (1,)), (1, _ALL ^ 0o2004000, (1,))],
    }
    return by_name[name]


def _instructions(machine: str) -> Iterator[tuple[int, int, int, int]]:
    """The filter: code, offsets of jumps if true and if false, operand."""
    column = list(_AUDIT_ARCH).index(machine)
    yield _LOAD, 0, 0, 4  # the architecture
    yield _JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, 0  # the number of the system call
    for entry in _ALLOWED.replace("\n", " ").split(";"):
        number = entry.split()[1 + column]
        if number != "-":
            yield _JUMP_IF_EQUAL, 0, 1, int(number)
            yield _RETURN, 0, 0, _ALLOW
    yield _JUMP_IF_EQUAL, 0, 1, _CLONE3
    yield _RETURN, 0, 0, _ERRNO | _ENOSYS  # the C library then tries clone
    for name, numbers in _EXAMINED.items():
        block = [*_examination(_conditions(name)), (_RETURN, 0, 0, _ALLOW)]
        yield _JUMP_IF_EQUAL, 0, len(block), numbers[column]
        yield from block
    yield _RETURN, 0, 0, _ERRNO | _EPERM


def _examination(conditions: Sequence[Condition]) -> Iterator[tuple[int, int, int, int]]:
    """Refuse a system call whose arguments do not meet the conditions, and go on else."""
    for argument, mask, values in conditions:
        yield _LOAD, 0, 0, 16 + 8 * argument
        yield _AND, 0, 0, mask
        for num_skipped in range(len(values), 0, -1):
            yield _JUMP_IF_EQUAL, num_skipped, 0, values[-num_skipped]
        yield _RETURN, 0, 0, _ERRNO | _EPERM


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def restrict_syscalls() -> None:
    """Allow no system calls but those of computing, of threads, and of files that are open to it.

    Everything else fails with ``EPERM``: no other process, no network, no debugging. Needs filters
    in the kernel, and x86-64 or ARM64; else raises ``OSError``.
    """
    machine = os.uname().machine
    if machine not in _AUDIT_ARCH or sys.maxsize < 2**32:
        raise OSError(f"there is no system call filter for {machine}")
    code = b"".join(struct.pack("=HBBI", *one) for one in _instructions(machine))
    program = _Program(len(code) // 8, code)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


# ---- limits, and the program ---------------------------------------------------------------------


def set_limits(memory: int, seconds: int, file_size: int) -> None:
    """Limit the address space, the processor time and the size of a file."""
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: file_size,
        resource.RLIMIT_NOFILE: _MAX_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def run(source: str) -> int:
    """Execute a program as ``__main__``; its exit code, unless it raises ``SystemExit``."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv = [_NAME]
    lines = source.splitlines(keepends=True)
    linecache.cache[_NAME] = (len(source), None, lines, _NAME)
    try:
        exec(compile(source, _NAME, "exec"), main.__dict__)
    except MemoryError:
        return MEMORY_EXIT
    except Exception as error:
        shown = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(error.with_traceback(shown))
        return 1
    return 0


def isolate(settings: dict[str, Any]) -> None:
    """Give up what the kind of isolation forbids; ``OSError`` if the machine does not allow it."""
    kind, readable = settings["isolation"], settings["readable"]
    parent = settings["parent"]
    if kind == "namespaces":
        enter_namespaces(readable, settings["directory"], settings["disk"])
        resource.setrlimit(resource.RLIMIT_NPROC, (_MAX_THREADS, _MAX_THREADS))
    else:
        os.chdir(settings["directory"])
    set_limits(settings["memory"], settings["seconds"], settings["file_size"])
    if kind != "none":
        drop_privileges()
    if kind == "landlock":
        restrict_files(readable, settings["directory"])
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    if kind != "none":
        restrict_syscalls()


def main() -> None:
    """Isolate this process, say so on the status pipe, and run the program."""
    settings = json.loads(sys.argv[1])
    status = settings["status"]
    with open(settings["source"], encoding="utf-8") as stream:
        source = stream.read()
    try:
        isolate(settings)
    except OSError as error:
        os.write(status, f"{error.strerror or error}".encode())
        os._exit(1)
    os.write(status, b"ready")
    os.close(status)
    sys.exit(run(source))


if __name__ == "__main__":
    main()
