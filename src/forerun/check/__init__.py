"""Is the text exactly the target's? Tests anybody can run on their own pair of target and drafter."""

from forerun.check.finding import Finding, Outcome
from forerun.check.plan import Pair, Plan
from forerun.check.suite import Report, check_pair

__all__ = ["Finding", "Outcome", "Pair", "Plan", "Report", "check_pair"]
