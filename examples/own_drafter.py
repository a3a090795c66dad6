"""A drafter of your own: two methods. This one remembers the last answers and repeats what followed in them.

python examples/own_drafter.py [MODEL]
"""

import sys
from collections.abc import Sequence

import torch

import forerun


class Remember(forerun.Drafter):
    """Looks for the row's last two tokens in stored texts and drafts what came next there."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def continuation(self, history: Sequence[int], most: int) -> list[int]:
        last = list(history[-2:])
        for text in self.texts:
            for place in range(len(text) - 2):
                if text[place : place + 2] == last:
                    return text[place + 2 : place + 2 + most]
        return []

    def propose(self, context: forerun.DraftContext) -> forerun.Draft:
        drafts = [self.continuation(h, n) for h, n in zip(context.histories, context.max_lengths, strict=True)]
        width = max(map(len, drafts), default=0)
        tokens = torch.tensor([draft + [0] * (width - len(draft)) for draft in drafts], dtype=torch.int64)
        return forerun.Draft(
            tokens=tokens.reshape(len(drafts), width).to(context.device),
            lengths=torch.tensor([len(draft) for draft in drafts], device=context.device),
            law=forerun.PointMass(tokens.reshape(len(drafts), width).to(context.device), context.vocab_size),
            deterministic=True,  # a function of the history: a policy may cut it short
        )

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing is kept between rounds, so there is nothing to take back."""


model, tokenizer = forerun.load(sys.argv[1] if len(sys.argv) > 1 else "embedded")
drafter = Remember()
decoder = forerun.SpeculativeDecoder(model, drafter, policy=6, strict=True, tokenizer=tokenizer)

for attempt in ("first", "second"):
    out = decoder.generate("The first ten prime numbers are", max_new_tokens=24)
    drafter.texts = out.sequences.tolist()
    print(f"{attempt} call: {out.stats.tokens_per_round:.2f} tokens a round")
print(out.texts[0])
