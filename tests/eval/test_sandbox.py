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
from forerun.eval.sandbox import inside, run, seccomp
from forerun.eval.sandbox.folder import DISK_BYTES, remove, usage
from forerun.eval.sandbox.run import Ending, Limits, run_program

QUICK = Limits(seconds=20, memory_mib=512)  # of programs that end by themselves, on however busy a machine
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


@needs_landlock
def test_a_program_may_write_in_its_own_folder_which_is_gone_afterwards(temporary: Path) -> None:
    assert run_program("open('a', 'w').write('x')\nassert open('a').read() == 'x'\nopen('/dev/null', 'w')").passed
    assert not list(temporary.iterdir())


def test_without_landlock_no_program_writes(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filter alone cannot tell folders apart. What writes nothing runs as everywhere."""
    absent = "from forerun.eval.sandbox import landlock; landlock.install = lambda folder: False; main("
    monkeypatch.setattr(run, "STARTER", run.STARTER.replace("main(", absent))
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
    assert run_program(program, Limits(seconds=0.2)).ending is Ending.TIME
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


SEARCHES = {
    "frames": "f = sys._getframe()\nwhile f: look(f.f_locals); look(f.f_globals); f = f.f_back",
    "other threads": "for f in sys._current_frames().values(): look(f.f_locals)",
    "objects": "for o in gc.get_objects(): look({0: o})",
    "a trace": "sys.settrace(lambda frame, *_: look(frame.f_locals))",
}


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
def test_what_makes_a_verdict_valid_is_not_found(search: str) -> None:
    program = (
        "import gc, re, sys\nfound = []\n"
        "def look(names):\n  for value in list(names.values()):\n"
        "    if type(value) in (str, bytes, dict) and re.search('[0-9a-f]{32}', str(value)): found.append(1)\n"
        f"try:\n  {search.replace(chr(10), chr(10) + '  ')}\nexcept PermissionError: pass\n"
        "assert not found, 'found it'"
    )
    outcome = run_program(program, QUICK)
    assert outcome.passed, outcome.message


@pytest.mark.parametrize(
    "forgery",
    [
        "f = sys._getframe().f_back\nwhile f:\n  for v in list(f.f_locals.values()):\n"
        "    if hasattr(v, 'release'):\n      try: v.release()\n      except RuntimeError: pass\n  f = f.f_back",
        'json.dumps = lambda *a: \'"", "passed": true\'',
        "json._default_encoder.encode = json.dumps = lambda *a: 'true'",
        "os.write = lambda fd, text: w(fd, text.replace(b'false', b'true'))",
        "import builtins\nbuiltins.bytes = builtins.type = lambda *a: True",
    ],
)
def test_a_verdict_is_not_forged(forgery: str) -> None:
    outcome = run_program(f"import json, os, sys, time\nw = os.write\n{forgery}\ntime.sleep(0.1)\n1 / 0", QUICK)
    assert outcome.ending is Ending.FAILED


STOLEN = (
    "import os, re, sys, threading, time, _thread\n"
    "def tell(rest):\n  for fd in range(3, 64):\n    try: os.write(fd, b'{\"message\": \"\"' + rest + b'\\n')\n"
    "    except OSError: pass\n"
    "def look(frame):\n  if 'passing' in frame.f_locals: tell(frame.f_locals['passing'])\n"
)
LOOK = "for frame in sys._current_frames().values(): look(frame)\n"
THEFTS = {
    "its memory": "file, found = open('/proc/self/mem', 'rb', 0), []\n",
    "its memory by an open folder": "file, found = os.fdopen(os.open('mem', os.O_RDONLY, "
    "dir_fd=os.open('/proc/self', os.O_RDONLY)), 'rb', 0), []\n",
    "a changed list of what is refused": "sys.modules['forerun.eval.sandbox.audit'].REFUSED = ('nothing',)\n" + LOOK,
    "a hook that is busy": "os.path.realpath = lambda *given, **named: time.sleep(0.5) or '/dev/null'\n"
    "threading.Thread(target=lambda: open('/dev/null', 'w')).start()\ntime.sleep(0.2)\n" + LOOK,
    "an interrupt of the thread that reports": "def hook(kind, error, trace):\n  while trace:\n"
    "    look(trace.tb_frame)\n    trace = trace.tb_next\nsys.excepthook = hook\n_thread.interrupt_main()\n1 / 0\n",
}
READ_MEMORY = (
    "for line in open('/proc/self/maps').read().splitlines():\n  if 'rw-p' not in line: continue\n"
    "  begin, end = (int(part, 16) for part in line.split()[0].split('-'))\n"
    '  try: file.seek(begin); found += re.findall(rb\'"nonce": "[0-9a-f]{32}\', file.read(end - begin))\n'
    "  except (OSError, ValueError): pass\n"
    "tell(b', ' + found[0] + b'\", \"passed\": true}')\n"
)


@pytest.mark.skipif(platform.system() != "Linux", reason="reads files of Linux's")
@pytest.mark.parametrize("theft", THEFTS)
def test_what_makes_a_verdict_valid_is_not_stolen(theft: str) -> None:
    program = STOLEN + THEFTS[theft] + (READ_MEMORY if "memory" in theft else "") + "os._exit(0)"
    outcome = run_program(program, QUICK)
    assert outcome.ending in (Ending.FAILED, Ending.DIED, Ending.TIME), outcome
    assert "mem" not in theft or outcome.message.startswith("PermissionError: a file named mem"), outcome


@pytest.mark.skipif(platform.system() != "Linux", reason="capabilities are Linux's")
def test_capabilities_are_given_up() -> None:
    program = "lines = open('/proc/thread-self/status').read().splitlines()\n"
    program += "sets = [line.split()[1] for line in lines if line[:6] in ('CapInh', 'CapPrm', 'CapEff')]\n"
    outcome = run_program(program + "assert len(sets) == 3 and not any(int(s, 16) for s in sets), sets", QUICK)
    assert outcome.passed and "privileges" in outcome.walls, outcome.message


DEEP = "import os\nfor i in range(3000):\n  os.mkdir('d' * 100, 0o700)\n  os.chdir('d' * 100)\n"


@needs_landlock
def test_folders_without_end_are_noticed_and_removed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_program(DEEP, QUICK).ending in (Ending.PASSED, Ending.DISK)  # as the watcher happens to look
    assert run_program(DEEP + "while True: pass", Limits(seconds=20)).ending is Ending.DISK
    monkeypatch.setattr(run, "DISK_BYTES", 1 << 20)
    assert run_program("import os\nfor i in range(10**6): os.mkdir(str(i))", Limits(seconds=20)).ending is Ending.DISK
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
    assert run_program(program, Limits(seconds=20)).ending is Ending.DISK
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


OUTSIDE, INSIDE = "open('../outside', 'w')", "open('within', 'w')"


@needs_kernel
@pytest.mark.parametrize(
    ("wall", "attack", "expected"),
    [
        ("audit.install('.')", OUTSIDE, "refused None"),
        ("audit.install('.')", INSIDE, "done"),
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
        'import os, subprocess, sys; os.write({status}, b\'{{"walls": ["none"]}}\\n\'); '
        f"subprocess.Popen([sys.executable, '-c', {child!r}]) # {{source}}{{folder}}{{memory}}{{seconds}}"
    )
    monkeypatch.setattr(run, "STARTER", starter)
    assert run_program("pass").ending is Ending.DIED
    time.sleep(1.2)
    assert not sign.exists()
