"""Shards: what is written is read back, damage is named, a second run goes on, budgets and full disks lose nothing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forerun.errors import ForerunError, InvalidArgument
from forerun.train import shards as module
from forerun.train.shards import Manifest, Shards, ShardWriter, TrainingText

TARGET = {"name": "tiny", "model_type": "llama", "hidden_size": 32, "vocab_size": 258}


def manifest(top_k: int = 0, vocab_size: int = 258, **arguments: Any) -> Manifest:
    return Manifest(TARGET | {"vocab_size": vocab_size}, top_k, {"seed": 0} | arguments, {"torch": "2"})


def text(item: int, length: int = 12) -> TrainingText:
    return TrainingText((torch.arange(length) * 7 + item) % 250, 3 + item % 2)


def fill(folder: Path, items: range = range(5), **settings: Any) -> ShardWriter:
    writer = ShardWriter(folder, manifest(), **{"shard_tokens": 24} | settings)
    for item in items:
        writer.add(item, text(item))
    writer.flush()
    return writer


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    fill(tmp_path)
    found = Shards(tmp_path)
    assert (found.num_sequences, found.num_tokens, found.vocab_size, found.top_k) == (5, 60, 258, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "data.json", "shard-00000.safetensors", "shard-00001.safetensors", "shard-00002.safetensors",
    ]  # fmt: skip
    for item, sequence in enumerate(found):
        assert torch.equal(sequence.tokens, text(item).tokens)
        assert sequence.tokens.dtype == torch.int64
        assert sequence.prompt_length == text(item).prompt_length
        assert sequence.top_ids is None and sequence.top_logprobs is None


def test_texts_of_one_prompt_are_known_as_such(tmp_path: Path) -> None:
    assert fill(tmp_path / "one") and list(Shards(tmp_path / "one").prompts) == [0, 1, 2, 3, 4]
    for part in (0, 1):
        writer = ShardWriter(tmp_path, manifest(samples_per_prompt=3), part=(part, 2), shard_tokens=24)
        for item in ((0, 2, 6), (4, 5, 10))[part]:
            writer.add(item, text(item))
        writer.flush()
    assert list(Shards(tmp_path).prompts) == [0, 0, 2, 1, 1, 3]


def test_the_format_is_the_one_agreed_on(tmp_path: Path) -> None:
    fill(tmp_path, range(2))
    tensors = load_file(tmp_path / "shard-00000.safetensors")
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert kinds["tokens"] == (torch.uint16, (24,))
    assert kinds["starts"] == (torch.int64, (3,))
    assert kinds["prompt_lengths"] == (torch.int32, (2,))
    assert tensors["starts"].tolist() == [0, 12, 24]


def test_ids_past_two_bytes_are_kept_whole(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, manifest(vocab_size=100_000))
    writer.add(0, TrainingText(torch.tensor([1, 65_536, 99_999]), 1))
    writer.flush()
    assert Shards(tmp_path).sequence(0).tokens.tolist() == [1, 65_536, 99_999]


def test_the_teachers_tops_stay_with_their_positions(tmp_path: Path) -> None:
    def teach(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        packed = torch.cat(texts)
        return torch.stack([packed, packed + 1], -1), torch.stack([-packed / 100, -packed / 10], -1)

    writer = ShardWriter(tmp_path, manifest(top_k=2), teach=teach)
    for item in (1, 0):
        writer.add(item, text(item))
    writer.flush()
    for item, sequence in enumerate(Shards(tmp_path)):
        assert sequence.top_ids is not None and sequence.top_logprobs is not None
        assert torch.equal(sequence.top_ids[:, 1], text(item).tokens + 1)
        assert torch.allclose(sequence.top_logprobs[:, 0], -text(item).tokens / 100, atol=2e-3)


def test_a_second_run_knows_what_is_done_and_adds_to_it(tmp_path: Path) -> None:
    first = fill(tmp_path, range(3))
    first.skip(90)
    first.add(3, text(3))
    first.flush()
    second = ShardWriter(tmp_path, manifest())
    assert second.done == {0, 1, 2, 3, 90}
    second.add(4, text(4))
    second.flush()
    assert [s.tokens.tolist() for s in Shards(tmp_path)] == [text(i).tokens.tolist() for i in range(5)]


def test_what_was_not_flushed_is_not_done(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, manifest(), shard_tokens=24)
    for item in range(3):
        writer.add(item, text(item))
    assert ShardWriter(tmp_path, manifest()).done == {0, 1}


def test_other_arguments_are_refused_by_name(tmp_path: Path) -> None:
    fill(tmp_path)
    with pytest.raises(InvalidArgument, match="seed was 0, now 1") as caught:
        ShardWriter(tmp_path, manifest(seed=1))
    assert "top_k" not in str(caught.value)
    ShardWriter(tmp_path, manifest(seed=0))


def test_slices_write_side_by_side_and_are_read_together(tmp_path: Path) -> None:
    for index in (0, 1):
        fill(tmp_path, range(index, 6, 2), part=(index, 2))
    assert (tmp_path / "data-1.json").exists() and (tmp_path / "shard-1-00000.safetensors").exists()
    found = sorted(s.tokens.tolist() for s in Shards(tmp_path))
    assert found == sorted(text(i).tokens.tolist() for i in range(6))


@pytest.mark.parametrize(
    ("change", "said"), [({"vocab_size": 300}, "vocab_size"), ({"slices": 3}, "slices was 2, now 3")]
)
def test_slices_of_different_arguments_are_not_mixed(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """Neither by a command that adds one, nor by whoever reads those that were put together by hand."""
    ShardWriter(tmp_path / "a", manifest(slices=2), part=(0, 2))
    with pytest.raises(InvalidArgument, match=rf"data-0\.json.*{said}"):
        ShardWriter(tmp_path / "a", manifest(**{"slices": 2} | change), part=(1, 2))
    ShardWriter(tmp_path / "b", manifest(**{"slices": 2} | change), part=(1, 2))
    (tmp_path / "b" / "data-1.json").rename(tmp_path / "a" / "data-1.json")
    with pytest.raises(InvalidArgument, match=rf"data-1\.json.*{said}"):
        Shards(tmp_path / "a")


def test_a_folder_that_was_not_split_takes_no_slices(tmp_path: Path) -> None:
    ShardWriter(tmp_path, manifest(slices=1))
    with pytest.raises(InvalidArgument, match=r"data\.json.*slices was 1, now 2"):
        ShardWriter(tmp_path, manifest(slices=2), part=(0, 2))


def test_the_disk_budget_is_never_exceeded(tmp_path: Path) -> None:
    budget = 12_000
    writer = ShardWriter(tmp_path, manifest(), shard_tokens=300, disk_budget=budget)
    for item in range(200):
        if writer.has_room(50):
            writer.add(item, text(item, 50))
    writer.flush()
    written = sum(path.stat().st_size for path in tmp_path.glob("shard-*"))
    assert budget - module.HEADER - 200 < written <= budget
    assert not writer.has_room(50) or written + module.HEADER + 120 <= budget


@pytest.mark.parametrize("change", ["truncate", "flip", "remove"])
def test_damage_is_named_with_its_remedy(tmp_path: Path, change: str) -> None:
    fill(tmp_path)
    path = tmp_path / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    if change == "truncate":
        path.write_bytes(content[:-5])
    elif change == "flip":
        content[-2] ^= 1  # the last token, still within the vocabulary
        path.write_bytes(content)
    else:
        path.unlink()
    with pytest.raises(InvalidArgument, match=r"shard-00001.*forerun train data"):
        Shards(tmp_path).sequence(3)


def test_an_unharmed_shard_is_served_beside_a_damaged_one(tmp_path: Path) -> None:
    fill(tmp_path)
    path = tmp_path / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1  # the last token, still within the vocabulary
    path.write_bytes(content)
    assert torch.equal(Shards(tmp_path).sequence(0).tokens, text(0).tokens)


def test_a_deleted_shard_is_written_again(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    writer = ShardWriter(tmp_path, manifest())
    assert writer.done == {0, 1, 4}
    for item in (2, 3):
        writer.add(item, text(item))
    writer.flush()
    assert sorted(s.tokens.tolist() for s in Shards(tmp_path)) == sorted(text(i).tokens.tolist() for i in range(5))


def test_a_full_disk_leaves_finished_shards_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = fill(tmp_path, range(2))
    writer.add(2, text(2))

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ForerunError, match="the disk is full"):
            writer.flush()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.json", "shard-00000.safetensors"]
    assert Shards(tmp_path).num_sequences == 2
    writer.flush()  # there is room again: what was held is still there
    assert Shards(tmp_path).num_sequences == 3


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="forerun train data"):
        Shards(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99, "shards": []}', '{"format": 1, "shards": []}'])
def test_a_bad_manifest_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "data.json").write_text(content)
    with pytest.raises(InvalidArgument, match=r"data\.json"):
        Shards(tmp_path)


def test_a_sequence_that_is_not_there_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    for i in (-1, 5):
        with pytest.raises(InvalidArgument, match="0 to 4"):
            Shards(tmp_path).sequence(i)


def test_the_fingerprint_follows_the_data(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    fill(tmp_path / "b")
    fill(tmp_path / "c", range(1, 6))
    a, b, c = (Shards(tmp_path / name).fingerprint for name in "abc")
    assert a == b != c
    assert json.loads((tmp_path / "a" / "data.json").read_text())["versions"] == {"torch": "2"}
