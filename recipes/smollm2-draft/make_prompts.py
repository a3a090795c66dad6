"""Prompts for six kinds of work, made from public text: mathematics, code, summaries, passages with questions,
translation, and talk (writing, rewriting, explaining, plain questions).

    python make_prompts.py DATA_FOLDER prompts.jsonl

DATA_FOLDER holds gsm8k/train.jsonl, mbpp/mbpp.jsonl, wikitext2/valid.txt and corpora/{wiki_demo.txt, c4_demo.jsonl,
gutenberg_sample.txt.xz}; nothing else of it is read. Benchmarks that the drafter is measured on are not among them.
Rows are {"prompt", "source"}, in random order, each once, the same for the same seed.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import templates

# Share of the prompts that are not GSM8K's or MBPP's.
SHARES = {
    "summarization": 0.11, "rag": 0.09, "translation": 0.17, "rewriting": 0.07,
    "writing": 0.22, "explanation": 0.12, "qa": 0.22,
}  # fmt: skip
MBPP_TRAIN = range(601, 975)
MBPP_WORDINGS = 4
STOP_NAMES = (
    "The This That These Those There Then They When Where What While With But And For From His Her Its Our Your You He "
    "She It We In On At As By If Of To After Before However Although Also Both Chapter Footnote Illustration"
)


@dataclass(frozen=True)
class Corpus:
    """Raw material: passages by length, sentences, names and terms."""

    long: tuple[str, ...]  # 60 words and more
    short: tuple[str, ...]  # 25 to 80 words
    sentences: tuple[str, ...]  # 6 to 30 words
    names: tuple[str, ...]
    terms: tuple[str, ...]
    most_passages: int  # beside one question


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--count", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-words", type=int, default=350, help="of a text to be summarised")
    parser.add_argument("--most-passages", type=int, default=4, help="beside one question")
    options = parser.parse_args()
    sizes = options.most_words, options.most_passages
    rows = make_prompts(options.data, options.count, sizes, random.Random(options.seed))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    options.output.write_text(text, encoding="utf-8")
    counts = {source: sum(row["source"] == source for row in rows) for source in sorted({r["source"] for r in rows})}
    print(f"{len(rows)} prompts, {len(text.encode()) / 1e6:.1f} MB: {counts}")


def make_prompts(data: Path, count: int, sizes: tuple[int, int], rng: random.Random) -> list[dict[str, str]]:
    """`sizes`: the most words of a text to be summarised, the most passages beside one question."""
    fixed = {"math": list(maths(data, rng)), "coding": list(coding(data, rng))}
    corpus = read_corpus(data, rng, *sizes)
    rest = max(count - sum(map(len, fixed.values())), 0)
    makers = {
        "summarization": summaries, "rag": passages_with_question, "translation": translations,
        "rewriting": rewriting, "writing": writing, "explanation": explanations, "qa": questions,
    }  # fmt: skip
    drawn = {kind: take(makers[kind](corpus, rng), round(rest * share)) for kind, share in SHARES.items()}
    rows = [{"prompt": p, "source": kind} for kind, prompts in (fixed | drawn).items() for p in dict.fromkeys(prompts)]
    rng.shuffle(rows)
    return rows


def take(prompts: Iterator[str], count: int) -> list[str]:
    """The first `count` different ones, or fewer where the source runs dry (five tries for one)."""
    chosen: dict[str, None] = {}
    for _ in range(5 * count):
        if len(chosen) == count:
            break
        chosen.setdefault(next(prompts))
    return list(chosen)


def maths(data: Path, rng: random.Random) -> Iterator[str]:
    """Most as they are, as one would ask them."""
    for row in _jsonl(data / "gsm8k" / "train.jsonl"):
        yield rng.choice(templates.MATHS).format(row["question"].strip())


def coding(data: Path, rng: random.Random) -> Iterator[str]:
    for row in _jsonl(data / "mbpp" / "mbpp.jsonl"):
        if row["task_id"] in MBPP_TRAIN:
            task = re.sub(r"^Write a (python )?function (to|that|which) ", "", row["text"].strip().rstrip("."))
            yield row["text"].strip()
            for template in rng.sample(templates.CODE, MBPP_WORDINGS - 1):
                yield template.format(task)


def summaries(corpus: Corpus, rng: random.Random) -> Iterator[str]:
    while True:
        yield rng.choice(templates.SUMMARISE).format(rng.choice(corpus.long))


def passages_with_question(corpus: Corpus, rng: random.Random) -> Iterator[str]:
    """A few passages, one of which knows something about what is asked."""
    while True:
        chosen = rng.sample(corpus.short, rng.randint(2, corpus.most_passages))
        if subject := subject_of(rng.choice(chosen), rng):
            question = rng.choice(templates.PASSAGE_QUESTIONS).format(subject)
            form, glue, numbered = rng.choice(templates.PASSAGES)
            parts = [f"[{i}] {text}" if numbered else text for i, text in enumerate(chosen, start=1)]
            yield form.format(passages=glue.join(parts), question=question)


def translations(corpus: Corpus, rng: random.Random) -> Iterator[str]:
    while True:
        if rng.random() < 0.55:
            yield rng.choice(templates.GERMAN_TO_ENGLISH).format(german(rng))
        else:
            language = rng.choice(("German", "German", "German", "French", "Spanish", "Italian"))
            yield rng.choice(templates.TRANSLATE).format(rng.choice(corpus.sentences), language=language)


def german(rng: random.Random) -> str:
    """One to three sentences, put together from parts that agree with each other."""
    return " ".join(_german_sentence(rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))


def _german_sentence(rng: random.Random) -> str:
    subject, when, tail = (rng.choice(templates.GERMAN[part]) for part in ("subjects", "times", "tails"))
    verb, rest = rng.choice(templates.GERMAN["predicates"])
    if rng.random() < 0.4:  # the verb stays second
        return f"{when} {verb} {subject} {rest}{tail}."
    return f"{subject[0].upper()}{subject[1:]} {verb} {when[0].lower()}{when[1:]} {rest}{tail}."


def rewriting(corpus: Corpus, rng: random.Random) -> Iterator[str]:
    while True:
        yield rng.choice(templates.REWRITE).format(rng.choice(corpus.short))


def writing(corpus: Corpus, rng: random.Random) -> Iterator[str]:
    while True:
        pool = corpus.terms if rng.random() < 0.6 else corpus.names
        yield rng.choice(templates.WRITE).format(rng.choice(pool), other=rng.choice(corpus.names))


def explanations(corpus: Corpus, rng: random.Random) -> Iterator[str]:
    while True:
        pool = corpus.terms if rng.random() < 0.7 else corpus.names
        yield rng.choice(templates.EXPLAIN).format(rng.choice(pool))


def questions(corpus: Corpus, rng: random.Random) -> Iterator[str]:
    """Some with a capital letter and a question mark, some as people type."""
    while True:
        asked = rng.choice(templates.QUESTIONS).format(rng.choice(corpus.names), other=rng.choice(corpus.names))
        yield asked if rng.random() < 0.6 else asked[0].lower() + asked[1:].rstrip("?")


def subject_of(passage: str, rng: random.Random) -> str | None:
    """A name in the passage, or the last words of one of its sentences."""
    if names := list(_names(passage)):
        return rng.choice(names)
    nouns = re.findall(r"\bthe ([a-z]{4,}(?: [a-z]{4,})?)\b", passage)
    return f"the {rng.choice(nouns)}" if nouns else None


def read_corpus(data: Path, rng: random.Random, most_words: int, most_passages: int) -> Corpus:
    wiki = _wiki(data / "corpora" / "wiki_demo.txt")
    wikitext = _wikitext(data / "wikitext2" / "valid.txt")
    web = [row["text"] for row in _jsonl(data / "corpora" / "c4_demo.jsonl")]
    books = _books(data / "corpora" / "gutenberg_sample.txt.xz", rng)
    long = [p for text in (*wiki * 3, *wikitext * 3, *web * 3, *books) for p in passages(text, 60, most_words, rng)]
    short = [p for text in (*wiki, *wikitext, *web, *books) for p in passages(text, 25, 80, rng)]
    factual = [*wiki, *wikitext, *web]
    short_sentences = [s for text in factual for s in sentences(text) if 6 <= len(s.split()) <= 30]
    names = sorted({name for text in factual for name in _names(text)})
    terms = sorted({term for text in (*factual, *books[:2000]) for term in _terms(text)})
    return Corpus(*(tuple(dict.fromkeys(part)) for part in (long, short, short_sentences, names, terms)), most_passages)


def passages(text: str, least: int, most: int, rng: random.Random) -> Iterator[str]:
    """Runs of whole sentences of a random length; short ones are likelier."""
    held: list[str] = []
    goal = least + (most - least) * rng.random() ** 2
    for sentence in sentences(text):
        held.append(sentence)
        size = sum(len(s.split()) for s in held)
        if size >= goal:
            if size <= most:
                yield " ".join(held)
            held, goal = [], least + (most - least) * rng.random() ** 2


def sentences(text: str) -> list[str]:
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z“\"])", re.sub(r"\s+", " ", text).strip())
    return [part for part in parts if part and part[-1] in '.!?”"']


def _names(text: str) -> Iterator[str]:
    """Capitalised words inside a sentence."""
    for name_match in re.finditer(r"(?<=[a-z,] )([A-Z][a-z]{2,}(?: (?:of |the )*[A-Z][a-z]{2,}){0,3})\b", text):
        if name_match[1].split()[0] not in STOP_NAMES.split():
            yield name_match[1]


def _terms(text: str) -> Iterator[str]:
    """Things that a text names or calls something."""
    cues = r"\b(?:known as|called|termed|such as|types? of|forms? of|theory of|use of|study of|history of|kinds? of)"
    term, end = r"(?:the |a |an )?([a-z]{4,}(?: [a-z]{5,})?)", r"(?=[,.;)]| (?:and|or|in|is|are|was)\b)"
    for term_match in re.finditer(f"{cues} {term}{end}", text):
        yield term_match[1]


def _wiki(path: Path) -> list[str]:
    """Articles one a line; markup has left empty brackets, and sections that run into each other are cut apart."""
    lines = path.read_text(encoding="utf-8").splitlines()
    cleaned = (re.sub(r"\s*\((?:[\s;,]|or)*\)|\((?=;\s)|(?<=\();\s*", "", line) for line in lines)
    return [part for line in cleaned for part in re.split(r"(?<=[.])(?=[A-Z][a-z])", line) if len(part.split()) > 25]


def _wikitext(path: Path) -> list[str]:
    """Paragraphs without headings and unknown words, their punctuation put back."""
    paragraphs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if len(line.split()) < 25 or line.strip().startswith("=") or line.count("<unk>") > 1:
            continue
        joined = line.replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".").replace(" <unk>", "")
        quoted = re.sub(r' " (.*?) " ', r' "\1" ', joined)
        paragraphs.append(re.sub(r" ([,.;:!?)%]|'s\b|n't\b)", r"\1", quoted).replace("( ", "(").strip())
    return paragraphs


def _books(path: Path, rng: random.Random, most: int = 12_000) -> list[str]:
    """Paragraphs of prose, a sample of them."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        parts = re.split(r"\n\s*\n", file.read())
    prose = [re.sub(r"\s+", " ", part).replace("_", "") for part in parts if _is_prose(part)]
    return rng.sample(prose, min(most, len(prose)))


def _is_prose(part: str) -> bool:
    words = part.split()
    clean = not re.search(r"[|*\[\]{}#=]|\d{4,}", part)
    return clean and 40 <= len(words) <= 350 and sum(word.isupper() for word in words) < 0.1 * len(words)


def _jsonl(path: Path) -> Sequence[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


if __name__ == "__main__":
    main()
