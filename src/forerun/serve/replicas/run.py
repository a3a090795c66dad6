"""Replicas on this machine: a cluster of Ray that is started for them, and ended with them."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from forerun.errors import ReplicasLost, first_line
from forerun.serve.replicas.logs import log_level, logging_config, shown_logs
from forerun.serve.replicas.names import APPLICATION, MIDDLEWARES, OURS_ALONE
from forerun.serve.settings import AddressSettings

STORE_BYTES = 80 * 2**20  # of shared memory, about the least Ray takes: nothing large travels between its processes
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nobody is told of what is served
    "RAY_worker_niceness": "0",  # Ray says 15: any other program would come before the replicas
    # Else requests of a stuck engine, which never end, are waited for as long as a replica may drain; its cores are
    # nobody else's until it is gone.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # A request is with its replica a few milliseconds sooner where the proxy calls it by gRPC, from its own event loop.
    # An answer that is no stream is one message, which would be bound to 4 MB.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # What Ray does all the time takes from the replicas' cores. Nobody reads its own metrics here.
    "RAY_enable_metrics_collection": "0",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",  # else every 100 ms, in the proxy and in each replica
    "REPORTER_UPDATE_INTERVAL_MS": "60000",  # of what processes use, for a dashboard that is not there
    "RAY_task_events_report_interval_ms": "0",  # never
    "RAY_event_stats": "0",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",  # rounds of the controller; else 0.1, a twentieth of a core
    "RAY_SERVE_EVENT_LOOP_MONITORING_INTERVAL_S": "60",
    "RAY_raylet_report_resources_period_milliseconds": "1000",  # of one machine, whose shares are fixed; else 100
    "RAY_memory_monitor_refresh_ms": "1000",  # else 250
    "RAY_raylet_check_gc_period_milliseconds": "1000",  # else 100, as the next one: of objects, of which there are few
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_kill_idle_workers_interval_ms": "5000",  # else 200
    "RAY_report_worker_backlog_interval_ms": "60000",  # of tasks that wait, which there are none of
    "RAY_debug_dump_period_milliseconds": "0",  # never
    "RAY_io_context_monitor_probe_interval_ms": "60000",
}
"""What Ray finds in its environment, unless whoever starts us has said otherwise."""
RAISED = re.compile(r"^forerun\.errors\.\w+: |^(?=\w*(?:Error|Exception): )")
"""How the last line of a traceback begins; the name of an error of ours says nothing that its message does not."""
LOOK_SECONDS = 2.0  # between two looks at the cluster
LOST_SECONDS = 30.0  # that it may not answer
POLL_SECONDS = 0.2


@contextmanager
def cluster(address: AddressSettings, cores: int) -> Iterator[None]:
    """Ray and its HTTP proxy. Its files are in a folder of their own, which goes with it."""
    os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = MIDDLEWARES
    os.environ[OURS_ALONE] = "1"
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray keeps one in the user's home
    import ray
    from ray import serve

    level = log_level(address)
    logging.getLogger("ray.serve").setLevel(level)
    with tempfile.TemporaryDirectory(prefix="forerun-", ignore_cleanup_errors=True) as folder:
        try:
            with _deaf_children():
                ray.init(
                    address="local",
                    num_cpus=cores,
                    include_dashboard=False,
                    log_to_driver=False,
                    object_store_memory=STORE_BYTES,
                    logging_level=level,
                    _temp_dir=folder,
                )
            _end_idle_processes()
            with shown_logs(Path(folder) / "session_latest" / "logs"):
                serve.start(
                    http_options={
                        "host": address.host,
                        "port": address.port,
                        "ssl_keyfile": address.ssl_keyfile,
                        "ssl_certfile": address.ssl_certfile,
                    },
                    logging_config=logging_config(address),
                )
                yield
        finally:
            ray.shutdown()


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes that are started meanwhile ignore SIGTERM: sent to a whole group, it is for us to let them end.

    Ray puts a handler of its own in the place of ours, which ends this process and leaves all that was started behind.
    """
    ours = signal.getsignal(signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, ours)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_idle_processes() -> None:
    """A dashboard's server without a dashboard, what scales nodes where there is one, and the reader of logs: a fifth
    of what Ray takes of the cores while nobody asks. `shown_logs` reads logs instead."""
    from ray._private import worker

    node = getattr(worker, "_global_node", None)
    for name in ("kill_dashboard", "kill_monitor", "kill_log_monitor"):
        if end := getattr(node, name, None):  # a later Ray may call them otherwise: then they run on
            end(check_alive=False)


def deploy(application: Any) -> None:
    """Wait until all replicas are ready. In the place of one that runs already, replica after replica."""
    from ray import serve

    try:
        serve.run(application, name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise ReplicasLost(f"no replica could be started: {_reason(error)}") from error


def _reason(error: RuntimeError) -> str:
    """What the last replica that was tried has raised, in a line: Ray tells its whole traceback."""
    from ray import serve

    application = serve.status().applications.get(APPLICATION)
    messages = [] if application is None else [each.message for each in application.deployments.values()]
    lines = [line for message in messages for line in message.splitlines() if RAISED.match(line)]
    return RAISED.sub("", lines[-1]) if lines else first_line(error)


def drain(seconds: float) -> None:
    """Let requests under way end; new ones are told to come back."""
    from ray import serve

    deadline = time.monotonic() + seconds
    serve.delete(APPLICATION, _blocking=False)
    while APPLICATION in serve.status().applications and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def serve_until_ended(
    application: Any, address: AddressSettings, cores: int, drain_seconds: float, on_ready: Callable[[str], None]
) -> None:
    """The first signal lets requests under way end, the second does not wait for it."""
    signals: SimpleQueue[int] = SimpleQueue()  # which a handler may put into whatever it interrupts
    signal.signal(signal.SIGTERM, _end_start)
    with cluster(address, cores):
        deploy(application)
        for number in (signal.SIGTERM, signal.SIGINT):  # before that, either of them ends the start
            signal.signal(number, lambda number, frame: signals.put(number))
        on_ready(url(address))
        watch = _Watch()
        while not _next(signals, LOOK_SECONDS):
            watch.check()
        draining = threading.Thread(target=drain, args=(drain_seconds,), daemon=True)
        draining.start()
        while draining.is_alive() and not _next(signals, POLL_SECONDS):
            watch.check()


def _end_start(number: int, frame: object) -> NoReturn:
    """As Ctrl-C does: what was started ends, and leaves nothing behind."""
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise SystemExit(128 + number)


def _next(signals: SimpleQueue[int], seconds: float) -> bool:
    try:
        return bool(signals.get(timeout=seconds))
    except Empty:
        return False


class _Watch:
    """Looks whether the cluster still answers, in a thread: asking one that does not may block for a minute."""

    def __init__(self) -> None:
        self._seen = time.monotonic()
        threading.Thread(target=self._look, daemon=True).start()

    def check(self) -> None:
        if time.monotonic() - self._seen > LOST_SECONDS:
            raise ReplicasLost(f"Ray has not answered for {LOST_SECONDS:.0f} s, and its replicas with it: start again")

    def _look(self) -> None:
        import ray

        with suppress(Exception):  # of a cluster that has ended, by our own doing or otherwise
            while any(node["Alive"] for node in ray.nodes()):
                self._seen = time.monotonic()
                time.sleep(LOOK_SECONDS)


def url(address: AddressSettings) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{'https' if address.ssl_certfile else 'http'}://{host}:{address.port}"
