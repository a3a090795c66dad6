"""Recordings of one batch kept apart where transformers mixes them up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

REPLACED = ("_need_fallback", "generate_with_fallback", "_prepare_decoder_input_ids")


@contextmanager
def kept_apart(model: Any) -> Iterator[None]:
    """Within the block the Whisper's `generate` treats each recording of a batch as it would alone.

    As of transformers 5.22 it writes what becomes of a window that is tried again by its place among those tried
    again, and reads it by its place in the batch: one recording's silence takes another's words, or leaves it invented
    ones. Whether a window is given the text before it is mixed up alike once a recording has ended, and depends on
    whether the first recording of the batch has any.
    """
    verdicts = _Verdicts(model._need_fallback)
    tries = _Tries(model.generate_with_fallback, verdicts)
    prompts = _Prompts(model._prepare_decoder_input_ids)
    replaced = {name: vars(model)[name] for name in REPLACED if name in vars(model)}  # of somebody who patched it, too
    vars(model).update(zip(REPLACED, (verdicts, tries, prompts), strict=True))
    try:
        yield
    finally:
        for name in REPLACED:
            delattr(model, name)
        vars(model).update(replaced)


class _Verdicts:
    """Notes which windows are to be tried again, which transformers does not return."""

    def __init__(self, judge: Callable[..., tuple[bool, bool]]) -> None:
        self.judge, self.again = judge, list[bool]()

    def __call__(self, *arguments: Any, **keywords: Any) -> tuple[bool, bool]:
        again, skip = self.judge(*arguments, **keywords)
        self.again.append(again)
        return again, skip


class _Tries:
    """One call of transformers' for each temperature, with the windows it is for: all of it is about them then."""

    def __init__(self, decode: Callable[..., Any], verdicts: _Verdicts) -> None:
        self.decode, self.verdicts = decode, verdicts

    def __call__(
        self,
        *,
        segment_input: Tensor,  # [B, mels, frames]
        decoder_input_ids: Tensor,  # [B, n]
        batch_idx_map: list[int],  # [B] which recordings these are
        temperatures: Any,
        do_condition_on_prev_tokens: list[bool],  # of all recordings
        kwargs: dict[str, Any],
        **others: Any,
    ) -> tuple[list[Any], list[Any], list[bool], list[bool], Any]:
        texts: list[Any] = [None] * len(batch_idx_map)
        outputs, skips, kind = texts.copy(), [False] * len(texts), None
        conditions, rows = list(do_condition_on_prev_tokens), list(range(len(texts)))
        for temperature in temperatures:
            self.verdicts.again.clear()
            tried = self.decode(
                **{**others, "cur_bsz": len(rows)},
                segment_input=segment_input[rows],
                decoder_input_ids=decoder_input_ids[rows],
                batch_idx_map=[batch_idx_map[row] for row in rows],
                temperatures=[temperature],
                do_condition_on_prev_tokens=[False] * len(rows),
                kwargs=_of_rows(kwargs, rows),
            )
            kind = tried[-1]
            for row, text, output, skip, condition in zip(rows, *tried[:-1], strict=True):
                texts[row], outputs[row], skips[row], conditions[batch_idx_map[row]] = text, output, skip, condition
            rows = [row for row, again in zip(rows, self.verdicts.again, strict=True) if again]
            if not rows:
                break
        return texts, outputs, skips, conditions, kind


class _Prompts:
    """Each recording's prompt made by itself, then padded on the left like transformers' own."""

    def __init__(self, prepare: Callable[..., Any]) -> None:
        self.prepare = prepare

    def __call__(
        self,
        *,
        init_tokens: Tensor,  # [N, n] of all recordings
        current_segments: list[Any],  # [N]
        batch_idx_map: list[int],  # [B]
        do_condition_on_prev_tokens: list[bool],  # [N]
        generation_config: Any,
        kwargs: dict[str, Any],
        **others: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        prepared = [
            self.prepare(
                **{**others, "cur_bsz": 1},
                init_tokens=init_tokens[[which]],
                current_segments=[current_segments[which]],
                batch_idx_map=[0],
                do_condition_on_prev_tokens=[do_condition_on_prev_tokens[which]],
                generation_config=generation_config,
                kwargs=kwargs.copy(),
            )
            for which in batch_idx_map
        ]
        keywords = {name: value for name, value in kwargs.items() if name != "decoder_attention_mask"}
        ids = _padded_left([row[0] for row, _ in prepared], generation_config.pad_token_id)
        if any("decoder_attention_mask" in more for _, more in prepared):
            masks = [more.get("decoder_attention_mask", torch.ones_like(row).bool())[0] for row, more in prepared]
            keywords["decoder_attention_mask"] = _padded_left(masks, False)
        return ids, keywords


def _of_rows(kwargs: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    mask = kwargs.get("decoder_attention_mask")
    return kwargs if mask is None else {**kwargs, "decoder_attention_mask": mask[rows]}


def _padded_left(parts: list[Tensor], value: float) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value, padding_side="left")
