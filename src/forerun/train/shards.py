"""Training text on disk: sequences packed into safetensors files, and a manifest that says which files are whole.

A shard holds `tokens` [T], the sequences one after the other; `starts` [S + 1], where each begins; `prompt_lengths`
[S], how many of its first tokens the target did not write; `items` [S], which prompt each answers; `skipped`, prompts
that gave nothing worth keeping; and, if asked for, `top_ids` and `top_logits` [T, K], the target's most likely
tokens after each position and their log-probabilities. The manifest is replaced after every shard: what it names is
finished.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from forerun.arguments import at_least, integer
from forerun.errors import InvalidArgument
from forerun.files import read_json, write_whole
from forerun.measure.stored import read

FORMAT = 1
SMALL_VOCABULARY = 2**16  # up to this many tokens, an id fits two bytes
PER_SEQUENCE = 8 + 4 + 8  # bytes of a start, a prompt length and an item
HEADER = 2048  # more than the names and shapes of a shard ever take
REMEDY = "delete that file and run the same `forerun train data` command again: it writes what is missing"

# (sequences) -> top_ids [T, K] int32, top_logits [T, K] float16
Teach = Callable[[list[Tensor]], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class TrainingText:
    """One prompt and what the target made of it."""

    tokens: Tensor  # [n] int64
    prompt_length: int  # tokens that are not to be trained on
    top_ids: Tensor | None = None  # [n, K] int64, the target's most likely tokens after each position
    top_logprobs: Tensor | None = None  # [n, K] float32


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """What the manifest says of one file."""

    file: str
    tokens: int
    sequences: int
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if Path(self.file).name != self.file:
            raise InvalidArgument(f"a shard is named {self.file!r}, which is no file of this folder")
        at_least(self, 0, "tokens", "sequences", "bytes")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder of shards is made of; each slice of the prompts has its own."""

    target: Mapping[str, Any]  # name, model_type, hidden_size, vocab_size
    top_k: int
    arguments: Mapping[str, Any]  # those that decide what is written
    versions: Mapping[str, str] = field(default_factory=dict)
    shards: tuple[ShardEntry, ...] = ()

    def __post_init__(self) -> None:
        integer("target['vocab_size']", self.target.get("vocab_size"), 1)

    def save(self, path: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        _put(path, text.encode())

    @classmethod
    def load(cls, path: Path) -> Manifest:
        remedy = "write the data again"
        content = read_json(path, remedy)
        version = content.pop("format", None) if isinstance(content, dict) else None
        if version != FORMAT:
            raise InvalidArgument(f"{path}: format {version!r}, this version of Forerun reads {FORMAT}; {remedy}")
        try:
            manifest: Manifest = read(cls, content, "manifest")
        except InvalidArgument as error:
            raise InvalidArgument(f"{path}: not a manifest of training data ({error}); {remedy}") from error
        return manifest


class ShardWriter:
    """Collects sequences and writes them, a shard at a time, never more than `disk_budget` bytes in all.

    Opening a folder that has some goes on where it stopped; `done` are the prompts that need no second try.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        part: tuple[int, int] = (0, 1),
        shard_tokens: int = 1_000_000,
        disk_budget: int | None = None,
        teach: Teach | None = None,
    ) -> None:
        self.folder, self.shard_tokens, self.disk_budget, self.teach = folder, shard_tokens, disk_budget, teach
        self._suffix = "" if part[1] == 1 else f"-{part[0]}"
        self._path = folder / f"data{self._suffix}.json"
        self._small = manifest.target["vocab_size"] <= SMALL_VOCABULARY
        self._pending: list[tuple[int, TrainingText]] = []
        self._skipped: list[int] = []
        self._pending_bytes = self._pending_tokens = 0
        self.done: set[int] = set()
        self.manifest = self._open(manifest)

    @property
    def num_tokens(self) -> int:
        return sum(entry.tokens for entry in self.manifest.shards) + self._pending_tokens

    @property
    def num_sequences(self) -> int:
        return sum(entry.sequences for entry in self.manifest.shards) + len(self._pending)

    def has_room(self, length: int) -> bool:
        """Whether a sequence of so many tokens still fits the disk budget."""
        if self.disk_budget is None:
            return True
        written = sum(entry.bytes for entry in self.manifest.shards)
        return written + HEADER + self._pending_bytes + self._size(length) <= self.disk_budget

    def add(self, item: int, sequence: TrainingText) -> None:
        self._pending.append((item, sequence))
        self._pending_tokens += len(sequence.tokens)
        self._pending_bytes += self._size(len(sequence.tokens))
        if self._pending_tokens >= self.shard_tokens:
            self.flush()

    def skip(self, item: int) -> None:
        """Remember that a prompt was tried and gave nothing."""
        self._skipped.append(item)
        self._pending_bytes += 8

    def flush(self) -> None:
        """Write what has been collected as one shard, then the manifest that names it."""
        if not self._pending:
            return
        tensors = self._tensors(sorted(self._pending, key=lambda pair: pair[0]))
        content = save(tensors)
        file = f"shard{self._suffix}-{self._next_number():05d}.safetensors"
        _put(self.folder / file, content)
        checksum = hashlib.sha256(content).hexdigest()
        entry = ShardEntry(file, self._pending_tokens, len(self._pending), len(content), checksum)
        self.manifest = replace(self.manifest, shards=(*self.manifest.shards, entry))
        self.manifest.save(self._path)
        self.done.update(tensors["items"].tolist(), self._skipped)
        self._pending, self._skipped, self._pending_bytes, self._pending_tokens = [], [], 0, 0

    def _size(self, length: int) -> int:
        token = (2 if self._small else 4) + self.manifest.top_k * (4 + 2)
        return length * token + PER_SEQUENCE

    def _next_number(self) -> int:
        numbers = [int(Path(entry.file).stem.rpartition("-")[2]) for entry in self.manifest.shards]
        return max(numbers, default=-1) + 1

    def _tensors(self, pairs: list[tuple[int, TrainingText]]) -> dict[str, Tensor]:
        sequences = [sequence for _, sequence in pairs]
        lengths = [len(sequence.tokens) for sequence in sequences]
        tensors = {
            "tokens": torch.cat([s.tokens for s in sequences]).to(torch.uint16 if self._small else torch.int32),
            "starts": torch.tensor([0, *accumulate(lengths)], dtype=torch.int64),
            "prompt_lengths": torch.tensor([s.prompt_length for s in sequences], dtype=torch.int32),
            "items": torch.tensor([item for item, _ in pairs], dtype=torch.int64),
            "skipped": torch.tensor(self._skipped, dtype=torch.int64),
        }
        if self.teach is not None:
            ids, logprobs = self.teach([s.tokens for s in sequences])
            tensors |= {"top_ids": ids.to(torch.int32), "top_logits": logprobs.to(torch.float16)}
        return tensors

    def _open(self, manifest: Manifest) -> Manifest:
        """The folder's own manifest where there is one, if it and those of other slices have the same arguments."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"{self.folder}: cannot be made a folder ({error}); choose another") from error
        for path in sorted(self.folder.glob("data*.json")):
            if path != self._path:
                _refuse_difference(path, Manifest.load(path), manifest)
        if not self._path.exists():
            manifest.save(self._path)
            return manifest
        before = Manifest.load(self._path)
        _refuse_difference(self._path, before, manifest)
        standing = tuple(entry for entry in before.shards if (self.folder / entry.file).exists())
        for entry in standing:
            shard = _read_shard(self.folder, entry)
            self.done.update(shard["items"].tolist(), shard["skipped"].tolist())
        return replace(before, shards=standing)


class Shards:
    """All sequences of a folder, whatever slices wrote them. Sizes are checked now, contents at the first touch."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        paths = sorted(self.folder.glob("data*.json"))
        if not paths:
            raise InvalidArgument(f"{folder}: no training data there (no data.json); make some with forerun train data")
        self.manifests = [Manifest.load(path) for path in paths]
        for path, manifest in zip(paths[1:], self.manifests[1:], strict=True):
            _refuse_strangers(path, self.manifests[0], manifest)
        self.entries = [entry for manifest in self.manifests for entry in manifest.shards]
        for entry in self.entries:
            _check_size(self.folder / entry.file, entry)
        self._ends = list(accumulate(entry.sequences for entry in self.entries))
        self._open: dict[int, dict[str, Tensor]] = {}

    @property
    def target(self) -> Mapping[str, Any]:
        """What wrote the sequences: name, model_type, hidden_size, vocab_size."""
        return self.manifests[0].target

    @property
    def vocab_size(self) -> int:
        return int(self.target["vocab_size"])

    @property
    def top_k(self) -> int:
        return self.manifests[0].top_k

    @property
    def num_tokens(self) -> int:
        return sum(entry.tokens for entry in self.entries)

    @property
    def num_sequences(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def prompts(self) -> Sequence[int]:
        """Which prompt each sequence answers: several answer one where more than one text a prompt was asked for."""
        samples = integer("samples_per_prompt", self.manifests[0].arguments.get("samples_per_prompt", 1), 1)
        if samples == 1:
            return range(self.num_sequences)
        numbers = range(len(self.entries))
        return [item // samples for number in numbers for item in self._shard(number)["items"].tolist()]

    @property
    def fingerprint(self) -> str:
        """Changes with any byte of the data, for the record of what was trained on."""
        return hashlib.sha256("".join(entry.sha256 for entry in self.entries).encode()).hexdigest()

    def sequence(self, i: int) -> TrainingText:
        if not 0 <= i < self.num_sequences:
            raise InvalidArgument(f"sequence {i}: {self.folder} has sequences 0 to {self.num_sequences - 1}")
        number = bisect_right(self._ends, i)
        shard = self._shard(number)
        place = i - (self._ends[number - 1] if number else 0)
        start, end = shard["starts"][place : place + 2].tolist()
        prompt_length = int(shard["prompt_lengths"][place])
        tokens = shard["tokens"][start:end].to(torch.int64)
        if "top_ids" not in shard:
            return TrainingText(tokens, prompt_length)
        ids, logprobs = shard["top_ids"][start:end], shard["top_logits"][start:end]
        return TrainingText(tokens, prompt_length, ids.to(torch.int64), logprobs.float())

    def _shard(self, number: int) -> dict[str, Tensor]:
        if number not in self._open:
            self._open[number] = _read_shard(self.folder, self.entries[number], self.vocab_size)
        return self._open[number]

    def __iter__(self) -> Iterator[TrainingText]:
        return (self.sequence(i) for i in range(self.num_sequences))


def _refuse_difference(path: Path, before: Manifest, now: Manifest) -> None:
    """The same folder goes on only with what it was begun with."""
    if changes := _changes(before, now):
        raise InvalidArgument(f"{path} was begun with other arguments: {changes}. Repeat those, or use another folder")


def _refuse_strangers(path: Path, first: Manifest, other: Manifest) -> None:
    """Slices are of one splitting of the same prompts: of two, some prompts would be there twice, others never."""
    if changes := _changes(first, other):
        raise InvalidArgument(
            f"{path} was written with other arguments than its neighbour: {changes}; keep them in folders of their own"
        )


def _changes(before: Manifest, now: Manifest) -> str:
    """Which arguments differ, in words; JSON has made lists of tuples."""
    old, new = (
        json.loads(json.dumps({"target": each.target, "top_k": each.top_k, **each.arguments})) for each in (before, now)
    )
    differ = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return "; ".join(f"{name} was {old.get(name)!r}, now {new.get(name)!r}" for name in differ)


def _check_size(path: Path, entry: ShardEntry) -> None:
    if not path.is_file():
        raise InvalidArgument(f"{path} is missing; run the same `forerun train data` command again: it writes it anew")
    if (size := path.stat().st_size) != entry.bytes:
        raise InvalidArgument(f"{path} has {size} bytes instead of {entry.bytes}; {REMEDY}")


def _read_shard(folder: Path, entry: ShardEntry, vocab_size: int | None = None) -> dict[str, Tensor]:
    """The shard's tensors, memory-mapped, after its checksum and its offsets have been looked at."""
    path = folder / entry.file
    _check_size(path, entry)
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    if checksum != entry.sha256:
        raise InvalidArgument(f"{path} is damaged (its checksum is not the manifest's); {REMEDY}")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
        _check_tensors(tensors, vocab_size)
    except (SafetensorError, KeyError, ValueError) as error:
        raise InvalidArgument(f"{path} is not a shard ({error}); {REMEDY}") from error
    return tensors


def _check_tensors(tensors: Mapping[str, Tensor], vocab_size: int | None) -> None:
    tokens, starts, prompts = tensors["tokens"], tensors["starts"], tensors["prompt_lengths"]
    lengths = starts.diff()
    good = int(starts[0]) == 0 and int(starts[-1]) == len(tokens) and bool((lengths > 0).all())
    if not good or len(prompts) != len(lengths) or bool((prompts > lengths).any()):
        raise ValueError("its offsets do not fit its tokens")
    if vocab_size is not None and int(tokens.to(torch.int64).max()) >= vocab_size:
        raise ValueError(f"it holds tokens outside the vocabulary of {vocab_size}")


def _put(path: Path, content: bytes) -> None:
    """Beside its place first, then renamed: whoever looks sees the whole of it or nothing."""
    write_whole(path, lambda beside: beside.write_bytes(content), "make room and run the command again")
