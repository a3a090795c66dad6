"""The loop: admit, run, commit, observe, retire, for all rows at once."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Thread, current_thread
from typing import Any
from weakref import ReferenceType

import torch

from forerun.arguments import integer
from forerun.cache.base import CacheFull
from forerun.drafters.base import Drafter
from forerun.engine.adjust import adjuster
from forerun.engine.bans import bans_of
from forerun.engine.commit import VerifiedRound, outcome_of
from forerun.engine.device.runner import Runner
from forerun.engine.device.shapes import SIZES, bucket
from forerun.engine.device.warm_up import Report, WarmUp, prompts_up_to, record
from forerun.engine.drafting import Drafting
from forerun.engine.faults import Faults
from forerun.engine.host_round import judge_prompts
from forerun.engine.launching import Launching
from forerun.engine.memory import MemoryFull, is_out_of_memory
from forerun.engine.pair import Pair
from forerun.engine.reading import JOIN_TOKENS, PROMPT_TOKENS, PromptReader
from forerun.engine.request import FinishReason, Request, check_fits
from forerun.engine.room import Room
from forerun.engine.roster import Roster
from forerun.engine.rounds import Rounds
from forerun.engine.row import Progress, Row, RowResult
from forerun.engine.stats import Seconds
from forerun.engine.stops import StopRule
from forerun.engine.turnstile import Turnstile
from forerun.errors import InvalidArgument, LayersNotBuilt
from forerun.kernels import on_device
from forerun.kernels.compiling import watched_variants
from forerun.math.penalties import check_bias
from forerun.models.autocast import refuse_autocast
from forerun.models.bodies import choose
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.policy.base import Policy, wrapped
from forerun.policy.heuristics import Constant
from forerun.rules import AnyRule, warning
from forerun.types import BatchView, Rule

# What a warm-up counts with where neither model nor caller says; and the longest draft, where the policy's is fixed.
MOST_CONTEXT, USUAL_DRAFT, LONGEST_DRAFT = 8192, 8, 128
# A warm-up's own requests: how many tokens each gains, and how many of them are read in one step.
WARM_UP_TOKENS, READING_TOGETHER = 4, 3


class Engine:
    """Rows in flight behind one target: `add` requests, `step` until `is_idle`, collect `take_results`.

    One thread steps; any thread may add, abort and take results meanwhile, and waits for the step under way.

    A step that raises has lost nothing: rows are where they were, or where a round that was over has brought them, and
    the next step says what this one would have said. Where memory runs out, fewer rows run at once from then on, and
    `OutOfMemory` is raised where it runs out again for one that is alone.

    `keep_rows` finished rows keep their keys, so that a request that begins with the same tokens (the next turn of a
    chat) starts from there; where keys lie in blocks, beginnings are kept for as long as there is room. A row waits
    until its keys fit into the cache, and the newest of the running rows waits again when they run out of room. No more
    than `max_rows` run at once; None leaves that to the cache.

    Up to `join_tokens` tokens of new prompts are taken along by the round they arrive in; the others are encoded before
    it, which is better where a long prompt would be padding for hundreds of other rows.

    Beside rows that decode, a step encodes at most `prompt_tokens` tokens of newcomers' prompts, those that its round
    takes along included, so that nobody waits for the whole prompt of another; None chooses by the device. Where nobody
    decodes, a step encodes four times as many, and as much as one pass can hold of a prompt that is alone; it may then
    have nothing to tell yet. Whoever needs least is read first. With `begins_together` no row is expected to come while
    others are in flight, as in a call of `generate`: where nobody decodes, all prompts are read in one step.

    With `compile`, rounds on a CUDA device are recorded as graphs where they can be (`engine.device`). With `ahead`,
    the next of them is then sent off before a step returns, so its draft lengths are asked for a little early. There
    the pass that ends a prompt also gives the first token (`first_from_prompt`): a step of its own, without a draft.
    `engine.drafter` is a clone of the drafter that was given, so that several engines may be given the same.
    A drafter or a policy that fails costs its draft and a warning, keys that cannot be given back cost all keys and a
    warning; `first_fault` keeps the traceback, and with `strict` the error is raised instead.

    A model that was changed (adapters, modules, weights, dtype, device) while no row was in flight is noticed by the
    next `add`; while rows are in flight it must stay as it is.
    What `examine` raises of a changed target refuses it.
    """

    def __init__(
        self,
        target: Scorer,
        drafter: Drafter | None,
        policy: Policy,
        *,
        rule: AnyRule = Rule.TOKEN,
        tokenizer: Any = None,
        keep_rows: int = 0,
        join_tokens: int = JOIN_TOKENS,
        prompt_tokens: int | None = None,
        max_rows: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        compile: bool = True,
        ahead: bool = True,
        strict: bool = False,
        examine: Callable[[Scorer], object] | None = None,
    ) -> None:
        self.faults = Faults(strict)
        self.pair = Pair(target, rule, self.faults, clock, compile=compile)
        self.target, self.rule, self.tokenizer = target, rule, tokenizer
        self.join_tokens = integer("join_tokens", join_tokens, 0)
        self.roster = Roster(self.pair, integer("keep_rows", keep_rows, 0))
        self.prefixes = self.roster.prefixes
        self.max_rows = max_rows if max_rows is None else integer("max_rows", max_rows, 1)
        usual = PROMPT_TOKENS.get(target.device.type, PROMPT_TOKENS["cpu"])
        self.prompt_tokens = usual if prompt_tokens is None else integer("prompt_tokens", prompt_tokens, 1)
        self.seconds = Seconds()
        self.run_by: Thread | None = None  # an AsyncEngine's: only this thread adds and steps
        self.call: ReferenceType[object] | None = None  # the call of `generate` under way; one nobody holds has ended
        # Adds what has come, where requests come while others decode; called within steps, too. None: none come.
        self.arrivals: Callable[[], None] | None = None
        self.begins_together = False
        self._turnstile = Turnstile()
        self._examine = examine
        self._unsaid: list[tuple[Row, Progress]] = []  # what rows have gained and no step has returned
        self._owes_round = False  # whether the others go on before more is admitted
        self._handles = itertools.count()
        self._room = Room(self.pair, self.roster)
        self.admission, self.row_limit = self._room.admission, self._room.row_limit
        self._rounds = Rounds(self.pair, self.roster)
        self._launching = Launching(self.pair, self.roster, self._rounds, ahead=ahead)
        self._reader = PromptReader(self.pair, self.roster, self.prompt_tokens)
        self._has_read = False  # whether the step under way has read prompts
        self.pair.connect(drafter, policy, tokenizer)

    @property
    def is_idle(self) -> bool:
        """Whether no row is in flight, and no step has something left to say."""
        return self.roster.is_empty and not self._unsaid

    @property
    def num_waiting(self) -> int:
        """Rows that wait for room, for the first time or again."""
        return len(self.roster.waiting)

    @property
    def num_preempted(self) -> int:
        """How often a running row had to wait again because keys or memory ran out."""
        return self.roster.num_preempted

    @property
    def num_prefix_queries(self) -> int:
        """Tokens of prompts that were looked for among keys which other rows had made."""
        return self.roster.num_prefix_queries

    @property
    def num_prefix_hits(self) -> int:
        """Those of them that were found there."""
        return self.roster.num_prefix_hits

    @property
    def num_recordings(self) -> int:
        """Pieces of work that were recorded as CUDA graphs so far."""
        passes = self.drafting.passes
        runners = (self.runner, None if passes is None else passes.runner)
        return sum(runner.recorder.num_recordings for runner in runners if runner is not None)

    @property
    def clock(self) -> Callable[[], float]:
        return self.pair.clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        self.pair.clock = clock

    @property
    def drafting(self) -> Drafting:
        return self.pair.drafting

    @property
    def runner(self) -> Runner | None:
        return self.pair.runner

    @property
    def first_from_prompt(self) -> bool:
        return self.pair.first_from_prompt

    @property
    def drafter(self) -> Drafter | None:
        """The clone that drafts here."""
        drafter = self.drafting.drafter
        return None if drafter is None else drafter.unwrapped

    @property
    def policy(self) -> Policy:
        policy: Policy = self.drafting.policy.unwrapped
        return policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        """Another one from the next round on."""
        self.drafting.policy = wrapped(policy)

    @property
    def lossy(self) -> str | None:
        """None where text follows the target's law; else a sentence that says why it does not."""
        return warning(self.rule)

    @property
    def first_fault(self) -> str | None:
        """The traceback of the first error that decoding went on behind (drafter, policy, cache, memory), or None."""
        return self.faults.first

    def add(self, request: Request) -> int:
        """Queue a request; it joins the batch at the next step. Returns its handle for `abort`, which no other has."""
        self.check_caller()
        refuse_autocast(self.target.model, self.target.device)
        with self._turnstile.calling():
            self._look_again()
            row = self._row(request)
            self.roster.waiting.append(row)
            return row.handle

    def _row(self, request: Request) -> Row:
        budget, output = self._budget(request), list[int]()
        if request.prediction and not self.drafting.takes_predictions:
            raise InvalidArgument("prediction: the drafter takes none; give Chain(PredictedText(), drafter)")
        self.admission.check(self.pair.caches, len(request.prompt), budget, request.source)
        stop = StopRule(request, budget, self.tokenizer)
        adjust = adjuster(request, output, self.target.kernels)
        row = Row(next(self._handles), request, list(request.prompt), output, stop, adjust, bans_of(request))
        row.begins_plain, row.added = self.first_from_prompt, self.clock()
        return row

    def _budget(self, request: Request) -> int:
        """New tokens a row may have: what was asked for, or what the model's context leaves."""
        if max(request.prompt) >= self.target.vocab_size or min(request.prompt) < 0:
            bad = next(t for t in request.prompt if not 0 <= t < self.target.vocab_size)
            raise InvalidArgument(f"prompt token {bad} is outside the target's vocabulary of {self.target.vocab_size}")
        check_bias(request.params.logit_bias, self.target.vocab_size)
        if request.stop_strings and not hasattr(self.tokenizer, "decode"):
            lack = "pass tokenizer= as well" if self.tokenizer is None else "the one given has no method decode"
            raise InvalidArgument(f"stop_strings need the tokenizer: {lack}")
        self.target.check_source(request.source)
        limit = self.target.context_length
        if limit is None:
            return request.max_new_tokens
        check_fits(request.prompt, limit)
        return min(request.max_new_tokens, limit - len(request.prompt))

    def notice_changes(self) -> None:
        """What `add` does before a first row: go on with models that were changed as they are now."""
        with self._turnstile.calling():
            if self.run_by in (None, current_thread()):
                self._look_again()

    def _look_again(self) -> None:
        """Before the first row of a call: are target and draft models still those that everything here is made from?

        What was made from other modules or weights is made anew, and no key of theirs is kept. Weights whose values
        alone have changed are read where they lie by whatever there is, but kept keys were made by the old ones.
        """
        if self.roster.is_empty:
            with on_device(self.target.device):
                if self.pair.has_changed:
                    self._make_anew()
                self.roster.drop_old_weights_keys()

    def _make_anew(self) -> None:
        """All that is made from the models, as they are now; rows begin again from their texts."""
        self.pair.is_stale = True  # until all of this has succeeded: a model that is refused is refused again
        self.roster.start_over()
        self.pair.renew(self.tokenizer, self._examine)

    def abort(self, *handles: int) -> None:
        """End rows with what they have, which their results tell; one that has ended stays as it is. Within a step (a
        tokenizer or a processor may call this): when the step is over."""
        with self._turnstile.calling():
            self.roster.aborted.update(handles)
            if self._turnstile.is_stepping:
                return
            try:
                self._say(handles)
                self._retire()
            except BaseException:
                self.roster.start_over()
                raise

    def postpone(self, seconds: float) -> None:
        """Move the deadlines of all rows: time spent on compiling is not decoding."""
        for row in self.roster.rows:
            if row.request.deadline is not None:
                row.request = replace(row.request, deadline=row.request.deadline + seconds)

    def take_results(self) -> list[RowResult]:
        """Finished sequences since the last call."""
        return list(self.take_results_by_handle().values())

    def take_results_by_handle(self) -> dict[int, RowResult]:
        """The same by the handles that `add` gave."""
        with self._turnstile.calling():
            results, self.roster.results = self.roster.results, {}
        return results

    def check_caller(self) -> None:
        """Raise where another thread adds and steps."""
        if self.run_by not in (None, current_thread()):
            raise InvalidArgument("an AsyncEngine runs this engine: give requests to its submit(), which steps as well")

    def step(self) -> list[Progress]:
        """One round for every row: admit, run, commit, observe, retire.

        Rows that need the host beside rows whose rounds the device runs by itself may have to wait for a later step.
        """
        self.check_caller()
        refuse_autocast(self.target.model, self.target.device)
        with self._turnstile.stepping(), on_device(self.target.device):
            return self._step()

    @torch.inference_mode()
    def _step(self) -> list[Progress]:
        while True:
            try:
                self._do_step()
                if self.row_limit.note_step():
                    self.roster.is_blocked = False
                return self._say()
            except BaseException as error:  # anywhere: a user's Ctrl-C, a tokenizer or a model that fails, no memory
                running = list(self.roster.running.values())
                self.roster.start_over()
                if isinstance(error, LayersNotBuilt) and self.target.counterparts is None:
                    self._go_on_by_modules(error)
                    return []
                if not (is_out_of_memory(error) and self.pair.survives_memory):
                    raise
                self._room.go_on_with_fewer(error, running)
            self._room.free_unused()  # here: until an error has been dealt with, it holds what its steps had made

    def _go_on_by_modules(self, error: LayersNotBuilt) -> None:
        """Where fused layers could not be compiled, on this machine or for this shape: rows go on from their texts."""
        self.faults.report(self.target.body, error, "the model's own modules run from now on, slower")
        choose.refuse(self.target.model)
        with torch.inference_mode(False):  # as between two calls
            self._make_anew()

    def _do_step(self) -> None:
        self._has_read = False
        if not self._unsaid:  # or a step was interrupted, and what it had gained comes first
            is_pending = self.runner is not None and self.runner.has_pending
            if not (is_pending or self.roster.unjudged or (self._owes_round and self.roster.decoding)):
                self._admit()
            self._expire()
            if self.roster.unjudged and not is_pending:
                self._judge_prompts()
            else:
                self._owes_round = False
                self._round()
        self._retire_behind_round()

    def _admit(self) -> None:
        """Take waiting rows in, in their order, as long as their keys fit beside those of the running ones."""
        self.roster.let_go()
        if self.roster.waiting and not self.roster.running:
            self.pair.evaluate()
        while self.roster.running and not self._room.can_run() and len(self.roster.running) > 1:
            self.roster.preempt_newest()
        while True:
            try:
                return self._take_in_waiting()
            except MemoryFull as error:
                if not self._room.preempt_for_memory(error):
                    raise
            self._room.free_unused()

    def _take_in_waiting(self) -> None:
        """Waiting rows in their order, as long as they fit; what they have to read is read, as far as there is room."""
        started = self.clock()
        self.admission.recount()  # an error may have come between
        while self.roster.waiting and self._room.can_admit(self.roster.waiting[0], self.max_rows):
            row = self.roster.waiting[0]
            self.roster.take_in(row, started)
            self.admission.count(row)
            if len(self.roster.running) == 1:
                self._room.can_run()  # or kept rows go
        self.admission.recount()
        self.roster.is_blocked = bool(self.roster.waiting)
        self._encode()
        if self.roster.reading:
            self._read_prompts()
            self.seconds.prefill += self.clock() - started

    def _encode(self) -> None:
        """Sources of new rows; one that the encoder cannot read ends its own row alone."""
        self.target.encode()
        for row in self.roster.running.values():
            if row.is_reading and (reason := self.target.why_unread(row.number)) is not None:
                row.finish_reason, row.error = FinishReason.ERROR, reason

    def _read_prompts(self) -> None:
        self._has_read = True
        together = self.begins_together or (self.call is not None and self.call() is not None)
        self._reader.read(self.prompt_tokens, self.join_tokens, together=together)

    def _expire(self) -> None:
        now = self.clock()
        for row in self.roster.rows:
            if row.request.deadline is not None and now >= row.request.deadline:
                row.finish_reason = FinishReason.TIME
        self._retire()

    def _judge_prompts(self) -> None:
        """First tokens for rows whose prompts have been read: a step of their own, so that they are told at once.

        The next round of all rows is sent off behind it, or else is the next step: newcomers that come one after the
        other keep nobody from going on.
        """
        self.roster.is_plain = False
        rows, self._owes_round = self.roster.unjudged, True
        logits = torch.stack([row.first_logits for row in rows if row.first_logits is not None])
        done = judge_prompts(rows, logits, self.pair)
        self._commit_or_undo(done)
        for row in rows:
            row.is_reading, row.first_logits = False, None
        self._account(done.spent)
        self._launching.send_off_behind_prompts()

    def _round(self) -> None:
        """One round of all rows that decode. Where their keys run out of room, the newest row waits for the others."""
        self.roster.is_plain = False
        while batch := self._batch():
            is_short = self._has_read = False  # where a try of this round fails, the next one reads what it needs
            try:
                for done in self._run(batch):
                    gained = self._commit_or_undo(done)
                    self.admission.observe(bucket(max(map(len, done.blocks), default=1)))
                    self.drafting.observe(outcome_of(done, gained))
                    self._launching.send_off_behind(done)
                    self._account(done.spent)  # last: what was recorded for the next round took this one's time
            except CacheFull as error:
                is_short = isinstance(error, MemoryFull)
                if not (self._room.preempt_for_memory(error) if is_short else self._room.preempt_for_keys()):
                    raise
                if not is_short and not self._unsaid:
                    continue
            if is_short:
                self._room.free_unused()
                continue
            places = {row.handle: place for place, row in enumerate(batch)}
            self._unsaid.sort(key=lambda entry: places.get(entry[0].handle, len(places)))
            return

    def _batch(self) -> list[Row]:
        """Rows that decode in the coming round: all whose prompts have been read."""
        decoding = self.roster.decoding
        if not decoding and self.roster.running and not self._has_read:  # those that decoded have ended meanwhile
            self._read_prompts()
            decoding = self.roster.decoding
        return self.roster.in_order(decoding)

    def _run(self, batch: list[Row]) -> Iterator[VerifiedRound]:
        """Draft, score and verify: first the rows that the device can run by itself, then the others step by step.

        What the device has done is committed before the others' round begins, and the next one is on its way.
        """
        on_device: set[int] = set()
        self._reader.room = self.prompt_tokens
        if self._launching.send_off(batch, self.arrivals):
            assert self.runner is not None
            self._admit_behind(self.runner)
            done = self.runner.collect()
            on_device = {row.handle for row in done.rows}
            self._rounds.share.add_device_round(done.seconds.decoding)
            yield done
        rest = [row for row in batch if row.handle not in on_device]
        if not on_device and self.runner is not None:
            self.runner.release_table()
        may_join = self.runner is not None and any(map(self.runner.may_take, rest))
        if rest and (not on_device or may_join or self._rounds.share.is_due):
            by_host = self._rounds.run_on_host(rest, beside_device=bool(on_device))
            if by_host is not None:
                yield by_host

    def _admit_behind(self, runner: Runner) -> None:
        """Newcomers' prompts follow the round under way at once, so that the device waits for no host in between.

        Where rows lie in blocks: there a new row moves no other, and no entry of the round's table writes to its keys.
        A round may hold more memory than admission has counted, because it is recorded for longer drafts. What then
        finds no room goes on being read: nobody can be sent away while a round is under way, but in the next step.
        """
        has_newcomers = self.roster.waiting or self.roster.reading
        if has_newcomers and runner.has_pending and not (self.target.cache.reads_in_place or self.target.observers):
            with suppress(CacheFull):
                self._take_in_waiting()

    def _commit_or_undo(self, done: VerifiedRound) -> list[Progress]:
        """Rows gain their tokens, or are where they were before. Once they have them they keep them.

        A round that the policy has seen must not be done again: its lengths would then be chosen by someone who knows
        what the same random numbers came to.
        """
        marks, said = [row.mark() for row in done.rows], len(self._unsaid)
        try:
            gained = self._rounds.commit(done)
            self._unsaid += zip(done.rows, gained, strict=True)
        except BaseException:
            del self._unsaid[said:]
            for row, mark in zip(done.rows, marks, strict=True):
                row.go_back(mark)
            raise
        return gained

    def _account(self, seconds: Seconds) -> None:
        self.seconds += seconds
        if self.runner is not None:
            self.seconds.capture = self.runner.recorder.seconds + self.drafting.capture_seconds

    def _retire_behind_round(self) -> None:
        """Keys that cannot be given back must not cost anybody the tokens that this step has gained."""
        try:
            self._retire()
        except Exception as error:
            self.faults.report(self.target.cache, error, "all keys are dropped, and rows go on from their texts")
            self.roster.start_over()

    def _retire(self) -> None:
        self.roster.retire()
        if self.roster.is_empty:
            self.row_limit.lift()

    def _say(self, handles: Collection[int] | None = None) -> list[Progress]:
        """What rows have gained, or some of them, counted into their statistics."""
        chosen = None if handles is None else frozenset(handles)
        entries = [entry for entry in self._unsaid if chosen is None or entry[0].handle in chosen]
        for row, _ in entries:
            row.count()
        self._unsaid = [] if chosen is None else [entry for entry in self._unsaid if entry[0].handle not in chosen]
        return [gained for _, gained in entries]

    def warm_up(
        self, rows: int = 64, draft: int | None = None, context: int | None = None, report: Report | None = None
    ) -> WarmUp:
        """Compile kernels, take the memory for keys, and record every round that up to `rows` rows can meet.

        Drafts have up to `draft` tokens, by default 8 or the length that the policy is fixed to, and from now on the
        policy is offered no longer ones. Texts have up to `context`, by default the model's. Requests within these
        bounds record nothing any more, whatever their parameters; nor do their prompts, which are read in passes that
        are not recorded, have a kernel compiled: prompts up to a few passes long are read for that. What a row does
        within the last few hundred keys of a longer context may still compile one. `report` is told how many rounds
        have been recorded and how many there are.
        """
        rows = integer("rows", rows, 1)
        draft, context = (
            value if value is None else integer(name, value, least)
            for name, value, least in (("draft", draft, 0), ("context", context, 1))
        )
        if not self.is_idle:
            raise InvalidArgument("warm_up while requests are under way: call it before the first, or when idle")
        if isinstance(self.target, Seq2SeqScorer):
            raise InvalidArgument("warm_up of a target that reads a source: its rounds are recorded as they come")
        started, limit = self.clock(), self.target.context_length
        longest = min(context or limit or MOST_CONTEXT, limit or MOST_CONTEXT)
        lengths = self._lengths_to_come(draft)
        with watched_variants() as variants, self.pair.evaluation():
            self._serve_warm_up([2], lengths, 1)
            with self._turnstile.stepping(), on_device(self.target.device), torch.inference_mode():
                count, remark = record(self.pair, rows, lengths, longest, self._row, report)
            if self.runner is not None:
                self._serve_warm_up(prompts_up_to(longest), lengths, rows)
        self._account(Seconds())
        self.roster.num_prefix_queries = self.roster.num_prefix_hits = 0
        return WarmUp(self.clock() - started, count, "" if count else remark, variants.num_compiled)

    def _lengths_to_come(self, most: int | None) -> list[int]:
        """Of drafts up to `most` tokens. Where rounds are recorded, the policy is offered no others from now on."""
        if self.drafting.drafter is None:
            return []
        if self.drafting.is_fixed:
            lengths = list(self.drafting.lengths(BatchView((0,), (0,), (LONGEST_DRAFT if most is None else most,))))
        else:
            most = USUAL_DRAFT if most is None else most
            lengths = [size for size in SIZES if size <= most]
        if self.runner is not None:
            self._rounds.most_drafted = max(lengths, default=0)
        return lengths

    def _serve_warm_up(self, prompts: Sequence[int], lengths: Sequence[int], rows: int) -> None:
        """Decode a few tokens behind prompts of these lengths: kernels are compiled, the memory for keys is taken.

        Each prompt is read alone and then, beside up to `rows` rows that decode, with others; all begin differently, or
        they would share keys instead of being read. The policy learns nothing from it.
        """
        policy, self.policy = self.policy, Constant(min(lengths, default=0))
        limits = (cache.num_tokens for cache in self.pair.caches)
        room = min((limit for limit in limits if limit is not None), default=sys.maxsize)
        fitting = [length for length in prompts if length + WARM_UP_TOKENS <= room]
        handles: list[int] = []
        try:
            for number, length in enumerate(fitting):
                handles.append(self.add(self._warm_up_request(number, length)))
                self._finish()
            for number, length in enumerate(fitting):
                while len(self.roster.rows) >= rows:
                    self.step()
                handles.append(self.add(self._warm_up_request(number, length)))
                if number % READING_TOGETHER == 0:
                    self.step()
            self._finish()
            self.roster.start_over()  # nobody begins like these
        finally:
            self.policy = policy
            with suppress(Exception):  # one error is on its way already
                self.abort(*handles)  # after a Ctrl-C nobody would step for these rows
            for handle in handles:
                self.roster.results.pop(handle, None)

    def _warm_up_request(self, number: int, length: int) -> Request:
        first = number % self.target.vocab_size
        limit = self.target.context_length or sys.maxsize
        return Request(prompt=(first, *[0] * (length - 1)), max_new_tokens=min(WARM_UP_TOKENS, limit - length))

    def _finish(self) -> None:
        while not self.is_idle:
            self.step()
