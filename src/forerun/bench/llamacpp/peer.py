"""What of llama.cpp is at hand: a `llama-server`, else llama-cpp-python, else the reason why neither is."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forerun.bench.llamacpp.binding import WithBinding
from forerun.bench.llamacpp.server import COPIES, DRAFTS, ServerSettings, WithLlamaServer, modes_of, started
from forerun.bench.llamacpp.server import PLAIN as NO_DRAFTS
from forerun.bench.methods import Method
from forerun.errors import InvalidArgument

PEER = "llama.cpp"
PROGRAM = "llama-server"
MISSING = (
    f"llama.cpp is left out: there is no {PROGRAM} on the PATH and no package llama_cpp. Give the program with "
    "--llama-server, or run: pip install llama-cpp-python"
)


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What a peer is given: the same as Forerun."""

    model: Path  # a GGUF file
    draft: Path | None
    rows: int
    context: int  # tokens of a row, at most
    threads: int
    on_gpu: bool
    temperature: float
    seed: int


class Peer(Protocol):
    """Another program that decodes the same file."""

    @property
    def source(self) -> str:
        """What is run, for records."""
        ...

    def names(self, has_draft: bool) -> tuple[str, ...]:
        """Of its methods; the first is its plain decoding."""
        ...

    def methods(self, settings: PeerSettings, names: Sequence[str]) -> AbstractContextManager[list[Method]]:
        """Ready to run until the block ends."""
        ...


@dataclass(frozen=True, slots=True)
class ServerPeer:
    """A server for each way to speculate: plain, copies of several kinds, a draft model."""

    program: Path
    modes: tuple[str, ...]
    source: str = PROGRAM

    def names(self, has_draft: bool) -> tuple[str, ...]:
        known = (mode for mode in self.modes if mode.startswith(COPIES) or (has_draft and mode == DRAFTS))
        return (PEER, *(f"{PEER}-{mode}" for mode in known))

    @contextmanager
    def methods(self, settings: PeerSettings, names: Sequence[str]) -> Iterator[list[Method]]:
        shared = ServerSettings(
            self.program, settings.model, settings.rows, settings.context, settings.threads, settings.on_gpu,
            settings.draft,
        )  # fmt: skip
        with ExitStack() as stack:
            methods: list[Method] = []
            for name in names:
                mode = name.removeprefix(f"{PEER}-") if name != PEER else NO_DRAFTS
                server = stack.enter_context(started(shared, mode))
                title = PEER if name == PEER else f"{PEER} {mode}"
                methods.append(WithLlamaServer(name, title, server, settings.temperature, settings.seed))
            yield methods


@dataclass(frozen=True, slots=True)
class BindingPeer:
    """The Python package."""

    source: str = "llama-cpp-python"

    def names(self, has_draft: bool) -> tuple[str, ...]:
        return (PEER, f"{PEER}-lookup")

    @contextmanager
    def methods(self, settings: PeerSettings, names: Sequence[str]) -> Iterator[list[Method]]:
        yield [
            WithBinding(
                name, PEER if name == PEER else f"{PEER} prompt lookup", settings.model, context=settings.context,
                threads=settings.threads, on_gpu=settings.on_gpu, temperature=settings.temperature, seed=settings.seed,
                lookup=name != PEER,
            )
            for name in names
        ]  # fmt: skip


def find(program: str | None = None) -> Peer | None:
    """The server named, else one on the PATH, else the package; None where there is nothing."""
    path = shutil.which(program or PROGRAM)
    if path is not None:
        return ServerPeer(Path(path), modes_of(Path(path)))
    if program is not None:
        raise InvalidArgument(f"llama_server={program!r}: no such program; give the path of a {PROGRAM}")
    return BindingPeer() if importlib.util.find_spec("llama_cpp") is not None else None
