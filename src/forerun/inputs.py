"""What people bring to `generate`, as rows of token ids: prompts, or sources for an encoder and how its text begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from forerun.arguments import INT64_MAX, check_whole, entries, integer, list_of, one_or_several, refuse, shown
from forerun.errors import InvalidArgument
from forerun.math.transfer import int64
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.types import Source

# Keywords of `generate` that are read here and nowhere else.
ENCODER_KEYWORDS = frozenset({
    "input_ids", "input_features", "input_values", "decoder_input_ids", "decoder_attention_mask",
    "decoder_start_token_id", "encoder_outputs",
})  # fmt: skip
# Ids that an encoder-decoder model's own configuration forces or forbids: without them its text is not the model's.
FROM_MODEL = (
    "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip


# What `generate` takes for its prompts.
Prompts = Tensor | str | Mapping[str, Any] | Sequence[Any]
REMEDY = (
    "give a text or a list of texts, chat messages, lists of token ids, or a tensor or array of token ids, "
    "[batch, length]"
)


@dataclass(frozen=True, slots=True)
class Padded:
    """The prompts of a call as tensors, and the keywords that came with them."""

    ids: Tensor | None  # [B, L]
    mask: Tensor | None  # [B, L]
    keywords: dict[str, Any]


def as_tensors(
    prompts: Any,
    mask: Any,
    keywords: Mapping[str, Any],
    tokenizer: Any,
    device: torch.device | None = None,
    *,
    ids_are_decoders: bool = False,
) -> Padded:
    """Whatever people bring, padded on the left: texts, chats, ragged lists of ids, arrays, a tokenizer's output.

    Tensors stay as they are. Texts and chats are turned into ids by the tokenizer, chats through its chat template.
    With `ids_are_decoders`, ids are how a decoder's text begins and `attention_mask` is that of another input (sound).
    """
    keywords = dict(keywords)
    has_own_mask = not ids_are_decoders
    if isinstance(prompts, Mapping):
        has_own_mask |= prompts.get("input_ids") is not None and prompts.get("attention_mask") is not None
        prompts, mask = _from_encoding(prompts, mask, keywords)
    if prompts is None or isinstance(prompts, Tensor):
        return Padded(prompts, _as_tensor("attention_mask", mask, device), keywords)
    if getattr(prompts, "ndim", 1) > 1:
        return Padded(_as_tensor("input_ids", prompts, device), _as_tensor("attention_mask", mask, device), keywords)
    rows = _rows_of_ids(prompts, tokenizer)
    if mask is None or not has_own_mask:
        marks = [[1] * len(row) for row in rows]
    else:
        marks = _rows_of_marks(mask, [len(row) for row in rows])
    ids, own_mask = _left_padded(rows, device), _left_padded(marks, device)
    if not ids_are_decoders:
        return Padded(ids, own_mask, keywords)
    if keywords.get("decoder_attention_mask") is None:
        keywords["decoder_attention_mask"] = own_mask
    return Padded(ids, None if has_own_mask else _as_tensor("attention_mask", mask, device), keywords)


def _from_encoding(encoding: Mapping[str, Any], mask: Any, keywords: dict[str, Any]) -> tuple[Any, Any]:
    """What a tokenizer or processor returned: its entries are arguments, as in `generate(**encoding)`."""
    parts = dict(encoding)
    if "role" in parts:
        refuse("input_ids", encoding, "a chat is a list of messages; put it into a list")
    ids = parts.pop("input_ids", None)
    parts = {"attention_mask": None, **parts}
    if mask is not None and parts["attention_mask"] is not None:
        raise InvalidArgument("attention_mask is given twice, by itself and within input_ids: leave one out")
    mask = parts.pop("attention_mask") if mask is None else mask
    for name, value in parts.items():
        if not isinstance(name, str):
            refuse("input_ids", encoding, REMEDY)
        if keywords.get(name) is not None and value is not None:
            raise InvalidArgument(f"{name} is given twice, by itself and within input_ids: leave one out")
        keywords[name] = value
    return ids, mask


def _as_tensor(name: str, value: Any, device: torch.device | None) -> Tensor | None:
    """An array or rectangular list as a tensor; a tensor, and what is neither, as it is: it is checked later."""
    if value is None or isinstance(value, Tensor) or not (hasattr(value, "__array__") or isinstance(value, list)):
        return value
    try:
        return torch.as_tensor(value, device=device)
    except Exception:  # objects, texts, rows of different lengths
        refuse(name, value, "must hold whole numbers in rows of equal length")


def _rows_of_ids(prompts: Any, tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt."""
    if isinstance(prompts, str):
        prompts = [prompts]
    parts = entries(prompts)
    if parts is None:
        raise InvalidArgument(f"input_ids is a {type(prompts).__name__}, {shown(prompts)}: {REMEDY}")
    if parts and all(isinstance(part, Mapping) for part in parts):
        parts = [parts]  # one chat
    if any(isinstance(part, str) or _is_chat(part) for part in parts):
        _check_can_read(tokenizer, parts)
    return [_row_of_ids(f"input_ids[{place}]", part, tokenizer) for place, part in enumerate(parts)]


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and any(isinstance(m, Mapping) for m in prompt)


def _row_of_ids(name: str, prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return text_ids(tokenizer, prompt)
    if _is_chat(prompt):
        return chat_ids(tokenizer, prompt)
    if type(prompt) is list and set(map(type, prompt)) == {int}:
        return [token if abs(token) <= INT64_MAX else integer(name, token) for token in prompt]
    if entries(prompt) is None:
        refuse(name, prompt, f"must be one prompt; {REMEDY}")
    return list_of(name, prompt, integer, "must be token ids")


def _check_can_read(tokenizer: Any, prompts: Sequence[Any]) -> None:
    first = next(prompt for prompt in prompts if isinstance(prompt, str) or _is_chat(prompt))
    what = "a text" if isinstance(first, str) else "a chat"
    if tokenizer is None:
        raise InvalidArgument(
            f"input_ids={shown(first)} is {what} and there is no tokenizer: give tokenizer= to SpeculativeDecoder or "
            "to this call, or give token ids"
        )
    if not callable(tokenizer):
        refuse("tokenizer", tokenizer, f"cannot encode {what} given as input_ids; use transformers.AutoTokenizer")


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, special tokens as the tokenizer adds them."""
    check_whole(text, "the prompt")
    return list_of("the tokenizer's input_ids", tokenizer(text).input_ids, integer, "must be token ids")


def chat_ids(tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    """Token ids of a chat, up to where the model's answer begins."""
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            refuse("input_ids", message, "a chat is a list of messages, dictionaries with 'role' and 'content'")
        calls_tools = message["content"] is None and message.get("tool_calls")
        if not isinstance(message["role"], str) or not (isinstance(message["content"], str | list) or calls_tools):
            refuse("input_ids", message, "a message's role is text, and so is its content, or a list of parts")
    return tokenize_rendered(tokenizer, render_chat(tokenizer, messages))


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """The chat as the model was trained to read it, up to where its answer begins; `tools` are what it may call."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise InvalidArgument("messages: the tokenizer has no chat template to read them by; give text, or token ids")
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=False,
            **({} if tools is None else {"tools": [dict(tool) for tool in tools]}),
        )
    except Exception as error:  # templates refuse roles they do not know, and orders they were not trained on
        raise InvalidArgument(f"messages: the tokenizer's chat template refuses them: {error}") from error
    return text


def tokenize_rendered(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that already holds its special tokens."""
    check_whole(text, "the prompt")
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _rows_of_marks(mask: Any, lengths: Sequence[int]) -> list[list[int]]:
    """The mask of each row of ids, which need not be equally long."""
    remedy = "give a list of ones and zeros a prompt, as long as it; without padding, leave it out"
    if getattr(mask, "is_meta", False) or getattr(mask, "ndim", 2) != 2:
        refuse("attention_mask", mask, remedy)
    rows = entries(mask) or (mask.tolist() if hasattr(mask, "tolist") else None)
    if rows is None:
        refuse("attention_mask", mask, remedy)
    marks = [list_of(f"attention_mask[{place}]", row, _mark, remedy) for place, row in enumerate(rows)]
    if [len(row) for row in marks] != list(lengths):
        refuse("attention_mask", mask, remedy)
    return marks


def _mark(name: str, value: Any) -> int:
    return int(value) if isinstance(value, bool) else integer(name, value, 0, 1)


def _left_padded(rows: Sequence[Sequence[int]], device: torch.device | None) -> Tensor:
    """[B, L] with zeros in front."""
    width = max(map(len, rows), default=0)
    lines = torch.zeros(len(rows), width, dtype=torch.long)
    for line, row in zip(lines, rows, strict=True):  # beside one long prompt, hundreds of short ones are all padding
        line[width - len(row) :] = int64(row)
    return lines if device is None else lines.to(device)


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """A call's rows, and the keywords that are left."""

    sources: tuple[Source, ...]
    prompts: list[list[int]]
    like: Tensor  # [B, L] the decoder's prompts, after which sequences take their width, dtype and device
    keywords: dict[str, Any]


def read_inputs(
    scorer: Seq2SeqScorer,
    inputs: Tensor | None,
    mask: Tensor | None,
    keywords: Mapping[str, Any],
    config: GenerationConfig,
) -> EncoderInputs:
    """As `model.generate` reads them; `inputs` is what was given without a name, or as `input_ids`."""
    encoder_kwargs = {name: value for name, value in keywords.items() if name in ENCODER_KEYWORDS and value is not None}
    rest = {name: value for name, value in keywords.items() if name not in ENCODER_KEYWORDS}
    name = scorer.encoder.name
    if inputs is not None:
        check_tensor(inputs, "input_ids", f"give a tensor of {name}")
        # A model that does not read text takes token ids for the decoder's, as transformers does.
        is_text = not inputs.is_floating_point() and not scorer.encoder.reads_text
        keyword = "decoder_input_ids" if is_text else name
        if keyword in encoder_kwargs:
            raise InvalidArgument(f"input_ids stands for {keyword} here, which is given as well: leave one out")
        encoder_kwargs[keyword] = inputs
    sources = _sources(encoder_kwargs.pop(name, None), encoder_kwargs.pop("encoder_outputs", None), mask, scorer)
    if unread := sorted(encoder_kwargs.keys() & {"input_ids", "input_features", "input_values"}):
        raise InvalidArgument(f"{', '.join(unread)}: {type(scorer.model).__name__}'s encoder reads {name}")
    configs = [c for c in (rest.get("generation_config"), config) if c is not None]
    ids = _decoder_ids(encoder_kwargs, len(sources), scorer, configs)
    rest = {**{field: _of_first(configs, field) for field in FROM_MODEL}, **rest}
    prompts = unpadded(
        ids,
        encoder_kwargs.get("decoder_attention_mask"),
        "decoder_input_ids",
        scorer.vocab_size,
        "decoder_attention_mask",
    )
    return EncoderInputs(sources, prompts, ids, rest)


def _of_first(configs: Sequence[GenerationConfig], field: str) -> Any:
    """As in transformers, the model's own configuration fills in what the caller's leaves open."""
    values = (getattr(config, field, None) for config in configs)
    return next((value for value in values if value is not None), None)


def refuse_for_causal(keywords: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Inputs of an encoder mean nothing to a model without one."""
    if unread := sorted(name for name, value in keywords.items() if name in ENCODER_KEYWORDS and value is not None):
        raise InvalidArgument(f"{', '.join(unread)}: {type(model).__name__} has no encoder; give input_ids")


def _sources(inputs: Any, states: Any, mask: Tensor | None, scorer: Seq2SeqScorer) -> tuple[Source, ...]:
    name = scorer.encoder.name
    if states is not None:
        return _from_states(states, inputs if scorer.encoder.reads_text else None, mask, scorer.encoder.width)
    if inputs is None:
        raise InvalidArgument(f"{type(scorer.model).__name__} reads a source: give {name}")
    if scorer.encoder.reads_text:
        return tuple(Source(ids=tuple(row)) for row in unpadded(inputs, mask, name, scorer.encoder.num_ids))
    _check_numbers(inputs, name, "give a tensor of numbers with one row a source")
    masks: Sequence[Tensor | None] = [None] * len(inputs)
    if mask is not None:
        check_tensor(mask, "attention_mask", "give a tensor of ones and zeros with one row a source")
        if mask.ndim < 2 or len(mask) != len(inputs):
            raise InvalidArgument(f"attention_mask is {tuple(mask.shape)} for {len(inputs)} sources: give one row each")
        check_mask(mask, tuple(mask.shape), name)
        masks = list(mask)
    return tuple(Source(features=row, mask=row_mask) for row, row_mask in zip(inputs, masks, strict=True))


def _check_numbers(values: Any, name: str, remedy: str) -> None:
    check_tensor(values, name, remedy)
    if not values.is_floating_point() or values.ndim < 2 or not len(values):
        raise InvalidArgument(f"{name}={shown(values)}: {remedy}")
    if not bool(values.isfinite().all()):
        raise InvalidArgument(f"{name} holds NaN or infinite numbers: {remedy}")


def _from_states(value: Any, ids: Tensor | None, mask: Tensor | None, width: int) -> tuple[Source, ...]:
    """Encoder outputs [B, S, H]: what the mask leaves of each row."""
    remedy = f"give states [batch, length, {width}], or what the encoder returned"
    parts = entries(value)  # a tuple of tensors; a model's output is none, but has them by place, too
    if not isinstance(value, Tensor) and not (parts or isinstance(value, ModelOutput)):
        refuse("encoder_outputs", value, remedy)
    states: Tensor = value if isinstance(value, Tensor) else value[0]
    _check_numbers(states, "encoder_outputs", remedy)
    if states.ndim != 3 or states.shape[2] != width:
        refuse("encoder_outputs", states, remedy)
    mask = getattr(value, "attention_mask", None) if getattr(value, "attention_mask", None) is not None else mask
    if mask is not None:
        check_tensor(mask, "attention_mask", "give a tensor of ones and zeros with one row a source")
        # Another shape is that of the audio, whose states are fewer and all there.
        mask = check_mask(mask, tuple(mask.shape), "encoder_outputs") if mask.shape == states.shape[:2] else None
    words = unpadded(ids, mask, "input_ids") if ids is not None else [[]] * len(states)
    if len(words) != len(states):
        raise InvalidArgument(f"encoder_outputs has {len(states)} rows and input_ids {len(words)}: make them agree")
    rows = states if mask is None else [row[real] for row, real in zip(states, mask, strict=True)]
    return tuple(Source(ids=tuple(row_ids), states=row) for row_ids, row in zip(words, rows, strict=True))


def _decoder_ids(
    encoder_kwargs: dict[str, Any], count: int, scorer: Seq2SeqScorer, configs: Sequence[GenerationConfig]
) -> Tensor:
    """[B, L] as in transformers: the start token, or the caller's own beginning with it in front."""
    ids: Tensor | None = encoder_kwargs.get("decoder_input_ids")
    if ids is not None:
        ids = check_ids(ids, "decoder_input_ids")
        if len(ids) != count:
            shape = tuple(ids.shape)
            raise InvalidArgument(f"decoder_input_ids has shape {shape}: give [{count}, length], a row a source")
    mask = encoder_kwargs.get("decoder_attention_mask")
    if mask is not None and ids is None:
        raise InvalidArgument("decoder_attention_mask without decoder_input_ids: give both, or neither")
    if mask is not None and ids is not None:
        mask = check_mask(mask, tuple(ids.shape), "decoder_input_ids", "decoder_attention_mask").to(ids.device)
    takes_any_start = scorer.model.config.model_type == "whisper"
    if ids is not None and takes_any_start:
        return ids
    start = _start(encoder_kwargs.get("decoder_start_token_id"), count, configs, scorer.vocab_size)
    start = start.to("cpu" if ids is None else ids.device)
    if ids is None:
        return start
    if mask is not None and not bool(mask.all()):
        ids, encoder_kwargs["decoder_attention_mask"] = _with_starts(ids, mask, start)
        return ids
    if bool((ids[:, :1] == start).any()):
        return ids
    if mask is not None:
        encoder_kwargs["decoder_attention_mask"] = torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)
    return torch.cat([start, ids], dim=1)


def _with_starts(ids: Tensor, mask: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Ragged rows [B, L], each with the start token before its first own one, as it would have alone; and their mask.

    What padding holds does not count: for T5 it looks like the start token.
    """
    first = mask.int().argmax(dim=1, keepdim=True)  # [B, 1]
    lacks = (ids.gather(1, first) != start) | ~mask.any(dim=1, keepdim=True)
    if not bool(lacks.any()):
        return ids, mask
    ids, mask = torch.cat([start, ids], dim=1), torch.cat([torch.zeros_like(mask[:, :1]), mask], dim=1)
    # One column on, the place before a row's first token has the number that token had.
    ids = ids.scatter(1, first, torch.where(lacks, start, ids.gather(1, first)))
    return ids, mask.scatter(1, first, lacks | mask.gather(1, first))


def _start(asked: Any, count: int, configs: Sequence[GenerationConfig], vocab_size: int) -> Tensor:
    """[B, 1]"""
    for value in (asked, _of_first(configs, "decoder_start_token_id"), _of_first(configs, "bos_token_id")):
        if value is not None:
            ids = one_or_several("decoder_start_token_id", value, partial(integer, low=0, high=vocab_size - 1))
            start = torch.tensor(ids).reshape(-1, 1)
            if len(start) not in (1, count):
                raise InvalidArgument(
                    f"decoder_start_token_id has {len(start)} entries for {count} sources: give one each"
                )
            return start.expand(count, 1)
    raise InvalidArgument(
        "how does the decoder begin? The model's generation_config has no decoder_start_token_id: pass "
        "decoder_start_token_id= or decoder_input_ids="
    )


def mask_of_padding(ids: Tensor, pad: int | None) -> Tensor | None:
    """Of ids [B, L] that came without a mask, as transformers has it: what is `pad` is no text. None where none is.

    A row of nothing else is left as it is: it may begin with that id.
    """
    if pad is None or not bool((is_pad := check_ids(ids, "input_ids") == pad).any()):
        return None
    return ~is_pad | is_pad.all(dim=1, keepdim=True)


def unpadded(
    ids: Tensor,
    mask: Tensor | None,
    name: str = "input_ids",
    vocab_size: int | None = None,
    mask_name: str = "attention_mask",
) -> list[list[int]]:
    """Each row's own tokens. Padding may be on either side; a hole in the middle is refused, and so is padding alone.

    With a `vocab_size`, a token that it does not hold is refused; what padding holds is nobody's business.
    """
    ids = check_ids(ids, name).cpu()
    if mask is not None and isinstance(mask, Tensor) and mask.is_cuda:  # each question of the device would wait for it
        mask = mask.cpu()
    real = (
        torch.ones_like(ids, dtype=torch.bool) if mask is None else check_mask(mask, tuple(ids.shape), name, mask_name)
    )
    prompts = []
    for row, (line, kept) in enumerate(zip(ids, real, strict=True)):
        tokens = line
        if not bool(kept.all()):  # in a long prompt without padding nothing has to be looked for
            places = kept.nonzero()[:, 0]
            if len(places) and int(places[-1] - places[0]) >= len(places):
                raise InvalidArgument(
                    f"{mask_name} of row {row} has a hole in the middle; pad on the left or the right"
                )
            tokens = line[kept]
        _check_tokens(tokens, row, name, vocab_size)
        prompts.append(tokens.tolist())
    return prompts


def check_ids(ids: Any, name: str) -> Tensor:
    """A matrix of whole numbers that can be read."""
    check_tensor(ids, name, "give a tensor of token ids [batch, length], such as torch.tensor([[1, 2, 3]])")
    if ids.ndim != 2:
        raise InvalidArgument(f"{name} has shape {tuple(ids.shape)}: give [batch, length]")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InvalidArgument(f"{name} is of type {ids.dtype}: token ids are whole numbers; give torch.long")
    whole: Tensor = ids.long()  # sequences hold what is generated, which a narrow type may not
    return whole


def check_mask(mask: Any, shape: tuple[int, ...], name: str, mask_name: str = "attention_mask") -> Tensor:
    """As booleans: True where there is something. Masks are ones and zeros, of whatever type."""
    check_tensor(mask, mask_name, "give a tensor of ones for tokens and zeros for padding")
    if tuple(mask.shape) != shape:
        raise InvalidArgument(f"{mask_name} is {tuple(mask.shape)} and {name} {shape}: make them agree")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InvalidArgument(
            f"{mask_name} holds other values than 0 and 1, as a mask that is added to scores does: give 1 for tokens "
            "and 0 for padding"
        )
    real: Tensor = mask.bool()
    return real


def check_tensor(value: Any, name: str, remedy: str) -> None:
    """A tensor that lies in memory as plain numbers."""
    if not isinstance(value, Tensor):
        raise InvalidArgument(f"{name} is a {type(value).__name__}, {shown(value)}: {remedy}")
    if value.is_meta:
        raise InvalidArgument(f"{name} is a meta tensor, which holds nothing: {remedy}")
    if value.is_nested or value.layout != torch.strided or value.is_quantized:
        kind = "nested" if value.is_nested else "quantised" if value.is_quantized else str(value.layout)
        raise InvalidArgument(f"{name} is a {kind} tensor: {remedy}")


def _check_tokens(tokens: Tensor, row: int, name: str, vocab_size: int | None) -> None:
    if not len(tokens):
        raise InvalidArgument(
            f"{name}: prompt {row} is empty: give at least one token (a begin-of-sequence id will do)"
        )
    if vocab_size is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        bad = next(token for token in tokens.tolist() if not 0 <= token < vocab_size)
        raise InvalidArgument(f"{name}: token {bad} is outside the target's vocabulary of {vocab_size}")
