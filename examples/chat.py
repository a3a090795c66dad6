"""A conversation that keeps the keys of earlier turns: each turn reads only what is new.

python examples/chat.py [MODEL]     then type; an empty line or the end of the input ends it
"""

import sys

import forerun

model, tokenizer = forerun.load(sys.argv[1] if len(sys.argv) > 1 else "embedded")
decoder = forerun.SpeculativeDecoder(model, tokenizer=tokenizer, keep_rows=1)

messages: list[dict[str, str]] = []
while question := sys.stdin.readline().strip():
    messages.append({"role": "user", "content": question})
    answer = decoder.generate(messages, max_new_tokens=48).texts[0]
    messages.append({"role": "assistant", "content": answer})
    print(answer)
