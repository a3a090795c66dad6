"""A draft learns, a shuffled teacher teaches nothing, and a killed run ends with the same weights."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import forerun
from forerun.drafters import from_folder
from forerun.errors import ForerunError, InvalidArgument
from forerun.loading.drafter_folder import load_drafter
from forerun.math.losses import TeacherLaw
from forerun.train import loop, run_folder
from forerun.train.head_loss import SharedHead
from forerun.train.loop import Diverged, Trained, TrainProgress, train_draft
from forerun.train.options import TrainOptions
from forerun.train.shards import Manifest, Shards, ShardWriter, TrainingText
from forerun.train.train_log import read_log
from train.texts import Memory, markov_target, memory, small, written_by

VOCAB, LENGTH = 24, 24
KINDS: dict[str, dict[str, Any]] = {
    "feature": {"kind": "feature", "unroll": 2},
    "parallel": {"kind": "parallel", "heads": 2},
    "causal": {"kind": "causal", "num_layers": 1},
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return markov_target(VOCAB)


@pytest.fixture(scope="module")
def data(target: PreTrainedModel) -> Memory:
    return memory(written_by(target, 120, LENGTH), VOCAB)


def run(target: PreTrainedModel, data: Any, folder: Path, options: TrainOptions, **more: Any) -> Trained:
    return train_draft(target, data, options, folder, save_dtype=torch.float32, **more)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_drafter(folder)[2]


@pytest.mark.quick("causal")
@pytest.mark.parametrize("kind", list(KINDS))
def test_acceptance_rises(target: PreTrainedModel, data: Memory, tmp_path: Path, kind: str) -> None:
    trained = run(target, data, tmp_path, small(loss="tv+kl", steps=40, **KINDS[kind]))
    first = read_log(tmp_path)[0]
    assert trained.proxy is not None
    assert trained.proxy.loss < 0.6 * first["loss"]
    assert trained.proxy.acceptance[0] > first["acceptance"][0] + 0.2
    assert trained.proxy.acceptance[0] > 0.65
    assert trained.proxy.tokens_per_round > 1.8


@pytest.mark.slow
def test_a_shuffled_teacher_teaches_nothing(
    target: PreTrainedModel, data: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: laws that belong to other positions. What is measured in the end is measured with the right ones."""
    options = small(loss="tv+kl", steps=40, **KINDS["feature"])
    honest = run(target, data, tmp_path / "honest", options)
    law, look = SharedHead.law, loop.Trainer._look

    def shuffled(self: SharedHead, features: Tensor) -> TeacherLaw:
        return law(self, features[torch.randperm(len(features))])

    def look_honestly(self: loop.Trainer, log: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(SharedHead, "law", law)
            return look(self, log)

    monkeypatch.setattr(SharedHead, "law", shuffled)
    monkeypatch.setattr(loop.Trainer, "_look", look_honestly)
    control = run(target, data, tmp_path / "control", options)
    assert honest.proxy is not None and control.proxy is not None
    assert honest.proxy.acceptance[0] > control.proxy.acceptance[0] + 0.3


class Killed(Exception):
    pass


@pytest.mark.quick("parallel-9")
@pytest.mark.parametrize(("kind", "stop"), [("feature", 7), ("feature", 12), ("parallel", 9), ("causal", 5)])
def test_a_killed_run_resumes_to_the_same_bits(
    target: PreTrainedModel, data: Memory, tmp_path: Path, kind: str, stop: int
) -> None:
    rollouts = {} if kind == "parallel" else {"rollout_share": 0.3}
    options = small(steps=14, draft_vocabulary=20, log_every=1, checkpoint_every=3, **KINDS[kind], **rollouts)
    run(target, data, tmp_path / "whole", options)

    def kill(progress: TrainProgress) -> None:
        if progress.step == stop:
            raise Killed

    with pytest.raises(Killed):
        run(target, data, tmp_path / "killed", options, report=kill)
    stands = run_folder.load_checkpoint(tmp_path / "killed")["step"]
    assert 0 < stands < stop
    run(target, data, tmp_path / "killed", options, resume=True)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    steps = [row["step"] for row in read_log(tmp_path / "killed") if "loss" in row]
    assert steps == list(range(1, 15))


@pytest.mark.slow
def test_the_weights_depend_on_the_seed(target: PreTrainedModel, data: Memory, tmp_path: Path) -> None:
    for seed in (0, 1):
        run(target, data, tmp_path / str(seed), small(steps=3, seed=seed))
    one, other = weights(tmp_path / "0"), weights(tmp_path / "1")
    assert not torch.equal(one["fuse.weight"], other["fuse.weight"])


@pytest.mark.slow
def test_resume_refuses_other_options_and_other_data(target: PreTrainedModel, data: Memory, tmp_path: Path) -> None:
    options = small(steps=4)
    run(target, data, tmp_path, options)
    with pytest.raises(InvalidArgument, match="other loss, learning_rate"):
        run(target, data, tmp_path, replace(options, loss="kl", learning_rate=1e-4), resume=True)
    fewer = Memory([data.sequence(i) for i in range(50)], VOCAB)
    with pytest.raises(InvalidArgument, match="other data"):
        run(target, fewer, tmp_path, options, resume=True)
    with pytest.raises(InvalidArgument, match="--resume"):
        run(target, data, tmp_path, options)
    with pytest.raises(InvalidArgument, match=r"no checkpoint\.pt"):
        run(target, data, tmp_path / "new", options, resume=True)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("odd", ["student", "optimizer", "options", "step"])
def test_a_checkpoint_of_another_make_is_named(target: PreTrainedModel, data: Memory, tmp_path: Path, odd: str) -> None:
    options = small(steps=2)
    run(target, data, tmp_path, options)
    state = run_folder.load_checkpoint(tmp_path)
    value = {"odd": torch.ones(2)} if odd == "student" else None
    run_folder.save_checkpoint(tmp_path, {name: entry for name, entry in state.items() if name != odd} | {odd: value})
    with pytest.raises(InvalidArgument, match=r"checkpoint\.pt' does not fit this run"):
        run(target, data, tmp_path, options, resume=True)


def test_a_damaged_checkpoint_is_named(target: PreTrainedModel, data: Memory, tmp_path: Path) -> None:
    run(target, data, tmp_path, small(steps=2))
    path = tmp_path / run_folder.CHECKPOINT
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(InvalidArgument, match=r"checkpoint\.pt.*damaged"):
        run(target, data, tmp_path, small(steps=2), resume=True)


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_last_good_state(
    target: PreTrainedModel, data: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    law, calls = SharedHead.law, []

    def poisoned(self: SharedHead, features: Tensor) -> TeacherLaw:
        calls.append(1)
        found = law(self, features)
        return TeacherLaw(found.log_p * torch.nan, found.elsewhere) if len(calls) > 6 else found

    monkeypatch.setattr(SharedHead, "law", poisoned)
    with pytest.raises(Diverged, match="learning-rate") as caught:
        run(target, data, tmp_path, small(steps=40, checkpoint_every=4, log_every=50))
    assert "checkpoint" in str(caught.value)
    state = run_folder.load_checkpoint(tmp_path)
    assert state["step"] == 4
    assert all(bool(value.isfinite().all()) for value in state["student"].values())


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("writer failed")])
def test_a_full_disk_is_said_and_what_was_saved_stays(
    target: PreTrainedModel, data: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    save, saves = torch.save, []

    def fill_up(state: Any, path: Path) -> None:
        saves.append(path)
        if len(saves) == 2:
            Path(path).write_bytes(b"half")
            raise error
        save(state, path)

    monkeypatch.setattr(torch, "save", fill_up)
    with pytest.raises(ForerunError, match=r"disk.*full.*--resume"):
        run(target, data, tmp_path, small(steps=9, checkpoint_every=3))
    assert run_folder.load_checkpoint(tmp_path)["step"] == 3
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_corrupt_shard_surfaces_with_its_name(target: PreTrainedModel, data: Memory, tmp_path: Path) -> None:
    stands = {"name": "tiny", "model_type": "llama", "hidden_size": 32, "vocab_size": VOCAB}
    writer = ShardWriter(tmp_path / "data", Manifest(stands, 0, {}), shard_tokens=800)
    for i in range(data.num_sequences):
        writer.add(i, data.sequence(i))
    writer.flush()
    shards = sorted((tmp_path / "data").glob("*.safetensors"))
    assert len(shards) > 2
    run(target, Shards(tmp_path / "data"), tmp_path / "good", small(steps=2))
    content = bytearray(shards[1].read_bytes())
    content[-3] ^= 0xFF
    shards[1].write_bytes(bytes(content))
    with pytest.raises(InvalidArgument, match=shards[1].name):
        run(target, Shards(tmp_path / "data"), tmp_path / "bad", small(steps=2))


@dataclass
class Clock:
    """Every look at it costs a second."""

    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.slow
def test_a_time_budget_ends_the_run_and_its_cosine(target: PreTrainedModel, data: Memory, tmp_path: Path) -> None:
    rates: list[float] = []
    options = small(steps=None, max_minutes=0.5, log_every=1, learning_rate=1e-3)
    trained = run(target, data, tmp_path, options, clock=Clock(), report=lambda p: rates.append(p.learning_rate))
    assert 10 <= trained.steps <= 30
    assert max(rates) > 0.9e-3
    assert rates[-1] < 0.1e-3


@pytest.mark.slow
def test_one_epoch_where_nothing_was_said(target: PreTrainedModel, data: Memory, tmp_path: Path) -> None:
    trained = run(target, data, tmp_path, small(steps=None))
    assert trained.tokens == (data.num_sequences - 8) * LENGTH


@pytest.mark.slow
def test_stored_laws_spare_the_target(
    target: PreTrainedModel, data: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all tokens stored, a causal draft ends where it does with the target at hand."""
    stored = []
    for i in range(data.num_sequences):
        tokens = data.sequence(i).tokens
        with torch.no_grad():
            logs, ids = target(tokens[None]).logits[0].log_softmax(-1).topk(VOCAB, dim=-1)
        stored.append(TrainingText(tokens, 2, ids, logs))
    options = small(steps=6, log_every=1, **KINDS["causal"])
    run(target, data, tmp_path / "online", options)
    monkeypatch.setattr(target.base_model, "forward", None)  # it must not be asked
    run(target, Memory(stored, VOCAB, top_k=VOCAB), tmp_path / "stored", options)
    online, offline = (
        [row["loss"] for row in read_log(tmp_path / name) if "loss" in row] for name in ("online", "stored")
    )
    assert offline == pytest.approx(online, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_proxy_foretells_the_decoder(target: PreTrainedModel, data: Memory, tmp_path: Path, kind: str) -> None:
    """Expected tokens per round on held-out text against those of real decoding, on the same law."""
    options = small(loss="tv+kl", steps=25, hold_out=40, draft_vocabulary=20, **KINDS[kind])
    trained = run(target, data, tmp_path, options)
    assert trained.proxy is not None
    places = len(trained.proxy.acceptance)
    decoder = forerun.SpeculativeDecoder(target, from_folder(tmp_path), policy=places)
    prompts = torch.stack([data.sequence(i).tokens[:2] for i in range(100)])
    stats = decoder.generate(prompts, max_new_tokens=30, temperature=1.0, seed=3).stats
    assert stats.acceptance_by_position[0] == pytest.approx(trained.proxy.acceptance[0], abs=0.06)
    # Among rounds that had room for the token: at the end of a row there is none.
    kept = zip(stats.num_accepted_tokens_per_pos, stats.num_draft_tokens_per_pos, strict=True)
    tokens_per_round = 1 + sum(accepted / drafted for accepted, drafted in kept)
    assert tokens_per_round == pytest.approx(trained.proxy.tokens_per_round, abs=0.12)


def test_the_folder_tells_where_it_comes_from(target: PreTrainedModel, data: Memory, tmp_path: Path) -> None:
    run(
        target, data, tmp_path, small(steps=2, draft_vocabulary=9), special_tokens={23, 7}, provenance={"commit": "abc"}
    )
    manifest, _, tensors = load_drafter(tmp_path)
    assert manifest.provenance["commit"] == "abc"
    assert manifest.provenance["options"]["loss"] == TrainOptions().loss
    assert manifest.provenance["data"] == data.fingerprint
    ids = tensors["draft_vocabulary"].tolist()
    assert len(ids) == 9 and {7, 23} <= set(ids)
    written = torch.cat([data.sequence(i).tokens[2:] for i in range(data.num_sequences)]).bincount(minlength=VOCAB)
    others = [int(written[i]) for i in ids if i not in (7, 23)]
    assert min(others) >= max(int(written[i]) for i in range(VOCAB) if i not in ids)
    json.dumps(manifest.provenance)


def test_data_of_another_vocabulary_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    other = memory(torch.ones(20, 10, dtype=torch.long), VOCAB + 1)
    with pytest.raises(InvalidArgument, match="vocabulary"):
        run(target, other, tmp_path, small())
