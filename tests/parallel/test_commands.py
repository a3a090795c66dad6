"""Commands whose target is split: under torchrun, and with --tensor-parallel; how a server ends when a rank is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from forerun.measure.record import load
from serve.process import spawned
from support.folders import VOCAB, save
from support.processes import descendants, is_running, wait_for
from support.tiny import tiny_model

pytestmark = pytest.mark.slow  # processes of their own, each of which imports torch

ENVIRONMENT = {
    **os.environ,
    "FORERUN_KERNELS": "off",
    "FORERUN_RANK_TIMEOUT": "5",
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "300",
    "OMP_NUM_THREADS": "1",
}
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "forerun")
BODY = {"prompt": "abc", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


def tiny_folder(folder: Path) -> str:
    return save(folder, tiny_model("llama", vocab=VOCAB, eos_token_id=0, max_position_embeddings=2048))


def run(*command: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        input=stdin,
        text=True,
        env=ENVIRONMENT | environment,
        timeout=240,
        check=False,
    )


def test_torchrun_and_tensor_parallel_say_the_same(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    draft = save(tmp_path / "draft", tiny_model("llama", seed=1, layers=1, vocab=VOCAB))
    asked = (
        "--model",
        folder,
        "--draft",
        draft,
        "--policy",
        "3",
        "--no-chat",
        "--max-new-tokens",
        "12",
        "--seed",
        "3",
        "--temperature",
        "0.8",
    )
    whole = run("forerun", "generate", *asked, "abcabc")
    # An address of no machine (RFC 5737): who starts its workers itself meets them at home, whatever a job was told.
    split = run("forerun", "generate", "--tensor-parallel", "2", *asked, "abcabc", MASTER_ADDR="192.0.2.1")
    torchrun = run(*TORCHRUN, "generate", "--draft-split", "on", *asked, stdin="abcabc")  # whose ranks share a pipe
    assert whole.returncode == split.returncode == torchrun.returncode == 0, (whole, split, torchrun)
    assert whole.stdout and whole.stdout == split.stdout == torchrun.stdout
    assert "a step took" in split.stderr and "draft model: split over 2 processes, as asked" in torchrun.stderr


@pytest.mark.parametrize("how", ["torchrun", "--tensor-parallel"])
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are looked up in /proc")
def test_ctrl_c_ends_all_ranks_and_keeps_what_was_measured(how: str, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    few = ("--methods", "lookup,forerun-plain", "--batch-sizes", "1", "--max-new-tokens", "128", "-o", str(output))
    split = TORCHRUN if how == "torchrun" else ("forerun",)
    asked = ("bench", "--model", tiny_folder(tmp_path), "--categories", "qa", "--prompts-per-category", "8", *few)
    command = [sys.executable, "-m", *split, *asked, *(() if how == "torchrun" else (how, "2"))]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: output.exists() and bool(load(output).rows), 120)
        started_by_it = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=40)[1]
    finally:
        process.kill()
    record = load(output)
    assert not record.complete and f"Record: {output}" in said, said
    assert "rank 1 has ended" not in said and "RankLost" not in said, said
    assert started_by_it and not any(map(is_running, started_by_it))
    assert process.returncode == (130 if how == "--tensor-parallel" else 1), said


@contextmanager
def served(folder: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    pytest.importorskip("llguidance")
    options = ("--port", "0", "--tensor-parallel", "2", "-d", "lookup", "--log-level", "error")
    command = [sys.executable, "-m", "forerun", "serve", folder, *options]
    with spawned(command, ENVIRONMENT | environment) as (process, url, _):
        yield process, url


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are looked up in /proc")
def test_a_server_that_loses_a_rank(how: signal.Signals, tmp_path: Path) -> None:
    with served(tiny_folder(tmp_path)) as (process, url):
        started_by_it = descendants(process.pid)
        (worker,) = (pid for pid in started_by_it if "forerun.parallel" in Path(f"/proc/{pid}/cmdline").read_text())
        assert len(started_by_it) == 2, "it, and the process that speaks HTTP"
        client = httpx.Client(base_url=url, timeout=60)
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as under_way:
            lines = under_way.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(worker, how)
            started = time.monotonic()
            rest = [line for line in lines if line]
        assert time.monotonic() - started < 30
        assert any("rank_lost" in line for line in rest), rest[-3:]
        assert process.wait(60) == 2
        assert all(map(is_gone, started_by_it))


@pytest.mark.slow  # the watch itself: tests/serve/test_apart.py
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are looked up in /proc")
def test_a_server_whose_first_rank_hangs(tmp_path: Path) -> None:
    with served(tiny_folder(tmp_path)) as (process, url):
        started_by_it = descendants(process.pid)
        client = httpx.Client(base_url=url, timeout=60)
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as under_way:
            lines = under_way.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(process.pid, signal.SIGSTOP)
            started = time.monotonic()
            rest = [line for line in lines if line]
        assert time.monotonic() - started < 30
        assert any("engine_dead" in line for line in rest), rest[-3:]
        assert process.wait(60) == -signal.SIGKILL
        end = time.monotonic() + 30
        while not all(map(is_gone, started_by_it)):
            assert time.monotonic() < end, "they outlive the server"
            time.sleep(0.1)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are looked up in /proc")
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    (own := tmp_path / "temporary").mkdir()
    shared = set(Path("/dev/shm").glob("*"))
    with served(tiny_folder(tmp_path), TMPDIR=str(own)) as (process, url):
        started_by_it = descendants(process.pid)
        assert httpx.post(f"{url}/v1/completions", json=BODY | {"max_tokens": 3}, timeout=60).status_code == 200
        process.kill()
        process.wait()
        end = time.monotonic() + 30
        while not all(map(is_gone, started_by_it)):
            assert time.monotonic() < end, "they outlive the server"
            time.sleep(0.1)
    assert not [*own.iterdir()]
    wait_for(lambda: set(Path("/dev/shm").glob("*")) <= shared, 10)  # others' tests may have theirs meanwhile
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/version")
