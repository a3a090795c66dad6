"""Programs that misbehave, behind all walls and behind each wall alone."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from forerun.errors import ForerunError
from forerun.eval.sandbox import inside, privileges, run, seccomp
from forerun.eval.sandbox.folder import DISK_BYTES, remove, usage
from forerun.eval.sandbox.run import Ending, ProgramLimits, run_program

QUICK = ProgramLimits(seconds=20, memory_mib=512)  # of programs that end by themselves, on however busy a machine
RAW = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"  # system calls that Python's own checks do not see


def has_landlock() -> bool:
    """As the kernel itself says: old ones have none, and containers may keep it from those within."""
    return platform.system() == "Linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) > 0


needs_kernel = pytest.mark.skipif(
    platform.system() != "Linux"
    or platform.machine() not in seccomp.CALLS
    or not Path("/proc/sys/kernel/seccomp/actions_avail").exists(),
    reason="walls of Linux's kernel",
)
needs_landlock = pytest.mark.skipif(not has_landlock(), reason="programs may only write where the kernel has Landlock")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sandboxes make their folders: of this test alone, whoever else runs programs on this machine."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_good_program_passes() -> None:
    outcome = run_program("import math, threading\nt = threading.Thread(target=print)\nt.start()\nt.join()\nassert 1")
    assert outcome.passed and outcome.message == "" and "audit" in outcome.walls


def start_with(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """What the sandboxed process does before it puts up its walls."""
    before = f"from forerun.eval.sandbox import audit, inside, landlock, seccomp\n{change}\nmain("
    monkeypatch.setattr(run, "STARTER", run.STARTER.replace("main(", before))


@needs_landlock
def test_a_program_may_write_in_its_own_folder_which_is_gone_afterwards(temporary: Path) -> None:
    assert run_program("open('a', 'w').write('x')\nassert open('a').read() == 'x'\nopen('/dev/null', 'w')").passed
    assert not list(temporary.iterdir())


def test_without_landlock_no_program_writes(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filter alone cannot tell folders apart. What writes nothing runs as everywhere."""
    start_with(monkeypatch, "landlock.install = lambda folder: False")
    good = run_program("import os\nassert os.listdir('.') == [] and open(os.__file__).read()", QUICK)
    assert good.passed and "landlock" not in good.walls, good.message
    if "seccomp" in good.walls:
        for attempt in ("open('a', 'w')", "open('/dev/null', 'w')", "import os; os.mkdir('a')"):
            assert run_program(attempt, QUICK).message.startswith("PermissionError: [Errno 1]")
    assert not list(temporary.iterdir())


def test_threads_are_counted_of_the_program_alone() -> None:
    """Linux holds all threads of a user against a limit on processes; root, for whom it has none, sees what was set.

    Forty at once have memory enough, however many cores glibc would keep memory apart for.
    """
    resource = pytest.importorskip("resource")
    done = threading.Event()
    others = [threading.Thread(target=done.wait) for _ in range(inside.PROCESSES + 10)]
    program = "import resource, threading\ndone = threading.Event()\n"
    program += "for _ in range(40): threading.Thread(target=done.wait).start()\n"
    program += "limit = resource.getrlimit(resource.RLIMIT_NPROC)\n"
    try:
        for thread in others:
            thread.start()
        outcome = run_program(f"{program}assert limit == {resource.getrlimit(resource.RLIMIT_NPROC)}, limit")
    finally:
        done.set()
        for thread in others:
            thread.join()
    if "seccomp" not in outcome.walls:
        pytest.skip("without the filter that limit is all that keeps a program from starting processes")
    assert outcome.passed, outcome.message


def test_a_program_imports_what_any_other_may_wherever_forerun_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a wheel Forerun lies beside NumPy: what is hidden is the entry added for its sake, not the folder."""
    plain = subprocess.check_output([sys.executable, "-I", "-c", "import sys; print(sys.path)"], text=True).strip()
    assert run_program(f"import sys\nassert sys.path == {plain}, sys.path").message == ""
    monkeypatch.setattr(run, "STARTER", "import sys; sys.path.append({source!r}); " + run.STARTER)
    assert run_program(f"import sys\nassert sys.path == {plain} + [{run.SOURCE!r}], sys.path").message == ""


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def (", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("input()", "EOFError"),
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError"),
        ("x = bytearray(700 << 20)", "MemoryError"),  # 512 MiB are allowed
        ("class E(Exception):\n  def __str__(self): raise ValueError\nraise E", "E: "),
        ("raise ValueError('x' * 10**6)", "ValueError: xxx"),
        ("next(iter(()))", "StopIteration"),  # which ends a loop of the steps without a word
        ("import os; os.fork()", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("import os; os.system('true')", "PermissionError"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "PermissionError"),
    ],
)
def test_failures_are_told(program: str, message: str) -> None:
    outcome = run_program(program, QUICK)
    assert outcome.ending is Ending.FAILED and outcome.message.startswith(message)
    assert len(outcome.message) <= 300


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
        "while True: print('x' * 100_000)",
        "import time; time.sleep(60)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nwhile True: pass",
    ],
)
def test_what_never_ends_is_ended(program: str) -> None:
    started = time.monotonic()
    assert run_program(program, ProgramLimits(seconds=0.2)).ending is Ending.TIME
    assert time.monotonic() - started < 0.2 + run.STARTING + 20, "not the minute that some of them sleep"


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import os; os.closerange(0, 100)",
        'import os\nfor fd in range(3, 60):\n  try: os.write(fd, b\'{"passed": true, "nonce": ""}\\n\')\n'
        "  except OSError: pass\nos._exit(0)",
        "import ctypes; ctypes.string_at(0)",
    ],
)
def test_ending_without_a_verdict_is_no_pass(program: str) -> None:
    assert run_program(program, QUICK).ending in (Ending.DIED, Ending.TIME)


# Tells everything found that could be what makes a verdict valid, and does what comes next wherever it meets a step.
STOLEN = (
    "import gc, os, re, signal, sys, threading, time, _thread\n"
    "def tell(text):\n  for fd in range(3, 64):\n    try: os.write(fd, b'\\n' + text + b'\\n')\n"
    "    except OSError: pass\n"
    "def look(value, depth=0, seen=set()):\n  if depth > 4 or id(value) in seen: return\n"
    "  if type(value) is bytes:\n    for found in re.findall(b'[0-9a-f]{32}', value): tell(found)\n"
    "  if type(value) is str: look(value.encode(errors='replace'))\n"
    "  inner = list(value.values()) if type(value) is dict else value if type(value) in (list, tuple) else ()\n"
    "  if inner: seen.add(id(value))\n"
    "  if type(value) is map: inner = list(value)\n"
    "  if type(value).__name__ == 'partial': inner = (value.func, *value.args)\n"
    "  for each in inner: look(each, depth + 1)\n"
    "def look_at(frame):\n  while frame: look(frame.f_locals); look(frame.f_globals); frame = frame.f_back\n"
)
OTHERS = "for frame in sys._current_frames().values(): look_at(frame)\n"
SEARCHES = {
    "frames": "look_at(sys._getframe())\n",
    "frames of other threads": OTHERS,
    "objects": "look(gc.get_objects())\n",
    "what refers to a step": "look(gc.get_referrers(os.write))\n",
    "a trace": "sys.settrace(lambda frame, *_: look_at(frame))\n",
    "a profile": "sys.setprofile(lambda frame, _, about: look_at(frame) or look(about))\n",
    "another interpreter": "import _xxsubinterpreters as others\nnumber = others.create()\n"
    "others.run_string(number, {!r})\n",
    "a changed list of what is refused": "sys.modules['forerun.eval.sandbox.audit'].REFUSED = ('nothing',)\n" + OTHERS,
    "a hook that is busy": "os.path.realpath = lambda *given, **named: time.sleep(0.5) or '/dev/null'\n"
    "threading.Thread(target=lambda: open('/dev/null', 'w')).start()\ntime.sleep(0.2)\n" + OTHERS,
    "an interrupt of the first thread": "def hook(kind, error, trace):\n  while trace:\n"
    "    look_at(trace.tb_frame)\n    trace = trace.tb_next\nsys.excepthook = hook\n_thread.interrupt_main()\n1 / 0\n",
    "what stdin still holds": "for file in (sys.stdin, sys.stdin.buffer):\n  try: file.seek(0)\n"
    "  except OSError: pass\n  look(file.read())\nlook(os.read(0, 100))\n",
    "files that are open": "for fd in range(64):\n  try: look(os.pread(fd, 10**5, 0))\n  except OSError: pass\n",
}


def search(what: str) -> str:
    within = STOLEN + OTHERS
    return f"{STOLEN}try:\n  {SEARCHES[what].format(within).rstrip().replace(chr(10), chr(10) + '  ')}\n" + (
        "except (PermissionError, RuntimeError, ZeroDivisionError, ImportError): pass\n"
    )


@pytest.mark.parametrize("what", SEARCHES)
def test_what_makes_a_verdict_valid_is_not_found(what: str) -> None:
    outcome = run_program(search(what) + "time.sleep(0.1)\nos._exit(0)", QUICK)
    assert outcome.ending in (Ending.DIED, Ending.TIME), outcome


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("frames", "inside.kept = held"),
        ("frames of other threads", "inside.kept = held; audit.REFUSED = ()"),
        ("objects", "audit.REFUSED = ()"),
        ("what refers to a step", "audit.REFUSED = ()"),
        ("a trace", "inside.kept = held; audit.REFUSED = ()"),
    ],
)
def test_such_a_search_finds_what_is_left_lying(what: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: of a sandbox that keeps it where it can be seen."""
    keep = (
        "given = inside._steps\ndef steps(status):\n  held = given(status)\n  {}\n  return held\ninside._steps = steps"
    )
    start_with(monkeypatch, keep.format(fault))
    assert run_program(search(what) + "(lambda: 0)()\nos._exit(0)", QUICK).passed


# What an error's own code reads of memory that was given back: a new buffer of a reader is shown to what it reads from.
GIVEN_BACK = (
    STOLEN + "import io\nclass Raw(io.RawIOBase):\n  def readable(self): return True\n  def tell(self): return 0\n"
    "  def readinto(self, buffer): look(bytes(buffer)); return 0\n"
    "raws = [Raw() for _ in range(4000)]\nreaders, begin = [io.BufferedReader(raw, 999) for raw in raws], "
    "io.BufferedReader.__init__\npairs = list(zip(readers, raws))\n"
    "class Error(Exception):\n  def __str__(self):\n    for reader, raw in pairs: begin(reader, raw, SIZE)\n"
    "    for reader in readers: reader.read(1)\n    return ''\n"
    "error, filled = Error(), [bytes(SIZE - 33) for _ in range(12000)]\n"
    "for name in list(sys.modules):\n  if 'sandbox.' in name and 'inside' not in name: "
    "vars(sys.modules[name]).clear()\n"
    "filled[10000::2] = [None] * 1000\nraise error"
)


def test_memory_that_was_given_back_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program = GIVEN_BACK.replace("SIZE", str(inside.NONCE_BYTES + 33))
    assert run_program(program, QUICK).ending is Ending.FAILED
    start_with(
        monkeypatch,
        "import weakref\ngiven, seen = inside._steps, []\n"
        "def steps(status):\n  held = given(status)\n  seen.extend(map(weakref.ref, held))\n  return held\n"
        "inside._steps, inside._describe = steps, lambda error: str([each() is None for each in seen])",
    )
    assert run_program("1 / 0", QUICK).message == str([False] * 3), "steps are there to the end, whatever was raised"


@pytest.mark.parametrize(
    "forgery",
    [
        "f = sys._getframe().f_back\nwhile f:\n  for v in list(f.f_locals.values()):\n"
        "    if hasattr(v, 'release'):\n      try: v.release()\n      except RuntimeError: pass\n  f = f.f_back",
        "f = sys._getframe().f_back\nwhile f:\n  f.f_locals.update(dict.fromkeys(f.f_locals, print))\n  f = f.f_back",
        "os.write = lambda fd, text: w(fd, text.replace(b'raised', b'walls'))",
        "os._exit = lambda code: None",
        "import builtins\nbuiltins.bytes = builtins.type = builtins.str = lambda *a: True",
        "import builtins\nbuiltins.exec = builtins.map = builtins.BaseException = lambda *a: None",
        "import collections, functools\ncollections.deque = functools.partial = lambda *a: None",
        "import signal\ntry: signal.signal(signal.SIGINT, print)\nexcept ValueError: pass\n_thread.interrupt_main()",
        "sys.unraisablehook = sys.excepthook = lambda *a: os._exit(0)",
    ],
)
def test_a_verdict_is_not_forged(forgery: str) -> None:
    program = f"import json, os, sys, time, _thread\nw = os.write\n{forgery}\ntime.sleep(0.1)\n1 / 0"
    assert run_program(program, QUICK).ending in (Ending.FAILED, Ending.DIED)


READ_MEMORY = (
    "found = []\nfor line in open('/proc/self/maps').read().splitlines():\n  if 'rw-p' not in line: continue\n"
    "  begin, end = (int(part, 16) for part in line.split()[0].split('-'))\n"
    "  try: file.seek(begin); look(file.read(end - begin))\n"
    "  except (OSError, ValueError): pass\n"
)
OPENED_TWICE = (
    "class Path:\n  asked = 0\n  def __fspath__(self):\n    self.asked += 1\n"
    "    return '/dev/null' if self.asked == {} else '/proc/self/mem'\n"
)
MEMORY = {
    "by name": "file = open('/proc/self/mem', 'rb', 0)\n",
    "as bytes": "file = open(b'/proc/self/mem', 'rb', 0)\n",
    "by an open folder": "file = os.fdopen(os.open('mem', os.O_RDONLY, "
    "dir_fd=os.open('/proc/self', os.O_RDONLY)), 'rb', 0)\n",
    "by a link": "os.symlink('/proc/self/mem', 'link')\nfile = open('link', 'rb', 0)\n",
    "with another realpath": "os.path.realpath = os.fsdecode = lambda *given, **named: '/dev/null'\n"
    "os.path.basename = lambda path: 'null'\nfile = open('/proc/self/mem', 'rb', 0)\n",
    "with another readlink": "os.readlink = lambda *given: '/dev/null'\nfile = open('/proc/self/mem', 'rb', 0)\n",
    "with other builtins": "import builtins, io\nbuiltins.isinstance = lambda *given: False\n"
    "builtins.PermissionError = lambda *given: None\nfile = io.FileIO('/proc/self/mem')\n",
    "by a path that changes": "import io\n" + OPENED_TWICE.format(2) + "file = io.FileIO(Path())\n",
    "by a path that changes at once": "import io\n" + OPENED_TWICE.format(1) + "file = io.FileIO(Path())\n",
    "by a path that lies": "import io\nclass Path:\n  __class__ = int\n"
    "  def __fspath__(self): return '/proc/self/mem'\nfile = io.FileIO(Path())\n",
    "by changing what the hook calls": "try: open('mem')\n"
    "except PermissionError as error: trace = error.__traceback__\n"
    "while trace.tb_next: trace = trace.tb_next\n"
    "trace.tb_frame.f_locals['end'].__code__ = (lambda *path: '').__code__\nfile = open('/proc/self/mem', 'rb', 0)\n",
    "by a text that lies": "import io\nclass Path(str):\n  def rpartition(self, at): return '', '', 'null'\n"
    "  __class__ = int\n  def __str__(self): return '/dev/null'\nfile = io.FileIO(Path('/proc/self/mem'))\n",
}


@pytest.mark.skipif(platform.system() != "Linux", reason="reads files of Linux's")
@pytest.mark.parametrize("landlock", ("as it is", "lambda folder: False"), ids=("walls as they are", "no landlock"))
@pytest.mark.parametrize("how", MEMORY)
def test_its_own_memory_is_not_read(how: str, landlock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the hook, which is all there is where the kernel has no Landlock."""
    if landlock != "as it is":
        start_with(monkeypatch, f"landlock.install = {landlock}")
    outcome = run_program(f"{STOLEN}{MEMORY[how]}{READ_MEMORY}os._exit(0)", QUICK)
    assert outcome.ending is Ending.FAILED and "Error" in outcome.message, outcome


def test_the_hook_runs_no_code_of_a_program() -> None:
    """Where it did, that would see the hook's frame, and from Python 3.13 on could change it meanwhile."""
    program = (
        "import io\nclass Path:\n  @property\n  def __class__(self): asked.append(1); return str\n"
        "  def __fspath__(self): return '/dev/null'\nasked = []\n"
        "try: io.FileIO(Path())\nexcept (PermissionError, TypeError): pass\nassert not asked, asked"
    )
    outcome = run_program(program, QUICK)
    assert outcome.passed, outcome.message


@needs_landlock
@pytest.mark.parametrize(
    "path", ["/proc/self/mem", "/proc/self/maps", "/proc/self/environ", "/proc/1/cmdline", "/proc/meminfo", "SECRET"]
)
def test_the_kernel_hides_what_no_program_needs(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no hook that would refuse before it does: what is neither Python's nor the system's is not read."""
    (tmp_path / "secret").write_text("kept")
    start_with(monkeypatch, "audit.install = lambda *given, **named: True")
    outcome = run_program(f"open({path.replace('SECRET', str(tmp_path / 'secret'))!r}).read()", QUICK)
    assert outcome.message.startswith("PermissionError: [Errno 13]"), outcome


def test_an_honest_program_reads_what_it_needs() -> None:
    program = (
        "import datetime, decimal, json, locale, logging, pwd, random, sqlite3, ssl, tempfile, zoneinfo, os, platform\n"
        "assert zoneinfo.ZoneInfo('UTC') and datetime.datetime.now().astimezone() and platform.platform()\n"
        "assert os.cpu_count() and open(os.__file__).read() and open('/dev/urandom', 'rb').read(4)\n"
        "assert pwd.getpwuid(os.getuid()) and os.path.expanduser('~') == os.getcwd()\n"
    )
    outcome = run_program(program, QUICK)
    assert outcome.passed, outcome.message


def test_what_a_program_tells_of_itself_cannot_stop_the_judge() -> None:
    told = "import os\nfor fd in range(3, 64):\n  try: os.write(fd, {})\n  except OSError: pass\nos._exit(0)"
    for junk in ("b'[' * 12000 + b'\\n'", "b'raised: \\xff\\n'", "b'\\nwalls: none\\n' * 9", "os.urandom(9999)"):
        outcome = run_program(told.format(junk), QUICK)
        assert outcome.ending in (Ending.DIED, Ending.FAILED) and "audit" in outcome.walls, outcome
    assert run_program("raise ValueError('\\ud800\\n1')", QUICK).message == "ValueError: \\ud800\\n1"


@pytest.mark.skipif(platform.system() != "Linux", reason="capabilities are Linux's")
def test_capabilities_are_given_up() -> None:
    program = (
        f"{RAW}import struct\nversion, held = struct.pack('=Ii', {privileges.VERSION}, 0), bytearray(b'x' * 24)\n"
        "sets = (ctypes.c_char * 24).from_buffer(held)\n"
        "assert libc.capget(version, sets) == 0 and not any(held), held\n"
    )
    outcome = run_program(program, QUICK)
    assert outcome.passed and "privileges" in outcome.walls, outcome.message


DEEP = "import os\nfor i in range(3000):\n  os.mkdir('d' * 100, 0o700)\n  os.chdir('d' * 100)\n"


@needs_landlock
def test_folders_without_end_are_noticed_and_removed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_program(DEEP, QUICK).ending in (Ending.PASSED, Ending.DISK)  # as the watcher happens to look
    assert run_program(DEEP + "while True: pass", ProgramLimits(seconds=20)).ending is Ending.DISK
    monkeypatch.setattr(run, "DISK_BYTES", 1 << 20)
    folders = "import os\nfor i in range(10**6): os.mkdir(str(i))"
    assert run_program(folders, ProgramLimits(seconds=20)).ending is Ending.DISK
    assert run_program("import os\nos.makedirs('a/b')\nos.mkdir('a/c', 0)\nos.symlink('a', 'link')", QUICK).passed
    assert not list(temporary.iterdir())


def test_a_folder_is_removed_however_deep_it_is(tmp_path: Path) -> None:
    """Deeper than Python calls itself, and with paths that are longer than the system takes."""
    top = tmp_path / "top"
    top.mkdir()
    place = os.open(top, os.O_RDONLY)
    for _ in range(sys.getrecursionlimit() + 200):
        os.mkdir("d" * 50, dir_fd=place)
        inner = os.open("d" * 50, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    try:
        assert usage(str(top)) > DISK_BYTES, "too deep to look into"
        remove(str(top))
        assert not top.exists()
    finally:
        subprocess.run(["rm", "-rf", top], check=True)  # pytest could not remove it either


@needs_landlock
def test_a_full_disk_is_prevented() -> None:
    program = "i = 0\nwhile True:\n  open(f'f{i}', 'wb').write(b'x' * (1 << 20))\n  i += 1"
    assert run_program(program, ProgramLimits(seconds=20)).ending is Ending.DISK
    assert "File too large" in run_program("open('f', 'wb').write(b'x' * (8 << 20))", QUICK).message


@pytest.mark.parametrize("stack", (0, 32768), ids=("usual stacks", "small stacks"))
def test_threads_without_end_are_survived(stack: int) -> None:
    program = f"import threading, time\nthreading.stack_size({stack})\n"
    program += "while True: threading.Thread(target=time.sleep, args=(60,)).start()"
    assert not run_program(program, QUICK).passed


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="threads are counted in /proc")
def test_threads_that_are_too_many_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "THREADS", 20)
    program = "import threading, time\nfor _ in range({}): threading.Thread(target=time.sleep, args=(60,)).start()\n"
    program += "time.sleep({})"
    assert run_program(program.format(30, 60), QUICK).ending is Ending.THREADS
    assert run_program(program.format(10, 3 * run.TICK), QUICK).ending is Ending.PASSED


@needs_kernel
@pytest.mark.parametrize(
    "call",
    [
        "libc.fork()",
        "libc.socket(2, 1, 0)",
        "libc.kill(__import__('os').getppid(), 9)",
        "libc.open(TARGET, 0o1)",
        "libc.open(TARGET, 0o2001)",
        "libc.unlink(TARGET)",
        "libc.rename(TARGET, TARGET + b'2')",
        "libc.truncate(TARGET, 0)",
        "libc.chmod(TARGET, 0)",
        "libc.mkdir(TARGET + b'.d', 0o755)",
        "libc.setsid()",
        "libc.ptrace(16, __import__('os').getppid(), 0, 0)",
        "libc.setrlimit(0, ctypes.create_string_buffer(16))",
        "libc.open(TARGET, 0o1000)",  # truncated though only read
        "libc.open(TARGET, 0o1003)",
        "libc.fcntl(0, 8, __import__('os').getppid())",  # signals to others: F_SETOWN, F_SETOWN_EX
        "libc.fcntl(0, 15, ctypes.create_string_buffer(8))",
        "libc.ioctl(0, 0x5412, b'x')",
        "libc.shmget(0, 4096, 0o1600)",
        "libc.semget(0, 1, 0o1600)",
        "libc.msgget(0, 0o1600)",
        "libc.syscall(248 if __import__('platform').machine() == 'x86_64' else 217, b'user', b'k', b'v', 1, -4)",
    ],
)
def test_the_kernel_refuses_what_python_does_not_see(call: str, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("kept")
    program = f"{RAW}TARGET = {os.fsencode(target)!r}\nassert {call} == -1\n"
    outcome = run_program(program + "assert ctypes.get_errno() in (1, 13)", QUICK)
    assert outcome.passed, outcome.message
    assert target.read_text() == "kept" and target.stat().st_mode & 0o600 and len(list(tmp_path.iterdir())) == 1


def alone(wall: str, attack: str, folder: Path) -> str:
    """What an attack meets where one wall stands by itself."""
    code = (
        f"from forerun.eval.sandbox import audit, landlock, seccomp\nassert {wall}\n"
        f"try:\n  {attack}\nexcept OSError as error: print('refused', error.errno)\nelse: print('done')"
    )
    path = os.pathsep.join([run.SOURCE])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or done.stderr


FOOLED = (
    "import builtins, os; os.path.realpath = lambda *given, **named: os.getcwd()\n"
    "  os.readlink = os.getcwd; os.stat = lambda path, stat=os.stat: stat('.'); builtins.bool = lambda value: True\n"
    "  os.path.__dict__['sep'] = os.sep = ''; os.symlink('../outside', 'link')"
)
OUTSIDE, INSIDE = "open('../outside', 'w')", "open('within', 'w')"
OTHERWISE = (
    "import os, tempfile; tempfile.tempdir = os.getcwd(); tempfile.NamedTemporaryFile().close(); os.makedirs('a/b/')"
)
"""Of the folder itself, and of one that ends in a slash."""


@needs_kernel
@pytest.mark.parametrize(
    ("wall", "attack", "expected"),
    [
        ("audit.install('.')", OUTSIDE, "refused None"),
        ("audit.install('.')", FOOLED, "refused None"),
        ("audit.install('.')", INSIDE, "done"),
        ("audit.install('.')", OTHERWISE, "done"),
        ("audit.install('.')", "__import__('os').mkdir('../outside/')", "refused None"),
        pytest.param("landlock.install('.')", OUTSIDE, f"refused {errno.EACCES}", marks=needs_landlock),
        pytest.param("landlock.install('.')", INSIDE, "done", marks=needs_landlock),
        ("seccomp.install(files_are_watched=False)", OUTSIDE, f"refused {errno.EPERM}"),
        ("seccomp.install(files_are_watched=False)", INSIDE, f"refused {errno.EPERM}"),
        ("seccomp.install(files_are_watched=True)", INSIDE, "done"),
        ("seccomp.install(files_are_watched=True)", "__import__('os').fork()", f"refused {errno.EPERM}"),
        ("seccomp.install(files_are_watched=True)", "__import__('socket').socket()", f"refused {errno.EPERM}"),
        ("seccomp.install(files_are_watched=True)", "__import__('os').kill(1, 0)", f"refused {errno.EPERM}"),
        ("True", OUTSIDE, "done"),  # the control: nothing stands, nothing is refused
    ],
)
def test_each_wall_stands_by_itself(wall: str, attack: str, expected: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    assert alone(wall, attack, home) == expected
    assert (tmp_path / "outside").exists() == (wall == "True")


def decide(program: list[seccomp.Instruction], arch: int, number: int, *arguments: int) -> int:
    """What the kernel would make of a filter: the few instructions that ours consist of."""
    words = {0: number, 4: arch}
    for place, value in enumerate(arguments):
        words |= {16 + 8 * place: value & 0xFFFFFFFF, 20 + 8 * place: value >> 32}
    place, loaded = 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        if code == seccomp.LOAD:
            loaded = words.get(operand, 0)
        elif code == seccomp.RETURN:
            return operand
        else:
            true = {
                seccomp.EQUAL: loaded == operand,
                seccomp.AT_LEAST: loaded >= operand,
                seccomp.ANY_BIT: bool(loaded & operand),
            }[code]
            place += if_true if true else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_decides_as_it_should_on_every_architecture(machine: str) -> None:
    calls = seccomp.CALLS[machine]
    watched = seccomp.program(calls, files_are_watched=True)
    strict = seccomp.program(calls, files_are_watched=False)
    refused, unknown = seccomp.REFUSE | errno.EPERM, seccomp.REFUSE | errno.ENOSYS
    assert len(strict) < 4096 and len(calls.refused) == len(set(calls.refused))
    for program in (watched, strict):
        assert decide(program, calls.arch, 1 if machine == "x86_64" else 64, 1) == seccomp.ALLOW  # write
        assert decide(program, calls.arch ^ 1, 0) == seccomp.KILL
        assert decide(program, calls.arch, 0x40000001) == refused
        assert {decide(program, calls.arch, number) for number in calls.refused} == {refused}
        assert decide(program, calls.arch, calls.clone, 0x3D0F00) == seccomp.ALLOW  # a thread
        assert decide(program, calls.arch, calls.clone, signal.SIGCHLD) == refused  # a process
        assert decide(program, calls.arch, calls.clone3) == unknown
        assert decide(program, calls.arch, calls.prlimit, 0, 7, 0, 0x7FFF00000000) == seccomp.ALLOW
        assert decide(program, calls.arch, calls.prlimit, 1, 7, 0) == refused
        assert decide(program, calls.arch, calls.prlimit, 0, 7, 1 << 32) == refused
    for program in (watched, strict):
        assert decide(program, calls.arch, calls.fcntl, 3, 1) == seccomp.ALLOW
        assert decide(program, calls.arch, calls.fcntl, 3, 8) == refused
        assert decide(program, calls.arch, calls.ioctl, 3, 0x5401) == seccomp.ALLOW
        assert decide(program, calls.arch, calls.ioctl, 3, 0x8901) == refused
    for number, place in calls.opens:
        flags = [0] * place
        for mode, allowed in ((0, False), (1, True), (2, True), (3, False)):
            verdict = decide(watched, calls.arch, number, *flags, mode | seccomp.TRUNCATE)
            assert verdict == (seccomp.ALLOW if allowed else refused)
        assert decide(strict, calls.arch, number, *flags, os.O_RDONLY) == seccomp.ALLOW
        assert decide(strict, calls.arch, number, *flags, os.O_RDWR) == refused
        assert decide(watched, calls.arch, number, *flags, os.O_RDWR) == seccomp.ALLOW
    assert {decide(strict, calls.arch, number) for number in calls.changing} == {refused}
    assert {decide(watched, calls.arch, number) for number in calls.changing} == {seccomp.ALLOW}


def test_a_sandbox_that_cannot_start_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "STARTER", "raise SystemExit(3) # {source}{folder}{status}{memory}{seconds}")
    with pytest.raises(ForerunError, match="exit code 3"):
        run_program("pass")


def test_processes_that_got_away_are_killed_with_their_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where the kernel has no filter: the program leaves a child behind, which would write after a while."""
    sign = tmp_path / "still here"
    child = f"import time; time.sleep(0.7); open({str(sign)!r}, 'w')"
    starter = (
        "import os, subprocess, sys; os.write({status}, b'walls: none\\n'); "
        f"subprocess.Popen([sys.executable, '-c', {child!r}]) # {{source}}{{folder}}{{memory}}{{seconds}}"
    )
    monkeypatch.setattr(run, "STARTER", starter)
    assert run_program("pass").ending is Ending.DIED
    time.sleep(1.2)
    assert not sign.exists()
