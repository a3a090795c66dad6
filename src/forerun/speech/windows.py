"""A batch of Whisper's windows decoded with drafts, in the place of transformers' own loop.

`Windows` is a `custom_generate` for `WhisperForConditionalGeneration.generate`. Everything around a window stays
transformers' own: where windows begin, the text before them, language and task, what a silent or repetitive window
comes to, and at which temperature it is tried again.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateEncoderDecoderOutput

from forerun.config import SamplingParams
from forerun.engine import Engine, Stats
from forerun.engine.request import Request
from forerun.errors import InvalidArgument
from forerun.inside_generate import listening
from forerun.keywords import GenerateCall
from forerun.result import GenerateResult
from forerun.speech.encoder_monitor import EncoderMonitor, worth_reading
from forerun.speech.rules import RowRules
from forerun.speech.window_call import WindowCall, refuse_unsupported
from forerun.stream import Stream
from forerun.types import Source

NUMBERS = 2**31  # request ids below are windows, those above are silence probes


def is_whisper(model: object) -> bool:
    """Whether a model is one of transformers' Whispers, whose `generate` decodes window by window."""
    return getattr(getattr(model, "config", None), "model_type", None) == "whisper"


@dataclass(slots=True)
class Windows:
    """`whisper.generate(features, custom_generate=Windows(engine))`.

    With a `monitor`, a window's random numbers are keyed by its own sound, so that they are the same in any batch, and
    drafters with an encoder of their own hear it too, and its scores are given back. Without one every call draws anew,
    as transformers does, and the caller keeps the scores.
    """

    engine: Engine
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    monitor: EncoderMonitor | None = None
    stats: Stats = field(default_factory=Stats)  # of all windows so far, their seconds included
    num_sampled: int = 0  # windows that were not decoded greedily
    num_calls: int = 0  # batches of windows, tries at other temperatures included
    _scores: Tensor | None = None  # [n, B, V] of the last batch, where they are to be given back

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,  # [B, n] padded on the left
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
        generation_config: GenerationConfig | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateEncoderDecoderOutput:
        if model is not self.engine.target.model:
            raise InvalidArgument("these windows belong to another model than the one whose generate was called")
        self.forget()
        self.num_calls += 1
        config = model.generation_config if generation_config is None else generation_config
        with listening(model) as streamer:
            refuse_unsupported(config, stopping_criteria, model_kwargs, streamer)
        call = WindowCall.of(model, logits_processor, config, input_ids)
        prompts = _unpadded(input_ids, model_kwargs.get("decoder_attention_mask"))
        rows = [_row(call, prompt, input_ids.shape[1]) for prompt in prompts]
        requests = self._requests(call, prompts, rows, self._sources(model_kwargs["encoder_outputs"][0]))
        probes = _silence_probes(call, requests)
        done = self._decode(call, [*requests, *(request for request, _ in probes)], input_ids)
        if call.detector is not None:
            call.detector._no_speech_prob = _silence([row for _, row in probes] or rows, call.detector.no_speech_token)
        sequences = done.sequences[: len(rows)]
        if not call.wants_dict:
            return sequences
        scores = _scores(call, rows, [row.tokens for row in done.rows[: len(rows)]]) if call.wants_scores else None
        if self.monitor is not None:  # without one they are the caller's, who may have asked for them
            self._scores = scores
        return GenerateEncoderDecoderOutput(sequences=sequences, scores=None if scores is None else tuple(scores))

    def forget(self) -> None:
        """Give back the memory of the last batch's scores.

        transformers looks at them once, to judge the window, and then holds on to them with the window's segments: an
        hour of speech would keep gigabytes.
        """
        if self._scores is not None:
            self._scores.untyped_storage().resize_(0)
            self._scores = None

    def _sources(self, states: Tensor) -> list[Source]:
        """Each row's window: what the encoder made of it, and what it read where that is known."""
        features = self.monitor.features if self.monitor is not None else None
        if features is None or len(features) != len(states):
            return [Source(states=row) for row in states]
        pairs = zip(states, features, strict=True)
        return [Source(states=row, features=read, worth=worth_reading(read, len(row))) for row, read in pairs]

    def _requests(
        self, call: WindowCall, prompts: Sequence[list[int]], rows: Sequence[RowRules], sources: Sequence[Source]
    ) -> list[Request]:
        numbers = _numbers(call.params.temperature, sources, self.num_calls)
        return [
            Request(prompt=tuple(prompt), max_new_tokens=call.budget, params=call.params, seed=self.seed,
                    request_id=number, stop_ids=call.ends, processors=(row,), source=source)
            for prompt, number, row, source in zip(prompts, numbers, rows, sources, strict=True)
        ]  # fmt: skip

    def _decode(self, call: WindowCall, requests: list[Request], input_ids: Tensor) -> GenerateResult:
        job = GenerateCall(tuple(requests), 1, call.pad, None, None, self.engine.tokenizer, is_seeded=True)
        stream = Stream(self.engine, job, input_ids)
        for _ in stream:
            pass
        done = stream.result
        if error := next((row.error for row in done.rows if row.error), None):
            raise InvalidArgument(error)
        spoken = [row.stats for row in done.rows if row.request.request_id < NUMBERS]
        self.stats = self.stats.plus(replace(Stats.total(spoken), seconds=done.stats.seconds))
        self.stats.lossy = done.lossy
        self.num_sampled += 0 if call.params.is_greedy else len(spoken)
        return done


def _unpadded(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    if mask is None:
        return [list(row) for row in input_ids.tolist()]
    return [
        [token for token, real in zip(ids, reals, strict=True) if real]
        for ids, reals in zip(input_ids.tolist(), mask.tolist(), strict=True)
    ]


def _row(call: WindowCall, prompt: list[int], width: int) -> RowRules:
    padding = [call.pad] * (width - len(prompt))
    return RowRules(call.rules, call.others, len(prompt), padding, call.wants_scores)


def _numbers(temperature: float, sources: Sequence[Source], calls: int) -> list[int]:
    """Keys for the rows' random numbers, of sound and temperature: a second try must not repeat the first.

    Rows of the same sound have the same key, as they would in batches of their own. Where sound is not known, rows are
    told apart by their places and by how many `calls` there were.
    """
    numbers: list[int] = []
    for place, source in enumerate(sources):
        unheard = f"{calls} {place}".encode()
        heard = unheard if source.features is None else source.features.float().cpu().numpy().tobytes()
        numbers.append(zlib.crc32(f"{temperature}".encode(), zlib.crc32(heard)) % NUMBERS)
    return numbers


def _silence_probes(call: WindowCall, requests: Sequence[Request]) -> list[tuple[Request, RowRules]]:
    """Rows of one token that read the window up to the start of its transcript, where silence is told.

    Nothing of the kind is needed where that is the end of the prompt: the rows themselves see it.
    """
    if call.detector is None or (later := call.detector.start_of_trans_offset - 1) == 0:
        return []
    prompts = [request.prompt[:-later] for request in requests]
    probes = [RowRules(None, (), len(prompt), [], False) for prompt in prompts]
    return [
        (replace(request, prompt=prompt, max_new_tokens=1, params=SamplingParams(), processors=(probe,),
                 request_id=NUMBERS + place), probe)
        for place, (request, prompt, probe) in enumerate(zip(requests, prompts, probes, strict=True))
    ]  # fmt: skip


def _silence(probes: Sequence[RowRules], token: int) -> Tensor:
    """[B] the model's own probability that nobody speaks."""
    first = [probe.first for probe in probes]
    return torch.stack([logits.float().softmax(-1)[token] for logits in first if logits is not None])


def _scores(call: WindowCall, rows: Sequence[RowRules], texts: Sequence[Sequence[int]]) -> Tensor:
    """[n, B, V] as transformers gives them, after all processors, where it reads them; zeros where a row has ended."""
    parts = [row.scores(text) for row, text in zip(rows, texts, strict=True)]
    for warper in call.warpers:
        parts = [warper(None, part) for part in parts]
    return torch.nn.utils.rnn.pad_sequence(parts).cpu()
