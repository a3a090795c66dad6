"""Tests of what holds for one version of transformers: the one that the list of proven model classes was made with."""

from __future__ import annotations

import pytest
import transformers

from forerun.models import proven

needs_pinned_transformers = pytest.mark.skipif(
    transformers.__version__ != proven.TRANSFORMERS,
    reason=f"model types were judged with transformers {proven.TRANSFORMERS}, and this is {transformers.__version__}",
)
