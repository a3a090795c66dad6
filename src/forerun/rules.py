"""Rules by which drafts are verified, and how to name one: the lossless ones are `Rule`, the others `forerun.lossy`."""

from __future__ import annotations

from difflib import get_close_matches

from forerun import lossy
from forerun.arguments import refuse
from forerun.errors import InvalidArgument
from forerun.lossy import LossyRule
from forerun.types import Rule

__all__ = ["AnyRule", "Rule", "parse", "warning"]

AnyRule = Rule | LossyRule


def parse(rule: AnyRule | str) -> AnyRule:
    """A rule from its text, `token` or `lenient:0.5`. A rule stays what it is."""
    if isinstance(rule, Rule | LossyRule):
        return rule
    if not isinstance(rule, str):
        refuse("rule", rule, "give a Rule, a rule of forerun.lossy, or the text of one")
    name, colon, rest = rule.partition(":")
    if name in lossy.RULES:
        return lossy.parse(rule)
    if name in list(Rule) and not colon:
        return Rule(name)
    if name in list(Rule):
        raise InvalidArgument(f"rule={rule!r}: {name!r} takes no values; leave out {':' + rest!r}")
    near = get_close_matches(name, [*Rule, *lossy.RULES], n=1)
    hint = f"did you mean {str(near[0])!r}? " if near else ""
    raise InvalidArgument(
        f"rule={rule!r}: {hint}choose one of {', '.join(Rule)} (lossless), or a lossy one: {lossy.EXAMPLES}"
    )


def warning(rule: AnyRule) -> str | None:
    """None for a lossless rule; else the sentence that says that the text does not follow the target."""
    return rule.warning if isinstance(rule, LossyRule) else None
