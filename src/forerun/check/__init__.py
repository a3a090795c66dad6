"""Is the text exactly the target's? Tests anybody can run on their own pair of target and drafter."""

from forerun.check.finding import CheckResult, Outcome
from forerun.check.settings import CheckSettings, Pair
from forerun.check.suite import Report, check_pair

__all__ = ["CheckResult", "Outcome", "Pair", "CheckSettings", "Report", "check_pair"]
