"""Replicas on a cluster of Ray that is started for them: what is lost with one of them, and what is not."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from forerun.cli import deployed
from forerun.processes import free_port
from forerun.serve.replicas import run
from forerun.serve.replicas.names import MIDDLEWARES
from forerun.serve.replicas.run import cluster, deploy, url
from forerun.serve.settings import AddressSettings
from serve.process import served
from serve.replicas import faults
from support.folders import VOCAB, save
from support.tiny import tiny_model

pytest.importorskip("ray", reason="pip install -r requirements/scale.txt")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc"),
]
RAY, SERVE = (str(Path(sys.executable).with_name(name)) for name in ("ray", "serve"))
TESTS = Path(__file__).resolve().parents[2]
DEPLOY = TESTS.parent / "deploy/ray"
SHORT = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = SHORT | {
    "max_tokens": 800,
    "temperature": 1,
}  # greedily a small model repeats itself, and drafts end it in no time
ALLOWANCE = 1.0  # seconds for a longer gap than any before: a dead replica's successor imports on the same cores
PATIENCE = 120.0  # seconds for replicas to come, on a machine that is busy with other things
TWO: dict[str, Any] = {"replicas": 2, "keep_rows": 4, "drain_seconds": PATIENCE}
FEW_ROWS: dict[str, Any] = {"replicas": 1, "max_replicas": 2, "max_rows": 2, "max_queued": 4}


class Cluster:
    """Its address, and what is served there. A file at `halt` brings one of its engines to a halt."""

    def __init__(self, address: AddressSettings, folder: str, halt: Path | None = None) -> None:
        self.url, self.folder, self.halt = url(address), folder, halt
        self._deployed: dict[str, Any] | None = None
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE, limits=httpx.Limits(max_connections=64))

    def deploy(self, replicas: int = 2, **options: Any) -> None:
        """Unless it is what was deployed last: every replica imports for ten seconds of a core."""
        named = {"model": self.folder, "device": "cpu", "draft": "lookup", "allow_anyone": True, "offline": True}
        asked = {**named, "replicas": replicas, **options}
        if asked != self._deployed:
            self._deployed = asked
            deploy(deployed.app(asked))
        wait_for(lambda: len(self.engines()) == replicas)

    def engines(self, metric: str = "vllm:num_requests_running") -> dict[str, float]:
        """The metric's value, by replica."""
        text = self.client.get("/metrics").text
        found = re.findall(rf'^{metric}{{engine="(\w+)"[^}}]*}} (\S+)', text, re.MULTILINE)
        return {engine: float(value) for engine, value in found}

    def ended(self) -> Counter[str]:
        """Sequences that have ended, by replica."""
        return Counter({engine: int(value) for engine, value in self.engines("vllm:request_success_total").items()})

    def stream(self, body: dict[str, Any] = LONG) -> tuple[str, list[float]]:
        """How a stream ended, and when each of its events came."""
        how, times = "cut off", list[float]()
        with self.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    times.append(time.monotonic())
                    event = json.loads(line.removeprefix("data: "))
                    how = event["error"]["code"] if "error" in event else event["choices"][0]["finish_reason"] or how
        return how, times

    def name(self) -> str | None:
        """Of the model that is served; None where none is yet."""
        try:
            answer = self.client.get("/v1/models")
        except httpx.TransportError:
            return None
        return str(answer.json()["data"][0]["id"]) if answer.status_code == 200 else None

    def complete(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json=SHORT | body)


def longest(gaps: list[tuple[float, float]]) -> float:
    return max((end - start for start, end in gaps), default=0.0)


def wait_for(done: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.3)


def descendants(of: int) -> dict[int, str]:
    """Their names, by process."""
    parents, names = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, name, parent = re.match(r"(\d+) \((.*)\) \S (\d+)", stat.read_text()).groups()  # type: ignore[union-attr]
            names[int(pid)] = f"{name} {stat.with_name('cmdline').read_text()}"
        except OSError:
            continue
        parents[int(pid)] = int(parent)
    found, new = set[int](), {of}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found |= new
    return {pid: names[pid] for pid in found}


def replicas_of(pid: int) -> list[int]:
    return [child for child, name in descendants(pid).items() if "ServeReplica" in name]


@pytest.fixture(scope="module")
def served_by_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for all: what runs on it is deployed anew only where a test needs something else."""
    folder = save(
        tmp_path_factory.mktemp("model"),
        tiny_model("llama", vocab=VOCAB, eos_token_id=0, max_position_embeddings=2048),
    )
    halt = tmp_path_factory.mktemp("halt") / "halt"
    address = AddressSettings(port=free_port("127.0.0.1"), log_level="error")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORERUN_KERNELS", "off")
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)  # for replicas: pytest adds it to its own paths
        patch.setattr(deployed, "maker", lambda options, limits: partial(faults.make, options, limits, str(halt)))
        # Several reports of the queue fall into the time that is looked back at, and a few that come late do not take
        # a replica away again that has just been asked for, also where processes wait for a core.
        for name, seconds in (("UPSCALE_SECONDS", 4.0), ("DOWNSCALE_SECONDS", 6.0), ("HEALTH_PERIOD", 0.5)):
            patch.setattr(f"forerun.serve.replicas.deployment.{name}", seconds)
        with cluster(address, cores=4):
            yield Cluster(address, folder, halt)


def test_replicas_share_the_work_and_beginnings_stay_together(served_by_ray: Cluster) -> None:
    served_by_ray.deploy(**TWO)
    before = served_by_ray.ended()
    texts = {served_by_ray.complete(prompt="x" * at).json()["choices"][0]["text"] for at in (3, 3, 3)}
    assert len(texts) == 1
    for at in range(16):
        assert served_by_ray.complete(prompt=f"{at} begins otherwise").status_code == 200
    spread = served_by_ray.ended() - before
    assert len(spread) == 2 and spread.total() == 19, spread
    for at in range(8):
        assert served_by_ray.complete(prompt="the same beginning " * 40 + str(at)).status_code == 200
    together = served_by_ray.ended() - before - spread
    assert list(together.values()) == [8], together


def test_an_answer_that_is_no_stream_may_be_long(served_by_ray: Cluster) -> None:
    served_by_ray.deploy(**TWO)
    answer = served_by_ray.complete(prompt=["x" * 2000] * 32, echo=True, logprobs=5, max_tokens=0)
    assert answer.status_code == 200, answer.text
    assert len(answer.content) > 4 * 2**20, "gRPC would bound messages to that"
    assert len(answer.json()["choices"]) == 32


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_sequence(served_by_ray: Cluster, stream: bool) -> None:
    """Though no replica asks the proxy whether it is still there."""
    served_by_ray.deploy(**TWO)
    asked = LONG | {"max_tokens": 1500, "stream": stream}

    def written() -> float:
        return sum(served_by_ray.engines("vllm:generation_tokens_total").values())

    before = written()
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.Client(base_url=served_by_ray.url, timeout=0.5) as client,
        client.stream("POST", "/v1/completions", json=asked) as answer,
    ):
        for _ in answer.iter_bytes():
            raise httpx.ReadTimeout("it has begun")
    wait_for(lambda: not any(served_by_ray.engines().values()) and written() > before, 20.0)
    assert written() - before < asked["max_tokens"]


def test_a_replica_that_is_killed_loses_its_own_streams_and_is_replaced(served_by_ray: Cluster) -> None:
    served_by_ray.deploy(**TWO)
    with ThreadPoolExecutor(8) as pool:
        bodies = [LONG | {"prompt": f"{at} begins otherwise"} for at in range(8)]
        streams = [pool.submit(served_by_ray.stream, body) for body in bodies]
        wait_for(lambda: sum(served_by_ray.engines().values()) == 8)
        running = served_by_ray.engines()
        assert all(running.values()), "all streams went to one replica"
        (one, *_) = replicas_of(os.getpid())
        time.sleep(0.5)  # all have begun, and there are gaps to compare with
        killed = time.monotonic()
        os.kill(one, signal.SIGKILL)
        ends = [stream.result() for stream in streams]
    outcomes = Counter(how for how, _ in ends)
    assert outcomes.keys() == {"replica_lost", "length"}, outcomes
    assert outcomes["replica_lost"] in running.values()
    gaps = [gap for how, times in ends if how == "length" for gap in itertools.pairwise(times)]
    before, after = ([gap for gap in gaps if (gap[1] > killed) is late] for late in (False, True))
    assert before and after, "they were under way when it was killed"
    assert longest(after) < longest(before) + ALLOWANCE, "the others stalled"
    wait_for(lambda: len(served_by_ray.engines()) == 2 and served_by_ray.engines().keys() != running.keys())
    assert served_by_ray.complete().status_code == 200


def test_a_replica_ends_with_its_engine_and_is_replaced(served_by_ray: Cluster) -> None:
    served_by_ray.deploy(**TWO)
    before = served_by_ray.engines().keys()
    with ThreadPoolExecutor(8) as pool:
        bodies = [LONG | {"prompt": f"{at} begins otherwise"} for at in range(8)]
        streams = [pool.submit(served_by_ray.stream, body) for body in bodies]
        wait_for(lambda: all(served_by_ray.engines().values()))
        (one, _) = [pid for pid, name in descendants(os.getpid()).items() if "engine_main" in name]
        os.kill(one, signal.SIGKILL)
        outcomes = Counter(stream.result()[0] for stream in streams)
    assert outcomes.keys() == {"replica_lost", "length"}, outcomes
    wait_for(lambda: len(served_by_ray.engines()) == 2 and len(served_by_ray.engines().keys() - before) == 1)
    assert served_by_ray.complete().status_code == 200


def test_an_engine_that_is_stuck_is_replaced(served_by_ray: Cluster) -> None:
    served_by_ray.deploy(**TWO)
    before = served_by_ray.engines().keys()

    def stream(at: int) -> tuple[str, float]:
        how, _ = served_by_ray.stream(LONG | {"prompt": f"{at} begins otherwise"})
        return how, time.monotonic()

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream, at) for at in range(8)]
        wait_for(lambda: all(served_by_ray.engines().values()))
        assert served_by_ray.halt is not None
        served_by_ray.halt.touch()
        halted = time.monotonic()
        ends = [stream.result() for stream in streams]
    outcomes = Counter(how for how, _ in ends)
    assert outcomes.keys() == {"replica_lost", "length"}, outcomes
    told = max(when for how, when in ends if how == "replica_lost")
    assert told - halted < PATIENCE / 2, "requests that never end were waited for"
    wait_for(lambda: len(served_by_ray.engines()) == 2 and len(served_by_ray.engines().keys() - before) == 1)
    assert served_by_ray.complete().status_code == 200


def test_a_replica_that_loses_a_rank_is_replaced(served_by_ray: Cluster) -> None:
    served_by_ray.deploy(replicas=1, tensor_parallel=2)
    before = served_by_ray.engines().keys()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(served_by_ray.stream)
        wait_for(lambda: all(served_by_ray.engines().values()))
        (rank,) = (pid for pid, name in descendants(os.getpid()).items() if "forerun.parallel" in name)
        os.kill(rank, signal.SIGKILL)
        assert stream.result()[0] in ("rank_lost", "replica_lost")
    wait_for(lambda: len(served_by_ray.engines()) == 1 and served_by_ray.engines().keys() != before)
    assert served_by_ray.complete().status_code == 200
    assert not Path(f"/proc/{rank}").exists()


def test_an_update_loses_nothing_and_neither_does_scaling_down(served_by_ray: Cluster) -> None:
    served_by_ray.deploy(**TWO)
    answers: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers.append(served_by_ray.complete().status_code)

    with ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        streams = [pool.submit(served_by_ray.stream) for _ in range(4)]
        wait_for(lambda: sum(served_by_ray.engines().values()) >= 4)
        served_by_ray.deploy(**TWO, served_model_name="second")
        streams += [pool.submit(served_by_ray.stream) for _ in range(4)]
        wait_for(lambda: sum(served_by_ray.engines().values()) >= 4)
        served_by_ray.deploy(replicas=1, served_model_name="third")
        ends = [stream.result()[0] for stream in streams]
        is_over.set()
        assert [one.result() for one in asking] == [None, None]
    assert ends == ["length"] * 8
    assert len(answers) > 10 and set(answers) == {200}, Counter(answers)
    assert served_by_ray.client.get("/v1/models").json()["data"][0]["id"] == "third"


def test_too_many_are_told_to_come_back(served_by_ray: Cluster) -> None:
    served_by_ray.deploy(**FEW_ROWS)
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda _: served_by_ray.complete(max_tokens=100), range(32)))
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused and {answer.status_code for answer in answers} == {200, 503}
    assert {answer.headers["retry-after"] for answer in refused} == {"1"}
    assert {answer.json()["error"]["code"] for answer in refused} == {"overloaded"}


def test_replicas_come_and_go_with_the_queue(served_by_ray: Cluster) -> None:
    served_by_ray.deploy(**FEW_ROWS)
    is_over = threading.Event()

    def ask() -> Counter[str]:
        ends = Counter[str]()
        while not is_over.is_set():
            ends[served_by_ray.stream(LONG | {"max_tokens": 200})[0]] += 1
        return ends

    with ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(ask) for _ in range(6)]  # four with the replica, two in the queue
        try:
            wait_for(lambda: len(served_by_ray.engines()) == 2)
        finally:
            is_over.set()
        ends = sum((one.result() for one in asking), Counter[str]())
    assert ends.total() >= 6 and ends.keys() == {"length"}, ends
    wait_for(lambda: len(served_by_ray.engines()) == 1)
    assert served_by_ray.complete().status_code == 200


def test_the_command_drains_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", tiny_model("llama", vocab=VOCAB, eos_token_id=0, max_position_embeddings=2048))
    port = free_port("127.0.0.1")
    before = {*Path("/tmp").glob("forerun-*"), *Path("/dev/shm").glob("*")}
    with served(Path(folder), "--replicas", "2", "-d", "lookup", port=port) as (process, address, line):
        assert "2 replicas" in line
        with httpx.stream("POST", f"{address}/v1/completions", json=LONG | {"stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            children = descendants(process.pid)
            assert len(replicas_of(process.pid)) == 2
            idle = ("log_monitor", "dashboard.py", "monitor.py")
            assert not [name for name in children.values() if any(each in name for each in idle)]
            process.send_signal(signal.SIGTERM)
            refused = itertools.takewhile(lambda got: got.status_code == 200, iter(lambda: try_one(address), None))
            assert len(list(refused)) < 1000
            assert [text for text in lines if text][-1] == "data: [DONE]", "what was under way has ended"
        assert process.wait(60) == 0
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 10)
    assert {*Path("/tmp").glob("forerun-*"), *Path("/dev/shm").glob("*")} <= before
    assert not is_listening(port)


def test_a_start_that_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", tiny_model("llama", vocab=VOCAB, eos_token_id=0, max_position_embeddings=2048))
    before = {*Path("/tmp").glob("forerun-*"), *Path("/dev/shm").glob("*")}
    command = [sys.executable, "-m", "forerun", "serve", folder, "--device", "cpu", "--port", "0", "--replicas", "1"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: any("raylet" in name for name in descendants(process.pid).values()))
        time.sleep(1.0)
        children = descendants(process.pid)
        process.terminate()
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 10)
    assert {*Path("/tmp").glob("forerun-*"), *Path("/dev/shm").glob("*")} <= before


def test_a_replica_that_cannot_be_started_says_why_in_a_line(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", tiny_model("llama", vocab=VOCAB, eos_token_id=0, max_position_embeddings=2048))
    options = ("--device", "cpu", "--port", "0", "--replicas", "1", "--draft", "no/such/draft", "--offline")
    command = [sys.executable, "-m", "forerun", "serve", folder, *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("Error: no replica could be started: no folder 'no/such/draft'")
    assert f'File "{Path(run.__file__)}"' not in ended.stderr, "a traceback of the command itself"
    assert "ServeController" in ended.stderr, "what Ray's processes say is shown meanwhile"


@contextmanager
def head_of_a_cluster(folder: Path, dashboard: int) -> Iterator[None]:
    """As whoever runs a cluster starts it; all of it ends with the block."""
    ports = ["--port", str(free_port("127.0.0.1")), "--dashboard-port", str(dashboard), "--dashboard-host", "127.0.0.1"]
    command = [RAY, "start", "--head", "--block", *ports, "--num-cpus", "2", "--temp-dir", str(folder)]
    with subprocess.Popen([*command, "--disable-usage-stats"], stdout=subprocess.DEVNULL) as head:
        try:
            yield
        finally:
            children = descendants(head.pid)
            head.terminate()
            head.wait(PATIENCE)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 20)


def test_a_config_file_is_deployed_and_deployed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", MIDDLEWARES)
    monkeypatch.setenv("FORERUN_KERNELS", "off")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # as the command has it for a cluster of its own
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    dashboard, address = free_port("127.0.0.1"), AddressSettings(port=free_port("127.0.0.1"))
    config = yaml.safe_load((DEPLOY / "serve.yaml").read_text(encoding="utf-8"))
    config["http_options"] = {"host": address.host, "port": address.port}
    (application,) = config["applications"]
    application["deployments"][0]["ray_actor_options"] = {"num_cpus": 1}
    with tempfile.TemporaryDirectory(prefix="ray-") as short, head_of_a_cluster(Path(short) / "r", dashboard):
        tiny = tiny_model("llama", vocab=VOCAB, eos_token_id=0, max_position_embeddings=2048)
        cluster = Cluster(address, save(Path(short) / "m", tiny))
        for name in ("first", "second"):
            told = {"model": cluster.folder, "device": "cpu", "draft": "lookup", "served_model_name": name}
            application["args"] = {**told, "replicas": 1, "allow_anyone": True, "offline": True}
            file = Path(short) / f"{name}.yaml"
            file.write_text(yaml.safe_dump(config), encoding="utf-8")
            command = [SERVE, "deploy", "--address", f"http://127.0.0.1:{dashboard}", str(file)]
            wait_for(lambda command=command: subprocess.run(command, capture_output=True, check=False).returncode == 0)  # type: ignore[misc]
            wait_for(lambda name=name: cluster.name() == name)  # type: ignore[misc]
        assert cluster.stream()[0] == "length"
        assert len(cluster.engines()) == 1, "the proxy has the middleware"


def try_one(address: str) -> httpx.Response:
    return httpx.post(f"{address}/v1/completions", json=SHORT, timeout=60)


def is_listening(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/version")
    except httpx.ConnectError:
        return False
    return True
