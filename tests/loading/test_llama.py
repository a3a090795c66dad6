"""A Llama and its tokenizer, from transformers to GGUF by the tests and back by the reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import UnsupportedModel
from forerun.loading import embedded, load_model
from forerun.loading.bpe import build_tokenizer
from forerun.loading.gguf import read_gguf
from forerun.loading.llama import llama_config, llama_weights, unpair_rotary_rows
from loading.gguf_writer import TOKENS, Typed, pair_rows, plain, tiny_llama, write_gguf, write_llama


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    expected = tiny_llama(tied=tied).state_dict()
    weights = llama_weights(read_gguf(write_llama(tmp_path / "x.gguf", tied=tied)))
    assert set(expected) - set(weights) == ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(expected[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("tied", [True, False])
def test_converted_model_gives_the_same_logits(tmp_path: Path, tied: bool) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    embedded.convert(write_llama(tmp_path / "x.gguf", tied=tied), folder)
    model, tokenizer = load_model(folder, device="cpu")
    ids = torch.arange(3, 19).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, tiny_llama(tied=tied)(ids).logits, rtol=0, atol=0)
    assert not model.training
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    assert tokenizer.padding_side == "left"
    assert tokenizer("ab a").input_ids == [TOKENS.index("ab"), TOKENS.index("Ġa")]


def test_rotary_rows_go_and_return() -> None:
    weight = torch.arange(24.0).reshape(12, 2)
    for heads in (1, 2, 3):
        paired = pair_rows(weight, heads)
        assert heads == 3 or not torch.equal(paired, weight)
        assert torch.equal(unpair_rotary_rows(paired, heads), weight) or 12 // heads % 2
    assert pair_rows(weight, 1)[:4, 0].tolist() == [0, 12, 2, 14]


def test_digits_stand_alone(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(read_gguf(write_llama(tmp_path / "x.gguf")))
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12").input_ids) == ["a", "ĠĠ", "1", "2"]
    by_words = write_llama(tmp_path / "y.gguf", change=lambda m: m.update({"tokenizer.ggml.pre": "gpt-2"}))
    tokenizer = build_tokenizer(read_gguf(by_words))
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12").input_ids) == ["a", "Ġ", "Ġ", "1", "2"]


def test_special_tokens_and_template(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(read_gguf(write_llama(tmp_path / "x.gguf")))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id) == (
        1,
        2,
        0,
        2,
    )
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert text == "<|im_start|>ab<|im_end|>"
    ids = tokenizer(text).input_ids
    assert ids == [1, TOKENS.index("ab"), 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def put(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda metadata: metadata.update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("general.architecture", "mamba"), "'mamba'"),
        (put("llama.rope.scaling.type", "yarn"), "rotary"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        llama_config(read_gguf(write_llama(tmp_path / "x.gguf", change=change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("tokenizer.ggml.model", "llama"), "'llama' tokenizer"),
        (put("tokenizer.ggml.pre", "qwen2"), "'qwen2'"),
        (put("tokenizer.ggml.add_bos_token", Typed("bool", True)), "before every text"),
        (put("tokenizer.ggml.token_type", Typed("i32", [3] * 3 + [6] * (len(TOKENS) - 3))), r"kinds \[6\]"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        build_tokenizer(read_gguf(write_llama(tmp_path / "x.gguf", change=change)))


def test_a_tensor_nobody_knows_is_refused(tmp_path: Path) -> None:
    metadata = {"llama.attention.head_count": Typed("u32", 1)}
    for name in ("rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight"):
        path = write_gguf(tmp_path / "x.gguf", metadata, {name: plain(torch.ones(4, 4))})
        with pytest.raises(UnsupportedModel, match=name):
            llama_weights(read_gguf(path))
