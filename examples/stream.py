"""Print a text as it is written, round by round; `|` stands where a round ended.

python examples/stream.py [MODEL]
"""

import sys

import forerun

model, tokenizer = forerun.load(sys.argv[1] if len(sys.argv) > 1 else "embedded")
decoder = forerun.SpeculativeDecoder(model, tokenizer=tokenizer)

with decoder.stream("Once upon a time", max_new_tokens=48, temperature=0.8, seed=1) as stream:
    for rows in stream:
        for progress in rows:  # one prompt, so one row
            print(tokenizer.decode(progress.tokens), end="|", flush=True)

print(f"\nfinished: {stream.result.finish_reasons[0]}, seed {stream.result.parameters[0]['seed']}")
