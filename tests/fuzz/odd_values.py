"""Values that somebody will give for some argument, made anew for every call: some are used up, some are changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BatchEncoding, GenerationConfig, LogitsProcessor, NoRepeatNGramLogitsProcessor

import forerun
from engine.scripted import Spell
from support.tiny import tiny_model

PROMPT = [12, 61, 7, 33, 85, 4]


def model() -> Any:
    return tiny_model("llama", layers=1, max_position_embeddings=40)


class Unkind:
    """Answers nothing it is asked."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("do not ask")

    __repr__ = __eq__ = __bool__ = __len__ = __iter__ = __float__ = __index__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class Says(LogitsProcessor):
    """Returns what it was told to, made from the scores it was given."""

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        self.answer = answer

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return self.answer(scores)


def meta() -> Tensor:
    return torch.ones(1, 6, dtype=torch.long, device="meta")


def sparse() -> Tensor:
    return torch.tensor([PROMPT]).to_sparse()


ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "1": lambda: 1,
    "3": lambda: 3,
    "-1": lambda: -1,
    "3.5": lambda: 3.5,
    "3.0": lambda: 3.0,
    "0.5": lambda: 0.5,
    "-0.5": lambda: -0.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "1e308": lambda: 1e308,
    "-1e308": lambda: -1e308,
    "1e-320": lambda: 1e-320,
    "1e30": lambda: 1e30,
    "10**30": lambda: 10**30,
    "-10**30": lambda: -(10**30),
    "10**5000": lambda: 10**5000,
    "2**63": lambda: 2**63,
    "2**70": lambda: 2**70,
    "1j": lambda: 1j,
    "''": lambda: "",
    "'a'": lambda: "a",
    "'5'": lambda: "5",
    "b'5'": lambda: b"5",
    "[]": list,
    "()": lambda: (),
    "{}": dict,
    "set()": lambda: set(),
    "[1]": lambda: [1],
    "[1.5]": lambda: [1.5],
    "['a']": lambda: ["a"],
    "['']": lambda: [""],
    "[None]": lambda: [None],
    "[True]": lambda: [True],
    "[nan]": lambda: [math.nan],
    "[10**30]": lambda: [10**30],
    "[-1]": lambda: [-1],
    "[[1]]": lambda: [[1]],
    "[[]]": lambda: [[]],
    "[[1.5]]": lambda: [[1.5]],
    "[[10**9]]": lambda: [[10**9]],
    "(1, 2)": lambda: (1, 2),
    "range(3)": lambda: range(3),
    "range(97)": lambda: range(97),
    "every id": lambda: list(range(97)),
    "every word": lambda: [[token] for token in range(97)],
    "{'a': 3.0}": lambda: {"a": 3.0},
    "{5: nan}": lambda: {5: math.nan},
    "{5: 'a'}": lambda: {5: "a"},
    "{10**9: 1}": lambda: {10**9: 1.0},
    "{-1: 1}": lambda: {-1: 1.0},
    "{5: inf}": lambda: {5: math.inf},
    "{5: 1e38}": lambda: {5: 1e38},
    "{5: 1e308}": lambda: {5: 1e308},
    "{1.5: 1}": lambda: {1.5: 1.0},
    "{(5,): 1.0}": lambda: {(5,): 1.0},
    "{(5,): nan}": lambda: {(5,): math.nan},
    "{(): 1.0}": lambda: {(): 1.0},
    "{every: -inf}": lambda: dict.fromkeys(range(97), -math.inf),
    "{(every,): -inf}": lambda: {(token,): -math.inf for token in range(97)},
    "{(every,): 3e38}": lambda: {(token,): 3e38 for token in range(97)},
    "[[[5], 1.0]]": lambda: [[[5], 1.0]],
    "[[5, 1.0]]": lambda: [[5, 1.0]],
    "object()": object,
    "Unkind()": Unkind,
    "int": lambda: int,
    "print": lambda: print,
    "lambda": lambda: lambda x: x,
    "generator": lambda: (i for i in range(3)),
    "...": lambda: ...,
    "Decimal": lambda: Decimal("0.5"),
    "Fraction": lambda: Fraction(1, 2),
    "Path": lambda: Path("no/such/folder"),
    "'no/such'": lambda: "no/such/folder",
    "np.int64": lambda: np.int64(3),
    "np.float32": lambda: np.float32(0.5),
    "np.bool": lambda: np.bool_(True),
    "np.array(3)": lambda: np.array(3),
    "np.array([3])": lambda: np.array([3]),
    "np.array([1, 2])": lambda: np.array([1, 2]),
    "np.array(ids)": lambda: np.array([PROMPT]),
    "np.array(str)": lambda: np.array(["a", "b"]),
    "tensor(3)": lambda: torch.tensor(3),
    "tensor(0.5)": lambda: torch.tensor(0.5),
    "tensor(nan)": lambda: torch.tensor(math.nan),
    "tensor(True)": lambda: torch.tensor(True),
    "tensor([3])": lambda: torch.tensor([3]),
    "tensor([1, 2])": lambda: torch.tensor([1, 2]),
    "tensor([])": lambda: torch.tensor([]),
    "tensor(1j)": lambda: torch.tensor(1j),
    "meta scalar": lambda: torch.empty((), device="meta"),
    "meta": meta,
    "sparse": sparse,
    "Linear": lambda: torch.nn.Linear(2, 2),
    "model": lambda: model(),
    "PromptLookup": lambda: forerun.PromptLookup,
    "PromptLookup()": forerun.PromptLookup,
    "Constant": lambda: forerun.Constant,
    "tokenizer": Spell,
    "Spell": lambda: Spell,
    "GenerationConfig": lambda: GenerationConfig,
    "GenerationConfig()": GenerationConfig,
    "Rule": lambda: forerun.Rule,
    "Lenient": lambda: forerun.lossy.Lenient,
    "'lenient:nan'": lambda: "lenient:nan",
    "'sigmoid:alpha=inf,beta=inf'": lambda: "sigmoid:alpha=inf,beta=inf",
    "'embedded'": lambda: "embedded",
    "'auto'": lambda: "auto",
}

IDS: dict[str, Callable[[], Any]] = {
    "float": lambda: torch.tensor([PROMPT]).float(),
    "bool": lambda: torch.ones(1, 6, dtype=torch.bool),
    "complex": lambda: torch.ones(1, 6, dtype=torch.complex64),
    "int32": lambda: torch.tensor([PROMPT], dtype=torch.int32),
    "uint8": lambda: torch.tensor([PROMPT], dtype=torch.uint8),
    "0-d": lambda: torch.tensor(3),
    "1-D": lambda: torch.tensor(PROMPT),
    "3-D": lambda: torch.tensor([[PROMPT]]),
    "no rows": lambda: torch.ones(0, 6, dtype=torch.long),
    "no columns": lambda: torch.ones(1, 0, dtype=torch.long),
    "long": lambda: torch.ones(1, 1000, dtype=torch.long),
    "huge id": lambda: torch.tensor([[2**62]]),
    "negative id": lambda: torch.tensor([[-1]]),
    "next id": lambda: torch.tensor([[97]]),
    "list": lambda: [PROMPT],
    "ragged": lambda: [[1, 2], [3]],
    "array": lambda: np.array([PROMPT]),
    "meta": meta,
    "sparse": sparse,
    "nested": lambda: torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged),
    "expanded": lambda: torch.tensor([[3]]).expand(1, 6),
    "parameter": lambda: torch.nn.Parameter(torch.ones(1, 6)),
    "text": lambda: "Once upon a time",
    "texts": lambda: ["Once", "upon a time"],
    "text and ids": lambda: ["Once", [1, 2]],
    "bytes": lambda: [b"Once"],
    "chat": lambda: [{"role": "user", "content": "hello"}],
    "chats": lambda: [[{"role": "user", "content": "hello"}], [{"role": "user", "content": "there"}]],
    "one message": lambda: {"role": "user", "content": "hello"},
    "message without role": lambda: [{"content": "hello"}],
    "message and ids": lambda: [[{"role": "user", "content": "hello"}, 3]],
    "encoding": lambda: BatchEncoding({"input_ids": [PROMPT, [3]], "attention_mask": [[1] * 6, [1]]}),
    "encoding of nothing": lambda: BatchEncoding({}),
    "encoding of too much": lambda: BatchEncoding({"input_ids": [PROMPT], "offset_mapping": [(0, 1)]}),
    "dictionary of numbers": lambda: {1: 2},
    "rows of nothing": lambda: [[], []],
    "rows of rows": lambda: [[[1, 2]], [[3]]],
    "rows of tensors": lambda: [torch.tensor(PROMPT), torch.tensor([3])],
    "rows of meta tensors": lambda: [torch.ones(6, dtype=torch.long, device="meta")],
    "rows of floats": lambda: [[1.0, 2.5]],
    "rows of bools": lambda: [[True, False]],
    "rows with a huge id": lambda: [[10**30], [-(10**30)]],
    "array of objects": lambda: np.array([[1, None]], dtype=object),
    "array of texts": lambda: np.array(["Once", "upon"]),
    "array of uint64": lambda: np.array([PROMPT], dtype=np.uint64),
    "3-D array": lambda: np.array([[PROMPT]]),
}
MASKS: dict[str, Callable[[], Any]] = {
    "bool": lambda: torch.ones(1, 6, dtype=torch.bool),
    "float": lambda: torch.ones(1, 6),
    "int8": lambda: torch.ones(1, 6, dtype=torch.int8),
    "zeros": lambda: torch.zeros(1, 6),
    "additive": lambda: torch.tensor([[-math.inf, 0.0, 0.0, 0.0, 0.0, 0.0]]),
    "additive min": lambda: torch.tensor([[torch.finfo(torch.float32).min, 0.0, 0.0, 0.0, 0.0, 0.0]]),
    "nan": lambda: torch.full((1, 6), math.nan),
    "twos": lambda: torch.full((1, 6), 2),
    "hole": lambda: torch.tensor([[1, 0, 1, 1, 1, 1]]),
    "halves": lambda: torch.full((1, 6), 0.5),
    "list": lambda: [[1] * 6],
    "array": lambda: np.ones((1, 6)),
    "narrow": lambda: torch.ones(1, 5),
    "1-D": lambda: torch.ones(6),
    "4-D": lambda: torch.ones(1, 1, 6, 6),
    "meta": meta,
    "sparse": sparse,
    "two rows": lambda: torch.ones(2, 6),
    "complex": lambda: torch.ones(1, 6, dtype=torch.complex64),
}
PROCESSORS: dict[str, Callable[[], Any]] = {
    "alone": lambda: NoRepeatNGramLogitsProcessor(2),
    "class": lambda: [NoRepeatNGramLogitsProcessor],
    "number": lambda: [3],
    "one argument": lambda: [lambda scores: scores],
    "three arguments": lambda: [lambda ids, scores, more: scores],
    "None": lambda: [Says(lambda s: None)],
    "number back": lambda: [Says(lambda s: 3.0)],
    "narrower": lambda: [Says(lambda s: s[:, :-1])],
    "flat": lambda: [Says(lambda s: s[0])],
    "ids": lambda: [Says(lambda s: s.argmax(-1, keepdim=True))],
    "nan": lambda: [Says(lambda s: s * math.nan)],
    "-inf": lambda: [Says(lambda s: torch.full_like(s, -math.inf))],
    "inf": lambda: [Says(lambda s: s + math.inf)],
    "double": lambda: [Says(lambda s: s.double())],
    "meta": lambda: [Says(lambda s: s.to("meta"))],
    "int": lambda: [Says(lambda s: s.long())],
    "sparse": lambda: [Says(lambda s: s.to_sparse())],
    "good": lambda: [NoRepeatNGramLogitsProcessor(2)],
}
