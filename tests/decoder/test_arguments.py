"""Arguments mean what they mean to `model.generate`, or are refused with a message that helps."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria

import forerun
from engine.scripted import PROMPT, answer
from forerun.engine import FinishReason, Request
from forerun.engine.stops import StopRule
from forerun.errors import InvalidArgument, NonFiniteLogits, UnknownArgument
from support.tiny import tiny_model

VOCAB = 97
IDS = torch.tensor([PROMPT])
OTHER = {  # a value that is not neutral for every field of a configuration that is refused
    "top_h": 0.4, "dola_layers": "high", "token_healing": True, "constraints": [object()], "force_words_ids": [[5]],
    "typical_p": 0.9, "min_length": 12, "guidance_scale": 1.5, "penalty_alpha": 0.6, "use_mtp": True,
    "assistant_ensemble_weight": 0.5, "speculation_type": "dflash", "num_beams": 2, "epsilon_cutoff": 0.1,
}  # fmt: skip


def decoder(drafter: Any = None, **settings: Any) -> forerun.SpeculativeDecoder:
    return forerun.SpeculativeDecoder(tiny_model("llama"), drafter, policy=3, **settings)


def configured(**fields: Any) -> GenerationConfig:
    """Past transformers' own checks, which refuse some of them, too."""
    config = GenerationConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("drafter", (None, "lookup"))
def test_sequence_bias_comes_before_the_repetition_penalty(drafter: str | None) -> None:
    """The penalty divides what is positive: a bias of a repeated token counts before it, as in transformers."""
    words = {(token,): 2.0 * (token % 5) - 4 for token in range(VOCAB)} | {(answer()[0], answer()[1]): 6.0}
    keywords: dict[str, Any] = {"sequence_bias": words, "repetition_penalty": 1.8, "max_new_tokens": 24}
    wanted = tiny_model("llama").generate(IDS, attention_mask=IDS * 0 + 1, do_sample=False, **keywords)
    ours = decoder(drafter)
    assert ours.generate(IDS, **keywords).sequences.tolist() == wanted.tolist()
    listed = {**keywords, "sequence_bias": [[list(word), bias] for word, bias in words.items()]}
    assert ours.generate(IDS, **listed).sequences.tolist() == wanted.tolist()


@pytest.mark.parametrize("name", OTHER)
def test_fields_of_a_configuration_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        decoder().generate(IDS, max_new_tokens=2, generation_config=configured(**{name: OTHER[name]}))


def test_unknown_fields_of_a_configuration_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"generation_config.max_new_token=3: .* 'max_new_tokens'"):
        decoder().generate(IDS, generation_config=GenerationConfig(max_new_token=3))


def test_a_models_own_fields_and_those_without_effect_pass() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.generation_config.alignment_heads = [[1, 2]]
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=3, early_stopping=True, length_penalty=2.0, bos_token_id=4)
    out = forerun.SpeculativeDecoder(model, None).generate(IDS, generation_config=config)
    assert out.new_tokens == [list(answer()[:3])]


class Refuses:
    """A processor that leaves nothing."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, self.value)


HALF = [[token] for token in range(50)]
NOTHING_LEFT: list[tuple[dict[str, Any], str]] = [
    ({"logits_processor": [Refuses(-math.inf)]}, "logits_processor Refuses leaves no token"),
    ({"logits_processor": [Refuses(math.nan)]}, "logits_processor Refuses leaves no token"),
    ({"presence_penalty": -3e38, "frequency_penalty": -3e38}, r"frequency_penalty=-3e\+38"),
    ({"sequence_bias": {(token,): -math.inf for token in range(VOCAB)}}, "sequence_bias leaves no token"),
    ({"suppress_tokens": list(range(40, VOCAB)), "sequence_bias": {(t,): -math.inf for t in range(40)}},
     r"suppress_tokens \(applied after sequence_bias\)"),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "message"), NOTHING_LEFT, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("drafter", (None, "lookup"))
def test_an_option_that_leaves_nothing_is_named(keywords: dict[str, Any], message: str, drafter: str | None) -> None:
    ours = decoder(drafter)
    with pytest.raises(NonFiniteLogits, match=message) as caught:
        ours.generate(IDS, max_new_tokens=9, **keywords)
    assert "weights" not in str(caught.value)
    assert ours.generate(IDS, max_new_tokens=3).new_tokens == [list(answer()[:3])]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"suppress_tokens": range(VOCAB)}, "suppress_tokens: all 97 tokens are forbidden"),
        ({"begin_suppress_tokens": list(range(VOCAB))}, "begin_suppress_tokens: all 97"),
        ({"bad_words_ids": HALF, "suppress_tokens": range(50, VOCAB)}, "bad_words_ids and suppress_tokens: all 97"),
        ({"logit_bias": dict.fromkeys(range(VOCAB), -math.inf)}, "logit_bias: all 97"),
        ({"logit_bias": {10**9: 1.0}}, "logit_bias: the vocabulary ends at 96"),
        ({"logit_bias": {"a": 3.0}}, "logit_bias, a key='a': must be a whole number"),
        ({"logit_bias": {5: math.nan}}, r"logit_bias\[5\]=nan"),
        ({"max_new_tokens": math.nan}, "max_new_tokens=nan: must be a whole number"),
        ({"max_new_tokens": 3.5}, "max_new_tokens=3.5"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"eos_token_id": [1.5]}, r"eos_token_id\[0\]=1.5"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"num_return_sequences": 2.5}, "num_return_sequences=2.5"),
        ({"num_return_sequences": 10**30}, "num_return_sequences=1"),
        ({"max_time": -1}, "max_time=-1"),
        ({"attention_mask": torch.zeros(1, 6) - math.inf}, "attention_mask holds other values"),
        ({"attention_mask": [["a"] * 6]}, "attention_mask=.*: must hold whole numbers"),
        ({"input_ids": IDS.float()}, "input_ids is of type torch.float32"),
        ({"input_ids": IDS.to_sparse()}, "input_ids is a torch.sparse_coo tensor"),
        ({"input_ids": IDS.to("meta")}, "input_ids is a meta tensor"),
        ({"logits_processor": Refuses(0)}, "put a single one into a list"),
        ({"temperature": torch.tensor([1.0, 2.0])}, "temperature has 2 entries for 1 prompts"),
        ({"presence_penalty": 1e308}, r"presence_penalty=1e\+308: must be a number of float32's range"),
        ({"frequency_penalty": -1e308}, r"frequency_penalty=-1e\+308: must be a number of float32's range"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf: must be > 0 and of float32's range"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_before_anything_runs(keywords: dict[str, Any], message: str) -> None:
    ours = decoder()
    with pytest.raises(InvalidArgument, match=message):
        ours.stream(**{"input_ids": IDS, **keywords})


@pytest.mark.parametrize(
    ("name", "ours"),
    [("stop", "stop_strings"), ("n", "num_return_sequences"), ("max_tokens", "max_new_tokens"), ("sed", "seed")],
)
def test_a_keyword_of_another_interface_is_named_as_it_is_here(name: str, ours: str) -> None:
    with pytest.raises(UnknownArgument, match=f"unknown keyword '{name}'; did you mean '{ours}'"):
        decoder().stream(IDS, **{name: 1})


def test_numbers_of_numpy_and_torch_count_as_numbers() -> None:
    ours = decoder()
    plain = ours.generate(IDS, max_new_tokens=5, temperature=0.5, top_k=7, seed=3).new_tokens
    given: dict[str, Any] = {
        "max_new_tokens": np.int64(5), "temperature": torch.tensor(0.5), "top_k": torch.tensor(7), "seed": np.array(3),
    }  # fmt: skip
    out = ours.generate(IDS.to(torch.int32), IDS.bool(), **given)
    assert out.new_tokens == plain
    assert [type(value) for value in out.parameters[0].values() if isinstance(value, (int, float))]
    assert type(out.rows[0].request.max_new_tokens) is int and type(out.rows[0].request.params.temperature) is float


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "embedded"}, r"target='embedded': give a loaded model: .*load_model"),
        ({"target": torch.nn.Linear(2, 2)}, "target=<Linear>: has no configuration"),
        ({"target": (tiny_model("llama"), None)}, r"target: a tuple of a model and more.*tokenizer = forerun\.load"),
        ({"drafter": tiny_model("llama")}, "drafter=<LlamaForCausalLM>: is a model; wrap it: DraftModel"),
        ({"drafter": forerun.PromptLookup}, r"drafter=<class PromptLookup>: is a class; .*PromptLookup\(...\)"),
        ({"drafter": "no/such/folder"}, "drafter='no/such/folder': there is no such folder"),
        ({"drafter": Path("no/such/folder")}, "drafter='no/such/folder': there is no such folder"),
        ({"policy": forerun.Constant}, "policy=<class Constant>: is a class"),
        ({"policy": True}, "policy=True"),
        ({"rule": "lenient:7"}, "rule='lenient:7': factor=7"),
        ({"tokenizer": "gpt2"}, "tokenizer='gpt2': must be a tokenizer"),
        ({"tokenizer": tiny_model("llama")}, "tokenizer=<LlamaForCausalLM>: must be a tokenizer"),
        ({"tokenizer": len}, "tokenizer=.*: must be a tokenizer"),
        ({"kernels": 3}, "kernels=3: choose one of auto, on, off"),
        ({"keep_rows": -1}, "keep_rows=-1"),
        ({"cache_tokens": 0}, "cache_tokens=0"),
        ({"compile": "no"}, "compile='no': must be True or False"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        forerun.SpeculativeDecoder(**{"target": tiny_model("llama"), "drafter": None, **settings})
    assert len(str(caught.value)) < 300


def test_a_tokenizer_is_what_tells_its_vocabulary() -> None:
    """Stop strings need one that decodes, which is said when they are asked for."""

    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {}

    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), None, tokenizer=Words())
    assert decoder.generate(torch.tensor([[5, 6]]), max_new_tokens=2).sequences.shape == (1, 4)
    with pytest.raises(InvalidArgument, match="stop_strings need the tokenizer: the one given has no method decode"):
        decoder.generate(torch.tensor([[5, 6]]), max_new_tokens=2, stop_strings=["a"])


def test_a_draft_model_by_name_says_how_to_load_it() -> None:
    with pytest.raises(InvalidArgument, match=r"DraftModel.load\('embedded'\)"):
        forerun.DraftModel("embedded")  # type: ignore[arg-type]


def test_requests_are_checked_too() -> None:
    for fields, message in (
        ({"prompt": (1.5,)}, r"prompt\[0\]=1.5"),
        ({"max_new_tokens": math.inf}, "max_new_tokens=inf"),
        ({"params": {}}, "params={}"),
        ({"stop_ids": frozenset({0.5})}, "stop_ids"),
        ({"processors": (int,)}, "is a class"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Request(**{"prompt": (1, 2), "max_new_tokens": 3, **fields})
    with pytest.raises(UnknownArgument, match="temperature"):
        decoder().generate(IDS, temprature=3)  # type: ignore[call-arg]


TEXTS = (
    "Once upon a time, there was a fox. The fox said: stop! Then it went home.",
    "na\u00efve caf\u00e9 \u2014 \u65e5\u672c\u8a9e \U0001f98a end",
    "  two  spaces\n\nand lines\n",
)
STOPS = (
    "pon a ti",  # of several tokens: the border comes between them
    " fox",
    "fox",
    "op!",
    "! T",
    "\n\n",
    "\n",
    "caf\u00e9",
    "\u00e9",
    "\u672c",
    "\U0001f98a",
    " ",
    "time,",
    "e",
)


@pytest.mark.model
@pytest.mark.parametrize("stop", (STOPS[0], *(pytest.param(stop, marks=pytest.mark.slow) for stop in STOPS[1:])))
def test_stop_strings_stop_where_transformers_stops(embedded: tuple[Any, Any], stop: str) -> None:
    """Along a text of a real tokenizer, split into prompt and output at every place."""
    tokenizer = embedded[1]
    theirs = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
    checked = 0
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ends = [bool(theirs(torch.tensor([ids[:n]]), None)[0]) for n in range(1, len(ids) + 1)]
        for border in range(1, len(ids)):
            request = Request(prompt=tuple(ids[:border]), max_new_tokens=99, stop_strings=(stop,))
            kept, reason = StopRule(request, 99, tokenizer).cut([], ids[border:])
            wanted = next((n + 1 - border for n in range(border, len(ids)) if ends[n]), None)
            found = kept if reason is FinishReason.STOP else None
            assert found == wanted, (text, border)
            checked += wanted is not None
    assert checked


@pytest.mark.parametrize("way", (pickle.dumps, copy.deepcopy, copy.copy), ids=lambda way: way.__name__)
def test_a_decoder_says_that_it_stays_where_it_is(way: Any) -> None:
    with pytest.raises(TypeError, match=r"SpeculativeDecoder cannot be copied or sent to another process.*there"):
        way(decoder())
