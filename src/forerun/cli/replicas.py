"""`forerun serve --replicas N`, and what a config file of `serve deploy` names: `forerun.cli.replicas:app`."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.options import settings_from
from forerun.cli.serve import make_service, serve, served_name
from forerun.config import Kernels, api_key, kernels
from forerun.errors import InvalidArgument
from forerun.serve.settings import AddressSettings, ReplicaSettings, ServiceSettings

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.serve.replicas.deployment import Share
    from forerun.serve.service import Service
    from forerun.serve.speech import SpeechService

EVERYWHERE = "0.0.0.0"
MORE_SECONDS = 5.0  # than replicas have to let requests end, before they are left alone


def serve_replicas(
    options: dict[str, Any],
    address: AddressSettings,
    limits: ServiceSettings,
    replicas: ReplicaSettings,
    console: Console,
) -> None:
    """Until a signal ends it."""
    _check_ray()
    from forerun.cli.console import say
    from forerun.serve.replicas.deployment import application
    from forerun.serve.replicas.run import free_port, serve_until_ended

    options = safe(options)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = _share(options, limits, _device(options["device"]), cores / replicas.most)
    if not address.port:
        address = replace(address, port=free_port(address.host))
    number = f"{replicas.replicas} to {replicas.most}" if replicas.max_replicas else f"{replicas.replicas}"
    device = f"{share.num_gpus} GPU" if share.num_gpus else f"{max(1, int(share.num_cpus))} threads"

    name = served_name(options, limits)

    def say_ready(url: str) -> None:
        say(console, f"Serving {name} at {url}: {number} replicas, {device} and {share.rows} sequences at a time each")

    served = application(_maker(options, limits), address, limits, replicas, share)
    serve_until_ended(served, address, cores, limits.drain_seconds + MORE_SECONDS, say_ready)


def app(asked: dict[str, Any]) -> Any:
    """The application of a config file: its `args` are options of `forerun serve`, without their dashes.

    Whoever can reach Ray's proxies can reach it, so it needs $FORERUN_API_KEY where the replicas start, or
    `allow_anyone: true`. The file's own `deployments` may override what is said here of resources and numbers.
    """
    _check_ray()
    from forerun.serve.replicas.deployment import application

    options = safe(parsed(asked))
    options["api_key"] = options["api_key"] or api_key()
    address = settings_from(AddressSettings, {**options, "host": EVERYWHERE})
    limits, replicas = settings_from(ServiceSettings, options), settings_from(ReplicaSettings, options)
    share = _share(options, limits, options["device"] or "cpu", 1.0)
    return application(_maker(options, limits), address, limits, replicas, share)


def parsed(asked: dict[str, Any]) -> dict[str, Any]:
    """As the command line would read them: the same names, defaults and complaints."""
    known = {param.name: param for param in serve.params}
    words: list[str] = []
    for name, value in asked.items():
        if name not in known:
            raise InvalidArgument(f"args: {name}: `forerun serve` has no --{name.replace('_', '-')}")
        is_flag = getattr(known[name], "is_flag", False)
        if is_flag != isinstance(value, bool):
            raise InvalidArgument(f"args: {name}: {value!r}: must be {'true or false' if is_flag else 'a value'}")
        if is_flag:
            words += [*known[name].opts[:1]] if value else [*known[name].secondary_opts[:1]]
        elif name == "model":
            words.append(str(value))
        else:
            for one in value if isinstance(value, list) else [value]:
                words += [known[name].opts[0], str(one)]
    try:
        return serve.make_context("serve", words).params
    except click.UsageError as error:
        raise InvalidArgument(f"args: {error.format_message()}") from error


def safe(options: dict[str, Any]) -> dict[str, Any]:
    """The same without compiled products on a CPU, unless they are asked for: replicas that ran them were seen to end
    by a segmentation fault under many requests at once, and nobody knows yet why. See docs/scale.md."""
    asked = options["kernels"] is not None or kernels() is not Kernels.AUTO
    is_on_gpu = (options["device"] or "").startswith("cuda") or _device(options["device"]) == "cuda"
    return options if asked or is_on_gpu else {**options, "kernels": Kernels.OFF.value}


def _check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise InvalidArgument("replicas are run by Ray Serve: pip install 'forerun[scale]'")


def _device(asked: str | None) -> str:
    from forerun.loading.load import choose_device

    return choose_device(asked).type if asked is None or ":" not in asked else asked


def _share(options: dict[str, Any], limits: ServiceSettings, device: str, num_cpus: float) -> Share:
    """A GPU for each process of a replica, or so many cores for all of them."""
    from forerun.serve.replicas.deployment import Share

    if ":" in device:
        raise InvalidArgument(f"--device {device}: replicas get their GPUs from Ray; say cuda, or leave it out")
    num_gpus = options["tensor_parallel"] if device == "cuda" else 0
    return Share(round(num_cpus, 2), num_gpus, limits.rows(device))


def _maker(options: dict[str, Any], limits: ServiceSettings) -> Any:
    return partial(_make, options, limits)


def _make(options: dict[str, Any], limits: ServiceSettings, engine: str) -> Service | SpeechService:
    """In the process of a replica, whose log is Ray's."""
    from forerun.cli.console import err_console, plain_warnings

    console = err_console()
    with plain_warnings(console):
        return make_service(options, limits, console, engine)
