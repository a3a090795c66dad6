"""The loss of one batch: the target's side without gradients, the draft's with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from transformers import PreTrainedModel

from forerun.math.losses import TeacherLaw
from forerun.train.batches import Batch
from forerun.train.head_loss import LossResult, Positions, SharedHead, chunked_loss
from forerun.train.init_student import InitialStudent
from forerun.train.options import TrainOptions
from forerun.train.students import Student
from forerun.train.writing import BACKENDS


class Objective:
    """What the draft is trained to lower; `module` is the student, perhaps wrapped for several processes."""

    def __init__(
        self, target: PreTrainedModel, initial: InitialStudent, options: TrainOptions, stored_laws: bool
    ) -> None:
        self.target, self.initial, self.options = target, initial, options
        self.module: Callable[[Tensor, Tensor | None], Tensor] = initial.student
        self.stored_laws = stored_laws  # the target's laws come with the batch, and it need not run
        self.device = target.device
        self._decay = torch.tensor([options.depth_decay**s for s in range(initial.student.depth)], device=self.device)
        self._firsts = torch.tensor(
            [initial.student.first(s + 1) for s in range(initial.student.depth)], device=self.device
        )

    def valid(self, batch: Batch) -> Tensor:
        """Which estimates of the batch's positions mean something: [S, M] bool, on the device."""
        return batch.times.to(self.device)[None] >= self._firsts[:, None]

    def __call__(self, batch: Batch, seed: int, measure: bool = False) -> LossResult:
        """`batch` is on the device; `seed` draws what is rolled out."""
        with self.precision():
            tokens = self._tokens(batch, seed)
            features = None if self.stored_laws else self.features(tokens)
            # Without gradients one process may look alone, and the wrapper would wait for the others.
            module = self.module if torch.is_grad_enabled() else self.initial.student
            hidden = module(tokens, features)
        positions = Positions(
            hidden.flatten(1, 2)[:, batch.keep],
            self._decay[:, None] * self.valid(batch),
            kept := None if features is None else features.flatten(0, 1)[batch.keep],
            self._law(batch, kept),
        )
        return chunked_loss(positions, self.initial.head.weight, self.options.mixture, self.options.chunk, measure)

    def precision(self) -> AbstractContextManager[Any]:
        """bfloat16 products over float32 weights on a GPU; on a CPU everything stays float32."""
        if self.device.type != "cuda":
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        stack.enter_context(sdpa_kernel(BACKENDS))
        return stack

    @torch.no_grad()
    def features(self, tokens: Tensor) -> Tensor:
        """What the target's head reads after every token: [B, L, H]."""
        hidden: Tensor = self.target.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden

    def _tokens(self, batch: Batch, seed: int) -> Tensor:
        if not len(batch.rolled):
            return batch.tokens
        student, chosen = self.initial.student, batch.tokens[batch.rolled]
        features = self.features(chosen) if student.reads_features else None
        generator = torch.Generator(self.device).manual_seed(seed)
        drafted = roll_out(
            student, self.initial.head, chosen, features, batch.cuts, self.options.rollout_length, generator
        )
        return batch.tokens.index_copy(0, batch.rolled, drafted)

    def _law(self, batch: Batch, features: Tensor | None) -> Callable[[slice], TeacherLaw]:
        head = self.initial.head
        if features is not None:
            return lambda part: head.law(features[part])
        ids, logs = batch.top_ids, batch.top_logprobs
        assert ids is not None and logs is not None, "neither features nor stored laws"
        return lambda part: TeacherLaw.from_top(ids[part], logs[part], head.full.shape[0], head.tokens)


@torch.no_grad()
def roll_out(
    student: Student,
    head: SharedHead,
    tokens: Tensor,  # [R, L] int64
    features: Tensor | None,  # [R, L, H] of these tokens
    cuts: Tensor,  # [R] int64, the last token of each row that stays
    length: int,
    generator: torch.Generator,
) -> Tensor:
    """Tokens [R, L] with up to `length` drafted ones after each cut, as far as the rows are wide.

    Later positions are then trained on the tokens they will meet when the draft is used.

    Each step runs over the whole row again: the layers are few, and nothing can go stale.
    """
    tokens = tokens.clone()
    features = None if features is None else features.clone()
    row = torch.arange(len(tokens), device=tokens.device)
    for step in range(length):
        now = (cuts + step).clamp(max=tokens.shape[1] - 2)
        hidden = student.once(tokens, features)[row, now]
        law = torch.softmax(hidden.float() @ head.weight.float().T, dim=-1)
        drawn = head.name(torch.multinomial(law, 1, generator=generator)[:, 0])
        fits = cuts + step < tokens.shape[1] - 1
        tokens[row, now + 1] = torch.where(fits, drawn, tokens[row, now + 1])
        if features is not None:
            features[row, now] = torch.where(fits[:, None], hidden.to(features.dtype), features[row, now])
    return tokens
