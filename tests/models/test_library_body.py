"""Described layers with a library's products, against the model's own forward: ragged rows, and logits of few."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch

from support.described import NAMES, described_model
from support.recompute import check, recomputed
from support.stored import stored_rows
from support.tiny import tiny_model

pytest.importorskip("numba")

from forerun.config import Kernels
from forerun.drafters.features import Features
from forerun.kernels.cpu.narrow import narrow_parameter
from forerun.models import self_check
from forerun.models.bodies import choose, cpu, cpu_library
from forerun.models.bodies.cpu_library import LibraryBody
from forerun.models.scorer import Scorer

OF_LATENTS = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
OF_EXPERTS = (
    "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "minimax_m2", "mixtral", "olmoe",
    "qwen2_moe", "qwen3_moe", "solar_open",
)  # fmt: skip
LEFT_TO_MODULES = dict.fromkeys(OF_LATENTS, "latents") | dict.fromkeys(OF_EXPERTS, "experts")
LEFT_TO_MODULES |= {"bloom": "bias", "mpt": "bias"}
RUN_BY_PRODUCTS = [name for name in NAMES if name not in LEFT_TO_MODULES]
LENGTHS, WIDTHS = (70, 9, 40), (8, 1, 30)  # more than one block of an MLP's tokens, where those are cut


def _scorer(model: Any) -> Scorer:
    """All of whose passes are taken for long ones."""
    scorer = Scorer(model, use=Kernels.ON)
    scorer.body.longest_pass, scorer.body.beyond = 0, LibraryBody(model, 2, Kernels.ON)
    return scorer


def _texts(model: Any) -> list[list[int]]:
    generator, vocab = torch.Generator().manual_seed(3), model.config.get_text_config().vocab_size
    return [torch.randint(vocab, (n + 30,), generator=generator).tolist() for n in LENGTHS]


def _fed(model: Any) -> tuple[Scorer, list[list[int]]]:
    scorer, texts = _scorer(model), _texts(model)
    for row in range(3):
        scorer.admit(row)
    scorer.feed(range(3), [text[:n] for text, n in zip(texts, LENGTHS, strict=True)])
    return scorer, [text[n : n + width] for text, n, width in zip(texts, LENGTHS, WIDTHS, strict=True)]


@pytest.mark.parametrize("family", RUN_BY_PRODUCTS)
@pytest.mark.quick("gemma2", "gpt_neox", "gpt2", "olmo2", "falcon-grouped", "gpt_neo", "granite", "gpt_neox-parallel")
def test_families(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind prompts of which the last layer has made keys and nothing else."""
    monkeypatch.setattr(cpu_library, "INNER_TOKENS", 16)
    model = described_model(family)
    assert (choose.why_not(model) or cpu_library.why_not(model)) is None
    scorer, blocks = _fed(model)
    made = scorer.score(range(3), blocks).split(list(WIDTHS))
    for text, n, width, logits in zip(_texts(model), LENGTHS, WIDTHS, made, strict=True):
        check(logits, recomputed(model, text[: n + width])[n:])


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gptj"])
@pytest.mark.parametrize("tails", [(1, 1, 1), (3, 1, 30), (8, 1, 2)])
def test_few_logits_are_those_of_all(tails: tuple[int, ...], family: str) -> None:
    scorer, blocks = _fed(described_model(family))
    all_of_them = scorer.score(range(3), blocks).split(list(WIDTHS))
    scorer.rewind(range(3), LENGTHS)
    few = scorer.score(range(3), blocks, tails).split(list(tails))
    for own, whole in zip(few, all_of_them, strict=True):
        check(own, whole[-len(own) :])


@pytest.mark.parametrize("ending", [(0,), (1,), (0, 2), (1, 2)])
def test_prompts_that_end_beside_others_that_go_on(ending: tuple[int, ...]) -> None:
    scorer, blocks = _fed(described_model("gemma3_text"))
    whole = scorer.score(range(3), blocks).split(list(WIDTHS))
    scorer.rewind(range(3), LENGTHS)
    made = scorer.feed_to_end(range(3), blocks, ending)
    assert sorted(made) == sorted(ending)
    for row, logits in made.items():
        check(logits, whole[row][-1])


def test_the_last_layer_runs_for_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens where few logits are wanted, none where none are, all where hidden states are asked for."""
    counts: list[int] = []
    finish = LibraryBody._finish_layer

    def counted(self: Any, index: int, layer: Any, states: Any, *rest: Any) -> None:
        counts.append(len(states.x))
        finish(self, index, layer, states, *rest)

    monkeypatch.setattr(LibraryBody, "_finish_layer", counted)
    scorer, blocks = _fed(described_model("llama"))
    layers, new = len(scorer.model.model.layers), sum(WIDTHS)
    assert counts == [sum(LENGTHS)] * (layers - 1)
    counts.clear()
    scorer.score(range(3), blocks, (1, 1, 2))
    assert counts == [new] * (layers - 1) + [4]
    counts.clear()
    scorer.feed_to_end(range(3), blocks, [0, 2])  # the prompt of row 1 goes on in a later pass
    assert counts == [new] * (layers - 1) + [2]
    counts.clear()
    embeddings = scorer.model.get_input_embeddings()(torch.tensor([1, 2, 3]))
    scorer.run([0], [3], embeddings)
    assert counts == [3] * layers


@pytest.mark.parametrize("family", RUN_BY_PRODUCTS)
@pytest.mark.quick("llama", "gemma3_text", "gpt_neox-parallel", "opt")
def test_the_last_layer_may_run_later(family: str) -> None:
    """For whoever reads hidden states, in parts and in any order; the target's keys keep their bits."""
    model = described_model(family)
    scorer, texts, heard = _scorer(model), _texts(model), Features()
    scorer.observers.append(heard)
    for row in range(3):
        scorer.admit(row)
        heard.admit(row)
    scorer.feed(range(3), [text[:30] for text in texts])
    scorer.feed_to_end(range(3), [text[30:] for text in texts], [1])
    pools = [pool for layer in scorer.cache.layers.values() for pool in layer.flat]
    before = [pool.clone() for pool in pools]
    assert sum(len(span) for spans in heard._unfinished.values() for span in spans) == sum(map(len, texts)) - 1
    some = torch.cat([_hidden(model, texts[2][:50])[20:], _hidden(model, texts[0][:40])])
    check(heard.take([2, 0], [20, 0], [30, 40], scorer), some)
    for row, text in enumerate(texts):
        check(heard.take([row], [0], [len(text)], scorer), _hidden(model, text))
    assert not heard._unfinished
    assert all(map(torch.equal, pools, before))
    assert scorer._skipped_by is scorer.body.beyond
    scorer.renew()
    assert scorer._skipped_by is None, "no row is left, and its weights may be the old model's"


def _hidden(model: Any, text: list[int]) -> torch.Tensor:
    """Last hidden states by transformers."""
    with torch.inference_mode():
        return model.base_model(torch.tensor([text])).last_hidden_state[0]


@pytest.mark.quick("bloom", "mpt", "mixtral", "gpt_oss", "deepseek_v3")
@pytest.mark.parametrize("family", LEFT_TO_MODULES)
def test_what_is_left_to_the_modules(family: str) -> None:
    assert LEFT_TO_MODULES[family] in str(cpu_library.why_not(described_model(family)))


def test_long_passes_are_tried_before_a_model_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = _scorer(described_model("gemma2"))
    scorer.body.longest_pass = 512
    assert self_check.tried(scorer).kind is self_check.Kind.PASSED
    assert scorer.body.longest_pass == 512
    hidden = LibraryBody._last_states
    monkeypatch.setattr(LibraryBody, "_last_states", lambda self, *call: 1.1 * hidden(self, *call).roll(1, dims=-1))
    with pytest.raises(self_check.UnsupportedModel, match="a pass as long prompts have it"):
        self_check.tried(scorer)


@pytest.mark.parametrize("name", ["BF16", "Q4_1"])
def test_narrow_weights_give_the_bits_of_float32(name: str) -> None:
    """Weights of different sizes, one after the other in the same memory."""
    narrow, wide = (copy.deepcopy(tiny_model("llama", hidden_size=64, intermediate_size=160)) for _ in range(2))
    for path, module in narrow.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            raw, stored = stored_rows(name, *module.weight.shape)
            module.weight = narrow_parameter(raw, stored)
            dense = stored.decode(raw.flatten()).view(module.weight.shape)
            wide.model.layers.get_submodule(path).weight = torch.nn.Parameter(dense)
    made = []
    for model in (narrow, wide):
        scorer, blocks = _fed(model)
        made.append(scorer.score(range(3), blocks))
    assert made[0].isfinite().all() and torch.equal(*made)


def test_narrow_weights_with_other_numbers_are_read_where_those_lie() -> None:
    """Assigned `data` exchanges the memory below a weight; a pass by the old address gives the old model's text."""
    model = copy.deepcopy(tiny_model("llama", hidden_size=64, intermediate_size=160))
    module = model.model.layers[0].mlp.down_proj
    module.weight = narrow_parameter(*stored_rows("Q4_1", *module.weight.shape))
    scorer, texts = Scorer(model, use=Kernels.ON), [[3, 4, 5, 6]]
    scorer.admit(0)
    before = scorer.score([0], texts)
    module.weight.data = narrow_parameter(*stored_rows("Q4_1", *module.weight.shape, seed=1))
    scorer.admit(1)
    after = scorer.score([1], texts)
    fresh = Scorer(model, use=Kernels.ON)
    fresh.admit(0)
    assert torch.equal(after, fresh.score([0], texts)) and not torch.equal(after, before)


def test_plain_layers_are_not_touched() -> None:
    """Tiles of ours run whatever nobody has called long: their bits are the same in any batch."""
    scorer = Scorer(described_model("llama"), use=Kernels.ON)
    assert type(scorer.body) is cpu.CpuBody and scorer.body.beyond is None and scorer.body.longest_pass is None


def test_nothing_of_the_cache_is_kept_beyond_a_pass() -> None:
    """It gives its memory back when no row is left; nor is there room to work, which this body has no use for."""
    scorer, _ = _fed(described_model("llama"))
    assert isinstance(scorer.body.beyond, LibraryBody)
    layer = weakref.ref(scorer.cache.layers[0].keys)
    scorer.reset()
    scorer.cache.clear()
    assert layer() is None and not len(scorer.body.beyond._scratch)
