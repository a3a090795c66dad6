"""`forerun bench serve` against this server: what answers tell of drafts is what its metrics count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from forerun.cli.main import cli
from forerun.measure.record import Record, load
from serve.serving import NAME, Server
from support.folders import VOCAB, save
from support.processes import descendants, wait_for
from support.tiny import tiny_model


def measured(record: Path, *arguments: str) -> Record:
    settings = ("--requests", "6", "--concurrency", "3", "--max-new-tokens", "12", "-o", str(record))
    done = CliRunner().invoke(cli, ["bench", "serve", *settings, *arguments])
    assert done.exit_code == 0, done.output
    return load(record, "serve")


def test_usage_and_metrics_agree(server: Server, tmp_path: Path) -> None:
    record = measured(tmp_path / "r.json", "--speculation", "on,off", server.url)
    assert record.settings["model"] == NAME and record.settings["served_by"] == "forerun"
    assert {row["tokens"] for row in record.rows} == {12} and len(record.rows) == 12
    on, off = record.tables[2].rows
    assert int(on[1]) > 0 and on[-1] == "usage" and off[1:3] == ("0", "0") and off[4] == "1.00"
    assert record.details["counters"]["3 at a time, drafts on"]["drafted"] == int(on[1])
    assert not any("somebody else" in remark for remark in record.remarks)
    assert server.is_idle()


@pytest.mark.slow
def test_without_an_address_it_starts_a_server_and_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", "off")  # a new machine compiles them for minutes
    folder = save(tmp_path / "model", tiny_model("llama", vocab=VOCAB, eos_token_id=0, max_position_embeddings=2048))
    record = measured(tmp_path / "r.json", "--", folder, "--device", "cpu", "--served-model-name", "mine")
    assert record.settings["model"] == "mine" and len(record.rows) == 6
    failed = CliRunner().invoke(cli, ["bench", "serve", "--", str(tmp_path / "nowhere")])
    assert failed.exit_code == 2 and "the server did not start" in failed.output


HOLDING = """
import sys, time
from forerun.bench.serve.process import served
with served(sys.argv[1:]) as url:
    print(url, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the signal of a parent's death is Linux's")
def test_its_server_does_not_outlive_it(tmp_path: Path) -> None:
    """Killed, so that nothing of its own can end it: neither the server stays nor the process that speaks for it."""
    folder = save(tmp_path / "model", tiny_model("llama", vocab=VOCAB, eos_token_id=0, max_position_embeddings=2048))
    command = [sys.executable, "-c", HOLDING, folder, "--device", "cpu"]
    environment = {**os.environ, "FORERUN_KERNELS": "off"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None and bench.stdout.readline().startswith("http://")
        started = descendants(bench.pid)
        bench.kill()
    assert len(started) == 2
    try:
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), 60)
    finally:
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
