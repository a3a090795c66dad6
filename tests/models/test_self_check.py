"""Models that no test has seen are tried when their decoder is made: what is wrong is refused, rounding is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from pytest import MonkeyPatch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from forerun import SpeculativeDecoder
from forerun.cache.base import ranges
from forerun.cache.ragged import RaggedCache
from forerun.config import Kernels
from forerun.errors import ForerunWarning, InvalidArgument, UnsupportedModel
from forerun.kernels import why_not_numba
from forerun.models import attention, masks, proven, ragged_states
from forerun.models import self_check as self_check_module
from forerun.models.bodies import readers
from forerun.models.bodies.base import ForwardPass, FusedBody
from forerun.models.bodies.description import Decoder
from forerun.models.cross_attention import Sources
from forerun.models.scorer import Scorer
from forerun.models.self_check import Examiner, Kind, described, is_proven, self_check, tried
from forerun.models.seq2seq import scorer_of
from forerun.models.trial import compare, rounding
from forerun.models.trial.oracle import Oracle
from forerun.models.trial.texts import plain_tokens
from support.census import Recipe, build, causal_recipes, seq2seq_recipes
from support.described import described_model
from support.pinned import needs_pinned_transformers
from support.tiny import plain_greedy, tiny_model

needs_numba = pytest.mark.skipif(why_not_numba() is not None, reason="needs Numba")
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
RECIPES = {recipe.name: recipe for recipe in causal_recipes()}
SEQ2SEQ = {recipe.name: recipe for recipe in seq2seq_recipes()}
PROVEN = [recipe for recipe in causal_recipes() if recipe.class_name in proven.CLASSES]


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: MonkeyPatch) -> None:
    """Whatever the caller's environment says."""
    monkeypatch.setenv("FORERUN_SELF_CHECK", "on")


@pytest.fixture
def this_transformers(monkeypatch: MonkeyPatch) -> None:
    """The list of proven classes as if it had been made with the transformers that is installed."""
    monkeypatch.setattr(proven, "TRANSFORMERS", transformers.__version__)


def wrong_positions(patch: MonkeyPatch) -> None:
    """New tokens stand one place further than their row's past says."""
    patch.setattr(ragged_states, "ranges", lambda starts, counts: ranges([s + 1 if s else 0 for s in starts], counts))


def wrong_mask(patch: MonkeyPatch) -> None:
    """One key of the future is seen."""
    dense, padded = masks.dense_mask, masks.padded_mask

    def rolled(states: Any, *rest: Any) -> Any:
        mask = dense(states, *rest)
        return None if mask is None else mask.roll(-1, -1)

    patch.setattr(masks, "dense_mask", rolled)
    patch.setattr(masks, "padded_mask", lambda *a: padded(*a).roll(-1, -1))


def stale_key(patch: MonkeyPatch) -> None:
    """A cut back leaves one key too many."""
    rewind = RaggedCache.rewind
    patch.setattr(RaggedCache, "rewind", lambda c, row, n: rewind(c, row, min(n + 1, c.length(row))))


def changed_keys(patch: MonkeyPatch) -> None:
    """The cache holds other keys than those the model made."""
    write = RaggedCache.write
    patch.setattr(RaggedCache, "write", lambda c, layer, where, k, *rest: write(c, layer, where, 2 * k, *rest))


def short_copy(patch: MonkeyPatch) -> None:
    """A copied prompt lacks its last key."""
    copy = RaggedCache._copy
    patch.setattr(RaggedCache, "_copy", lambda c, source, target, n: copy(c, source, target, n - 1))


FAULTS = {
    wrong_positions: "drafts behind ragged rows",
    wrong_mask: "pass",
    stale_key: "after a cut back",
    changed_keys: "pass",
    short_copy: "copied",
}


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ("llama", "mixtral", "bloom"))
def test_rounding_passes(name: str, dtype: torch.dtype) -> None:
    found = tried(scorer_of(build(RECIPES[name]).to(dtype)))
    assert found.kind is Kind.PASSED and found.deviation <= found.allowed < 0.5


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize(
    ("name", "dtype"), (("llama", torch.float64), ("bloom", torch.float32), ("mixtral", torch.bfloat16))
)
def test_controls_are_refused(
    name: str, dtype: torch.dtype, fault: Callable[[MonkeyPatch], None], monkeypatch: MonkeyPatch
) -> None:
    scorer = scorer_of(build(RECIPES[name]).to(dtype))
    fault(monkeypatch)
    with pytest.raises(UnsupportedModel, match=FAULTS[fault]):
        tried(scorer)


@needs_pinned_transformers
@pytest.mark.slow
@pytest.mark.parametrize("recipe", PROVEN, ids=lambda recipe: recipe.name)
def test_every_exact_type_passes_and_every_fault_is_refused(recipe: Recipe) -> None:
    try:
        scorer = scorer_of(build(recipe).float())
    except UnsupportedModel as error:  # another variant of its class is exact; test_census.py holds the list of both
        pytest.skip(f"a check needs a model that is taken, and {recipe.name} is refused: {error}")
    tried(scorer)
    for fault in FAULTS:
        with MonkeyPatch.context() as patch:
            fault(patch)
            with pytest.raises(UnsupportedModel):
                tried(scorer)


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", ("t5", "whisper"))
def test_encoder_decoder_models(name: str, fault: Callable[[MonkeyPatch], None], monkeypatch: MonkeyPatch) -> None:
    scorer = scorer_of(build(SEQ2SEQ[name]).float())
    assert tried(scorer).kind is Kind.PASSED
    fault(monkeypatch)
    # Sources are moved by the same copies: a short one is seen by the row that reads the last source.
    with pytest.raises(UnsupportedModel, match="copied|after a cut back" if fault is short_copy else FAULTS[fault]):
        tried(scorer)


@pytest.mark.parametrize("name", ("t5", "whisper"))
def test_a_source_of_another_row_is_refused(name: str, monkeypatch: MonkeyPatch) -> None:
    scorer = scorer_of(build(SEQ2SEQ[name]).float())
    read_by = Sources.read_by
    monkeypatch.setattr(Sources, "read_by", lambda sources, rows: read_by(sources, [*rows[1:], rows[0]]))
    with pytest.raises(UnsupportedModel, match="differ from the model's own"):
        tried(scorer)


def test_the_body_in_use_is_what_is_checked() -> None:
    class Wrong(FusedBody):
        def hidden(self, call: ForwardPass) -> Tensor:
            embeddings: Tensor = model.get_input_embeddings()(call.new)
            return embeddings * 0.5

        def head(self, hidden: Tensor) -> Tensor:
            logits: Tensor = model.get_output_embeddings()(hidden)
            return logits

    model = tiny_model("llama")
    scorer = scorer_of(model)
    scorer.body = Wrong()
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM: Forerun's logits differ .* a prompt's pass"):
        tried(scorer)


class Other(LlamaForCausalLM):
    """A class that no test has proven, and that is wrong: it forgets the cache's past positions."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        options.pop("position_ids", None)
        return super().forward(*arguments, **options)


def other(like: str = "llama") -> PreTrainedModel:
    model = tiny_model(like)
    made = Other(model.config).eval()
    made.load_state_dict(model.state_dict())
    return made


@pytest.mark.usefixtures("this_transformers")
def test_what_was_done_is_told() -> None:
    assert SpeculativeDecoder(tiny_model("llama"), None).self_check.kind is Kind.PROVEN
    assert SpeculativeDecoder(other(), None, self_check=False).self_check.kind is Kind.OFF
    with pytest.raises(UnsupportedModel, match=r"^Other: Forerun's logits differ .* model.generate"):
        SpeculativeDecoder(other(), None)


@pytest.mark.usefixtures("this_transformers")
def test_the_doctor_says_what_was_done(monkeypatch: MonkeyPatch) -> None:
    assert described(tiny_model("llama")).startswith("proven")
    assert described(other()).startswith("refused: Other")
    assert described(tiny_model("mamba")).startswith("refused: Mamba")
    monkeypatch.setattr(proven, "CLASSES", frozenset())
    assert "deviation" in described(tiny_model("llama"))
    monkeypatch.setenv("FORERUN_SELF_CHECK", "off")
    assert "switched off" in described(other())


class Foreign(torch.nn.Module):
    """Llama's attention in somebody's own words: by the mask it is given, or by the order of the keys alone."""

    def __init__(self, own: Any, heeds_mask: bool) -> None:
        super().__init__()
        self.own, self.heeds_mask = own, heeds_mask

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        own, shape = self.own, (*hidden_states.shape[:-1], -1, self.own.head_dim)
        query, key, value = (
            product(hidden_states).view(shape).transpose(1, 2) for product in (own.q_proj, own.k_proj, own.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, own.layer_idx)
        new, seen = query.shape[-2], key.shape[-2]
        mask = attention_mask if self.heeds_mask else None
        if mask is None:
            mask = torch.ones(new, seen, dtype=torch.bool).tril(seen - new)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return own.o_proj(out.transpose(1, 2).flatten(2)), None


def put_in(model: PreTrainedModel, heeds_mask: bool) -> None:
    for layer in model.base_model.layers:
        layer.self_attn = Foreign(layer.self_attn, heeds_mask)


@pytest.mark.usefixtures("this_transformers")
@pytest.mark.parametrize("kernels", ["on", "off"])
def test_a_proven_class_with_modules_of_somebodys_own_is_tried(kernels: str) -> None:
    """Alone, either says what Llama says; in a ragged batch the one that looks at no mask sees other rows' padding."""
    prompt, want = [5, 9, 3, 60, 2], plain_greedy(tiny_model("llama"), [5, 9, 3, 60, 2], 5)
    blind, sighted = (copy.deepcopy(tiny_model("llama")) for _ in range(2))
    put_in(blind, heeds_mask=False)
    put_in(sighted, heeds_mask=True)
    assert plain_greedy(blind, prompt, 5) == plain_greedy(sighted, prompt, 5) == want
    with pytest.raises(UnsupportedModel, match=r"^LlamaForCausalLM: Forerun's logits differ"):
        SpeculativeDecoder(blind, None, kernels=kernels)
    decoder = SpeculativeDecoder(sighted, None, kernels=kernels)
    assert decoder.self_check.kind is Kind.PASSED
    assert decoder.generate([[7, 8, *prompt], prompt], max_new_tokens=5).new_tokens[1] == want


@pytest.mark.usefixtures("this_transformers")
def test_modules_that_are_put_in_later_are_tried_by_the_next_call(monkeypatch: MonkeyPatch) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, None)
    assert decoder.self_check.kind is Kind.PROVEN
    put_in(model, heeds_mask=False)
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match=r"^LlamaForCausalLM: Forerun's logits differ"):
            decoder.generate([[5, 9, 3]], max_new_tokens=2)
    for layer in model.base_model.layers:
        layer.self_attn.heeds_mask = True
    assert len(decoder.generate([[5, 9, 3]], max_new_tokens=2).new_tokens[0]) == 2
    monkeypatch.setattr(self_check_module, "tried", lambda scorer: pytest.fail("tried again without need"))
    model.base_model.layers[0].mlp.down_proj.weight.data *= 2
    decoder.generate([[5, 9, 3]], max_new_tokens=2)


@pytest.mark.usefixtures("this_transformers")
def test_linear_layers_of_somebodys_own_need_no_trial() -> None:
    """Quantised ones, adapted ones, and those that accelerate fetches weights for: each token is by itself there."""

    class Packed(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).round(decimals=3)

    model = copy.deepcopy(tiny_model("llama"))
    model.lm_head.__class__ = Packed
    replaced, fetched = model.base_model.layers[0].mlp.up_proj, model.base_model.norm
    replaced.forward = replaced.forward
    fetched._old_forward, fetched._hf_hook = fetched.forward, object()
    fetched.forward = lambda x: fetched._old_forward(x)
    model.base_model.forward = torch.compile(model.base_model.forward, backend="eager")
    assert is_proven(model)
    fetched._old_forward = lambda x: x
    assert not is_proven(model)


@pytest.mark.usefixtures("this_transformers")
def test_layers_that_are_gone_leave_other_ones_to_be_tried() -> None:
    """Fused layers of a family that no test has run were compared; the modules behind them were not."""
    model = tiny_model("gpt_neox")
    scorer, examine = scorer_of(model, use=Kernels.ON), Examiner(True)
    assert scorer.is_fused
    examine(scorer)
    first = examine.verdict
    assert examine(scorer) is first
    scorer.body = scorer.modules
    assert examine(scorer) is not first


@dataclass
class Cost:
    """Shapes of token ids: of the model's own forwards, and of Forerun's passes."""

    own: list[tuple[int, ...]] = field(default_factory=list)
    ours: list[int] = field(default_factory=list)


@pytest.fixture
def cost(monkeypatch: MonkeyPatch) -> Cost:
    cost, forward, run = Cost(), Oracle._forward, Scorer._by

    def counted(self: Oracle, texts: Any) -> Tensor:
        cost.own.append((len(texts), len(texts[0][1])))
        return forward(self, texts)

    def passed(self: Scorer, body: Any, call: ForwardPass) -> Any:
        cost.ours.append(len(call.new))
        return run(self, body, call)

    monkeypatch.setattr(Oracle, "_forward", counted)
    monkeypatch.setattr(Scorer, "_by", passed)
    return cost


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("use", (Kernels.OFF, pytest.param(Kernels.ON, marks=needs_numba)))
def test_what_a_trial_costs(use: Kernels, dtype: torch.dtype, cost: Cost) -> None:
    """One short forward of the model, and three passes of ours that together are not longer."""
    tried(Scorer(copy.deepcopy(tiny_model("llama")).to(dtype), use=use))
    assert cost.own == [(5, 16)]
    assert cost.ours == [22, 25, 4]


def test_what_a_trial_of_another_body_for_long_passes_costs(cost: Cost) -> None:
    scorer = scorer_of(tiny_model("llama"))
    scorer.body.beyond = scorer.modules
    tried(scorer)
    assert cost.own == [(5, 20)]
    assert cost.ours == [22, 25, 4, 12]


def test_what_a_trial_of_an_encoder_decoder_model_costs(cost: Cost) -> None:
    """One forward for each of two lengths of sources."""
    tried(scorer_of(build(SEQ2SEQ["t5"]).float()))
    assert cost.own == [(2, 16), (3, 9)]
    assert cost.ours == [22, 25, 4]


def test_what_the_model_makes_of_rounding_is_measured_only_where_it_matters(
    cost: Cost, monkeypatch: MonkeyPatch
) -> None:
    """Two forwards more, of one text."""
    plain = tried(scorer_of(tiny_model("llama")))
    assert 0 < plain.deviation < plain.allowed == rounding.surely_allowed(tiny_model("llama"))
    cost.own.clear()
    monkeypatch.setattr(rounding, "surely_allowed", lambda model: 0.0)
    monkeypatch.setattr(compare, "surely_allowed", rounding.surely_allowed)
    found = tried(scorer_of(tiny_model("llama")))
    assert cost.own == [(5, 16), (1, 16), (1, 16)]
    assert found.deviation == plain.deviation < found.allowed < 0.01


@pytest.mark.parametrize("fails", (True, False), ids=["fails", "differs"])
def test_single_rows_decide_where_a_models_batches_are_others(
    fails: bool, cost: Cost, monkeypatch: MonkeyPatch
) -> None:
    """A class whose own forward takes one row, or is wrong about several, says what it says row by row."""
    forward = Oracle._forward

    def single(self: Oracle, texts: Any) -> Tensor:
        if fails and len(texts) > 1:
            raise ValueError("one row, please")
        return forward(self, texts) * (1 if len(texts) == 1 else 1.5)

    monkeypatch.setattr(Oracle, "_forward", single)
    assert tried(scorer_of(tiny_model("llama"))).kind is Kind.PASSED
    assert [rows for rows, _ in cost.own][-5:] == [1] * 5
    stale_key(monkeypatch)
    with pytest.raises(UnsupportedModel, match="after a cut back"):
        tried(scorer_of(tiny_model("llama")))


def test_another_transformers_proves_nothing(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(proven, "TRANSFORMERS", "5.0.0")
    found = SpeculativeDecoder(tiny_model("llama"), None).self_check
    assert found.kind is Kind.PASSED and "deviation" in str(found)
    assert described(tiny_model("llama")).startswith("checked")


def test_the_environment_can_switch_it_off(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_SELF_CHECK", "off")
    assert SpeculativeDecoder(other(), None).self_check.kind is Kind.OFF
    with pytest.raises(UnsupportedModel):
        SpeculativeDecoder(other(), None, self_check=True)
    monkeypatch.setenv("FORERUN_SELF_CHECK", "perhaps")
    with pytest.raises(InvalidArgument, match="on or off"):
        SpeculativeDecoder(other(), None)


def test_an_error_inside_is_a_refusal_with_its_cause(monkeypatch: MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    scorer = scorer_of(tiny_model("llama"))
    monkeypatch.setattr(attention, "_attend", broken)
    with pytest.raises(UnsupportedModel, match="RuntimeError: mat1 and mat2") as caught:
        tried(scorer)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_settings_of_any_shape_whose_names_speak_of_tokens() -> None:
    """Configurations keep what config.json has; ids among it are no plain text, wherever they stand."""
    model = copy.deepcopy(tiny_model("llama"))
    model.config.special_tokens_map = {"image": 3, "names": ["<a>", "<b>"], "others": [[4, 5], {"6": 7}]}
    model.config.token_weights, model.config.tokenizer_class, model.config.add_token = [0.5, None], "Own", True
    scorer = scorer_of(model)
    tried(scorer)
    plain = plain_tokens(scorer)
    assert not {3, 4, 5, 7} & set(plain) and {6, 8} <= set(plain)


def test_nothing_stays_behind() -> None:
    """No keys, no hooks, no other attention, and the caller's random numbers are his own."""
    model = tiny_model("llama")
    scorer = scorer_of(model)
    cache, before = scorer.cache, torch.get_rng_state()
    tried(scorer)
    assert scorer.cache is cache and not cache.layers and not cache.rows and cache.num_slots == 0
    assert torch.equal(before, torch.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())
    assert model.config._attn_implementation in ("sdpa", "eager")


def misread(monkeypatch: MonkeyPatch) -> None:
    """Attention and MLP of every described layer stand side by side where they follow each other, or the reverse."""
    right = readers.describe

    def wrong(model: PreTrainedModel) -> Decoder:
        decoder = right(model)
        layers = (replace(layer, is_parallel=not layer.is_parallel) for layer in decoder.layers)
        return replace(decoder, layers=tuple(layers))

    monkeypatch.setattr(readers, "describe", wrong)


@needs_numba
def test_fused_layers_that_differ_are_left_to_the_modules(monkeypatch: MonkeyPatch) -> None:
    model = described_model("gpt_neox")
    assert self_check(Scorer(model, use=Kernels.ON)).kind is Kind.PASSED
    misread(monkeypatch)
    scorer = Scorer(model, use=Kernels.ON)
    assert scorer.is_fused
    with pytest.warns(ForerunWarning, match="fused layers are not used"):
        assert self_check(scorer).kind is Kind.PASSED
    assert not scorer.is_fused and not Scorer(model, use=Kernels.ON).is_fused


@needs_numba
def test_a_model_whose_modules_differ_as_well_is_refused(monkeypatch: MonkeyPatch) -> None:
    misread(monkeypatch)
    wrong_positions(monkeypatch)
    with pytest.raises(UnsupportedModel, match="differ from the model's own"):
        self_check(Scorer(described_model("gpt_neox"), use=Kernels.ON))
