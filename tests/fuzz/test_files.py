"""Damaged files of every kind that is read: each is read all the same, or refused with an error of ours.

Never a raw exception, never minutes, never gigabytes. A case is a kind of file and a seed, and repeats exactly.
"""

from __future__ import annotations

import gzip
import json
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from forerun.cli.main import cli
from forerun.cli.prompts import read_prompts as read_cli_prompts
from forerun.drafters import NgramTable, from_folder
from forerun.errors import ForerunError
from forerun.loading import embedded, load_model
from forerun.loading.ctranslate import read_ctranslate
from forerun.loading.drafter_folder import DrafterManifest, describe_target, save_drafter
from forerun.models.draft_head import DraftHead
from forerun.speech import audio
from forerun.train.prompts import read_prompts
from forerun.train.run_folder import load_checkpoint, save_checkpoint
from forerun.train.shards import Manifest, Shards, ShardWriter, TrainingText
from fuzz.mutations import damaged
from loading.ctranslate_writer import pack
from loading.gguf_writer import write_llama
from support.folders import VOCAB
from support.folders import save as save_model
from support.sound import babble, write
from support.tiny import tiny_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SPARE = 4 << 30
"""Bytes a case may ask for beyond what the process has; a header that is believed asks for more."""
LONGEST = 20.0
"""Seconds of CPU time a case may take."""
QUICK, MANY = 8, 150


@dataclass(frozen=True)
class Kind:
    """A kind of file: how a good one is made, which file of the folder is damaged, and how it is read."""

    make: Callable[[Path], object]
    file: str
    read: Callable[[Path], object]
    most: int = MANY


def _read_gguf(folder: Path) -> None:
    place = folder / "converted"
    place.mkdir(exist_ok=True)
    embedded.convert(folder / "m.gguf", place)


def _model(folder: Path) -> None:
    save_model(folder, tiny_model("llama", vocab=VOCAB))


def _checkpoint_model(folder: Path) -> None:
    _model(folder)
    weights = tiny_model("llama", vocab=VOCAB).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def _load(folder: Path) -> None:
    load_model(folder, device="cpu", offline=True)


def _feature_drafter(folder: Path) -> None:
    target = tiny_model("llama", vocab=VOCAB)
    head = DraftHead.for_target(target, 1)
    manifest = DrafterManifest("feature", 0, describe_target(target), provenance={"steps": 3})
    tensors = dict(head.state_dict()) | {"draft_vocabulary": torch.arange(0, VOCAB, 2, dtype=torch.int32)}
    save_drafter(folder, manifest, head.config, tensors)


def _shards(folder: Path) -> None:
    entry = {"name": "tiny", "model_type": "llama", "hidden_size": 32, "vocab_size": VOCAB}
    writer = ShardWriter(folder, Manifest(entry, 0, {}))
    for i in range(4):
        writer.add(i, TrainingText(torch.arange(10 + i), 3))
    writer.flush()


PROMPTS = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}, {"turns": ["c", "d"]}]


def _lines(folder: Path) -> None:
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))


def _questions(folder: Path) -> None:
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, PROMPTS[:1] * 3)))


def _archive(folder: Path) -> None:
    (folder / "p.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, PROMPTS * 20)).encode()))


def _listen(path: Path) -> None:
    audio.duration(path)
    audio.read(path)


def _show(folder: Path) -> None:
    result = CliRunner().invoke(cli, ["--debug", "bench", "show", str(folder / "r.json")])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception


def _record(name: str) -> Kind:
    return Kind(lambda folder: shutil.copy(RESULTS / name, folder / "r.json"), "r.json", _show)


KINDS = {
    "gguf": Kind(lambda folder: write_llama(folder / "m.gguf"), "m.gguf", _read_gguf),
    "gguf through transformers": Kind(
        lambda folder: write_llama(folder / "m.gguf"), "m.gguf", lambda folder: _load(folder / "m.gguf"), 30
    ),
    "ctranslate": Kind(
        lambda folder: (folder / "model.bin").write_bytes(pack("WhisperSpec", {"a": torch.ones(2, 3)}, {"b": "a"})),
        "model.bin",
        lambda folder: read_ctranslate(folder / "model.bin"),
    ),
    "model": Kind(_model, "model.safetensors", _load, 60),
    "checkpoint of a model": Kind(_checkpoint_model, "pytorch_model.bin", _load, 60),
    "config.json": Kind(_model, "config.json", _load, 60),
    "generation_config.json": Kind(_model, "generation_config.json", _load, 40),
    "tokenizer.json": Kind(_model, "tokenizer.json", _load, 40),
    "tokenizer_config.json": Kind(_model, "tokenizer_config.json", _load, 40),
    "drafter's forerun.json": Kind(_feature_drafter, "forerun.json", from_folder),
    "drafter's config.json": Kind(_feature_drafter, "config.json", from_folder),
    "drafter's weights": Kind(_feature_drafter, "model.safetensors", from_folder),
    "n-gram table": Kind(
        lambda folder: NgramTable.count([[5, 6, 7, 8] * 9], order=2, vocab_size=20).save(folder / "t"),
        "t",
        lambda folder: NgramTable.load(folder / "t"),
    ),
    "data.json": Kind(_shards, "data.json", lambda folder: [*Shards(folder)]),
    "shard": Kind(_shards, "shard-00000.safetensors", lambda folder: [*Shards(folder)]),
    "prompts": Kind(_lines, "p.jsonl", lambda folder: read_prompts([folder / "p.jsonl"])),
    "prompts of generate": Kind(_questions, "p.jsonl", lambda folder: read_cli_prompts((), folder / "p.jsonl")),
    "packed prompts": Kind(_archive, "p.jsonl.gz", lambda folder: read_prompts([folder / "p.jsonl.gz"])),
    "checkpoint of a run": Kind(
        lambda folder: save_checkpoint(folder, {"step": 3, "weights": {"a": torch.ones(3)}}),
        "checkpoint.pt",
        load_checkpoint,
    ),
    "wav": Kind(lambda f: write(f / "s.wav", babble(0.5, 1)), "s.wav", lambda f: _listen(f / "s.wav")),
    "flac": Kind(lambda f: write(f / "s.flac", babble(0.5, 1)), "s.flac", lambda f: _listen(f / "s.flac")),
    "record of speed": _record("cpu-batch4.json"),
    "record of rounds": _record("seq2seq-h200.json"),
    "record of scores": _record("eval-sampled.json"),
    "record of a plan": _record("plan-h200.json"),
    "record of words": _record("asr-cpu.json"),
}


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Whoever believes a header that asks for much more than there is gets a MemoryError, which is no error of ours."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    if pages is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def attempt(kind: Kind, good: bytes, folder: Path, seed: int) -> str | None:
    """What went wrong with one case, in words."""
    (folder / kind.file).write_bytes(damaged(good, seed))
    started = time.process_time()
    try:
        with bounded_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind.read(folder)
    except ForerunError:
        pass
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    if (spent := time.process_time() - started) > LONGEST:
        return f"seed {seed}: {spent:.0f} seconds"
    return None


def run(name: str, folder: Path, seeds: range) -> None:
    if name == "gguf through transformers":
        pytest.importorskip("gguf")
        pytest.importorskip("accelerate")
    kind = KINDS[name]
    kind.make(folder)
    good = (folder / kind.file).read_bytes()
    kind.read(folder)  # what is not damaged is read
    problems = [problem for seed in seeds if (problem := attempt(kind, good, folder, seed))]
    assert not problems, "\n".join(problems[:10])


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_read_or_refused(name: str, tmp_path: Path) -> None:
    run(name, tmp_path, range(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_many_damaged_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    run(name, tmp_path, range(QUICK, KINDS[name].most))
