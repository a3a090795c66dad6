"""Functions run by several processes at once, which form a group of torch.distributed over gloo."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import forerun
from forerun.models.sharded import is_sharded
from forerun.parallel import Coordinator
from forerun.parallel.join import group
from support import shared, staged
from support.tiny import tiny_model

RankFunction = Callable[..., Any]
VOCAB = 96  # transformers before 5.22 splits heads of models evenly or not at all
PATIENCE = 30.0  # seconds between the end of rank 0 and that of the others
BUSY = "100"  # seconds that ranks wait for each other: a process may get no core for long where many tests run


def run_ranks(
    size: int,
    function: RankFunction,
    *arguments: Any,
    seconds: float = 300,
    wait_for: Sequence[int] | None = None,
    backend: str = "gloo",
) -> list[Any]:
    """What `function(*arguments)` returns on each rank; a string with its traceback where it raises, None where the
    process ends without a word. Only the ranks of `wait_for` are waited for, where it is given."""
    context = _forkserver()
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    readers, processes = [], []
    for rank in range(size):
        reader, writer = context.Pipe(duplex=False)
        told = (rank, size, store.port, backend, writer, function, arguments)
        process = context.Process(target=_rank, args=told, daemon=True)
        process.start()
        writer.close()
        readers.append(reader)
        processes.append(process)
    try:
        return _collect([readers[rank] for rank in wait_for or range(size)], monotonic() + seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()


@dataclass(frozen=True)
class CommandRank:
    """How a command ended on one rank."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""


def run_command(
    size: int, *arguments: str, stdin: str = "", seconds: float = 300, **environment: str
) -> list[CommandRank]:
    """`torchrun --nproc-per-node SIZE -m forerun ARGUMENTS`, but that its processes are there in milliseconds. Each of
    them has a `stdin` of its own, where torchrun's share one. What a rank other than 0 says goes where this process's
    output goes: it ends without handing it over."""
    context = _forkserver()
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    reader, writer = context.Pipe(duplex=False)
    told = (size, store.port, writer, arguments, stdin, environment)
    processes = [context.Process(target=_command, args=(rank, *told), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    writer.close()
    try:
        (first,) = _collect([reader], monotonic() + seconds)
        assert isinstance(first, CommandRank), first
        for process in processes[1:]:
            process.join(PATIENCE)
        return [first, *(CommandRank(process.exitcode) for process in processes[1:])]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _command(
    rank: int,
    size: int,
    port: int,
    writer: Connection,
    arguments: Sequence[str],
    stdin: str,
    environment: dict[str, str],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), FORERUN_RANK_TIMEOUT=BUSY,
        TORCHELASTIC_RUN_ID="tests", TORCHELASTIC_USE_AGENT_STORE="True", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), **environment,
    )  # fmt: skip
    from click.testing import CliRunner

    from forerun.cli.main import cli

    result = CliRunner().invoke(cli, [*arguments], input=stdin)
    ranks = group()
    if isinstance(ranks, Coordinator):
        ranks.stop()  # as it does when its process ends
    writer.send(CommandRank(result.exit_code, result.stdout, result.stderr))
    os._exit(result.exit_code)


def _forkserver() -> Any:
    context = multiprocessing.get_context("forkserver")  # a child is there in milliseconds, with everything imported
    context.set_forkserver_preload(["support.ranks", "transformers.models.llama.modeling_llama"])
    return context


def _collect(readers: Sequence[Connection], deadline: float) -> list[Any]:
    results: dict[Any, Any] = {}
    while len(results) < len(readers):
        ready = wait([reader for reader in readers if reader not in results], max(deadline - monotonic(), 0))
        assert ready, "ranks hang"
        for reader in ready:
            assert isinstance(reader, Connection)
            try:
                results[reader] = reader.recv()
            except EOFError:
                results[reader] = None
    return [results[reader] for reader in readers]


def _rank(
    rank: int, size: int, port: int, backend: str, writer: Connection, function: RankFunction, arguments: Any
) -> None:
    torch.set_num_threads(1)
    own = 0 if backend in (staged.NAME, shared.NAME) else rank  # whose ranks share one device
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(own), WORLD_SIZE=str(size), FORERUN_RANK_TIMEOUT=BUSY)
    store = TCPStore("127.0.0.1", port, size, is_master=False)
    staged.register()
    shared.register()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        result = function(*arguments)
    except Exception:
        result = traceback.format_exc()
    writer.send(result)
    os._exit(0)  # peers that were killed or stopped must not be waited for


def load_shard(folder: str) -> Any:
    """This rank's part of a model."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()


Call = tuple[list[list[int]], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A decoder and some calls of it."""

    drafter: str
    settings: dict[str, Any]
    calls: tuple[Call, ...]

    def decoder(self, target: Any) -> forerun.SpeculativeDecoder:
        return forerun.SpeculativeDecoder(target, _drafter(self.drafter, target), **{"kernels": "off", **self.settings})

    def decode(self, target: Any) -> list[list[list[int]]]:
        """New tokens of each call."""
        decoder = self.decoder(target)
        if isinstance(decoder.ranks, Coordinator):
            decoder.ranks.check_every = 1  # states of caches are compared before every pass
        return [decoder.generate(prompts, **keywords).new_tokens for prompts, keywords in self.calls]


def _drafter(name: str, target: Any) -> Any:
    """ "split draft" and "split tree" are split where the target is, and then lie in its folder (`save_pair`)."""
    if name == "lookup":
        return forerun.PromptLookup()
    is_split = name.startswith("split") and is_sharded(target)
    draft = forerun.DraftModel(
        load_shard(f"{target.name_or_path}/draft") if is_split else tiny_draft().to(target.device)
    )
    return forerun.Tree(draft, nodes=5, width=2) if name.endswith("tree") else draft


def tiny_draft() -> Any:
    return tiny_model("llama", seed=1, layers=1, vocab=VOCAB, num_key_value_heads=4)


def save_pair(target: Any, folder: Path) -> None:
    """A target for ranks to load, and beside it the draft model of `Case`."""
    target.save_pretrained(folder)
    tiny_draft().save_pretrained(folder / "draft")


def decode_all(folder: str, cases: Sequence[Case]) -> list[list[list[list[int]]]]:
    """What all cases give on this rank, with one target."""
    target = load_shard(folder)
    return [case.decode(target) for case in cases]


def raised(function: Callable[[], Any]) -> str:
    """The kind and message of the error that a function raises."""
    try:
        function()
    except forerun.errors.ForerunError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
