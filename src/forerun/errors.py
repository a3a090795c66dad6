"""Every error a user can meet. Each message says what was wrong, the value, and what to do."""

from __future__ import annotations


class ForerunError(Exception):
    """Base of all errors raised on purpose by Forerun."""


class InvalidArgument(ForerunError, ValueError):
    """A parameter has a value that cannot be honoured."""


class UnknownArgument(ForerunError, TypeError):
    """A keyword nobody knows; the nearest known one is named."""


class UnsupportedModel(ForerunError, ValueError):
    """A model whose state cannot be cut back, or whose attention cannot be made ragged."""


class TokenizerMismatch(ForerunError, ValueError):
    """Target and drafter do not speak the same tokens."""


class ModelNotFound(ForerunError, FileNotFoundError):
    """No model under that name, folder or file; the message names the command that helps."""


class UnreadableAudio(ForerunError, ValueError):
    """A sound file that cannot be transcribed; the message begins with its name."""


class NonFiniteLogits(ForerunError, ArithmeticError):
    """A row's logits are NaN or infinite: the target's own, or an option made them so; the message says which."""


class OutOfMemory(ForerunError, MemoryError):
    """Memory ran out again for a row that ran alone; the message says what helps, and the cause is what was raised.

    `handle` is what the engine's `add` gave for it: others can go on once it is aborted.
    """

    def __init__(self, message: str, handle: int | None = None) -> None:
        super().__init__(message)
        self.handle = handle


class EngineClosed(ForerunError, RuntimeError):
    """A request for an `AsyncEngine` whose thread has ended, or is about to."""


class RankLost(ForerunError, RuntimeError):
    """A process that holds a part of the target has ended, hangs or is out of step: nothing can be decoded any more."""


class ReplicasLost(ForerunError, RuntimeError):
    """The cluster on which copies of a server run does not answer any more."""


class LayersNotBuilt(ForerunError, RuntimeError):
    """A kernel of fused layers could not be compiled: an engine goes on by the model's own modules."""


class ServerError(ForerunError, RuntimeError):
    """A server over HTTP that cannot be reached, or that answers with an error; the message holds its words.

    `status` is its HTTP status, None where there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ForerunWarning(UserWarning):
    """Something was survived that the user should hear of once."""


class FaultWarning(ForerunWarning):
    """What was survived is a fault of a drafter or of what else proposes and plans, not a loss of speed alone."""


def first_line(error: BaseException) -> str:
    """What others' errors say, without the advice that follows; the error's kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def kind_and_line(error: BaseException) -> str:
    """The same with the kind in front, for errors that were not made to be read."""
    return f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__
