"""Tests say the same whatever their caller has told Forerun to do."""

from __future__ import annotations

import os

from support.environment import settle


def test_the_callers_settings_are_left_out() -> None:
    environment = {
        "FORERUN_KERNELS": "auto", "FORERUN_SELF_CHECK": "on", "NUMBA_NUM_THREADS": "16", "FORERUN_API_KEY": "sesame",
        "FORERUN_RANK_TIMEOUT": "1", "FORERUN_CACHE": "there", "HOME": "here",
    }  # fmt: skip
    settle(environment)
    own = {"FORERUN_KERNELS": "off", "FORERUN_SELF_CHECK": "off", "NUMBA_NUM_THREADS": "2"}
    assert environment == {**own, "FORERUN_CACHE": "there", "HOME": "here"}
    assert own.items() <= dict(os.environ).items(), "these tests run with them, too"
