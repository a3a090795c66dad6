"""Servers at IPv6 and https addresses; what refuses other ones is tested with the command."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve.process import served

BODY = {"prompt": "abc", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("model") / "tiny"


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no address ::1")
def test_ipv6(model: Path) -> None:
    with served(model, "--host", "::1") as (_, url, _):
        assert url.startswith("http://[::1]:")
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["usage"]["completion_tokens"] == 40
        assert httpx.get(f"{url}/v1/models", headers={"Origin": url}).status_code == 200


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_https(model: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate], check=True, capture_output=True,
    )  # fmt: skip
    with served(model, "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)) as (_, url, _):
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(verify=trusting, timeout=60) as client:
            whole = client.post(f"{url}/v1/completions", json=BODY).json()["choices"][0]["text"]
            with client.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}) as answer:
                lines = [line for line in answer.iter_lines() if line]
            assert lines[-1] == "data: [DONE]" and whole and len(lines) > 5
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url.replace('https', 'http')}/health")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{url}/health")
