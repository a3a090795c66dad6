"""`forerun serve`: what is refused before anything is loaded, and how it ends."""

from __future__ import annotations

import importlib.util
import io
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.command import Command
from forerun.cli.replicas import check_gpus
from forerun.errors import InvalidArgument
from forerun.loading import whisper
from forerun.serve.settings import AddressSettings, ReplicaSettings, ServiceSettings
from forerun.speech.audio import RATE
from serve.process import served
from support.folders import VOCAB, save
from support.sound import babble
from support.tiny import tiny_model

serve = Command("serve")
BODY = {"prompt": "abc", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}


def test_an_address_that_others_reach_needs_a_key() -> None:
    refused = serve("--host", "0.0.0.0", FORERUN_API_KEY="")
    assert refused.exit_code == 2 and "set an API key, or say --allow-anyone" in refused.stderr
    assert serve("--max-rows", "0").exit_code == 2
    assert "both" in serve("--ssl-keyfile", __file__).stderr
    assert "'x' does not exist" in serve("--ssl-keyfile", __file__, "--ssl-certfile", "x").stderr


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody else listens at."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_where_it_cannot_listen_is_said_before_a_model_is_looked_for(taken: int) -> None:
    here = ("--host", "localhost", "--port", str(taken))  # also where it has another address that is free
    for address in (("--port", str(taken)), here, ("--host", "nowhere.invalid", "--allow-anyone")):
        refused = serve("no/such/folder", *address)
        assert refused.exit_code == 2
        assert "cannot listen there" in refused.stderr and "no folder" not in refused.stderr
    for host in ("127.0.0.1", "localhost", ""):
        assert "no folder" in serve("no/such/folder", "--port", "0", "--host", host, "--allow-anyone").stderr


def test_files_that_are_no_certificate_are_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.pem").write_text("Dear Sir or Madam")
    letter = str(tmp_path / "letter.pem")
    refused = serve("no/such/folder", "--port", "0", "--ssl-certfile", letter, "--ssl-keyfile", letter)
    assert refused.exit_code == 2
    assert "no certificate and its key in PEM form" in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.output


def test_an_empty_key_is_no_key() -> None:
    refused = serve("no/such/folder", "--api-key", "")
    assert refused.exit_code == 2 and "--api-key is empty" in refused.stderr


@pytest.mark.parametrize("key", ("Schl\u00fcssel", "a\nb", " \n", "\U0001f511"))
def test_a_key_that_no_client_can_send_is_refused(key: str) -> None:
    with pytest.raises(InvalidArgument, match="of ASCII") as refused:
        AddressSettings(api_key=key, host="0.0.0.0")
    assert "Schl" not in str(refused.value)
    assert AddressSettings(api_key=" sesame\n").api_key == "sesame"


@pytest.mark.parametrize("name", ("timeout", "drain_seconds"))
def test_limits_end(name: str) -> None:
    for value in (math.inf, math.nan):
        with pytest.raises(InvalidArgument, match=name):
            ServiceSettings(**{name: value})


def test_what_a_whisper_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.cli.serve.is_whisper", lambda options: True)
    options = {"--quantize": "int8", "--draft-quantize": "int8", "--tensor-parallel": "2", "--draft-split": "off"}
    for option in options.items():
        refused = serve(*option)
        assert refused.exit_code == 2 and option[0] in refused.stderr and "leave it out" in refused.stderr


def test_a_whisper_needs_what_reads_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before a model is loaded, not to each client."""
    monkeypatch.setattr("forerun.cli.serve.is_whisper", lambda options: True)
    monkeypatch.setattr("forerun.cli.transcribe.load_pair", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    refused = serve()
    assert refused.exit_code == 2 and "pip install 'forerun[speech]'" in refused.stderr


def test_replicas_need_a_queue() -> None:
    refused = serve("--replicas", "2", "--max-queued", "0")
    assert refused.exit_code == 2 and "--max-queued 0: requests for replicas wait in Ray" in refused.stderr


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else find(name))
    refused = serve()
    assert refused.exit_code == 2 and "serving needs fastapi: pip install 'forerun[serve]'" in refused.stderr


def test_replicas_need_ray_and_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    assert "pip install 'forerun[scale]'" in serve("--replicas", "2").stderr
    assert "needs --replicas" in serve("--max-replicas", "2").stderr
    assert "at least --replicas 3" in serve("--replicas", "3", "--max-replicas", "2").stderr
    assert serve("--replicas", "0").exit_code == 2
    assert "--round-seconds: nobody replaces a server that is alone" in serve("--round-seconds", "9").stderr


def test_what_no_replica_could_serve_is_refused_before_ray_starts(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.cli.replicas.check_ray", lambda: None)
    folder = save(tmp_path, tiny_model("llama", vocab=VOCAB))
    for refusal, model, *options in (
        ("cannot listen there", "no/such/folder", "--port", str(taken)),
        ("no folder", "no/such/folder"),
        ("do not divide by 3 processes; use 1 or 2", folder, "--tensor-parallel", "3"),
        ("--quantize int8: a model split over processes", folder, "--tensor-parallel", "2", "--quantize", "int8"),
        ("--draft-split on: the target is not split", folder, "--draft-split", "on"),
        ("--tree 'bush'", folder, "--tree", "bush"),
    ):
        refused = serve(model, "--port", "0", "--replicas", "2", *options)
        assert refused.exit_code == 2 and refusal in " ".join(refused.stderr.split()), refused.output
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}
    assert "torchrun has started 2 processes" in serve(folder, "--port", "0", "--replicas", "2", **torchrun).stderr


def test_replicas_that_gpus_do_not_suffice_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait for more for ever."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    options, number = {"tensor_parallel": 2}, ReplicaSettings(replicas=1, max_replicas=3)
    with pytest.raises(InvalidArgument, match="3 replicas need 2 GPU each, and there are 5; at most 2 fit"):
        check_gpus(options, number, "cuda")
    check_gpus(options, number, "cpu")
    check_gpus(options, ReplicaSettings(replicas=2), "cuda")


def test_other_commands_do_not_import_the_server() -> None:
    code = (
        "import sys, forerun, forerun.cli.main, forerun.cli.serve; "
        "sys.exit(bool({'fastapi', 'uvicorn', 'pydantic', 'llguidance', 'torch'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def refuses(url: str) -> bool:
    """Whether nobody listens there. An answer that does not come says nothing of it."""
    try:
        httpx.get(f"{url}/health")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        return False
    return False


def begun(url: str) -> Any:
    """A stream of which a part has been read."""
    client = httpx.Client(timeout=60)
    answer = client.send(client.build_request("POST", f"{url}/v1/completions", json=BODY), stream=True)
    lines = answer.iter_lines()
    assert next(lines).startswith("data: ")
    return lines


@pytest.mark.slow
def test_the_first_signal_drains_and_the_second_ends(tmp_path: Path) -> None:
    """That what is under way ends, and the server with it, is seen under load (`tests/serve/test_faults.py`)."""
    with served(tmp_path / "one") as (process, url, line):
        assert "cpu, float32" in line and "16 sequences at a time" in line
        lines = begun(url)
        process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 60
        while not refuses(url):
            assert time.monotonic() < end, "it still takes requests"
            time.sleep(0.05)
        assert process.poll() is None and any(text.startswith("data: ") for text in lines), "what it had goes on"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) is not None


@pytest.mark.slow
@pytest.mark.model
def test_a_whisper_by_its_name_takes_recordings() -> None:
    soundfile = pytest.importorskip("soundfile")
    if whisper.WHEEL.find() is None:
        pytest.skip(f"whisper-tiny.en is not installed; run: {whisper.WHEEL.install}")
    written = io.BytesIO()
    soundfile.write(written, babble(1.0, 0), RATE, format="WAV")
    with served("whisper-tiny.en", "--served-model-name", "ears") as (process, url, line):
        assert "8 sequences at a time" in line
        sent = {"file": ("a.wav", written.getvalue())}
        answer = httpx.post(f"{url}/v1/audio/transcriptions", files=sent, data={"model": "ears"}, timeout=120)
        assert answer.status_code == 200 and isinstance(answer.json()["text"], str), answer.text
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
