"""llama.cpp inside this process by llama-cpp-python: one row at a time, plainly or with its prompt lookup."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from typing import Any

from forerun.bench.methods import Prompts, Run

LOOKUP_TOKENS = 10  # the class's own default


class WithBinding:
    """A method of the Python package `llama_cpp`."""

    target = None

    def __init__(
        self, name: str, title: str, model: Path, *, context: int, threads: int, on_gpu: bool, temperature: float,
        seed: int, lookup: bool = False,
    ) -> None:  # fmt: skip
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS) if lookup else None
        self.name, self.title, self.temperature = name, title, temperature
        self.llama: Any = Llama(
            str(model), n_ctx=context, n_threads=threads, n_threads_batch=threads, n_gpu_layers=-1 if on_gpu else 0,
            seed=seed, draft_model=draft, verbose=False,
        )  # fmt: skip

    def refusal(self, batch: int) -> str | None:
        return "llama-cpp-python decodes one sequence at a time" if batch > 1 else None

    def run(self, prompts: Prompts, max_new_tokens: int) -> Run:
        (prompt,) = prompts
        self.llama.reset()  # else what two prompts have in common would be read once
        passes, evaluate = [0], self.llama.eval

        def counted(tokens: Any) -> None:
            passes[0] += 1
            evaluate(tokens)

        self.llama.eval = counted
        try:
            started = time.perf_counter()
            drawn = self.llama.generate(list(prompt), temp=self.temperature, top_k=0, top_p=1.0, min_p=0.0)
            tokens = tuple(islice(drawn, max_new_tokens))
            seconds = time.perf_counter() - started
        finally:
            del self.llama.eval  # the class's own is back
        return Run((tokens,), seconds, rounds=passes[0])

    def memory(self) -> int | None:
        return None  # its pages are this process's
