"""Running an encoder over sources: in batches of like shape and bounded size, each source without its padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from forerun.errors import InvalidArgument
from forerun.types import Source

# Positions of one encoder pass, padding included: long enough to keep a processor busy, short enough to bound memory.
ENCODER_TOKENS = 16384


@dataclass
class EncoderOutput(BaseModelOutput):
    """Encoder states as a decoder takes them."""

    attention_mask: Tensor | None = None  # Moonshine asks for one


def encoder_width(model: PreTrainedModel) -> int:
    """Of the encoder's states."""
    return int(getattr(model.config, "d_model", None) or model.config.hidden_size)


class Encoder:
    """The encoder of an encoder-decoder model.

    States that come with a source are the target's; a draft with an encoder of its own, which `is_draft`, only takes
    them where there is nothing else to read.
    """

    def __init__(self, model: PreTrainedModel, is_draft: bool = False) -> None:
        self.module: Any = model.get_encoder()
        self.name = str(getattr(self.module, "main_input_name", model.main_input_name))
        self.device, self.dtype = model.device, model.dtype
        self.width = encoder_width(model)
        self.is_draft = is_draft
        self.calls = 0
        self._takes_mask = "attention_mask" in signature(self.module.forward).parameters
        config, table = model.config, self.module.get_input_embeddings() if self.reads_text else None
        weight = getattr(table, "weight", None)
        self.num_ids = None if weight is None else int(weight.shape[0])  # that it can read, where that is known
        # Whisper's windows are of one length; other encoders of features take any.
        is_whisper = config.model_type == "whisper"
        places = getattr(self.module, "embed_positions", None)
        # Tokens that there are places for in a table of them; past its end a GPU's work would end for good.
        self.most_tokens: int | None = None
        if isinstance(places, nn.Embedding):
            self.most_tokens = places.num_embeddings - getattr(places, "offset", 0)
        self._window = (config.num_mel_bins, 2 * config.max_source_positions) if is_whisper else None

    @property
    def reads_text(self) -> bool:
        return self.name == "input_ids"

    def check(self, source: Source) -> None:
        """Raise unless the encoder can read this."""
        if (states := self._states(source)) is not None:
            if states.ndim != 2 or states.shape[1] != self.width or not len(states):
                raise InvalidArgument(
                    f"encoder states of shape {tuple(states.shape)}: this model's decoder reads [length, {self.width}] "
                    "for each row, of at least one"
                )
        elif self.reads_text and not source.ids:
            raise InvalidArgument("the source is empty: give the encoder at least one token")
        elif self.num_ids is not None and not 0 <= min(source.ids) <= max(source.ids) < self.num_ids:
            bad = next(token for token in source.ids if not 0 <= token < self.num_ids)
            raise InvalidArgument(f"source token {bad} is outside the encoder's vocabulary of {self.num_ids}")
        elif self.reads_text and self.most_tokens is not None and len(source.ids) > self.most_tokens:
            long = f"the source has {len(source.ids)} tokens"
            raise InvalidArgument(f"{long}, this model's encoder {self.most_tokens} positions: shorten it")
        elif not self.reads_text and source.features is None:
            raise InvalidArgument(f"this model's encoder reads {self.name}: give Source(features=...)")
        elif source.features is not None and self._window not in (None, tuple(source.features.shape)):
            raise InvalidArgument(
                f"{self.name} of shape {tuple(source.features.shape)} for a row: this model's encoder reads "
                f"{self._window}; pad or cut them as its feature extractor does"
            )

    def length(self, source: Source) -> int:
        """How many states it makes of this, or more where a mask leaves some out."""
        if (states := self._states(source)) is not None:
            return max(len(states), 1)
        if self.reads_text or source.features is None:
            return max(len(source.ids), 1)  # of what cannot be read there is one
        frames = source.features.shape[-1]
        return max(int(self.module._get_feat_extract_output_lengths(torch.tensor(frames))), 1)

    @torch.inference_mode()
    def run(self, sources: Sequence[Source]) -> tuple[list[Tensor], dict[Source, str]]:
        """States [S, H] of each source, and why some cannot be read: those have one state of zeros."""
        states_of: dict[int, Tensor] = {}
        unread: dict[Source, str] = {}
        for i, source in enumerate(sources):
            try:
                self.check(source)  # a draft's were not before; ids out of range end a GPU's work for good
            except InvalidArgument as error:
                unread[source], states_of[i] = str(error), self._nothing()
            else:
                if (states := self._states(source)) is not None:
                    states_of[i] = states.to(self.device, self.dtype)
        rest = [i for i in range(len(sources)) if i not in states_of]
        for batch in _batches(rest, [_size(source) for source in sources]):
            states_of |= zip(batch, self._run_some([sources[i] for i in batch], unread), strict=True)
        return [states_of[i] for i in range(len(sources))], unread

    def _run_some(self, sources: Sequence[Source], unread: dict[Source, str]) -> list[Tensor]:
        """A batch that fails is tried one by one: a source that cannot be read takes nobody along."""
        try:
            return self._run(sources)
        except InvalidArgument as error:
            if len(sources) > 1:
                return [states for source in sources for states in self._run_some([source], unread)]
            unread[sources[0]] = str(error)
            return [self._nothing()]

    def _nothing(self) -> Tensor:
        """States of a source that cannot be read."""
        return torch.zeros(1, self.width, device=self.device, dtype=self.dtype)

    def _states(self, source: Source) -> Tensor | None:
        """What needs no encoding."""
        can_read = bool(source.ids) if self.reads_text else source.features is not None
        return None if self.is_draft and can_read else source.states

    def _run(self, sources: Sequence[Source]) -> list[Tensor]:
        self.calls += 1
        inputs, mask = self._text(sources) if self.reads_text else self._features(sources)
        options = {"attention_mask": mask} if mask is not None and self._takes_mask else {}
        try:
            out = self.module(**{self.name: inputs}, **options)
        except torch.cuda.OutOfMemoryError:
            raise
        except (ValueError, IndexError, RuntimeError) as error:  # another shape or length than it was built for
            shape = tuple(inputs.shape)
            raise InvalidArgument(f"the encoder cannot read {self.name} of shape {shape}: {error}") from error
        states: Tensor = out.last_hidden_state
        kept = mask if self.reads_text else getattr(out, "attention_mask", None)
        if kept is None:
            return list(states)
        if not kept.any(-1).all():
            raise InvalidArgument(f"the mask of {self.name} leaves nothing of a source: give at least one frame")
        return [row[real] for row, real in zip(states, kept.bool(), strict=True)]

    def _text(self, sources: Sequence[Source]) -> tuple[Tensor, Tensor | None]:
        """[B, S] padded on the right; the mask is left out where nothing is padded."""
        longest = max(len(source.ids) for source in sources)
        ids = torch.tensor([[*s.ids, *[0] * (longest - len(s.ids))] for s in sources], device=self.device)
        mask = torch.tensor([[1] * len(s.ids) + [0] * (longest - len(s.ids)) for s in sources], device=self.device)
        return ids, mask

    def _features(self, sources: Sequence[Source]) -> tuple[Tensor, Tensor | None]:
        features = torch.stack([s.features for s in sources if s.features is not None]).to(self.device, self.dtype)
        masks = [s.mask for s in sources if s.mask is not None]
        return features, torch.stack(masks).to(self.device) if masks else None


def _size(source: Source) -> tuple[Any, ...]:
    """What must agree for two sources to be one batch, and how long they are."""
    if source.features is None:
        return (), len(source.ids)
    masked = None if source.mask is None else tuple(source.mask.shape)
    return (tuple(source.features.shape), masked), source.features.shape[-1]


def _batches(places: Sequence[int], sizes: Sequence[tuple[Any, ...]]) -> Iterator[list[int]]:
    """Sources of one kind side by side, the shorter ones first, so that little is padded."""
    batch: list[int] = []
    for place in sorted(places, key=lambda i: (repr(sizes[i][0]), sizes[i][1])):
        kind, length = sizes[place]
        if batch and (sizes[batch[0]][0] != kind or length * (len(batch) + 1) > ENCODER_TOKENS):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
