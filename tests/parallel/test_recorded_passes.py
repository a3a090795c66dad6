"""Passes of a split target as recorded work: all ranks record, run or launch one, and never some of them."""

from __future__ import annotations

import os
import signal
import time
import warnings
import weakref
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import count as count_from
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import forerun
from forerun.config import Kernels
from forerun.drafters.device import Shape
from forerun.engine.device import runner
from forerun.engine.device.recorder import Marks, Scratch
from forerun.engine.device.row_table import RowTable
from forerun.engine.device.runner import Runner
from forerun.engine.device.shapes import key_bound, table_width
from forerun.models import scorer as scorer_module
from forerun.models.bodies import shard
from forerun.models.bodies.shard_gpu import ShardGpuBody
from forerun.models.scorer import Scorer
from forerun.models.sharded import RecordedCall, RecordedPass, on_every_rank
from forerun.parallel import Coordinator
from forerun.types import Rule
from support import shared
from support.interpreter import on_gpu_alone
from support.ranks import VOCAB, Call, Case, load_shard, raised, run_ranks, save_pair
from support.recording import count, pretend
from support.ties import check_greedy, deviation
from support.tiny import tiny_model

RAGGED = [[5, 6, 7, 8, 5, 6, 7], [9, 3], [4, 4, 1, 2, 11, 12, 13, 14, 15, 16, 17, 18]]
GREEDY: Call = (RAGGED, {"max_new_tokens": 10})
SAMPLED: Call = (RAGGED, {"max_new_tokens": 10, "temperature": 0.9, "top_p": 0.95, "seed": 3})
PENALISED: Call = (RAGGED, {"max_new_tokens": 6, "temperature": 1.0, "repetition_penalty": 1.3, "seed": 4})
CASES = [
    Case("lookup", {"policy": 3}, (GREEDY, SAMPLED, PENALISED)),
    Case("draft", {"policy": 3, "rule": "block"}, (GREEDY, SAMPLED)),
    Case("split draft", {"policy": 3, "cache_tokens": 4096}, (GREEDY, SAMPLED)),
    Case("lookup", {"policy": 2, "cache_tokens": 90}, (SAMPLED, PENALISED)),  # rows wait for room, and begin again
    Case("tree", {"policy": 3}, (SAMPLED,)),  # by passes that are launched, in turns with rounds without a draft
]
SECONDS = 2.0  # that a rank may keep the others waiting


def decode_recorded(folder: str, cases: list[Case], in_blocks: bool) -> Any:
    """New tokens of all cases on this rank, and how much was recorded and run for each."""
    seen = pretend(in_blocks=in_blocks)
    target, found = load_shard(folder), []
    for case in cases:
        before = seen.captured, seen.replayed
        found.append((case.decode(target), seen.captured - before[0], seen.replayed - before[1]))
    return found


def check(model: Any, cases: list[Case], outcomes: list[Any]) -> None:
    noise = 2 * max(deviation(model, prompt) for prompt in RAGGED)
    for case, found in zip(cases, outcomes, strict=True):
        for (prompts, keywords), got, want in zip(case.calls, found, case.decode(model), strict=True):
            if keywords.get("temperature"):
                assert got == want, (case, keywords)
                continue
            for prompt, ours, theirs in zip(prompts, got, want, strict=True):
                check_greedy(model, prompt, ours, theirs, noise)


@pytest.mark.quick("blocks")
@pytest.mark.parametrize("in_blocks", [True, False], ids=["blocks", "pieces that move"])
def test_two_ranks_say_what_one_process_says(in_blocks: bool, tmp_path: Path) -> None:
    model = tiny_model("llama", vocab=VOCAB)
    save_pair(model, tmp_path)
    first, other = run_ranks(2, decode_recorded, str(tmp_path), CASES, in_blocks)
    assert isinstance(first, list), first
    assert first == other, "tokens, or what was recorded and run, differ between ranks"
    check(model, CASES, [tokens for tokens, _, _ in first])
    for case, (_, captured, replayed) in zip(CASES[:4], first[:4], strict=True):
        assert 0 < captured < replayed, case


def decode_unfilled(folder: str) -> Any:
    """The same with a rank that never writes what a recording reads."""
    pretend()
    if dist.get_rank() == 1:
        RowTable.assign_blocks = lambda self, *numbers: None  # type: ignore[method-assign]
    return CASES[0].decode(load_shard(folder))


@pytest.mark.slow
def test_a_rank_that_runs_other_tokens_is_seen(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab=VOCAB)
    save_pair(model, tmp_path)
    first, _ = run_ranks(2, decode_unfilled, str(tmp_path))
    assert isinstance(first, list), first
    with pytest.raises(AssertionError):
        check(model, CASES[:1], [first])


def decode_with_trouble(folder: str, rank: int, what: str) -> Any:
    """Tokens and, on rank 0, warnings and what is said of recordings afterwards, where one rank has trouble."""
    has_trouble = dist.get_rank() == rank
    seen = pretend("no graphs here" if has_trouble and what == "refuses" else None)

    def fail(step: str, number: int) -> None:
        if (step, number) == ("capture", 2):  # the first size has been recorded by then
            raise torch.OutOfMemoryError("no memory for a graph")

    def lack_room(self: Scratch, like: Any, number: int) -> None:
        raise torch.OutOfMemoryError("no memory for logits")

    if has_trouble and what == "fails":
        seen.before = fail
    if has_trouble and what == "lacks room":
        Scratch.reserve = lack_room  # type: ignore[method-assign]
    decoder = CASES[0].decoder(load_shard(folder))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tokens = [decoder.generate(prompts, **keywords).new_tokens for prompts, keywords in CASES[0].calls]
    said = [str(warning.message) for warning in told if issubclass(warning.category, forerun.ForerunWarning)]
    return tokens, said, decoder.recorded, seen.captured, seen.replayed


@pytest.mark.quick("1-fails")
@pytest.mark.parametrize(
    ("rank", "what"), [(1, "fails"), (0, "fails"), (1, "refuses"), (1, "lacks room"), (0, "lacks room")]
)
def test_a_rank_that_cannot_record(rank: int, what: str, tmp_path: Path) -> None:
    """All of them launch from then on, and rank 0 says so once."""
    model = tiny_model("llama", vocab=VOCAB)
    save_pair(model, tmp_path)
    first, other = run_ranks(2, decode_with_trouble, str(tmp_path), rank, what)
    assert isinstance(first, tuple) and isinstance(other, tuple), (first, other)
    check(model, CASES[:1], [first[0]])
    assert first[0] == other[0]
    reasons = {"fails": "no memory for a graph", "refuses": "no graphs here", "lacks room": "no memory for logits"}
    assert len(first[1]) == 1 and reasons[what] in first[1][0]
    assert ("rank 1" in first[1][0]) is (rank == 1)
    assert first[2] == "nothing: recording failed"
    captured, replayed = (2, 1) if what == "fails" else (0, 0)
    assert first[3] == other[3] == captured
    assert first[4] == other[4] and (first[4] >= replayed if captured else first[4] == 0)


def fail_in_a_rehearsal(folder: str, rank: int) -> Any:
    """What each rank is told, and warned of, where one fails between the sums of the layers and that of the logits."""
    os.environ["FORERUN_RANK_TIMEOUT"] = str(SECONDS)
    pretend()
    decoder = CASES[0].decoder(load_shard(folder))

    def fail(self: ShardGpuBody, out: Any, hidden: Any) -> None:
        raise torch.OutOfMemoryError("no memory for a product")

    if dist.get_rank() == rank:
        ShardGpuBody.head_into = fail  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            decoder.generate(GREEDY[0], **GREEDY[1])
        except Exception as error:
            own = [warning for warning in told if issubclass(warning.category, forerun.ForerunWarning)]
            return f"{type(error).__name__}: {error}", list(map(str, own))
    return None


@pytest.mark.quick("1")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rehearsal_that_fails_on_one_rank(rank: int, tmp_path: Path) -> None:
    """Others are within its sums: whatever came next would be added up with what they still wait for."""
    tiny_model("llama", vocab=VOCAB).save_pretrained(tmp_path)
    told = run_ranks(2, fail_in_a_rehearsal, str(tmp_path), rank)
    assert all(isinstance(one, tuple) for one in told), told
    (error, warned), own = told[0], told[rank][0]
    reason = "a pass failed on rank 0 (no memory for a product)" if rank == 0 else "rank 1 has ended"
    assert error.startswith("RankLost: ") and reason in error
    assert own == error if rank == 0 else own == "OutOfMemoryError: no memory for a product"
    assert not warned, "it decodes on, launched, beside a rank that waits in a sum"


def move_in_one() -> Any:
    """What a follower says behind its passes, and whether the scorer has noticed, once only shards have moved."""
    pretend()
    target = split_in_one(tiny_model("llama", vocab=VOCAB))
    with on_every_rank(target):
        scorer = Scorer(target, use=Kernels.OFF)
    scorer.admit(0)
    follower = Runner(scorer, None, Rule.TOKEN, time.perf_counter, whole_rounds=False)
    changes: list[Any] = [("reserve", ((0,), (4,), 8), {})]
    what = RecordedPass(1, 3, 1024, [scorer.cache.slot(0)], 0, [0], [[5, 6, 7]])
    said = [
        raised(partial(follower.repeat, RecordedCall(0, changes, what, is_new=is_new, is_run=True)))
        for is_new in (True, False)
    ]
    noticed = [scorer.has_changed()]
    for weight in target.parameters():
        if isinstance(weight, DTensor):
            weight._local_tensor = weight._local_tensor.clone()
    other = replace(what, past=[1], slots=[0, 1])  # other rows: weights are looked at
    said.append(raised(lambda: follower.repeat(RecordedCall(0, [], other, is_new=False, is_run=True))))
    return said, [*noticed, scorer.has_changed()]


def test_a_follower_that_has_not_recorded_a_pass_says_so() -> None:
    """Rank 0 may be waiting for its sums by then: there is nothing left but to end."""
    told = run_ranks(1, move_in_one)[0]
    assert isinstance(told, tuple), told
    (*before, after), noticed = told
    assert before == ["nothing was raised"] * 2
    assert after.startswith("RankLost: ") and "moved on this rank alone" in after
    assert noticed == [False, True]


def renew(folder: str) -> Any:
    """Whether what follows or records passes has gone on this rank whenever the cache of a changed target is made."""
    pretend()
    target, gone, make = load_shard(folder), [], scorer_module.new_cache
    decoder = CASES[0].decoder(target)
    decoder.generate(GREEDY[0], **GREEDY[1])
    if isinstance(decoder.ranks, Coordinator):
        old: list[Any] = [decoder.engine.runner]
        target.remark = "a setting that was not there"
    else:
        old = list(decoder.ranks._scorers.values())
    known = list(map(weakref.ref, old))
    del old

    def new_cache(*some: Any) -> Any:
        gone.append([one() is None for one in known])
        return make(*some)

    scorer_module.new_cache = new_cache  # type: ignore[attr-defined]
    return gone, decoder.generate(GREEDY[0], **GREEDY[1]).new_tokens


def test_a_changed_target_finds_its_memory_free(tmp_path: Path) -> None:
    """On all ranks: the smallest of their caches is the size of all."""
    model = tiny_model("llama", vocab=VOCAB)
    model.save_pretrained(tmp_path)
    first, other = run_ranks(2, renew, str(tmp_path))
    assert isinstance(first, tuple) and isinstance(other, tuple), (first, other)
    assert first == other and first[0] == [[True]]
    check(model, [replace(CASES[0], calls=(GREEDY,))], [[first[1]]])


def test_ctrl_c_while_a_pass_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are in that pass, and in step behind it. A second one need not wait."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    closed, sent = list[str](), list[Any]()
    link: Any = SimpleNamespace(send=sent.append, close=closed.append, ended_peers=lambda patience=0: [])
    ranks = Coordinator(link, calls_are_shared=True)

    def look() -> bool:
        now = next(looks)
        if now is None:
            raise KeyboardInterrupt
        return bool(now)

    call: Any = None
    looks = iter([False, None, False, True])
    with pytest.raises(KeyboardInterrupt), ranks.run(call, look):
        pass
    assert list(looks) == [] and not closed
    looks = iter([False, None, None])
    with pytest.raises(KeyboardInterrupt), ranks.run(call, look):
        pass
    assert closed == ["a pass failed on rank 0 (KeyboardInterrupt)"]


def interrupt(folder: str) -> Any:
    """On rank 0 tokens of a call behind one that a Ctrl-C has ended."""
    pretend()
    decoder = CASES[0].decoder(load_shard(folder))
    if dist.get_rank() == 1:
        return raised(lambda: forerun.parallel.serve_passes(decoder))
    decoder.ranks.check_every, looks, is_over = 1, count_from(1), Marks.is_over

    def interrupted(self: Marks) -> bool:
        if next(looks) == 3:
            raise KeyboardInterrupt
        return is_over(self)

    Marks.is_over = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(GREEDY[0], **GREEDY[1])
    told = [decoder.generate(prompts, **keywords).new_tokens for prompts, keywords in CASES[0].calls]
    decoder.ranks.stop()
    return told


@pytest.mark.slow
def test_calls_behind_a_ctrl_c(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab=VOCAB)
    model.save_pretrained(tmp_path)
    told, _ = run_ranks(2, interrupt, str(tmp_path))
    assert isinstance(told, list), told
    check(model, CASES[:1], [told])


@pytest.mark.parametrize(
    ("backend", "device", "sums"),
    [
        ("nccl", "cuda", None),
        ("cpu:gloo,cuda:nccl", "cuda", None),
        ("gloo", "cuda", "gloo"),
        ("cpu:nccl,cuda:gloo", "cuda", "gloo"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("nccl", "cpu", "None"),
    ],
)
def test_sums_that_a_graph_can_hold(
    backend: str, device: str, sums: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by what torch says of a group, which names a backend for each kind of device."""
    config = str(dist.distributed_c10d.BackendConfig(dist.Backend(backend)))
    monkeypatch.setattr(shard, "group_of", lambda model: None)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(runner, "is_sharded", lambda model: True)
    body = object.__new__(ShardGpuBody)
    target: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device(device)), body=body)
    reason = None if sums is None else f"the target is split over processes, and sums by {sums} cannot be captured"
    assert runner.why_not_passes(target) == reason
    if reason is not None:
        with pytest.raises(forerun.errors.UnsupportedModel, match=f"sums by {sums}"):
            runner.follower_of(target)
    by_modules: Any = SimpleNamespace(model=target.model, body=object())
    assert runner.why_not_passes(by_modules) == "the target is split over processes, and run by transformers' modules"


def lose_in_replay(folder: str, how: int | None, on_gpu: bool = False) -> Any:
    """On rank 0 what a request is told whose pass never ends, and after how many seconds."""
    os.environ["FORERUN_RANK_TIMEOUT"] = str(SECONDS)
    seen = count() if on_gpu else pretend()
    decoder = forerun.SpeculativeDecoder(load_shard(folder), None, kernels="on" if on_gpu else "off")
    if dist.get_rank() == 1:

        def end(step: str, number: int) -> None:
            if how is not None and (step, number) == ("replay", 4):
                os.kill(os.getpid(), how)

        seen.before = end
        return raised(lambda: forerun.parallel.serve_passes(decoder))
    if how is None:  # as on a GPU, where nobody raises
        Marks.is_over = lambda self: False  # type: ignore[method-assign]
    requests = decoder.requests([[1, 2, 3]], max_new_tokens=50)
    with forerun.AsyncEngine(decoder.engine) as engine:
        started = time.monotonic()
        first = raised(lambda: engine.submit(requests[0]).result(60))
        return first, time.monotonic() - started, raised(lambda: engine.submit(requests[0]).result(60)), seen.replayed


@pytest.mark.quick("killed")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, None], ids=["killed", "stopped", "unnoticed"])
def test_a_rank_that_is_lost_in_a_recorded_pass(how: signal.Signals | None, tmp_path: Path) -> None:
    tiny_model("llama", vocab=VOCAB).save_pretrained(tmp_path)
    leader = run_ranks(2, lose_in_replay, str(tmp_path), None if how is None else int(how), wait_for=(0,))[0]
    assert isinstance(leader, tuple), leader
    first, seconds, later, replayed = leader
    assert first.startswith("RankLost: ") and later.startswith("RankLost: "), (first, later)
    assert replayed == (1 if how is None else 4)
    assert ("a recorded pass has not ended" in first) is (how is None)
    assert seconds < SECONDS + 20  # of a machine that is busy with other things


def warm_up(folder: str) -> Any:
    """How many passes a warm-up records on this rank, and requests after it."""
    seen = pretend()
    decoder = forerun.SpeculativeDecoder(load_shard(folder), "lookup", policy=3, kernels="off", cache_tokens=4096)
    if dist.get_rank() == 1:
        forerun.parallel.serve_passes(decoder)
        return seen.captured, seen.replayed
    told: list[tuple[int, int]] = []
    done = decoder.engine.warm_up(4, context=512, report=lambda *numbers: told.append(numbers))
    warm, recorded = seen.captured, decoder.recorded
    requests = decoder.requests(RAGGED, max_new_tokens=10)
    with forerun.AsyncEngine(decoder.engine) as engine:
        texts = [stream.result(60).tokens for stream in [engine.submit(request) for request in requests]]
    decoder.ranks.stop()
    return done.num_rounds, told[-1], warm, recorded, seen.captured, seen.replayed, texts


@pytest.mark.slow
def test_a_warm_up_records_on_all_ranks(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab=VOCAB)
    model.save_pretrained(tmp_path)
    first, other = run_ranks(2, warm_up, str(tmp_path))
    assert isinstance(first, tuple), first
    rounds, told, warm, recorded, captured, replayed, texts = first
    assert told == (rounds, rounds) and warm >= rounds
    assert recorded == "the target's pass: the target is split over processes, which rank 0 tells of every pass"
    assert captured == warm, "requests have recorded something"
    assert (captured, replayed) == other and replayed
    want = forerun.SpeculativeDecoder(model, "lookup", policy=3, kernels="off").generate(*GREEDY[:1], **GREEDY[1])
    noise = 2 * max(deviation(model, prompt) for prompt in RAGGED)
    for prompt, ours, theirs in zip(RAGGED, texts, want.new_tokens, strict=True):
        check_greedy(model, prompt, list(ours), theirs, noise)


def split_in_one(model: Any) -> Any:
    """All of a Llama on one rank, as a part of itself: transformers would leave it whole."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, init_device_mesh(model.device.type, (1,)), plan)


def decode_alone(model: Any, cases: list[Case]) -> Any:
    """By one rank: tokens, captures and replays of each case, what is recorded, and whether a replayed pass says the
    same as its launched work, to the last bit."""
    seen = count() if model.device.type == "cuda" else pretend()
    # It refuses what transformers has not split, and transformers leaves a model on one rank whole.
    import_module("forerun.parallel.join").check_split = lambda model: None
    target, found, words = split_in_one(model), [], []
    for case in cases:
        before = seen.captured, seen.replayed
        found.append((case.decode(target), seen.captured - before[0], seen.replayed - before[1]))
        words.append(case.decoder(target).recorded)
    scorer = case.decoder(target).engine.target
    rows = [
        SimpleNamespace(number=i, request=SimpleNamespace(prompt=(0,) * 8), stop=SimpleNamespace(budget=8))
        for i in (0, 1)
    ]
    made: Any = Runner(scorer, None, Rule.TOKEN, time.perf_counter, whole_rounds=False)
    for row, prompt in enumerate(RAGGED[:2]):
        scorer.admit(row)
        scorer.feed([row], [prompt])
    past, logits = [scorer.length(row) for row in (0, 1)], []
    with torch.inference_mode():
        for _ in range(2):
            logits.append(made.score(rows, [[3, 4, 5], [6, 7]]).clone())
            scorer.rewind([0, 1], past)
        device_round = made._round_of(2, table_width(3))
        made._scratch.rows.zero_()
        device_round.score(Shape(0, 3, key_bound(3)))  # launched, with what was sent for the recording
        logits.append(made._scratch.rows[[0, 1, 2, 3, 4]].clone())
        logits.append(scorer.score([0, 1], [[3, 4, 5], [6, 7]]))
    same = [torch.equal(logits[0], other) for other in logits[1:3]]
    return found, words, same, float((logits[0] - logits[3]).abs().max()), float(logits[3].abs().max())


def on_one_rank(folder: str, device: str, cases: list[Case]) -> Any:
    from transformers import AutoModelForCausalLM

    return decode_alone(AutoModelForCausalLM.from_pretrained(folder).to(device).eval(), cases)


def on_a_gpu(case: Case) -> Case:
    return replace(case, settings={**case.settings, "kernels": "on"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), pytest.param("nccl", "cuda", marks=[pytest.mark.gpu, on_gpu_alone])]
)
def test_one_rank_says_what_one_process_says(backend: str, device: str, tmp_path: Path) -> None:
    model = tiny_model("llama", vocab=VOCAB).to(device)
    save_pair(model, tmp_path)
    cases = [on_a_gpu(case) if device == "cuda" else case for case in (CASES[0], CASES[3])]
    told = run_ranks(1, on_one_rank, str(tmp_path), device, cases, backend=backend)[0]
    assert isinstance(told, tuple), told
    found, words, same, apart, largest = told
    check(model, cases, [tokens for tokens, _, _ in found])
    assert all(0 < captured < replayed for _, captured, replayed in found)
    assert all(said.startswith("the target's pass: ") for said in words)
    assert same == [True, True], "a replay differs from another, or from what was launched"
    assert apart <= 1e-4 * largest, "float32 sums in another order"


def decode_on_shared_gpu(folder: str, cases: list[Case]) -> Any:
    """As `decode_recorded`, and sums that have failed."""
    seen, target, found = count(), load_shard(folder), []
    for case in cases:
        before = seen.captured, seen.replayed
        found.append((case.decode(target), seen.captured - before[0], seen.replayed - before[1]))
    return found, shared.num_failed()


@pytest.mark.slow
@pytest.mark.gpu
@on_gpu_alone
def test_two_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    """Captured, by sums that a graph can hold (`support.shared`)."""
    model = tiny_model("llama", vocab=VOCAB).to("cuda")
    save_pair(model, tmp_path)
    cases = [on_a_gpu(case) for case in CASES[:4]]
    first, other = run_ranks(2, decode_on_shared_gpu, str(tmp_path), cases, backend=shared.NAME)
    assert isinstance(first, tuple), first
    assert first == other and first[1] == 0
    check(model, cases, [tokens for tokens, _, _ in first[0]])
    assert all(0 < captured < replayed for _, captured, replayed in first[0])


@pytest.mark.slow
@pytest.mark.gpu
@on_gpu_alone
def test_a_rank_that_is_lost_while_a_graph_waits_for_it(tmp_path: Path) -> None:
    tiny_model("llama", vocab=VOCAB).save_pretrained(tmp_path)
    told = run_ranks(2, lose_in_replay, str(tmp_path), int(signal.SIGKILL), True, wait_for=(0,), backend=shared.NAME)
    assert isinstance(told[0], tuple), told[0]
    first, _, later, replayed = told[0]
    assert "rank 1 has ended" in first and later.startswith("RankLost: ") and replayed == 4
