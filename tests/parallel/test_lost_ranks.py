"""A rank that dies or hangs: whoever waits hears of it in time, and nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import forerun
from forerun.cache.base import KeyValueCache
from forerun.errors import RankLost
from forerun.models import scorer as scorer_module
from forerun.models.scorer import Scorer
from forerun.models.sharded import by_all_ranks
from forerun.parallel import Coordinator, Worker
from forerun.parallel.link import Link
from support.ranks import VOCAB, Case, load_shard, raised, run_ranks, save_pair
from support.recording import pretend
from support.tiny import tiny_model

SECONDS = 2.0  # that a rank may keep the others waiting


def lose(folder: str, how: int) -> Any:
    """On rank 0 what a request under way and one behind it are told, and after how many seconds."""
    os.environ["FORERUN_RANK_TIMEOUT"] = str(SECONDS)
    decoder = forerun.SpeculativeDecoder(load_shard(folder), None, kernels="off")
    if dist.get_rank() == 1:
        repeat, passes = Scorer.repeat, []

        def repeat_some(self: Scorer, call: Any) -> None:
            passes.append(call)
            if len(passes) == 4:
                os.kill(os.getpid(), how)
            repeat(self, call)

        Scorer.repeat = repeat_some  # type: ignore[method-assign]
        return raised(lambda: forerun.parallel.serve_passes(decoder))
    requests = decoder.requests([[1, 2, 3]], max_new_tokens=50)
    with forerun.AsyncEngine(decoder.engine) as engine:
        started = time.monotonic()
        first = raised(lambda: engine.submit(requests[0]).result(60))
        seconds = time.monotonic() - started
        return first, seconds, raised(lambda: engine.submit(requests[0]).result(60))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_under_way_are_told(how: signal.Signals, tmp_path: Path) -> None:
    tiny_model("llama", vocab=VOCAB).save_pretrained(tmp_path)
    leader = run_ranks(2, lose, str(tmp_path), int(how), wait_for=(0,))[0]
    assert isinstance(leader, tuple), leader
    first, seconds, later = leader
    assert first.startswith("RankLost: "), first
    assert later.startswith("RankLost: "), later
    assert ("rank 1 has ended" in first) is (how == signal.SIGKILL)
    assert seconds < SECONDS + 20  # of a machine that is busy with other things


def hang_where_ranks_meet(folder: str, where: str) -> Any:
    """On rank 0 what a call is told, or the making of a decoder, where rank 1 stops and nothing is loaded any more; and
    after how many seconds."""
    os.environ["FORERUN_RANK_TIMEOUT"] = str(SECONDS)
    pretend()

    def stop(*some: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    if where == "a size is agreed on":  # as on a GPU, where that of a cache is
        scorer_module.new_cache = partial(agree_on_a_size, scorer_module.new_cache)  # type: ignore[attr-defined]
    if dist.get_rank() == 1 and where == "a recorder's follower is made":
        Worker._make_follower = stop  # type: ignore[assignment, method-assign]
    if dist.get_rank() == 1 and where == "a size is agreed on":
        Worker.smallest = stop  # type: ignore[assignment, method-assign]
    target = load_shard(folder)
    started = time.monotonic()
    told = raised(lambda: decode_unless(dist.get_rank() == 1 and where == "a call begins", stop, target))
    return told, time.monotonic() - started


def agree_on_a_size(make: Callable[..., Any], *some: Any) -> Any:
    if (agreed := some[4]) is not None:
        agreed(4096)
    return make(*some)


def decode_unless(hangs: bool, stop: Callable[[], None], target: Any) -> None:
    decoder = forerun.SpeculativeDecoder(target, None, kernels="off", self_check=False)
    if hangs:
        stop()
    decoder.generate([[1, 2, 3]], max_new_tokens=5)


@pytest.mark.quick("a recorder's follower is made")
@pytest.mark.parametrize("where", ["a recorder's follower is made", "a size is agreed on", "a call begins"])
def test_a_rank_that_hangs_where_all_meet(where: str, tmp_path: Path) -> None:
    """Rank 0 has the lock by then that the watch of a server needs: it waits no longer than in a pass."""
    tiny_model("llama", vocab=VOCAB).save_pretrained(tmp_path)
    leader = run_ranks(2, hang_where_ranks_meet, str(tmp_path), where, wait_for=(0,), seconds=60)[0]
    assert isinstance(leader, tuple), leader
    told, seconds = leader
    assert told.startswith("RankLost: ") and "rank 1 has not answered for 2 s ($FORERUN_RANK_TIMEOUT)" in told, told
    assert seconds < SECONDS + 20  # of a machine that is busy with other things


@by_all_ranks
def fail(model: Any, ranks: tuple[int, ...]) -> str:
    if dist.get_rank() in ranks:
        raise ValueError("no")
    return "done"


def call_together(folder: str) -> Any:
    """On rank 0 what becomes of calls of the model that fail on all ranks, and then on one, as a command makes them."""
    link = Link.establish()
    if dist.get_rank() == 1:
        return raised(lambda: Worker(link).serve(until_stop=True))
    ranks = Coordinator(link, calls_are_shared=False)
    model = ranks.load(folder, {"size": 2, "offline": True})
    found: list[Any] = [raised(lambda: model(torch.tensor([[1, 2]])))]
    for who in ((0, 1), (), (1,), ()):
        try:
            found.append(fail(model, who))
        except (ValueError, RankLost) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_calls_of_the_model_that_fail(tmp_path: Path) -> None:
    tiny_model("llama", vocab=VOCAB).save_pretrained(tmp_path)
    found, other = run_ranks(2, call_together, str(tmp_path))
    direct, both, after, one, later = found
    assert "split over processes that only run Forerun's own passes" in direct
    assert both == "ValueError: no" and after == "done", "ranks that have failed alike are in step"
    assert one == later and one.startswith("RankLost") and "failed on other ranks (ValueError: no)" in one
    assert other.startswith("RankLost")


def test_a_lost_rank_is_a_503() -> None:
    pytest.importorskip("llguidance")
    from forerun.serve.errors import api_error_of

    error = api_error_of(forerun.errors.RankLost("rank 1 has ended"))
    assert (error.status, error.code) == (503, "rank_lost")


def leave_early(folder: str) -> Any:
    decoder = forerun.SpeculativeDecoder(load_shard(folder), None, kernels="off")
    if dist.get_rank() == 0:
        return None
    return raised(lambda: decoder.generate([[1, 2]], max_new_tokens=3))


def test_ranks_that_call_when_rank_0_has_ended(tmp_path: Path) -> None:
    tiny_model("llama", vocab=VOCAB).save_pretrained(tmp_path)
    assert run_ranks(2, leave_early, str(tmp_path))[1].startswith("RankLost: ")


@pytest.mark.slow
@pytest.mark.parametrize(("raised_by_it", "is_shown"), [("[gloo/pair.cc] reset by peer", False), ("a mistake", True)])
def test_a_worker_whose_peer_has_gone_says_so_in_a_line(raised_by_it: str, is_shown: bool) -> None:
    """Whatever it waits for: a thread that reads standard input is no reason to complain at the end."""
    program = (
        "import sys; import forerun.parallel.__main__ as m\n"
        "def work(*some): raise RuntimeError(sys.argv[1])\n"
        "m.work = work; m.main('1', '3', '0', 'cpu')"
    )
    command = [sys.executable, "-c", program, raised_by_it]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.wait(120) == 1
        said = process.stderr.read()
    assert said.endswith(f"forerun: rank 1 has ended: RuntimeError: {raised_by_it}\n")
    assert ("Traceback" in said) is is_shown and "Fatal" not in said


def decode_with_another_cache(folder: str) -> str:
    """Of rank 1 nothing is cut back: its rows keep the keys of refused tokens."""
    target = load_shard(folder)
    if dist.get_rank():
        replay = KeyValueCache.replay
        KeyValueCache.replay = lambda cache, changes: replay(cache, [one for one in changes if one[0] != "rewind"])
    call = ([[5, 6, 7, 8, 5, 6, 7]], {"max_new_tokens": 12, "temperature": 1.0, "seed": 1})
    return raised(lambda: Case("draft", {"policy": 3}, (call,)).decode(target))


def test_caches_that_are_no_longer_alike_are_noticed(tmp_path: Path) -> None:
    """What the tests of split targets rely on: they compare the states of all ranks before every pass."""
    save_pair(tiny_model("llama", vocab=VOCAB), tmp_path)
    ranks = run_ranks(2, decode_with_another_cache, str(tmp_path))
    assert all(told.startswith("RankLost: ") for told in ranks), ranks
    assert "no longer in the same state" in ranks[1]
