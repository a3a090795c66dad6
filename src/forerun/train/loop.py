"""The training loop: batches in, steps, looks at held-out text, checkpoints, and a drafter folder at the end."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.errors import ForerunError, InvalidArgument, first_line
from forerun.train.batches import Batch, BatchOrder, Rollouts, collate, prefetched, split, step_seed
from forerun.train.init_student import InitialStudent, draft_tokens, init_student
from forerun.train.objective import Objective
from forerun.train.options import TrainOptions
from forerun.train.processes import Processes
from forerun.train.proxy import ProxyResult, measure
from forerun.train.run_folder import CHECKPOINT, load_checkpoint, save_checkpoint, write_drafter
from forerun.train.schedule import TrainSchedule
from forerun.train.shards import TrainingText
from forerun.train.train_log import TrainLog, draw_curves


class Diverged(ForerunError, ArithmeticError):
    """The loss is no number any more."""


class Data(Protocol):
    """Sequences by number, and what a run must know of them as a whole; `Shards` is one."""

    @property
    def num_sequences(self) -> int: ...
    @property
    def prompts(self) -> Sequence[int]: ...  # which prompt each sequence answers
    def sequence(self, i: int, /) -> TrainingText: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """What the caller hears every few steps."""

    step: int
    done: float  # 0 to 1
    loss: float
    acceptance: list[float]  # by estimate, on the batch of that step
    learning_rate: float
    tokens_per_second: float
    proxy: ProxyResult | None  # the newest


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run left behind."""

    folder: Path
    steps: int
    tokens: int
    seconds: float
    proxy: ProxyResult | None
    num_parameters: int  # trained ones


@dataclass(slots=True)
class _State:
    """Everything that changes, beside the weights and the optimiser's memory."""

    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0  # seconds of training, over all resumptions


def train_draft(
    target: PreTrainedModel,
    data: Data,
    options: TrainOptions,
    folder: Path,
    *,
    resume: bool = False,
    special_tokens: Iterable[int] = (),
    provenance: dict[str, Any] | None = None,
    save_dtype: torch.dtype = torch.bfloat16,
    clock: Callable[[], float] = time.monotonic,
    report: Callable[[TrainProgress], None] = lambda progress: None,
    processes: Processes | None = None,
) -> Trained:
    """Train a draft for `target` on `data` and leave it in `folder`. A killed run goes on with `resume`."""
    check_run(data, options, folder, resume)
    check_data(data, target)
    trainer = Trainer(target, data, options, folder, special_tokens, clock, processes or Processes())
    if resume:
        trainer.resume()
    with _fast_products(target.device):
        return trainer.run(report, provenance or {}, save_dtype)


def check_run(data: Data, options: TrainOptions, folder: Path, resume: bool) -> None:
    """What can be wrong with a run before its target is loaded: too little data, a folder that holds another run."""
    split(data.prompts, options.hold_out, options.seed)
    check_folder(folder, resume)


def check_folder(folder: Path, resume: bool) -> None:
    """Raise where a run cannot begin, or go on, in that folder."""
    exists = (folder / CHECKPOINT).exists()
    if resume and not exists:
        raise InvalidArgument(f"{str(folder)!r} has no {CHECKPOINT} to resume from; start the run without --resume")
    if exists and not resume:
        raise InvalidArgument(f"{str(folder)!r} holds a run already; use --resume to go on with it, or another folder")


class Trainer:
    """One run. Randomness is a function of seed and step, so a checkpoint needs no generator's state."""

    def __init__(
        self,
        target: PreTrainedModel,
        data: Data,
        options: TrainOptions,
        folder: Path,
        special_tokens: Iterable[int],
        clock: Callable[[], float],
        processes: Processes,
    ) -> None:
        self.target, self.data, self.options, self.folder = target.eval().requires_grad_(False), data, options, folder
        self.clock, self.processes = clock, processes
        self.state = _State()
        members, held = split(data.prompts, options.hold_out, options.seed)
        lengths, counts = survey(data, options.draft_vocabulary is not None)
        self.order = BatchOrder(lengths, members, options.batch_tokens, options.max_length, options.seed)
        self._held_out_order = BatchOrder(lengths, held, options.batch_tokens, options.max_length, 0) if held else None
        self.initial = init_student(target, options, draft_tokens(options, counts, special_tokens, data.vocab_size))
        self.objective = Objective(target, self.initial, options, _uses_stored_laws(data, options))
        self.optimizer: Any = _optimizer(self.initial, options, target.device)
        self.schedule = _schedule(options, self.order, processes.num)
        self._proxy: ProxyResult | None = None
        self._looked_at = -1

    def resume(self) -> None:
        """Go on from the folder's checkpoint, if it was made by the same options and data."""
        stored = load_checkpoint(self.folder)
        try:
            self._take_over(stored)
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            if isinstance(error, InvalidArgument):
                raise
            reason = first_line(error)
            raise InvalidArgument(
                f"{str(self.folder / CHECKPOINT)!r} does not fit this run ({reason}); delete it and train again"
            ) from error

    def _take_over(self, stored: dict[str, Any]) -> None:
        differing = self.options.differing(stored["options"])
        differing += ["data"] if stored["data"] != self.data.fingerprint else []
        if differing:
            raise InvalidArgument(
                f"{str(self.folder)!r} was begun with other {', '.join(differing)}; repeat those, or choose another "
                "folder"
            )
        self.initial.student.load_state_dict(stored["student"])
        self.optimizer.load_state_dict(stored["optimizer"])
        self.state = _State(int(stored["step"]), int(stored["tokens"]), float(stored["elapsed"]))

    def run(
        self, report: Callable[[TrainProgress], None], provenance: dict[str, Any], save_dtype: torch.dtype
    ) -> Trained:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = TrainLog(self.folder, self.state.step) if self.processes.is_main else None
        self.objective.module, self.optimizer = self.processes.wrap(self.initial.student, self.optimizer)
        self._train(log, report)
        self.processes.wait()
        if self.processes.is_main:
            if self._looked_at != self.state.step:
                self._proxy = self._look(log)
            self._save()
            write_drafter(self.folder, self.target, self.initial, self._provenance(provenance), save_dtype)
            draw_curves(self.folder)
        size = sum(weight.numel() for weight in self.initial.trainable)
        state = self.state
        return Trained(self.folder, state.step, state.tokens, state.elapsed, self._proxy, size)

    def _train(self, log: TrainLog | None, report: Callable[[TrainProgress], None]) -> None:
        options, state = self.options, self.state
        began = self.clock() - state.elapsed
        saved_at, logged = state.elapsed, (state.elapsed, state.tokens)
        losses: list[Tensor] = []
        for batch in prefetched(self._batches()):
            done = self.schedule.progress(state.step, state.elapsed)
            if done >= 1:
                break
            last = self.schedule.steps is not None and state.step + 1 >= self.schedule.steps
            logs = (state.step + 1) % options.log_every == 0 or state.step == 0 or last
            loss, overlap, rate = self._step(batch, logs)
            losses.append(loss)
            state.step += 1
            state.tokens += batch.num_tokens * self.processes.num
            if logs:
                mean = self._checked_mean(losses)
                losses = []
                state.elapsed = self.processes.agreed(self.clock() - began)
                speed = (state.tokens - logged[1]) / max(state.elapsed - logged[0], 1e-9)
                logged = (state.elapsed, state.tokens)
                done = self.schedule.progress(state.step, state.elapsed)
                progress = TrainProgress(state.step, done, mean, overlap.tolist(), rate, speed, self._proxy)
                if log is not None:
                    log.add(_row(progress, state))
                    report(progress)
            state.elapsed = self.processes.agreed(self.clock() - began)
            if self.processes.is_main and state.step % options.evaluate_every == 0:
                self._proxy = self._look(log)
            if self._is_time_to_save(saved_at):
                self._checked_mean(losses)
                saved_at = state.elapsed
                if self.processes.is_main:
                    self._save()
        self._checked_mean(losses)
        state.elapsed = self.processes.agreed(self.clock() - began)

    def _step(self, batch: Batch, logs: bool) -> tuple[Tensor, Tensor, float]:
        """One update. Nothing here waits for the device."""
        state, options = self.state, self.options
        rate = options.learning_rate * self.schedule.factor(self.schedule.progress(state.step + 1, state.elapsed))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        result = self.objective(batch.to(self.target.device), step_seed(options.seed, state.step), measure=logs)
        self.processes.backward(result.loss)
        torch.nn.utils.clip_grad_norm_(self.initial.trainable, options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result.loss.detach(), self._means(result.overlap, batch), rate

    def _means(self, overlap: Tensor, batch: Batch) -> Tensor:
        """Acceptance by estimate, over the positions where it means something: [S]."""
        if not overlap.numel():
            return overlap
        valid = self.objective.valid(batch)
        return self.processes.mean((overlap * valid).sum(dim=1) / valid.sum(dim=1).clamp(min=1))

    def _batches(self) -> Iterator[Batch]:
        """From the current step on; several processes take turns."""
        options = self.options
        rollouts = Rollouts(options.rollout_share, options.rollout_length)
        step = self.state.step
        for members in self.processes.share(self.order.from_step(step * self.processes.num)):
            texts = [self.data.sequence(i) for i in members]
            seed = step_seed(options.seed, step)
            yield collate(texts, options.max_length, rollouts, seed, self.objective.stored_laws)
            step += 1

    def _look(self, log: TrainLog | None) -> ProxyResult | None:
        self._looked_at = self.state.step
        if self._held_out_order is None:
            return None
        groups = [[self.data.sequence(i) for i in members] for members in self._held_out_order.epoch(0)]
        stored = self.objective.stored_laws
        batches = (collate(texts, self.options.max_length, Rollouts(), 0, stored) for texts in groups)
        proxy = measure(self.objective, batches)
        if log is not None:
            log.add({"step": self.state.step, "proxy": asdict(proxy)})
        return proxy

    def _checked_mean(self, losses: list[Tensor]) -> float:
        """The only place that reads losses from the device; here a run that went wrong ends."""
        if not losses:
            return math.nan
        mean = float(self.processes.mean(torch.stack(losses).mean()))
        if not math.isfinite(mean):
            where = f"the checkpoint in {str(self.folder)!r}" if (self.folder / CHECKPOINT).exists() else "nothing yet"
            raise Diverged(
                f"the loss became {mean} by step {self.state.step}; saved so far and good: {where}. "
                "Lower --learning-rate (or raise --warm-up), and check the data"
            )
        return mean

    def _is_time_to_save(self, saved_at: float) -> bool:
        every = self.options.checkpoint_every
        by_steps = every is not None and self.state.step % every == 0
        return by_steps or self.state.elapsed - saved_at >= 60 * self.options.checkpoint_minutes

    def _save(self) -> None:
        save_checkpoint(
            self.folder,
            {
                "options": self.options.as_dict(),
                "data": self.data.fingerprint,
                "step": self.state.step,
                "tokens": self.state.tokens,
                "elapsed": self.state.elapsed,
                "student": self.initial.student.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            },
        )

    def _provenance(self, more: dict[str, Any]) -> dict[str, Any]:
        state = self.state
        done = {"steps": state.step, "tokens": state.tokens, "seconds": round(state.elapsed, 1)}
        proxy = None if self._proxy is None else asdict(self._proxy)
        return {**more, "options": self.options.as_dict(), "data": self.data.fingerprint, **done, "proxy": proxy}


def draft_shape(options: TrainOptions, data: Data, special_tokens: Iterable[int]) -> Tensor | None:
    """The ids the draft will be able to say, [Vd]; None for all."""
    counts = survey(data, True)[1] if options.draft_vocabulary is not None else Counter()
    return draft_tokens(options, counts, special_tokens, data.vocab_size)


def survey(data: Data, count: bool) -> tuple[list[int], Counter[int]]:
    """The length of every sequence and, if asked for, how often each token was written by the target."""
    lengths: list[int] = []
    counts: Counter[int] = Counter()
    written: list[Tensor] = []
    for i in range(data.num_sequences):
        text = data.sequence(i)
        lengths.append(len(text.tokens))
        if count:
            written.append(text.tokens[text.prompt_length :])
    if written:
        tokens, times = torch.cat(written).unique(return_counts=True)
        counts.update(dict(zip(tokens.tolist(), times.tolist(), strict=True)))
    return lengths, counts


def check_data(data: Data, target: PreTrainedModel) -> None:
    size = target.get_output_embeddings().weight.shape[0]
    if data.vocab_size != size:
        raise InvalidArgument(
            f"the data was written with a vocabulary of {data.vocab_size} tokens, the target has {size}; "
            "use the target that wrote it, or write it again"
        )


def _uses_stored_laws(data: Data, options: TrainOptions) -> bool:
    """Stored laws spare the target's run, but know neither its hidden states nor texts that were drafted later."""
    return (
        options.kind == "causal" and data.top_k > 0 and not options.rollout_share and not options.mixture.needs_features
    )


def _optimizer(initial: InitialStudent, options: TrainOptions, device: torch.device) -> torch.optim.AdamW:
    decayed = [weight for weight in initial.trainable if weight.dim() > 1]
    plain = [weight for weight in initial.trainable if weight.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")


def _schedule(options: TrainOptions, order: BatchOrder, processes: int) -> TrainSchedule:
    """Steps as asked for, or those of the epochs; one epoch where nothing at all was said."""
    epochs = options.epochs
    if options.steps is None and epochs is None and options.max_minutes is None:
        epochs = 1.0
    enough = None if options.steps is None else options.steps * processes
    by_epochs = None if epochs is None else max(1, order.num_steps(epochs, enough) // processes)
    limits = [limit for limit in (options.steps, by_epochs) if limit is not None]
    seconds = None if options.max_minutes is None else 60 * options.max_minutes
    return TrainSchedule(min(limits, default=None), seconds, options.warm_up)


def _row(progress: TrainProgress, state: _State) -> dict[str, Any]:
    return {
        "step": progress.step,
        "loss": progress.loss,
        "acceptance": [round(value, 5) for value in progress.acceptance],
        "learning_rate": progress.learning_rate,
        "tokens": state.tokens,
        "seconds": round(state.elapsed, 2),
        "tokens_per_second": round(progress.tokens_per_second, 1),
    }


@contextmanager
def _fast_products(device: torch.device) -> Iterator[None]:
    """float32 products of the heads on a GPU's tensor cores, at the precision of TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
