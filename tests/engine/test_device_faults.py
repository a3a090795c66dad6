"""What device rounds promise beside the tokens: lengths that agree, faults that are survived, and controls."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.device_engines import GREEDY, Rehearsing, engine, rehearsing, requests, texts
from forerun import SpeculativeDecoder
from forerun.cache.paged import PagedCache
from forerun.config import Kernels
from forerun.drafters.device import DeviceDrafter
from forerun.engine import Engine
from forerun.engine.device.capture import Work
from forerun.engine.device.choose import describe, runner_of
from forerun.engine.device.recorder import Recorder
from forerun.engine.device.runner import Runner
from forerun.engine.device.shapes import ShapeChooser
from forerun.errors import ForerunWarning
from forerun.math import advance
from forerun.models.bodies.rehearsal import is_rehearsal
from forerun.models.scorer import Scorer
from forerun.models.static_pass import StaticPass, StaticRows
from forerun.policy import Constant
from forerun.types import Rule
from support.finish import finished
from support.recompute import check, recomputed
from support.tiny import tiny_model


def test_lengths_agree_with_the_host_between_rounds() -> None:
    """What `engine.device.runner` promises: with nothing in the air, the device's numbers are the host's."""
    made = engine(True, ahead=False)
    for request in requests(3, new=30):
        made.add(replace(request, prompt=(7, *request.prompt)))
    for _ in range(4):
        made.step()
        assert made.runner is not None and made.runner._round is not None and not made.runner.has_pending
        table = made.runner._round.table
        for place, row in enumerate(table.rows):
            assert made.target.length(row.number) == len(row.history) - 1 == int(table.row_state.past[place])
            assert [*row.history[-2:]] == table.row_state.block[place, :2].tolist()
            assert (row.round, len(row.output)) == (int(table.keys.round[place]), int(table.keys.position[place]))
        assert int(table.row_state.past[3]) == 1, "the place without a row stays where it is"


def test_broken_logits_end_their_row_alone() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    poisoned = 11
    model.get_input_embeddings().weight[poisoned] = float("nan")
    target = Scorer(model, use=Kernels.OFF)
    made = Engine(target, None, Constant(0))
    made.pair.runner = runner_of(target, None, Rule.TOKEN, made.clock)
    good, bad = requests(2)
    numbers = [made.add(good), made.add(replace(bad, prompt=(*bad.prompt, poisoned)))]
    errors = {result.request.request_id: result.error for result in finished(made)}
    assert numbers and errors[0] is None and errors[1] is not None


class Refusing(Recorder):
    """A device on which the n-th recording fails."""

    def __init__(self, number: int) -> None:
        super().__init__(torch.device("cpu"))
        self.left = number

    def record(self, work: Work, state: Any, whole: bool = False) -> Work:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return work


@pytest.mark.quick("2")
@pytest.mark.parametrize("number", [0, 2, 4])
def test_a_recording_that_fails_costs_a_warning(number: int) -> None:
    want = texts(engine(False), requests(3))
    made = engine(True)
    assert made.runner is not None
    made.runner.recorder = made.runner.recordings.recorder = Refusing(number)
    with pytest.warns(ForerunWarning, match="stream is capturing.*without CUDA graphs"):
        assert texts(made, requests(3)) == want
    assert made.runner.is_disabled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texts(made, requests(3)) == want


class RefusingLater(Rehearsing):
    """Work is run once before it counts; `left` pieces of it can still be recorded."""

    left = 1000

    def record(self, work: Work, state: Sequence[Tensor], whole: bool = False) -> Work:
        if not self.left:
            raise RuntimeError("out of graphs")
        self.left -= 1
        return super().record(work, state, whole)


@pytest.mark.parametrize("drafter", ["model", "top tree"])
def test_a_draft_that_was_rehearsed_for_nothing_spoils_no_key(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies leave out layers in a rehearsal, and a draft begins with tokens whose keys were there before."""
    logits = StaticPass.logits

    def careless(a_pass: StaticPass, tokens: Tensor, rows: StaticRows, *given: Any, **named: Any) -> Tensor:
        found = logits(a_pass, tokens, rows, *given, **named)
        if is_rehearsal():
            for layer in a_pass.scorer.cache.layers.values():
                for pool in layer.flat:
                    pool[rows.addresses] = 9.0
        return found

    monkeypatch.setattr(StaticPass, "logits", careless)
    made = rehearsing(engine(True, drafter=drafter, policy=3, ahead=False))
    assert made.runner is not None and isinstance(made.runner.drafter, DeviceDrafter)
    recorder = made.runner.recorder = made.runner.recordings.recorder = RefusingLater(torch.device("cpu"))
    for request in requests(2, GREEDY, new=40):
        made.add(request)
    for _ in range(4):
        made.step()
    made.add(requests(3, GREEDY)[2])  # a larger table, whose draft is recorded and whose pass is not
    recorder.left = 1
    (scorer,) = made.runner.drafter.scorers
    with pytest.warns(ForerunWarning, match="out of graphs"):
        made.step()
    for row in made.roster.running.values():
        known = row.history[: scorer.length(row.number)]
        check(scorer.score([row.number], [[5]]), recomputed(scorer.model, [*known, 5])[-1:])
        scorer.rewind([row.number], [len(known)])


def test_rows_begin_anew_after_a_round_that_only_reserved_their_memory() -> None:
    """Of a text of two tokens a draft model has no key yet, but blocks, when the first recording fails."""
    asked = [replace(request, prompt=request.prompt[:2]) for request in requests(3)]
    want = texts(engine(False), asked)
    made = engine(True, cache=PagedCache(1024, torch.device("cpu"), block_size=16))
    assert made.runner is not None
    made.runner.recorder = made.runner.recordings.recorder = Refusing(2)
    with pytest.warns(ForerunWarning, match="without CUDA graphs"):
        assert texts(made, asked) == want
    assert made.first_fault is None


@pytest.mark.slow
def test_a_cache_that_grows_has_its_recordings_made_anew() -> None:
    made = engine(True)
    assert made.runner is not None
    texts(made, requests(2, new=10))
    before = made.target.cache.capacity
    long = [replace(request, max_new_tokens=before) for request in requests(2, GREEDY)]
    assert texts(made, long) == texts(engine(False), long)
    assert made.target.cache.capacity > before and made.runner.recordings.num_moved > 0


class Holding(Recorder):
    """Replays with the weights that a model had when the work was recorded, as a graph of their addresses does."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.device)
        self.model = model

    def record(self, work: Work, state: Sequence[Tensor], whole: bool = False) -> Work:
        self.rehearse(work, state, whole)
        self.num_recordings += 1
        modules = self.model.modules()
        held = [(m, name, w, w.data) for m in modules for name, w in m.named_parameters(recurse=False)]

        def replay() -> None:
            own = [(m, name, m._parameters[name], m._parameters[name].data) for m, name, *_ in held]
            _put_in(held)
            work()
            _put_in(own)

        return replay


def _put_in(weights: Sequence[tuple[Any, str, Any, Tensor]]) -> None:
    for module, name, weight, numbers in weights:
        weight.data = numbers
        module._parameters[name] = weight


def _moved(model: Any) -> None:
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data = -2 * weight.data


def _assigned(model: Any) -> None:
    model.load_state_dict(copy.deepcopy(tiny_model("llama", 7)).double().state_dict(), assign=True)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("change", [_moved, _assigned], ids=lambda change: change.__name__)
def test_no_recording_of_a_model_outlives_its_change(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(True, double=True, drafter="none")
    model = made.target.model

    def holding(*given: Any) -> Runner:
        runner = runner_of(*given)
        runner.recorder = runner.recordings.recorder = Holding(model)
        return runner

    monkeypatch.setattr("forerun.engine.pair.runner_for", holding)
    made.pair.runner = holding(made.target, None, made.rule, made.clock)
    before = texts(made, requests(3, GREEDY))
    change(model)
    after = texts(Engine(Scorer(model, use=Kernels.OFF), None, Constant(0), compile=False), requests(3, GREEDY))
    assert after != before, "control: this change is one"
    assert texts(made, requests(3, GREEDY)) == after
    assert made.runner is not None and made.runner.recorder.num_recordings > 0


def test_what_is_recorded_is_said_in_words() -> None:
    for drafter, words in (("model", "whole rounds"), ("random", "target's pass: RandomDraft drafts on the host")):
        made = engine(True, drafter=drafter)
        assert words in describe(made.runner, made.target, made.drafter, made.rule)
    assert made.runner is not None
    made.runner.is_disabled = True
    assert "recording failed" in describe(made.runner, made.target, made.drafter, made.rule)
    assert "cpu has no CUDA graphs" in SpeculativeDecoder(tiny_model("llama"), "lookup").recorded


def test_sizes_asked_for_now_and_then_are_stood_in_for() -> None:
    chooser = ShapeChooser(patience=2)
    assert chooser.pick("rows", 8, 8) == 8
    assert [chooser.pick("rows", 4, 4) for _ in range(4)] == [8, 8, 4, 4]
    assert [chooser.pick("rows", 10, 12) for _ in range(3)] == [12, 12, 10], "nothing larger is there"
    assert chooser.pick("drafts", 3, 3) == 3, "another kind"


# Controls: each breaks one promise of a device round, and a comparison with rounds step by step must notice.


def _forgets_round(state: Any, *given: Any) -> None:
    _advance(state, *given)
    state.round.sub_(state.active)


def _wrong_previous(state: Any, *given: Any) -> None:
    _advance(state, *given)
    state.block[:, 0] = state.block[:, 1]


def _one_key_too_many(state: Any, *given: Any) -> None:
    _advance(state, *given)
    state.past.add_(state.active)


_advance = advance.advance


@pytest.mark.quick("_forgets_round")
@pytest.mark.parametrize("fault", [_forgets_round, _wrong_previous, _one_key_too_many])
def test_control_a_fault_in_advancing_is_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want = texts(engine(False), requests(3))
    monkeypatch.setattr(advance, "advance", fault)
    assert texts(engine(True), requests(3)) != want


def test_control_budgets_shorten_drafts_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the last rounds of a row draw other tokens than plain steps would."""
    asked = requests(8, new=13)
    want = texts(engine(False, policy=7), asked)
    assert texts(engine(True, policy=7), asked) == want
    monkeypatch.setattr(advance, "draft_lengths", lambda asked, budget, position, most: asked.clamp(max=most))
    assert texts(engine(True, policy=7), asked) != want
