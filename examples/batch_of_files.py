"""Continue every text file of a folder and write the answers beside them, many files at a time.

python examples/batch_of_files.py FOLDER [MODEL]     reads *.txt, writes *.out
"""

import sys
from pathlib import Path

import forerun

ROWS = 8  # files in one batch; each row accepts its own number of draft tokens

if len(sys.argv) < 2:
    sys.exit(__doc__)
folder = Path(sys.argv[1])
model, tokenizer = forerun.load(sys.argv[2] if len(sys.argv) > 2 else "embedded")
decoder = forerun.SpeculativeDecoder(model, tokenizer=tokenizer)

files = sorted(folder.glob("*.txt"), key=lambda file: file.stat().st_size)  # rows of similar length side by side
for start in range(0, len(files), ROWS):
    some = files[start : start + ROWS]
    texts = [file.read_text(encoding="utf-8") for file in some]
    out = decoder.generate(texts, max_new_tokens=32)
    for file, text in zip(some, out.texts, strict=True):
        file.with_suffix(".out").write_text(text, encoding="utf-8")
    print(f"{start + len(some)} of {len(files)} files, {out.stats.tokens_per_round:.2f} tokens a round")
