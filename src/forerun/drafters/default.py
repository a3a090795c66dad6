"""The drafter for whoever does not name one."""

from __future__ import annotations

from transformers import PreTrainedModel

from forerun import drafts
from forerun.drafters.chain import Chain
from forerun.drafters.from_folder import from_folder
from forerun.drafters.prompt_lookup import PromptLookup
from forerun.types import Drafter

MIN_NGRAM = 2  # with a trained drafter behind it, prompt lookup only speaks where it is fairly sure


def default_drafter(target: PreTrainedModel) -> Drafter:
    """Prompt lookup; where a trained drafter for this target comes with Forerun, that one behind it.

    Speech is the exception: a transcript repeats itself too seldom for lookup to be worth its rounds.
    """
    folder = drafts.for_target(target)
    if folder is None:
        return PromptLookup()
    trained = from_folder(folder)
    return trained if folder == drafts.WHISPER else behind_lookup(trained)


def behind_lookup(drafter: Drafter) -> Chain:
    """Copies where the text repeats itself, `drafter` elsewhere."""
    return Chain(PromptLookup(min_ngram=MIN_NGRAM), drafter)
