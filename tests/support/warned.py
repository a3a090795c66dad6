"""What Forerun warned of during a test: failing drafters end in a warning, not in an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from forerun.errors import ForerunWarning


def forerun_warnings(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """The messages of Forerun's own warnings among those that `recwarn` or `catch_warnings` recorded."""
    return [str(warning.message) for warning in caught if issubclass(warning.category, ForerunWarning)]
