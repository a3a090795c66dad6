"""A conversation that keeps the keys of earlier turns: each turn reads only what is new.

python examples/chat.py [MODEL]     then type; an empty line or the end of the input ends it
"""

import sys

import forerun
from forerun.loading import load

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "embedded")
decoder = forerun.SpeculativeDecoder(model, tokenizer=tokenizer, keep_rows=1)

messages: list[dict[str, str]] = []
while question := sys.stdin.readline().strip():
    messages.append({"role": "user", "content": question})
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    out = decoder.generate(**inputs, max_new_tokens=48)
    answer = tokenizer.decode(out.new_tokens[0], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
    print(answer)
