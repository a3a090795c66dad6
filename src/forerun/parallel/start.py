"""Processes that hold a target together: those that torchrun has started, or workers that rank 0 starts itself."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from forerun.config import local_rank, num_ranks, rank_and_size
from forerun.errors import InvalidArgument, RankLost, kind_and_line
from forerun.loading import check_shards
from forerun.loading.load import choose_device
from forerun.parallel.coordinator import Coordinator
from forerun.parallel.join import set_group
from forerun.parallel.link import MEETING, Link
from forerun.parallel.worker import Worker

HERE = "127.0.0.1"  # where workers of one machine meet; $MASTER_ADDR may have been set for another job
GRACE = 5.0  # seconds that workers are given to end by themselves


def sharded_target(name: str, size: int, options: dict[str, Any]) -> Any:
    """A target that several processes load together, on rank 0; on the others this does not return.

    Under torchrun these are its processes; otherwise `size` - 1 are started here, and end with this one.
    """
    size, (rank, launched) = num_ranks(size), rank_and_size()
    check_shards(name, size, offline=options["offline"])
    device = _check_device(options["device"], size)
    if launched > 1:
        _init_group(device)
    else:
        _start_workers(size, device)
    if rank > 0:
        as_follower(rank, _serve)
    coordinator = Coordinator(Link.establish(None if launched > 1 else HERE), calls_are_shared=False)
    set_group(coordinator)
    return coordinator.load(name, {"size": size, **options, "device": None})


def _check_device(device: str | None, size: int) -> torch.device:
    """transformers splits over accelerators where there are any."""
    kind = choose_device(None)
    if device is not None and torch.device(device).type != kind.type:
        raise InvalidArgument(f"--device {device}: a target that is split runs on {kind.type} here; leave --device out")
    if kind.type == "cuda" and rank_and_size()[1] == 1 and torch.cuda.device_count() < size:
        raise InvalidArgument(f"{size} processes need as many GPUs; there are {torch.cuda.device_count()}")
    return kind


def _init_group(device: torch.device, store: Any = None, rank: int = -1, size: int = -1) -> None:
    """The process group; torchrun has said in the environment where it meets unless a `store` is given."""
    own = None
    if device.type == "cuda":
        own = torch.device("cuda", local_rank())
        torch.cuda.set_device(own)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, device_id=own, timeout=timedelta(seconds=MEETING)
    )


def _start_workers(size: int, device: torch.device) -> None:
    store = TCPStore(HERE, 0, size, is_master=True, wait_for_workers=False)
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "forerun.parallel", str(rank), str(size), str(store.port), device.type],
            stdin=subprocess.PIPE,  # closes when this process ends, however it does
            stdout=subprocess.DEVNULL,
        )
        for rank in range(1, size)
    ]
    atexit.register(_end, workers)  # before the group's own farewell is registered: it runs after it
    share_cores(size, device)
    _wait_for(workers, store)
    _init_group(device, store, 0, size)


def _wait_for(workers: list[subprocess.Popen[bytes]], store: TCPStore) -> None:
    """Until all have come, or one has ended: a process group would wait for it much longer."""
    deadline = time.monotonic() + MEETING
    while not store.check([_present(rank) for rank in range(1, len(workers) + 1)]):
        ended = [worker for worker in workers if worker.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise RankLost("a process that was to hold a part of the target has ended; see what it said above")
        time.sleep(0.05)


def _present(rank: int) -> str:
    return f"forerun rank {rank}"


def share_cores(size: int, device: torch.device) -> None:
    """Every process would take all cores for itself."""
    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // size))


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    """Nothing is left behind: who does not end is killed, stopped processes included."""
    for worker in workers:
        assert worker.stdin is not None
        with suppress(OSError):
            worker.stdin.close()
    for worker in workers:
        try:
            worker.wait(GRACE)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def work(rank: int, size: int, port: int, device: torch.device) -> None:
    """What a process that rank 0 has started does until that one ends."""
    os.environ["LOCAL_RANK"] = str(rank)  # transformers and we look there for the device
    share_cores(size, device)
    store = TCPStore(HERE, port, size, is_master=False)
    store.set(_present(rank), "")
    _init_group(device, store, rank, size)
    _serve()


def _serve() -> None:
    Worker(Link.establish()).serve(until_stop=True)


def as_follower(rank: int, serve: Callable[[], None]) -> NoReturn:
    """The rest of a process that follows rank 0. It ends at once: an interpreter that ends waits for peers that hang,
    and for the thread that reads standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, with which this process ends
    try:
        serve()
    except RankLost:  # rank 0 has ended, and has said why
        os._exit(1)
    except Exception as error:
        if not _is_of_peers(error):
            traceback.print_exc()
        sys.stderr.write(f"forerun: rank {rank} has ended: {kind_and_line(error)}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _is_of_peers(error: Exception) -> bool:
    """Whether it tells of another rank that has gone: rank 0 says what that means, and where it was says nothing."""
    return isinstance(error, dist.DistError) or any(library in str(error) for library in ("gloo", "NCCL"))
