"""Is the text exactly the target's? Tests anybody can run on their own pair of target and drafter."""

from forerun.check.base import CheckResult, CheckSettings, Outcome, Pair
from forerun.check.suite import Report, check_pair

__all__ = ["CheckResult", "Outcome", "Pair", "CheckSettings", "Report", "check_pair"]
