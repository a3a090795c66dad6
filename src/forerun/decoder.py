"""SpeculativeDecoder: the face that looks like `model.generate`."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Unpack

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from forerun.arguments import choice, flag, integer, methods, refuse, shown
from forerun.config import Kernels
from forerun.config import self_check as wants_self_check
from forerun.drafters import from_folder, named_drafter
from forerun.drafters.base import Drafter
from forerun.engine import Engine, Request
from forerun.engine.device.choose import describe
from forerun.errors import InvalidArgument, ModelNotFound, NonFiniteLogits
from forerun.inputs import (
    REMEDY,
    Prompts,
    as_tensors,
    check_ids,
    mask_of_padding,
    read_inputs,
    refuse_for_causal,
    unpadded,
)
from forerun.inside_generate import decoder_inputs, listening, read_call
from forerun.kernels import on_device
from forerun.keywords import GenerateCall, GenerateKeywords, check_tokenizer, padding_id, parse_generate_kwargs
from forerun.math.attention import Form
from forerun.models.adapters import unwrapped
from forerun.models.autocast import refuse_autocast
from forerun.models.cache_size import describe as describe_cache
from forerun.models.evaluation import Evaluation
from forerun.models.families import check_model
from forerun.models.self_check import Examiner
from forerun.models.seq2seq import Seq2SeqScorer, scorer_of
from forerun.models.sharded import is_sharded, on_every_rank
from forerun.parallel import Coordinator, Worker, examine_split, join, load_draft
from forerun.policy import as_policy
from forerun.policy.base import Policy
from forerun.result import GenerateResult
from forerun.rules import AnyRule, parse
from forerun.speech.windows import Windows, is_whisper
from forerun.stream import Stream
from forerun.types import Rule

MOST_CALL_DRAFTERS = 4  # whose engines are kept for the next call that names them

__all__ = ["GenerateResult", "SpeculativeDecoder", "Stream"]


class SpeculativeDecoder:
    """Decodes faster with a drafter's help and says exactly what the target would have said.

    `drafter` is any of `DraftModel`, `FeatureHead`, `ParallelHeads`, `PromptLookup`, `NgramTable`, `EarlyExit`,
    `RandomDraft`, `Chain`, `Tree`, `TopK`, one of your own, a folder with a trained one, None for plain decoding, or
    "auto": prompt lookup, and behind it the trained drafter that comes with Forerun where one fits the target, or
    on a CPU a copy of the target in 8 bits where that measures fast and takes little of the free memory; `policy`
    is "auto", a draft length, or a policy object: "auto" measures what pays, and in sampled calls that name a `seed`
    goes by acceptance alone, so that the same call gives the same tokens (a `CostModel()` measures in those, too);
    `rule` is one of `Rule`, all of them lossless, or a lossy one of
    `forerun.lossy` such as "lenient:0.5", of which the result then warns. `kernels` says whether kernels may stand in
    for torch, in passes, draws and judgements alike: "auto" (on a CPU where they measure faster), "on", "off", or None
    for what $FORERUN_KERNELS says when the decoder is made; drafters follow the target. `compile` says whether rounds
    on a CUDA device may be recorded as graphs, which costs a moment once a shape (`result.stats.seconds.capture`) and
    saves most of the host's time in every round after it. A drafter or a policy that fails costs its draft and a
    warning, and `engine.first_fault` keeps the first traceback; with `strict` the error is raised.
    All rows together have keys of at most `cache_tokens` tokens, those of what an encoder has read included; rows that
    do not fit wait. None: on a GPU a share of the memory that is free when the first row comes, elsewhere as many as
    rows need; `decoder.cache` tells.
    `cache_dtype` ("int8", "fp8") on a GPU rounds keys and values to eight bits, each head of each token by a scale of
    its own: half the memory and half the reading of long texts, and another model, whose text follows the rounded keys.
    A target of a class that the test suite has not proven with the installed transformers is first tried on a few short
    rows beside its own forward, and refused with what differs. `self_check=False` leaves that out, None does as
    $FORERUN_SELF_CHECK says (on or off); `decoder.self_check` tells what was done.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | str | Path | None = "auto",
        *,
        policy: str | int | Policy = "auto",
        rule: AnyRule | str = Rule.TOKEN,
        tokenizer: Any = None,
        attention: Form | str = Form.AUTO,
        kernels: Kernels | str | None = None,
        keep_rows: int = 0,
        cache_tokens: int | None = None,
        cache_dtype: str | None = None,
        compile: bool = True,
        strict: bool = False,
        self_check: bool | None = None,
    ) -> None:
        check_model("target", target)
        self._wrapped_target = target
        target = self.target = unwrapped(target)
        refuse_autocast(target, target.device)
        self.tokenizer = None if tokenizer is None else check_tokenizer("tokenizer", tokenizer)
        self.policy, self._policy = as_policy(policy), policy
        use = None if kernels is None else choice("kernels", kernels, Kernels)
        form, verification = choice("attention", attention, Form), parse(rule)
        kept, recorded = integer("keep_rows", keep_rows, 0), flag("compile", compile)
        wanted = wants_self_check(None if self_check is None else flag("self_check", self_check))
        tokens = None if cache_tokens is None else integer("cache_tokens", cache_tokens, 1)
        self._new_scorer = partial(scorer_of, target, form, use=use, cache_tokens=tokens)
        if cache_dtype is not None:
            self._new_scorer = partial(self._new_scorer, cache_dtype=cache_dtype)
        self._new_engine = partial(
            Engine,
            rule=verification,
            tokenizer=tokenizer,
            keep_rows=kept,
            compile=recorded,
            strict=flag("strict", strict),
        )
        self.ranks = join(target)
        with Evaluation((target,)), on_device(target.device):
            if self.ranks is None:
                scorer, examine = self._new_scorer(), Examiner(wanted)
                self.self_check = examine(scorer)
                self._new_engine = partial(self._new_engine, examine=examine)
                self.engine = self._new_engine(scorer, _drafter(drafter, target), self.policy)
            else:
                self.self_check = examine_split(target, self._new_scorer.keywords | {"form": form}, wanted)
                self._split_drafts = _meet(drafter)  # which nobody else may hold on ranks that only repeat
                self.engine = self._engine_of_rank(self.ranks, drafter)
        self._call_engines: OrderedDict[Any, tuple[Any, Engine]] = OrderedDict()  # by name or identity of the drafter

    def _engine_of_rank(self, ranks: Coordinator | Worker, drafter: Any) -> Engine:
        """On rank 0 the engine that decodes; on the others one that is only asked what it can do."""
        engines: list[Engine] = []

        def make() -> None:
            engines.append(self._new_engine(self._new_scorer(), _drafter(drafter, self.target), self.policy))

        ranks.call(make)
        with on_every_rank(self.target):  # what it is asked needs no counterparts
            return engines[0] if engines else self._new_engine(self._new_scorer(), None, self.policy)

    def __getstate__(self) -> NoReturn:
        """For `pickle` and `copy`, which would otherwise tell of a lock that they have met somewhere within."""
        raise TypeError(
            "a SpeculativeDecoder cannot be copied or sent to another process: it holds keys and compiled kernels; "
            "send the model's name and make a decoder there, or give the model to a second SpeculativeDecoder"
        )

    def __repr__(self) -> str:
        parts = (type(self.target).__name__, type(self.drafter).__name__ if self.drafter is not None else "no drafter")
        return f"SpeculativeDecoder({', '.join(parts)}, policy={type(self.policy).__name__}, rule={self.engine.rule})"

    @property
    def drafter(self) -> Drafter | None:
        """The one that drafts here: a fresh one of that which was given."""
        return self.engine.drafter

    @property
    def cache(self) -> str:
        """How many tokens the keys of all rows may have, and the memory for it, in words."""
        return describe_cache(self.target, self.engine.target.cache)

    @property
    def recorded(self) -> str:
        """What of a round is recorded as a CUDA graph, and if not all of it, why."""
        return describe(self.engine.runner, self.engine.target, self.drafter, self.engine.rule)

    def generate(
        self,
        input_ids: Prompts | None = None,
        attention_mask: Any = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> GenerateResult:
        """Like `model.generate`, for any batch.

        `input_ids` may be a text, a list of texts, chat messages (a list of dictionaries, or several such lists), lists
        of token ids of any lengths, an array or tensor of ids, or what a tokenizer returned. Tensors may be padded on
        either side; the mask says where. Texts and chats need a `tokenizer`, here or at the decoder.
        `drafter` and `policy` stand in for the decoder's own in this call alone; `drafter=None` or "off" decodes
        plainly.
        An encoder-decoder target reads `input_ids`, `input_features` or whatever its encoder takes, or
        `encoder_outputs`; its text begins with `decoder_input_ids`, or else with the model's start token.
        One deliberate difference: nothing is read from a hidden default. Without sampling parameters it is greedy.
        """
        if self.ranks is None:
            return _finished(self.stream(input_ids, attention_mask, **keywords))
        _meet(keywords.get("drafter"))
        result = self.ranks.call(lambda: _finished(self.stream(input_ids, attention_mask, **keywords)), _portable)
        tokenizer = self.tokenizer if keywords.get("tokenizer") is None else keywords["tokenizer"]
        return replace(result, tokenizer=tokenizer, sequences=result.sequences.to(self.target.device))

    def stream(
        self,
        input_ids: Prompts | None = None,
        attention_mask: Any = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> Stream:
        """Yields what the rows gained, round by round; `Progress.row` counts the sequences of this call.

        `close()`, or the end of `with decoder.stream(...) as stream:`, ends all rows with what they have; `result` is
        there once it has ended. Until then no other call can run on this decoder; a stream that was left and that
        nobody holds any more is closed.
        """
        if isinstance(self.ranks, Worker):
            raise InvalidArgument(
                "stream on a rank that holds a part of the target: rank 0 streams, the others call "
                "forerun.parallel.serve_passes(decoder); or all of them call generate"
            )
        others: dict[str, Any] = dict(keywords)
        engine = self._engine_of_call(others.pop("drafter")) if "drafter" in others else self.engine
        policy = others.pop("policy", None)
        call, like = self._parse(input_ids, attention_mask, others)
        if policy is not None:
            call = replace(call, policy=as_policy(policy))
        return Stream(engine, call, like)

    def requests(
        self,
        input_ids: Prompts | None = None,
        attention_mask: Any = None,
        **keywords: Unpack[GenerateKeywords],
    ) -> tuple[Request, ...]:
        """The same call as requests for `forerun.Engine` and `forerun.AsyncEngine`, one a sequence.

        `drafter`, `policy`, `streamer` and `max_time` belong to a call as a whole and are refused.
        """
        others: dict[str, Any] = dict(keywords)
        for name in ("drafter", "policy", "streamer", "max_time"):
            if others.get(name) is not None or (name == "drafter" and name in others):  # where None is a choice
                raise InvalidArgument(f"{name}={shown(others[name])} is for a whole call: use generate or stream")
        call, _ = self._parse(input_ids, attention_mask, others)
        self.engine.tokenizer = call.tokenizer
        return call.requests

    def as_custom_generate(self) -> Callable[..., Any]:
        """For trying it inside existing code: `model.generate(**inputs, custom_generate=decoder.as_custom_generate())`.

        Processors and stopping criteria of the caller are applied as transformers would, or refused; a `streamer` is
        given the text as it comes.
        Sampled text follows `seed=` in that call. Without one its numbers are drawn from torch's generator, which
        `torch.manual_seed` governs; the same text then comes again where draft lengths do not depend on the clock, as
        they do under `auto`. A row that fails raises, unless all is asked for by `return_dict_in_generate`.
        `stop_strings=` go to `decoder.generate`, or in as a `StopStringCriteria` beside a decoder with a tokenizer:
        transformers keeps `tokenizer=` from functions and refuses them.
        A Whisper's `generate` decodes window by window, by rules that only its processors know: see `forerun.speech`.
        """
        if is_whisper(self.target):
            return Windows(self.engine)

        def custom_generate(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: Sequence[Any] = (),
            stopping_criteria: Sequence[Any] = (),
            generation_config: GenerationConfig | None = None,
            seed: int | Sequence[int] | None = None,  # transformers looks for the name here and then lets it pass
            **model_kwargs: Any,
        ) -> Any:
            def run() -> GenerateResult:
                with listening(model) as streamer:  # until a stream takes over
                    call, like = self._call_inside(
                        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs,
                        {"streamer": streamer, "seed": seed},
                    )  # fmt: skip
                return _finished(Stream(self.engine, call, like, streams_prompt=False))

            if self.ranks is None:
                result = run()
            else:  # ranks hand it on by the host
                result = self.ranks.call(run, _portable)
                result = replace(result, sequences=result.sequences.to(self.target.device))
            wants_dict = generation_config is not None and generation_config.return_dict_in_generate
            return result if wants_dict else _sound(result).sequences

        return custom_generate

    def _call_inside(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        processors: Sequence[Any],
        criteria: Sequence[Any],
        config: GenerationConfig | None,
        model_kwargs: dict[str, Any],
        others: dict[str, Any],
    ) -> tuple[GenerateCall, Tensor]:
        """`others` are keywords that transformers knows nothing of, or keeps to itself."""
        if model is not self.target:
            raise InvalidArgument("as_custom_generate belongs to another model than the one whose generate was called")
        surrounding = read_call(model, input_ids, processors, criteria, config, model_kwargs)
        mask, keywords = model_kwargs.get("attention_mask"), {**surrounding.keywords, **others}
        is_seeded = keywords["seed"] is not None
        if keywords.get("do_sample") and not is_seeded:
            keywords["seed"] = int(torch.randint(2**63 - 1, ()))
        if isinstance(self.engine.target, Seq2SeqScorer):
            begins = decoder_inputs(input_ids, model_kwargs, keywords)
            call, like = self._parse(None, mask, {**keywords, **begins})
        else:
            mask = torch.ones_like(input_ids) if mask is None else mask  # transformers leaves one without zeros out
            call, like = self._parse(input_ids, mask, keywords)
        requests = tuple(map(surrounding.for_row, call.requests, range(len(call.requests))))
        return replace(call, requests=requests, is_seeded=is_seeded), like

    def _engine_of_call(self, drafter: Any) -> Engine:
        """An engine with another drafter, and with keys and a policy of its own: other calls do not notice it."""
        key = drafter if drafter is None or isinstance(drafter, str | Path) else id(drafter)
        if key not in self._call_engines:
            drafting = _drafter(drafter, self.target)
            policy = self._another_policy()
            with Evaluation((self.target,)), on_device(self.target.device):
                self._call_engines[key] = drafter, self._new_engine(self._new_scorer(), drafting, policy)
        self._call_engines.move_to_end(key)
        while len(self._call_engines) > MOST_CALL_DRAFTERS:
            self._call_engines.popitem(last=False)
        return self._call_engines[key][1]

    def _another_policy(self) -> Policy:
        """As the decoder's was given, for another engine."""
        if isinstance(self._policy, str):
            return as_policy(self._policy)
        try:
            return copy.deepcopy(self.policy)
        except Exception as error:  # one that holds a lock, or a file
            remedy = f"cannot be copied for a call with its own drafter ({error}); give its class a __deepcopy__"
            raise InvalidArgument(
                f"policy={shown(self.policy)} {remedy}, or make a decoder with that drafter"
            ) from error

    def _parse(self, input_ids: Any, attention_mask: Any, keywords: Any) -> tuple[GenerateCall, Tensor]:
        """The call as requests, and the tensor after which its sequences are shaped."""
        unwrapped(self._wrapped_target)  # an adapter may have come that acts in the wrapper: it is refused
        config, scorer = self.target.generation_config or GenerationConfig(), self.engine.target
        if scorer.has_other_vocabulary():  # by which ids of this call are judged
            self.engine.notice_changes()
        tokenizer = self.tokenizer
        if keywords.get("tokenizer") is not None:
            tokenizer = check_tokenizer("tokenizer", keywords["tokenizer"])
        reads_sound = isinstance(scorer, Seq2SeqScorer) and not scorer.encoder.reads_text
        padded = as_tensors(
            input_ids, attention_mask, keywords, tokenizer, self.target.device, ids_are_decoders=reads_sound
        )
        input_ids, attention_mask, keywords = padded.ids, padded.mask, padded.keywords
        if isinstance(scorer, Seq2SeqScorer):
            inputs = read_inputs(scorer, input_ids, attention_mask, keywords, config)
            call = parse_generate_kwargs(
                inputs.prompts, inputs.keywords, config, self.tokenizer, inputs.sources, vocab_size=scorer.vocab_size
            )
            like = inputs.like.to(self.target.device)
        else:
            refuse_for_causal(keywords, self.target)
            like = _required(input_ids)
            mask_name = "attention_mask"
            if attention_mask is None:  # transformers looks for padding before decoders, not before encoders
                pad = padding_id(keywords, config)
                attention_mask = mask_of_padding(like, pad)
                mask_name += f" (none is given, so ids that are pad_token_id={pad} count as padding)"
            prompts = unpadded(like, attention_mask, vocab_size=scorer.vocab_size, mask_name=mask_name)
            call = parse_generate_kwargs(prompts, keywords, config, self.tokenizer, vocab_size=scorer.vocab_size)
        if call.streamer is not None and len(call.requests) > 1:
            raise InvalidArgument(
                f"a streamer takes one sequence and there are {len(call.requests)}; use decoder.stream"
            )
        return call, like


def _meet(drafter: Any) -> tuple[PreTrainedModel, ...]:
    """Let draft models that are split over the target's processes run in step with it; all ranks come here."""
    models = drafter.split_models if isinstance(drafter, Drafter) else ()
    for model in models:
        join(model)
    return models


def _portable(result: GenerateResult) -> GenerateResult:
    """A result for other processes: without what only this one can hold."""
    rows = tuple(replace(row, request=replace(row.request, biases=(), processors=())) for row in result.rows)
    return replace(result, rows=rows, tokenizer=None, sequences=result.sequences.cpu())


def _finished(stream: Stream) -> GenerateResult:
    for _ in stream:
        pass
    if all(stream.result.errors):
        raise _failure(stream.result, 0)(stream.result.errors[0])
    return stream.result


def _failure(result: GenerateResult, row: int) -> type[InvalidArgument | NonFiniteLogits]:
    return InvalidArgument if result.rows[row].was_refused else NonFiniteLogits


def _sound(result: GenerateResult) -> GenerateResult:
    """One whose rows have all ended well: of a tensor alone nobody could tell."""
    for row, error in enumerate(result.errors):
        if error:
            raise _failure(result, row)(f"row {row}: {error}; return_dict_in_generate=True gives the other rows")
    return result


def _drafter(value: Drafter | str | Path | None, target: PreTrainedModel) -> Drafter | None:
    if value is None:
        return None
    if isinstance(value, str):
        return _named(value, target)
    if isinstance(value, Path):
        if not value.is_dir():
            refuse("drafter", str(value), "there is no such folder; give a drafter's folder, or a name such as 'auto'")
        return from_folder(value, device=target.device, dtype=target.dtype)
    if isinstance(value, nn.Module) and not hasattr(value, "propose"):
        refuse("drafter", value, f"is a model; wrap it: DraftModel({type(value).__name__.lower()})")
    drafter: Drafter = methods(
        "drafter", value, ("propose", "rewind"),
        "give an object with the methods propose and rewind, a name such as 'auto' or 'lookup', a folder, or None",
    )  # fmt: skip
    return drafter


def _named(name: str, target: PreTrainedModel) -> Drafter | None:
    loading: dict[str, Any] = {"device": target.device, "dtype": target.dtype}
    if is_sharded(target):
        loading["load_model"] = load_draft
    try:
        return named_drafter(name, target, **loading)
    except ModelNotFound as error:
        raise InvalidArgument(
            f"drafter={shown(name)}: there is no such folder, file or model; give a drafter's folder, a model's name, "
            "or one of 'auto', 'lookup' and 'off'"
        ) from error


def _required(input_ids: Tensor | None) -> Tensor:
    if input_ids is None:
        raise InvalidArgument(f"input_ids is missing: {REMEDY}")
    return check_ids(input_ids, "input_ids")
