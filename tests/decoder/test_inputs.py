"""`generate` takes what people have: texts, chats, ragged lists, arrays, encodings. Same ids, same tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

import forerun
from forerun.errors import InvalidArgument
from support.seq2seq import batch_of, rows_of
from support.tiny import plain_greedy, tiny_model

NEW = 6
ROWS = [[12, 61, 7, 33, 85, 4], [5, 9], [44, 3, 2, 1]]
PADDED = [[0] * (6 - len(row)) + row for row in ROWS]
MASK = [[0] * (6 - len(row)) + [1] * len(row) for row in ROWS]


class Words:
    """A tokenizer of numbers separated by blanks, with a chat template."""

    chat_template: str | None = "numbers"

    def __call__(self, text: str, add_special_tokens: bool = True) -> BatchEncoding:
        return BatchEncoding({"input_ids": [int(word) for word in text.split()]})

    def decode(self, tokens: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return " ".join(map(str, tokens))

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(97)}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        if messages[0]["role"] != "user":
            raise ValueError("users speak first")
        return " ".join(message["content"] for message in messages)


def text(row: list[int]) -> str:
    return " ".join(map(str, row))


def chat(row: list[int]) -> list[dict[str, str]]:
    return [{"role": "user", "content": text(row)}]


FORMS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "padded tensor": lambda: (torch.tensor(PADDED), {"attention_mask": torch.tensor(MASK)}),
    "lists of ids": lambda: (ROWS, {}),
    "tuples of ids": lambda: (tuple(map(tuple, ROWS)), {}),
    "padded lists": lambda: (PADDED, {"attention_mask": MASK}),
    "padded lists, tensor of marks": lambda: (PADDED, {"attention_mask": torch.tensor(MASK)}),
    "lists of ids with ragged marks": lambda: (ROWS, {"attention_mask": [[1] * len(row) for row in ROWS]}),
    "arrays": lambda: ([np.array(row) for row in ROWS], {}),
    "tensors": lambda: ([torch.tensor(row) for row in ROWS], {}),
    "padded array": lambda: (np.array(PADDED, dtype=np.int32), {"attention_mask": np.array(MASK)}),
    "texts": lambda: ([text(row) for row in ROWS], {}),
    "array of texts": lambda: (np.array([text(row) for row in ROWS]), {}),
    "chats": lambda: ([chat(row) for row in ROWS], {}),
    "encoding of tensors": lambda: (
        BatchEncoding({"input_ids": torch.tensor(PADDED), "attention_mask": torch.tensor(MASK)}), {},
    ),
    "encoding of lists": lambda: (
        BatchEncoding({"input_ids": ROWS, "attention_mask": [[1] * len(row) for row in ROWS]}), {},
    ),
    "dictionary": lambda: ({"input_ids": ROWS}, {}),
}  # fmt: skip


def decoder_of(tokenizer: Any = None, **settings: Any) -> forerun.SpeculativeDecoder:
    return forerun.SpeculativeDecoder(
        tiny_model("llama"), "lookup", policy=2, tokenizer=tokenizer, kernels="off", **settings
    )


def wanted(rows: list[list[int]] = ROWS) -> list[list[int]]:
    return [plain_greedy(tiny_model("llama"), row, NEW) for row in rows]


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_every_form_gives_the_same_tokens(form: str, method: str) -> None:
    prompts, more = FORMS[form]()
    decoder = decoder_of(Words())
    if method == "generate":
        result = decoder.generate(prompts, max_new_tokens=NEW, **more)
    else:
        with decoder.stream(prompts, max_new_tokens=NEW, **more) as stream:
            for _ in stream:
                pass
        result = stream.result
    assert result.new_tokens == wanted()
    assert result.sequences[:, :6].tolist()[0] == ROWS[0]
    assert result.texts == [text(row) for row in wanted()]


@pytest.mark.parametrize("prompt", [text(ROWS[0]), chat(ROWS[0])], ids=["text", "chat"])
def test_one_prompt_needs_no_list(prompt: Any) -> None:
    assert decoder_of(Words()).generate(prompt, max_new_tokens=NEW).new_tokens == wanted(ROWS[:1])


def test_the_tokenizer_may_come_with_the_call() -> None:
    result = decoder_of().generate(text(ROWS[0]), tokenizer=Words(), max_new_tokens=NEW)
    assert result.texts == [text(wanted(ROWS[:1])[0])]


class NoTemplate(Words):
    chat_template = None


class OnlyDecodes:
    decode = Words.decode


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "text without tokenizer": (None, "12 7", {}, "give tokenizer= to SpeculativeDecoder"),
    "chat without tokenizer": (None, chat([1]), {}, "is a chat and there is no tokenizer"),
    "chat without template": (NoTemplate(), chat([1]), {}, "no chat template"),
    "tokenizer that cannot encode": (OnlyDecodes(), "12 7", {}, "cannot encode"),
    "template that refuses": (Words(), [{"role": "king", "content": "1"}], {}, "users speak first"),
    "message without content": (Words(), [{"role": "user"}], {}, "'role' and 'content'"),
    "message of nothing": (Words(), [{"role": "user", "content": None}], {}, "a message's role is text"),
    "message of a number": (Words(), [{"role": "user", "content": 3}], {}, "a message's role is text"),
    "role of a number": (Words(), [{"role": 3, "content": "1"}], {}, "a message's role is text"),
    "half of a character": (Words(), ["1 \ud83d"], {}, "the prompt holds half of a character"),
    "chat with half of a character": (Words(), [{"role": "user", "content": "1 \ud83d"}], {}, "half of a character"),
    "one message": (Words(), {"role": "user", "content": "1"}, {}, "put it into a list"),
    "one row of ids": (None, [1, 2, 3], {}, r"input_ids\[0\]=1"),
    "no rows": (None, [], {}, "no prompts"),
    "empty row": (None, [[1], []], {}, "prompt 1 is empty"),
    "half a token": (None, [[1, 2.5]], {}, r"input_ids\[0\]\[1\]=2.5"),
    "token beyond the vocabulary": (None, [[1, 97]], {}, "token 97 is outside"),
    "huge token": (None, [[10**30]], {}, r"input_ids\[0\]"),
    "mask of another shape": (None, ROWS, {"attention_mask": torch.tensor(MASK)}, "without padding, leave it out"),
    "mask with other numbers": (None, [[1, 2]], {"attention_mask": [[1, 2]]}, r"attention_mask\[0\]\[1\]=2"),
    "mask twice": (None, {"input_ids": ROWS, "attention_mask": MASK}, {"attention_mask": MASK}, "given twice"),
    "number": (None, 3, {}, "input_ids is a int"),
    "unknown entry": (None, {"input_ids": ROWS, "lenght": [3]}, {}, "unknown keyword 'lenght'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_with_the_remedy(case: str) -> None:
    tokenizer, prompts, more, message = REFUSED[case]
    with pytest.raises(forerun.ForerunError, match=message):
        decoder_of(tokenizer).generate(prompts, max_new_tokens=NEW, **more)


def test_texts_need_a_tokenizer() -> None:
    result = decoder_of().generate(ROWS, max_new_tokens=NEW)
    with pytest.raises(InvalidArgument, match="new_tokens"):
        _ = result.texts


def test_short_descriptions() -> None:
    decoder = decoder_of()
    assert repr(decoder) == "SpeculativeDecoder(LlamaForCausalLM, PromptLookup, policy=Constant, rule=token)"
    result = decoder.generate(ROWS, max_new_tokens=NEW)
    assert repr(result).startswith("GenerateResult(3 rows, 18 tokens, ")
    assert repr(result.stats).startswith("Stats(18 tokens, ")
    assert "no drafter" in repr(forerun.SpeculativeDecoder(tiny_model("llama"), "off", kernels="off"))


@pytest.mark.parametrize("as_encoding", [False, True])
def test_lists_begin_the_text_of_a_model_that_reads_sound(as_encoding: bool) -> None:
    """As in transformers, token ids are then the decoder's, and a mask of the features stays theirs."""
    model = tiny_model("whisper")
    decoder = forerun.SpeculativeDecoder(model, None, kernels="off")
    features: dict[str, Any] = dict(batch_of("whisper", rows_of("whisper")[:2]))
    begins = [[3, 5, 7], [4]]
    ids = torch.tensor([[3, 5, 7], [0, 0, 4]])
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    want = decoder.generate(decoder_input_ids=ids, decoder_attention_mask=mask, max_new_tokens=NEW, **features)
    marks = [[1, 1, 1], [1]]
    given: Any = BatchEncoding({"input_ids": begins, "attention_mask": marks}) if as_encoding else begins
    assert decoder.generate(given, max_new_tokens=NEW, **features).new_tokens == want.new_tokens


def test_a_tokenizer_that_only_decodes_can_go_with_a_draft_model() -> None:
    """It tells no vocabulary, so sizes are compared."""
    draft = forerun.DraftModel(tiny_model("llama"), tokenizer=Words())
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), draft, tokenizer=OnlyDecodes(), kernels="off")
    assert decoder.generate(ROWS, max_new_tokens=NEW).new_tokens == wanted()


class TestPaddingWithoutAMask:
    """transformers takes ids for padding that can be nothing else, and so do we."""

    PAD, END = 7, 3
    IDS = torch.tensor([[7, 7, 11, 12], [21, 22, 23, 24], [7, 31, 32, 33]])

    def _model(self, pad: int | None = PAD, end: int | list[int] | None = END) -> Any:
        model = copy.deepcopy(tiny_model("llama"))
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = pad, end
        return model

    def _both(self, model: Any, ids: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
        theirs = model.generate(ids, max_new_tokens=12, do_sample=False, **keywords)
        mine = forerun.SpeculativeDecoder(model, None).generate(ids, max_new_tokens=12, **keywords)
        return mine.sequences, theirs

    @pytest.mark.parametrize("end", [END, [END, 5], None])
    def test_is_taken_for_padding(self, end: Any) -> None:
        mine, theirs = self._both(self._model(end=end), self.IDS)
        assert torch.equal(mine, theirs)
        alone = forerun.SpeculativeDecoder(self._model(end=end), None).generate([[11, 12]], max_new_tokens=12)
        assert mine[0, 4:].tolist()[: len(alone.new_tokens[0])] == alone.new_tokens[0]

    @pytest.mark.parametrize("pad, end", [(PAD, PAD), (PAD, [END, PAD]), (None, END)])
    def test_is_text_where_it_may_be(self, pad: int | None, end: Any) -> None:
        mine, theirs = self._both(self._model(pad, end), self.IDS)
        assert torch.equal(mine, theirs)
        masked = forerun.SpeculativeDecoder(self._model(pad, end), None).generate([[11, 12]], max_new_tokens=12)
        assert mine[0, 4:].tolist()[: len(masked.new_tokens[0])] != masked.new_tokens[0]

    def test_the_call_may_name_it(self) -> None:
        mine, theirs = self._both(self._model(pad=None), self.IDS, pad_token_id=7)
        assert torch.equal(mine, theirs)

    @pytest.mark.parametrize("inside", [False, True])
    def test_a_mask_of_ones_says_that_it_is_text(self, inside: bool) -> None:
        model, ones = self._model(), torch.ones_like(self.IDS)
        decoder = forerun.SpeculativeDecoder(model, None)
        theirs = model.generate(self.IDS, attention_mask=ones, max_new_tokens=12, do_sample=False)
        if inside:
            mine = model.generate(
                self.IDS, attention_mask=ones, max_new_tokens=12, do_sample=False,
                custom_generate=decoder.as_custom_generate(),
            )  # fmt: skip
        else:
            mine = decoder.generate(self.IDS, ones, max_new_tokens=12).sequences
        assert torch.equal(mine, theirs)

    def test_in_the_middle_it_is_asked_about(self) -> None:
        decoder = forerun.SpeculativeDecoder(self._model(), None)
        with pytest.raises(InvalidArgument, match=r"none is given, so ids that are pad_token_id=7 .* row 1 has a hole"):
            decoder.generate(torch.tensor([[1, 2, 4], [1, 7, 4]]), max_new_tokens=2)
        whole = decoder.generate(torch.tensor([[7]]), max_new_tokens=2)
        assert len(whole.new_tokens[0]) == 2

    def test_an_encoder_reads_it_as_transformers_encoders_do(self) -> None:
        model = copy.deepcopy(tiny_model("t5"))
        pad, end = model.generation_config.pad_token_id, model.generation_config.eos_token_id
        assert pad is not None and pad != end
        ids = torch.tensor([[21, 22, 23, 24], [11, 12, pad, pad]])
        mine, theirs = self._both(model, ids)
        assert torch.equal(mine, theirs)
