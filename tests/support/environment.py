"""The settings that tests run with, whatever their caller's environment says."""

from __future__ import annotations

from collections.abc import MutableMapping

# Where things are kept, what is measured, how much is run: none of it changes what a test expects.
OF_THE_CALLER = {"FORERUN_CACHE", "FORERUN_COMMIT", "FORERUN_DATA", "FORERUN_TEST_DATA", "FORERUN_FEW_ROWS"}


def settle(environment: MutableMapping[str, str]) -> None:
    for name in [name for name in environment if name.startswith("FORERUN_") and name not in OF_THE_CALLER]:
        del environment[name]
    environment["FORERUN_KERNELS"] = "off"  # chosen by timing otherwise; tests that mean them ask for them
    environment["FORERUN_SELF_CHECK"] = "off"  # controls break passes on purpose; its own tests ask for it
    environment["NUMBA_NUM_THREADS"] = "2"  # the same pool on one core and on sixteen
