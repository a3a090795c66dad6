"""Train a feature head for a model: the model writes text, the head learns from it, and drafts.

python examples/train_head.py OUTPUT [MODEL] [STEPS]     20 steps by default: enough to see it run, not to be fast

`forerun train data` and `forerun train draft` do the same with all options.
"""

import sys
from pathlib import Path

import torch

import forerun
from forerun.loading.drafter_folder import describe_target
from forerun.train.loop import train_draft
from forerun.train.options import TrainOptions
from forerun.train.shards import Manifest, Shards, ShardWriter, TrainingText

if len(sys.argv) < 2:
    sys.exit(__doc__)
output = Path(sys.argv[1])
model, tokenizer = forerun.load(sys.argv[2] if len(sys.argv) > 2 else "embedded")
steps = int(sys.argv[3]) if len(sys.argv) > 3 else 20

# 1. Text in the model's own words: twelve answers to each prompt, at temperature 1.
prompts = ["Tell me about rivers.", "Write a short poem.", "What is a prime number?", "Describe a village."]
plain = forerun.SpeculativeDecoder(model, None, tokenizer=tokenizer)
out = plain.generate(prompts, max_new_tokens=32, temperature=1.0, seed=0, num_return_sequences=12)
writer = ShardWriter(output / "data", Manifest(describe_target(model), top_k=0, arguments={}))
for number, row in enumerate(out.rows):
    writer.add(number, TrainingText(torch.tensor([*row.request.prompt, *row.tokens]), len(row.request.prompt)))
writer.flush()

# 2. A head of one layer that reads the model's last hidden state.
options = TrainOptions(kind="feature", steps=steps, hold_out=8, max_length=96, batch_tokens=768, unroll=2)
trained = train_draft(
    model,
    Shards(output / "data"),
    options,
    output / "head",
    report=lambda progress: print(f"step {progress.step}: loss {progress.loss:.3f}"),
)
print(f"trained {trained.num_parameters:,} weights in {trained.seconds:.0f} s")

# 3. Draft with it.
decoder = forerun.SpeculativeDecoder(model, output / "head", policy=2, tokenizer=tokenizer)
out = decoder.generate(prompts[0], max_new_tokens=32)
print(f"{out.stats.tokens_per_round:.2f} tokens a round")
