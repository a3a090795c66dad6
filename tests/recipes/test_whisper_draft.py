"""A shallow decoder on its target's encoder: what it learns from, that it learns, and the law it then drafts with."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from shallow_decoder import (
    EMBEDDING,
    Distillation,
    ShallowDecoder,
    ShallowOptions,
    distil,
    draft_vocabulary,
    measure,
    save,
)
from torch import Tensor
from transcripts import MOST_TOKENS, TeacherOutputs, TranscribedWindows, batches, concatenate, mixed_batches, transcribe

import forerun
from forerun.config import SamplingParams
from forerun.drafters import DraftModel
from forerun.drafters.choose import from_folder
from forerun.engine import Engine, Request
from forerun.errors import InvalidArgument
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.policy import Constant
from forerun.types import Draft, DraftContext, Source
from support.whisper import END, FIRST_TIME, NO_TIMES, START, STEPS, VOCAB, tiny_whisper

WINDOWS = 6
STEPS_TAKEN = 60


@lru_cache
def target() -> Any:
    return tiny_whisper().requires_grad_(False)


@lru_cache
def sound() -> Tensor:
    return torch.randn(WINDOWS, 8, 2 * STEPS, generator=torch.Generator().manual_seed(3))


@lru_cache
def windows(timestamps: bool = False) -> TranscribedWindows:
    model = target()
    model.generation_config.max_length = None
    return transcribe(model, sound(), timestamps=timestamps, batch_size=4, most_tokens=30)


@pytest.mark.slow
def test_transcripts_are_the_targets_own() -> None:
    """Token for token what its own `generate` says, the end included, whatever the batch."""
    found = windows()
    for row in range(WINDOWS):
        said = found.tokens[row, : int(found.lengths[row])].tolist()
        assert said[:2] == [START, NO_TIMES]
        for place in range(2, len(said)):
            with torch.no_grad():
                logits = target()(
                    encoder_outputs=(found.states[row : row + 1],), decoder_input_ids=torch.tensor([said[:place]])
                ).logits[0, -1]
            logits[target().generation_config.suppress_tokens] = -torch.inf
            if place == 2:
                logits[target().generation_config.begin_suppress_tokens] = -torch.inf
            assert said[place] == int(logits.argmax())
        assert END not in said[2:-1]
    torch.testing.assert_close(found.states, target().get_encoder()(sound()).last_hidden_state)


def test_with_timestamps_they_begin_with_one() -> None:
    found = windows(timestamps=True)
    assert (found.first == 1).all()
    assert (found.tokens[:, 1] >= FIRST_TIME).all()


def test_what_is_judged_is_what_was_chosen() -> None:
    found = windows()
    assert int(found.judged.sum()) == int((found.lengths - found.first).sum())
    written = found.tokens[:, 1:][found.judged]
    expected = torch.cat([found.tokens[i, 2 : int(found.lengths[i])] for i in range(WINDOWS)])
    assert written.tolist() == expected.tolist()


def test_transcripts_that_never_end_are_dropped() -> None:
    tokens = torch.full((2, MOST_TOKENS + 2), 5)
    found = TranscribedWindows(torch.zeros(2, 1, 1), tokens, torch.tensor([2, 2]), torch.tensor([MOST_TOKENS + 2, 9]))
    assert found.finished().lengths.tolist() == [9]


def test_a_pass_over_the_batches_meets_every_window_once() -> None:
    found = windows()
    marked = TranscribedWindows(torch.arange(WINDOWS).float()[:, None, None], found.tokens, found.first, found.lengths)
    met = [int(i) for batch in batches(marked, 4, torch.Generator().manual_seed(0)) for i in batch.states.flatten()]
    assert sorted(met) == list(range(WINDOWS))
    both = concatenate([found, windows(timestamps=True)], END)
    assert len(both) == 2 * WINDOWS
    assert both.tokens.shape[1] == max(found.tokens.shape[1], windows(timestamps=True).tokens.shape[1])


def test_the_commonest_tokens_and_those_that_must_be_there() -> None:
    assert draft_vocabulary([7, 3, 9, 5], 4, always=[END, 3]).tolist() == [3, 7, 9, END]
    assert draft_vocabulary([7, 3], 10).tolist() == [3, 7]


def ranked() -> list[int]:
    used = torch.bincount(windows().tokens[:, 1:][windows().judged])
    return used.argsort(descending=True).tolist()[: int((used > 0).sum())]


@lru_cache
def lesson() -> tuple[Distillation, float, float]:
    ids = draft_vocabulary(ranked(), 40, always=[END])
    distillation = Distillation(target(), ShallowDecoder(target(), (1,), ids), "kl+tv")
    before = measure(distillation, windows()).loss
    parts = [
        (distillation.with_teacher(windows()), 0.5),
        (windows(), 0.5),
    ]  # what the target thinks is kept, or asked for
    options = ShallowOptions(seconds=None, steps=STEPS_TAKEN, learning_rate=3e-3, batch_size=WINDOWS)
    assert distil(distillation, parts, options, lambda *told: None) == STEPS_TAKEN
    return distillation, before, measure(distillation, windows()).loss


def test_what_the_target_thinks_may_be_kept() -> None:
    """Asked once or in every step, in batches of any size: the same figures; another window's outputs give others."""
    ids = draft_vocabulary(ranked(), 40, always=[END])
    distillation = Distillation(target(), ShallowDecoder(target(), (1,), ids), "kl+tv")
    kept = distillation.with_teacher(windows(), size=4)
    assert kept.teacher is not None and windows().teacher is None
    found, wanted = measure(distillation, kept, size=5), measure(distillation, windows())
    assert asdict(found) == pytest.approx(asdict(wanted), abs=1e-5)
    rolled = TeacherOutputs(kept.teacher.features.roll(1, 0), kept.teacher.mass.roll(1, 0), kept.teacher.mean_logprob)
    assert measure(distillation, replace(kept, teacher=rolled)).loss > wanted.loss + 0.01


def test_windows_the_target_is_unsure_of_can_be_left_out() -> None:
    distillation = Distillation(target(), ShallowDecoder(target(), (1,), torch.arange(VOCAB)), "kl")
    kept = distillation.with_teacher(windows())
    assert kept.teacher is not None
    row = int(kept.teacher.mean_logprob.argmin())
    with torch.no_grad():
        logits = target()(encoder_outputs=(kept.states[row : row + 1],), decoder_input_ids=kept.tokens[row : row + 1])
    logs = logits.logits[0, :-1]
    logs[:, target().generation_config.suppress_tokens] = -torch.inf
    chosen = logs.log_softmax(-1).gather(1, kept.tokens[row, 1:, None])[:, 0][kept.judged[row]]
    assert float(kept.teacher.mean_logprob[row]) == pytest.approx(float(chosen.mean()), abs=1e-4)
    clear = kept.confident(float(kept.teacher.mean_logprob[row]))
    assert len(clear) == WINDOWS - 1


def test_batches_take_their_share_of_each_part() -> None:
    marked = [replace(windows(), states=torch.full_like(windows().states, mark)) for mark in (1.0, 2.0)]
    stream = mixed_batches([(marked[0], 0.25), (marked[1], 0.75)], 4, torch.Generator().manual_seed(0), END)
    for _, batch in zip(range(5), stream, strict=False):
        assert sorted(batch.states[:, 0, 0].tolist()) == [1.0, 2.0, 2.0, 2.0]


@pytest.mark.slow
def test_training_lowers_the_loss_and_leaves_the_target_alone() -> None:
    weights = {name: weight.clone() for name, weight in target().named_parameters()}
    distillation, before, after = lesson()
    assert after < 0.5 * before
    assert all(torch.equal(weight, weights[name]) for name, weight in target().named_parameters())
    assert EMBEDDING not in distillation.student.trained()


def test_training_without_an_end_is_refused() -> None:
    distillation = Distillation(target(), ShallowDecoder(target(), (1,), torch.arange(VOCAB)), "kl")
    with pytest.raises(InvalidArgument, match="never end"):
        distil(distillation, [(windows(), 1.0)], ShallowOptions(seconds=None), lambda *told: None)


def test_all_layers_and_all_tokens_are_the_target_itself() -> None:
    """Before any training: acceptance and agreement are 1, so nothing stands between the two laws but the layers."""
    allowed = torch.tensor(sorted(set(range(VOCAB)) - set(target().generation_config.suppress_tokens)))
    whole = Distillation(target(), ShallowDecoder(target(), (0, 1), allowed), "kl")
    found = measure(whole, windows())
    assert found.acceptance == pytest.approx(1, abs=1e-5)
    assert found.agreement == found.coverage == 1
    shallow = Distillation(target(), ShallowDecoder(target(), (1,), allowed), "kl")
    assert measure(shallow, windows()).acceptance < 0.95


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("draft") / "shallow"
    distillation, _, _ = lesson()
    save(distillation.student, target(), place, {"made": "by a test"})
    return place


class Watched(DraftModel):
    """Keeps its drafts, and the rows and histories they were made for."""

    made: list[tuple[tuple[int, ...], list[list[int]], Draft]]

    def propose(self, context: DraftContext) -> Draft:
        before = [list(history) for history in context.histories]
        draft = super().propose(context)
        self.made.append((context.rows, before, draft))
        return draft


@lru_cache
def as_stored() -> ShallowDecoder:
    """The student with its weights rounded as the folder keeps them."""
    student = ShallowDecoder(target(), (1,), lesson()[0].student.ids)
    with torch.no_grad():
        for mine, other in zip(student.trained().values(), lesson()[0].student.trained().values(), strict=True):
            mine.copy_(other.half())
    return student.eval()


def students_law(text: list[int], row: int) -> Tensor:
    """[V] from the student itself, run over the whole text, with the encoder's own states."""
    student = as_stored()
    head = target().get_output_embeddings().weight[student.ids]
    with torch.inference_mode():
        states = target().get_encoder()(sound()[row : row + 1]).last_hidden_state
        logits = student(torch.tensor([text]), states)[0, -1] @ head.T
    return torch.zeros(VOCAB).index_copy(0, student.ids, logits.softmax(-1))


@pytest.mark.slow
def test_the_law_it_reports_is_the_trained_students(folder: Path) -> None:
    """Drafts of ragged rows in the engine against the student itself."""
    drafter = Watched.load(folder)
    drafter.made = []
    engine = Engine(Seq2SeqScorer(target()), drafter, Constant(3))
    for row in range(3):
        engine.add(
            Request(prompt=(START, NO_TIMES), max_new_tokens=12, params=SamplingParams(temperature=1.0), seed=5,
                    request_id=row, source=Source(features=sound()[row]))
        )  # fmt: skip
    while not engine.is_idle:
        engine.step()
    gaps, controls = [], []
    for rows, histories, draft in drafter.made:
        for b, row in enumerate(rows):
            for place in range(int(draft.lengths[b])):
                text = [*histories[b], *draft.tokens[b, :place].tolist()]
                got = draft.law.at(torch.full((len(rows),), place))[b].float()
                gaps.append(float((got - students_law(text, row)).abs().max()))
                controls.append(float((got - students_law(text, (row + 1) % 3)).abs().max()))
    assert len(gaps) > 20
    assert max(gaps) < 1e-4
    assert max(controls) > 1e-2, "another row's sound would have been told apart"


@pytest.mark.quick("token")
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_greedy_text_is_the_targets(folder: Path, rule: str) -> None:
    prefix = torch.tensor([[START, NO_TIMES]]).expand(WINDOWS, -1)
    texts = [
        forerun.SpeculativeDecoder(target(), drafter, rule=rule, policy=4).generate(
            input_features=sound(), decoder_input_ids=prefix, max_new_tokens=24
        )
        for drafter in (None, from_folder(folder))
    ]
    assert texts[0].sequences.tolist() == texts[1].sequences.tolist()
    assert texts[1].stats.num_accepted_tokens > 0


def test_another_target_is_refused(folder: Path) -> None:
    from support.tiny import tiny_model

    with pytest.raises(InvalidArgument, match="was made for"):
        forerun.SpeculativeDecoder(tiny_model("bart"), from_folder(folder))


def test_weights_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    from forerun.loading.drafter_folder import load_drafter, save_drafter

    manifest, config, tensors = load_drafter(folder)
    tensors.pop("model.decoder.layers.0.fc1.weight")
    save_drafter(tmp_path / "damaged", manifest, config, tensors)
    with pytest.raises(InvalidArgument, match="do not fit"):
        forerun.SpeculativeDecoder(target(), from_folder(tmp_path / "damaged"))
