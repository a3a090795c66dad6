"""`forerun serve --replicas N`: as many servers as asked, run by Ray Serve."""

from __future__ import annotations

import importlib.util
import logging
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from forerun.cli.pair import check_speculation, check_split
from forerun.cli.service import check_whisper, is_whisper, load_model, make_speech_service, served_name
from forerun.config import rank_and_size
from forerun.errors import InvalidArgument, ModelNotFound
from forerun.processes import free_port, usable_cores
from forerun.serve.apart.process import EngineProcess
from forerun.serve.settings import AddressSettings, ReplicaSettings, ServiceSettings

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.decoder import SpeculativeDecoder
    from forerun.serve.model import ServedModel
    from forerun.serve.replicas.deployment import Share
    from forerun.serve.service import Service

log = logging.getLogger("ray.serve")
MORE_SECONDS = 5.0  # than replicas have to let requests end, before they are left alone


def serve_replicas(
    options: dict[str, Any],
    address: AddressSettings,
    limits: ServiceSettings,
    replicas: ReplicaSettings,
    console: Console,
) -> None:
    """Until a signal ends it."""
    check_queue(limits)
    check_ray()
    device = _device(options["device"])
    _check_model(options)
    check_gpus(options, replicas, device)
    from forerun.cli.console import say
    from forerun.serve.replicas.deployment import application
    from forerun.serve.replicas.run import serve_until_ended

    cores = usable_cores()
    share = share_of(options, limits, device, cores / replicas.most)
    if not address.port:
        address = replace(address, port=free_port(address.host))
    number = f"{replicas.replicas} to {replicas.most}" if replicas.max_replicas else f"{replicas.replicas}"
    part = f"{share.num_gpus} GPU" if share.num_gpus else f"{max(1, int(share.num_cpus))} threads"
    name = served_name(options, limits)

    def say_ready(url: str) -> None:
        say(console, f"Serving {name} at {url}: {number} replicas, {part} and {share.rows} sequences at a time each")

    # What fails at once would fail again: whoever has typed the command is told why.
    served = application(maker(options, limits), address, limits, replicas, share, tries=1)
    serve_until_ended(served, address, cores, limits.drain_seconds + MORE_SECONDS, say_ready)


def check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise InvalidArgument("replicas are run by Ray Serve: pip install 'forerun[scale]'")


def check_queue(limits: ServiceSettings) -> None:
    if limits.max_queued < 1:
        raise InvalidArgument(
            f"--max-queued {limits.max_queued}: requests for replicas wait in Ray, which lets at least 1 of them"
        )


def _check_model(options: dict[str, Any]) -> None:
    """What every replica would refuse, after Ray has started, each time it is tried again."""
    if (size := rank_and_size()[1]) > 1:
        raise InvalidArgument(
            f"--replicas: torchrun has started {size} processes that would each start replicas; leave it out "
            f"and say --tensor-parallel {size}"
        )
    if is_whisper(options):
        check_whisper(options)
    else:
        check_split(options)
        if options["tensor_parallel"] > 1:
            from forerun.loading import check_shards

            check_shards(options["model"], options["tensor_parallel"], offline=options["offline"])
    check_speculation(options)


def check_gpus(options: dict[str, Any], replicas: ReplicaSettings, device: str) -> None:
    """Ray would wait for GPUs that never come."""
    if device != "cuda":
        return
    import torch

    each, present = options["tensor_parallel"], torch.cuda.device_count()
    if each * replicas.most > present:
        raise InvalidArgument(
            f"{replicas.most} replicas need {each} GPU each, and there are {present}; at most {present // each} fit"
        )


def _device(asked: str | None) -> str:
    from forerun.loading.load import choose_device

    return choose_device(asked).type if asked is None or ":" not in asked else asked


def share_of(options: dict[str, Any], limits: ServiceSettings, device: str, num_cpus: float) -> Share:
    """A GPU for each process of a replica, or so many cores for all of them."""
    from forerun.serve.replicas.deployment import Share

    if ":" in device:
        raise InvalidArgument(f"--device {device}: replicas get their GPUs from Ray; say cuda, or leave it out")
    num_gpus = options["tensor_parallel"] if device == "cuda" else 0
    # Rounded down: a hundredth more than there is, and Ray would wait for a core for the last replica for ever.
    return Share(int(num_cpus * 100) / 100, num_gpus, limits.max_rows or _rows(options, limits, device))


def _rows(options: dict[str, Any], limits: ServiceSettings, device: str) -> int:
    """A Whisper decodes fewer recordings than a language model sequences."""
    with suppress(ModelNotFound):  # on the node that reads a config file; where replicas start it may be
        if is_whisper(options):
            from forerun.serve.speech import BATCH

            return BATCH
    return limits.rows(device)


def maker(options: dict[str, Any], limits: ServiceSettings) -> Any:
    return partial(_make, options, limits)


def _make(options: dict[str, Any], limits: ServiceSettings, engine: str) -> Service:
    """In the process of a replica, whose log is Ray's."""
    service = _service(options, limits, engine)
    if options["round_seconds"] is not None:
        service.longest_round = options["round_seconds"]
    return service


def _service(options: dict[str, Any], limits: ServiceSettings, engine: str) -> Service:
    """Text is decoded in a further process, so that the interpreter which answers Ray and its proxy does not keep the
    engine's waiting; a Whisper's batches are long enough to share it."""
    from forerun.cli.console import err_console, plain_warnings

    console = err_console()
    with plain_warnings(console):
        if is_whisper(options):
            return make_speech_service(options, limits, console, engine)
        process = EngineProcess(partial(_load, options, limits))
        from forerun.serve.text import TextService

        model, backend = process.loaded()
        backend.on_lost = partial(_end, process)
        return TextService(model, backend, limits, engine)


def _load(options: dict[str, Any], limits: ServiceSettings) -> tuple[SpeculativeDecoder, ServedModel]:
    """In the engine's own process."""
    from forerun.cli.console import err_console, plain_warnings

    console = err_console()
    with plain_warnings(console):
        return load_model(options, limits, console)


def _end(process: EngineProcess) -> None:
    """Without its engine a replica is nothing: Ray sees its process end, and starts another one."""
    log.error("the engine's process has ended with status %d, and this replica with it", process.wait())
    logging.shutdown()
    os._exit(1)
