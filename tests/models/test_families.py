"""Families that are awkward each in a way of its own: decoded exactly, or refused with the reason and a remedy."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

from forerun import PromptLookup, RandomDraft, SpeculativeDecoder
from forerun.errors import InvalidArgument, UnsupportedModel
from forerun.math.attention import Form
from forerun.models import families
from forerun.models.bodies import readers
from forerun.models.families import Layout
from forerun.models.scorer import Scorer
from support.census import Recipe, build, causal_recipes
from support.census_judge import Outcome, judge
from support.pinned import needs_pinned_transformers
from support.recompute import check, recomputed
from support.tiny import plain_greedy, ragged_prompts, tiny_model

pytestmark = needs_pinned_transformers

RECIPES = {recipe.name: recipe for recipe in causal_recipes()}

# One of each kind: a latent in the cache, a mask made of values, heads repeated by the model; the attention interface
# with nothing said of it; ALiBi, windows and positions told from places; positions looked up; keys shared by layers;
# positions counted by a layer.
QUICK = ("deepseek_v3", "doge", "jetmoe", "stablelm", "mpt", "gpt_neo", "bart", "gemma3n_text", "llama4_text")
SLOW = (
    "axk1", "deepseek_v2", "diffllama", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu",
    "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart", "whisper",
    "git", "gpt_neox_japanese", "mvp", "trocr", "xglm", "gemma4_text", "moss_transcribe_diarize",
)  # fmt: skip
ENCODERS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip


def of_type(model_type: str, **overrides: Any) -> Any:
    """A tiny model of one type, with settings of its own."""
    known = RECIPES[model_type]
    return build(Recipe(model_type, known.class_name, overrides={**known.overrides, **overrides}))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_exact(name: str) -> None:
    """Ragged, with drafts that are kept in part, and with trees where the family takes them."""
    finding = judge(RECIPES[name])
    assert finding.outcome is Outcome.EXACT, finding.reason


@pytest.mark.parametrize("name", ("bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ENCODERS[1:])))
def test_encoders_are_refused_until_they_are_decoders(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="is_decoder=True"):
        Scorer(of_type(name))
    finding = judge(Recipe(name, RECIPES[name].class_name, overrides={**RECIPES[name].overrides, "is_decoder": True}))
    assert finding.outcome is Outcome.EXACT, finding.reason


@pytest.mark.parametrize("places", [(0, 1), ("cuda:0", torch.device("cuda", 1)), (0, "cuda:1", "cpu"), ("xpu:0", 1)])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_layers_on_several_accelerators_are_refused(
    name: str, places: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name)
    monkeypatch.setattr(model, "hf_device_map", dict(enumerate(places)), raising=False)
    with pytest.raises(UnsupportedModel, match=r'device 0 and device 1 .*device_map=\{"": 0\}') as refused:
        SpeculativeDecoder(model, "lookup")
    assert ("--tensor-parallel 2" in str(refused.value)) is (name == "llama"), "T5 is not run split"


@pytest.mark.parametrize("places", [(0,), (0, "cuda:0", torch.device("cuda")), (1, "cpu", "disk"), ("cpu", "disk")])
def test_layers_beside_one_accelerator_are_not_refused(
    places: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(model, "hf_device_map", dict(enumerate(places)), raising=False)
    families.inspect(model)


def test_tokens_that_see_the_future_are_refused() -> None:
    """An encoder that does not say so is found out by its mask."""
    model = of_type("bert")
    for module in model.modules():
        module.__dict__.pop("is_decoder", None)
    for layer in model.bert.encoder.layer:
        layer.is_decoder = True
    scorer = Scorer(model)
    scorer.admit(0)
    with pytest.raises(UnsupportedModel, match="see those that follow them"):
        scorer.score([0], [[5, 6, 7]])


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gptj", "bloom", "deepseek_v3"])
def test_a_configuration_that_is_not_causal_is_refused(name: str, kernels: str) -> None:
    """transformers' mask builders read it; attention's own modules say nothing of it."""
    model, text = of_type(name).float(), torch.tensor([[5, 6, 7, 9]])
    causal = model(text, use_cache=False).logits
    model.config.is_causal = False
    assert not torch.allclose(model(text, use_cache=False).logits[:, :-1], causal[:, :-1]), "control"
    with pytest.raises(UnsupportedModel, match="load it with is_causal=True"):
        SpeculativeDecoder(model, None, kernels=kernels)
    assert readers.why_not(model) == "attention in both directions"


@pytest.mark.parametrize(("name", "value"), [("gemma", True), ("gemma3_text", True), ("gemma4_text", "all")])
def test_attention_in_both_directions_is_refused(name: str, value: Any) -> None:
    model, text = of_type(name, use_bidirectional_attention=value).float(), torch.tensor([[5, 6, 7, 9]])
    other = torch.tensor([[5, 6, 7, 11]])
    seen = [model(ids, use_cache=False).logits[:, :-1] for ids in (text, other)]
    assert not torch.allclose(*seen), "control: what follows tells"
    with pytest.raises(UnsupportedModel, match="load it with use_bidirectional_attention=None"):
        SpeculativeDecoder(model, None)
    if name in readers.FAMILIES:
        assert readers.why_not(model) == "attention in both directions"


@pytest.mark.parametrize(("name", "value"), [("gemma2", True), ("gemma4_text", "vision")])
def test_a_setting_that_leaves_text_as_it_is_is_taken(name: str, value: Any) -> None:
    """Gemma 2 makes causal masks all the same; the tokens of images are no text."""
    model, text = of_type(name, use_bidirectional_attention=value).float(), [5, 6, 7, 9]
    scorer = Scorer(model)
    scorer.admit(0)
    check(scorer.score([0], [text]), recomputed(model, text))


def test_a_decoder_behind_an_encoder_that_is_not_causal_is_refused() -> None:
    model = copy.deepcopy(tiny_model("t5"))
    model.get_decoder().config.is_causal = False
    with pytest.raises(UnsupportedModel, match="load it with is_causal=True"):
        SpeculativeDecoder(model, None)


def test_a_model_that_stops_being_causal_is_refused() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, None, kernels="on")
    model.config.is_causal = False
    with pytest.raises(UnsupportedModel, match="load it with is_causal=True"):
        decoder.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)


@pytest.mark.parametrize("name", sorted(families.REASONS))
def test_what_is_left_is_refused_with_its_reason(name: str) -> None:
    model = copy.copy(tiny_model("codegen"))
    model.config = copy.deepcopy(model.config)
    model.config.model_type = name
    with pytest.raises(UnsupportedModel, match=r"CodeGenForCausalLM (keeps|puts|predicts|reads|rotates)"):
        families.inspect(model)


@pytest.mark.parametrize("name", sorted(families.SEQ2SEQ_REASONS))
def test_what_is_left_with_an_encoder_is_refused_with_its_reason(name: str) -> None:
    model = copy.copy(tiny_model("t5"))
    model.config = copy.deepcopy(model.config)
    model.config.model_type = name
    with pytest.raises(
        UnsupportedModel,
        match=r"T5ForConditionalGeneration (changes|computes|counts|has|keeps|projects|puts|sends|writes) ",
    ):
        SpeculativeDecoder(model, None)


def test_positions_that_nobody_can_tell_are_refused() -> None:
    model = copy.deepcopy(tiny_model("bloom"))
    model.config.model_type = "gptj"  # which would take positions
    with pytest.raises(UnsupportedModel, match="counts positions from the length of the cache"):
        Scorer(model)


def test_attention_of_its_own_is_found_out() -> None:
    """A class that claims the attention interface and does not call it: packed rows notice, padded ones serve it."""
    model = copy.deepcopy(tiny_model("codegen"))
    model.config.model_type, type(model)._supports_attention_backend = "something_new", True
    try:
        scorer, text = Scorer(model), ragged_prompts(2, 97, seed=3)[1]
        assert scorer.family.layout is Layout.PACKED
    finally:
        del type(model)._supports_attention_backend
    scorer.admit(0)
    check(scorer.score([0], [text]), recomputed(tiny_model("codegen"), text))
    assert scorer.family.layout is Layout.PADDED


@pytest.mark.parametrize("name", ("mpt", "gpt_neo"))
def test_places_end_where_positions_do(name: str) -> None:
    """A row that ends at the context's end beside a short one with a long draft: no place lies past the end."""
    model, end = of_type(name), 256
    texts = [ragged_prompts(2, 97, seed=2, longest=end)[1], [5, 9]]
    scorer = Scorer(model)
    assert scorer.context_length == end
    for row, text in enumerate(texts):
        scorer.admit(row)
        scorer.feed([row], [text[:-1]])
    block = [texts[1][-1], 7, 8, 3]
    got = scorer.score([0, 1], [[texts[0][-1]], block])
    check(got[:1], recomputed(model, texts[0])[-1:].to(got.dtype))
    check(got[1:], recomputed(model, [*texts[1], *block[1:]])[-4:])
    scorer.rewind([0, 1], [end - 1, 1])
    assert scorer.score([0, 1], [[4], block], [1, 1]).shape == (2, 97)


def test_moshi_ends_where_its_cache_forgets() -> None:
    """Its cache keeps a window that its mask does not know: past it `model.generate` depends on how it got there."""
    model = of_type("moshi", sliding_window=16)
    assert Scorer(model).context_length == 16
    prompt = ragged_prompts(2, 97, seed=6, longest=9)[1]
    out = SpeculativeDecoder(model, PromptLookup(), policy=2).generate(torch.tensor([prompt]), max_new_tokens=7)
    assert out.sequences[0, len(prompt) :].tolist() == plain_greedy(model, prompt, 7)
    with pytest.raises(InvalidArgument, match="context ends at 16"):
        SpeculativeDecoder(model, None).generate(torch.tensor([[*prompt, *prompt]]), max_new_tokens=7)


def test_block_sparse_attention_ends_where_it_begins() -> None:
    model = of_type("big_bird", is_decoder=True, block_size=4, num_random_blocks=2, attention_type="block_sparse")
    assert Scorer(model).context_length == 36
    assert Scorer(of_type("big_bird", is_decoder=True, attention_type="original_full")).context_length == 256


def test_assistants_without_keys_are_refused() -> None:
    model = copy.copy(tiny_model("llama"))
    model.config = copy.deepcopy(model.config)
    model.config.num_kv_shared_layers = model.config.num_hidden_layers
    with pytest.raises(UnsupportedModel, match="keys of its own"):
        Scorer(model)


OTHERS = ("axk1", "deepseek_v2", "glm4_moe_lite", "longcat_flash", "youtu", "minicpm3", "diffllama", "doge", "jetmoe")


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("kernels", ("off", "on"))
@pytest.mark.parametrize("name", ("deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)))
def test_forms_and_kernels_change_nothing(name: str, form: Form, kernels: str) -> None:
    """Latents, values of another size than keys, and keys that a layer changes, whatever attention shall look like."""
    model, prompts = model_named(name), ragged_prompts(3, 97, seed=5, longest=17)
    ids = torch.zeros(3, 17, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 17 - len(prompt) :] = torch.tensor(prompt)
    decoder = SpeculativeDecoder(model, RandomDraft(), policy=2, attention=form, kernels=kernels, keep_rows=3)
    for _ in range(2):  # the second time rows begin with keys that were kept
        out = decoder.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=6)
        for row, prompt in enumerate(prompts):
            assert out.sequences[row, 17:].tolist() == expected(name, tuple(prompt))


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "longcat_flash", "youtu", "axk1"))
def test_values_of_the_size_of_keys(name: str) -> None:
    """With other sizes a wrong layout is an error; with these it would be another text."""
    known = RECIPES[name]
    finding = judge(Recipe(name, known.class_name, {**known.overrides, "v_head_dim": 12}))
    assert finding.outcome is Outcome.EXACT, finding.reason


@cache
def model_named(name: str) -> Any:
    return build(RECIPES[name])


@cache
def expected(name: str, prompt: tuple[int, ...]) -> list[int]:
    return plain_greedy(model_named(name), list(prompt), 6)
