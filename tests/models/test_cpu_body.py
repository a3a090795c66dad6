"""The fused body against transformers' modules: the same numbers, rows that do not feel each other, clear refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from support.census import Recipe, build
from support.described import NAMES, NEW, TEXTS, described_model, expected, feed
from support.recompute import check, recomputed
from support.tiny import tiny_model

pytest.importorskip("numba")

from forerun.config import Kernels
from forerun.kernels.cpu import measured
from forerun.models.bodies import choose, cpu
from forerun.models.bodies.cpu_library import LibraryBody
from forerun.models.scorer import Scorer

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.4,
}  # fmt: skip


def _llama3_rope() -> Any:
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope, attention_bias=True))


def _qwen2() -> Any:
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1))
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.q_proj.bias)
        nn.init.normal_(layer.self_attn.k_proj.bias)
    return model


MODELS = {
    "llama": lambda: tiny_model("llama"),
    "mistral": lambda: tiny_model("mistral"),
    "qwen3": lambda: tiny_model("qwen3"),
    "qwen2 with windows": _qwen2,
    "llama 3 rotary, biases": _llama3_rope,
    "one key head": lambda: LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_key_value_heads": 1})),
    "a key head each": lambda: LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_key_value_heads": 4})),
}


@pytest.fixture(params=MODELS, scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(1)
    return MODELS[request.param]().eval()


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.quick(
    "gemma2", "gpt_neox", "gpt2", "olmo2", "bloom", "cohere2", "qwen2_moe", "gpt_oss", "longcat_flash",
    "falcon-grouped", "gemma3-with-images",
)  # fmt: skip
def test_families(family: str) -> None:
    """Ragged prompts in two parts with a cut between them, several new tokens of two rows, then one row alone."""
    model = described_model(family)
    want = expected(model)
    scorer = _scorer(model)
    feed(scorer)
    got = scorer.score([0, 1], NEW).split([len(new) for new in NEW])
    for own, right in zip(got, want, strict=True):
        check(own, right)
    scorer.rewind([0], [len(TEXTS[0])])
    check(torch.cat([scorer.score([0], [[token]]) for token in NEW[0]]), want[0])


def test_experts_that_nobody_chose_have_no_part_in_identities() -> None:
    """LongCat's first expert is infinite, and its router never chooses it."""
    model = described_model("longcat_flash")
    for layer in model.model.layers:
        layer.mlp.experts.down_proj[0] = torch.inf
        layer.mlp.router.e_score_correction_bias[0] = -100.0
    want = expected(model)
    assert all(logits.isfinite().all() for logits in want), "control"
    scorer = _scorer(model)
    feed(scorer)
    for own, right in zip(scorer.score([0, 1], NEW).split([len(new) for new in NEW]), want, strict=True):
        check(own, right)


def _scorer(model: Any, **more: Any) -> Scorer:
    scorer = Scorer(model, use=Kernels.ON, **more)
    assert scorer.is_fused, choose.why_not(model)
    return scorer


def _tokens(model: Any, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (count,), generator=generator).tolist()


def test_ragged_rows_agree_with_the_modules(model: Any) -> None:
    """Prompts of many lengths (more than one chunk of tokens), blocks of many widths, cut back and gone on."""
    scorer = _scorer(model)
    lengths = (1, 9, 40, 75)
    texts = [_tokens(model, n + 30, n) for n in lengths]
    for row in range(4):
        scorer.admit(row)
    scorer.feed(range(4), [text[:n] for text, n in zip(texts, lengths, strict=True)])
    at = list(lengths)
    for widths in ((1, 1, 1, 1), (3, 1, 5, 2), (8, 8, 8, 8)):
        blocks = [text[a : a + w] for text, a, w in zip(texts, at, widths, strict=True)]
        got = scorer.score(range(4), blocks).split(list(widths))
        for text, a, w, logits in zip(texts, at, widths, got, strict=True):
            check(logits, recomputed(model, text[: a + w])[a:])
        at = [a + (w + 1) // 2 for a, w in zip(at, widths, strict=True)]
        scorer.rewind(range(4), at)


def test_same_bits_alone_in_any_batch_in_any_block(model: Any) -> None:
    text, neighbour = _tokens(model, 60, 5), _tokens(model, 77, 6)
    alone = _scorer(model)
    alone.admit(0)
    steps = torch.cat([alone.score([0], [[token]]) for token in text])
    beside = _scorer(model)
    for row in (3, 7):
        beside.admit(row)
    whole = beside.score([3, 7], [neighbour, text])[len(neighbour) :]
    assert torch.equal(steps, whole)


def test_hidden_states_and_picked_logits(model: Any) -> None:
    heard: list[torch.Tensor] = []

    class Ear:
        def on_hidden_states(self, rows: Any, past: Any, counts: Any, hidden: torch.Tensor, finished: Any) -> None:
            assert finished is None, "fused layers leave none out"
            heard.append(hidden)

        def on_copy(self, source: int, row: int, length: int) -> None:
            raise AssertionError

    scorer = _scorer(model)
    scorer.observers.append(Ear())
    scorer.admit(0)
    text = _tokens(model, 12, 8)
    last = scorer.score_last([0], [text])
    with torch.no_grad():
        want = model.base_model(torch.tensor([text]), use_cache=False).last_hidden_state[0]
    check(heard[0], want)
    check(last, recomputed(model, text)[-1:])


def test_weights_that_are_replaced_are_seen(model: Any) -> None:
    own = copy.deepcopy(model)
    scorer = _scorer(own)
    scorer.admit(0)
    text = _tokens(own, 6, 9)
    before = scorer.score([0], [text])
    own.base_model.layers[1].mlp.down_proj.weight.data = torch.randn_like(own.base_model.layers[1].mlp.down_proj.weight)
    scorer.rewind([0], [0])
    after = scorer.score([0], [text])
    assert not torch.allclose(before, after)
    check(after, recomputed(own, text))


def test_a_pass_that_fails_leaves_no_token(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = _scorer(model)
    scorer.admit(0)
    scorer.feed([0], [[1, 2, 3]])
    monkeypatch.setattr(scorer.body, "_run", lambda *a: (_ for _ in ()).throw(MemoryError("none left")))
    with pytest.raises(MemoryError):
        scorer.score([0], [[4]])
    assert scorer.length(0) == 3


class TestRefusals:
    """Whatever the fused body would skip in silence is left to the modules, with a reason."""

    def reason(self, model: Any) -> str:
        assert not Scorer(model, use=Kernels.ON).is_fused
        return str(choose.why_not(model))

    def test_another_family(self) -> None:
        assert "xglm is none of" in self.reason(build(Recipe("xglm", "XGLMForCausalLM", {})).float())

    def test_hooks(self) -> None:
        model = copy.deepcopy(tiny_model("llama"))
        model.model.layers[0].register_forward_hook(lambda *a: None)
        assert "hooks" in self.reason(model)

    def test_a_layer_of_another_kind(self) -> None:
        class Adapter(nn.Linear):
            pass

        model = copy.deepcopy(tiny_model("llama"))
        old = model.model.layers[1].mlp.up_proj
        model.model.layers[1].mlp.up_proj = Adapter(old.in_features, old.out_features, bias=False)
        assert "Adapter" in self.reason(model)

    def test_another_dtype(self) -> None:
        assert "float64" in self.reason(copy.deepcopy(tiny_model("llama")).double())

    def test_another_activation(self) -> None:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="mish"))
        assert "activation Mish" in self.reason(model)

    def test_rotary_that_depends_on_the_batch(self) -> None:
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 256}
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope))
        assert "dynamic" in self.reason(model)

    def test_switched_off(self) -> None:
        assert not Scorer(tiny_model("llama"), use=Kernels.OFF).is_fused

    def test_without_numba(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("forerun.kernels.why_not_numba", lambda: "No module named 'numba'; pip install numba")
        scorer = Scorer(tiny_model("llama"), use=Kernels.ON)
        assert not scorer.is_fused
        assert cpu.why_not(tiny_model("llama")) is None
        assert "pip install numba" in str(choose.why_not(tiny_model("llama")))


def test_auto_takes_the_faster_body_and_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(choose, "measured", lambda model: {"1": 2.0, "2": 1.0, "modules": 3.0})
    scorer = Scorer(model, use=Kernels.AUTO)
    assert isinstance(scorer.body, cpu.CpuBody) and scorer.body.num_threads == 2
    monkeypatch.setattr(choose, "measured", lambda model: {"1": 2.0, "2": 1.0, "modules": 0.5})
    assert not Scorer(model, use=Kernels.AUTO).is_fused


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_auto_leaves_long_passes_to_others_where_they_measured_faster(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a library's products between our layers; to the modules where those do not know the family's attention."""
    monkeypatch.setattr(choose, "measured", lambda model: {"1": 1.0, "modules": 3.0})
    monkeypatch.setattr(choose, "longest_pass", lambda model, threads: 4)
    model, by_others = described_model(family), []
    scorer = Scorer(model, use=Kernels.AUTO)
    assert isinstance(scorer.body.beyond, LibraryBody) == (family == "llama")
    other = scorer.body.beyond or scorer.modules
    run = other.run
    monkeypatch.setattr(other, "run", lambda call: by_others.append(len(call.new)) or run(call))
    exact = Scorer(model, use=Kernels.OFF)
    for each in (scorer, exact):
        each.admit(0)
        each.feed([0], [TEXTS[0][:5]])
    check(scorer.score([0], [[3, 4, 5, 6]]), exact.score([0], [[3, 4, 5, 6]]))
    assert by_others == [5]
    assert Scorer(model, use=Kernels.ON).body.longest_pass is None


@pytest.mark.parametrize(
    ("times", "longest"),
    [
        ((0.1, 0.1, 0.1), None),
        ((0.4, 0.4, 10), 512),
        ((1, 4), 128),  # as far ahead as behind: halfway
        ((1.9, 4), 70),
        ((1, 2.1), 234),
        ((9,), 32),
        ((0.9, 0.9), 512),
    ],
)
def test_the_longest_pass_lies_between_two_timed_ones(
    times: tuple[float, ...], longest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a pass of 256 takes long, none of four times the tokens is timed: a library is taken to win there."""
    answers = [{"tiles": float(time), "library": 2.0} for time in times]
    monkeypatch.setattr("forerun.kernels.cpu.measured.seconds", lambda steps, repeats: answers.pop(0))
    assert choose._measure_longest_pass(tiny_model("llama", max_position_embeddings=2048), 1) == longest
    assert not answers


def test_real_timing_names_every_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.kernels.cpu.measured.disturbances", lambda: 0)  # whatever else runs here
    found = choose._measure(tiny_model("llama"), 2)
    assert set(found) == {"1", "2", "modules"} and min(found.values()) > 0


@pytest.mark.parametrize(
    ("disturbed", "two", "best"),
    [
        (0, 1.1, {"1": 3.0, "2": pytest.approx(3.3), "modules": 6.0}),
        (0, 3.0, {"2": 3.0, "modules": 6.0}),  # which only a busy core explains
        (1, 1.1, {"2": 3.0, "modules": 6.0}),
        (1, 20.0, {"1": 3.0, "modules": 6.0}),
    ],
)
def test_a_busy_moment_does_not_choose_one_thread(
    disturbed: int, two: float, best: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would decode with one thread for as long as it lives, because its other process was starting as well.
    Under a quota, where more threads are many times slower, it does well to."""

    def seconds(steps: dict[str, Any], repeats: int) -> dict[str, float]:
        measured._disturbed.number += disturbed
        return {name: {"1": 1.0, "2": two, "modules": 2.0}[name] for name in steps}

    monkeypatch.setattr(measured, "seconds", seconds)
    monkeypatch.setattr(measured._disturbed, "number", 0)
    monkeypatch.setattr(choose, "TIMED", (1, 4, 8))
    assert choose._measure(tiny_model("llama"), 2) == best
    assert (measured.disturbances() == 0) == (len(best) == 3), "what is odd is not kept"
