"""Decode several prompts in one batch, with drafts.

python examples/generate.py [MODEL]     a Hub name, a folder or a GGUF file; default: the embedded model
"""

import sys

import forerun

model, tokenizer = forerun.load(sys.argv[1] if len(sys.argv) > 1 else "embedded")
decoder = forerun.SpeculativeDecoder(model, tokenizer=tokenizer)

prompts = ["The capital of France is", "To be or not to be, that is", "1, 2, 3, 4,"]
out = decoder.generate(prompts, max_new_tokens=24)

for prompt, text in zip(prompts, out.texts, strict=True):
    print(prompt, "|", text)
print(f"{out.stats.tokens_per_round:.2f} tokens a round, {out.stats.acceptance_rate:.0%} of the drafts accepted")
