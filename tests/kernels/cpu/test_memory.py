"""Room that compiled code makes for itself must be its own as long as it is used.

Numba frees an array behind the last line that names it, and an address names nothing: who goes on by the address alone
writes over what others have been given meanwhile. So nobody takes the address of an array of his own.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from forerun.kernels import cpu

FOLDER = Path(cpu.__file__).parent
BROKEN = """
def product(x, size):
    room = np.empty(size)
    part = room[2:]
    return x.ctypes.data + part.ctypes.data
"""
# Two threads for which malloc has one arena: what one gives back, the other is given next.
AT_ONCE = """
import ctypes, sys
from concurrent.futures import ThreadPoolExecutor

import torch

from forerun.kernels.cpu.narrow import NarrowWeight, address, product_of
from forerun.math.integer import encode_rows, row_format
from forerun.math.panels import encode_panels, panel_format
from support.stored import stored_rows

SIZE, COUNT, ROWS, TURNS = 576, 64, 33, 200
KINDS = {
    "integers": lambda seed: (encode_rows(torch.randn(COUNT, SIZE)), row_format(SIZE)),
    "panels": lambda seed: (encode_panels(torch.randn(COUNT, SIZE)), panel_format(SIZE)),
}
made = KINDS.get(sys.argv[1], lambda seed: stored_rows(sys.argv[1], COUNT, SIZE, seed))

def differing(seed):
    weight, x, out = NarrowWeight(*made(seed)), torch.randn(ROWS, SIZE), torch.empty(TURNS, ROWS, COUNT)
    product = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)(product_of(weight))
    for turn in out:
        product(address(weight), x.data_ptr(), SIZE, turn.data_ptr(), COUNT, ROWS, SIZE, 0, COUNT)
    return int((out != out.mode(0).values).any(-1).any(-1).sum())

with ThreadPoolExecutor(2) as pool:
    print(sum(pool.map(differing, range(2))))
"""


def own_addresses(source: str) -> list[str]:
    """`function: array` for every function that takes the address of an array which it has made itself."""
    return [
        f"{function.name}: {name}"
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        for name in sorted(_made(function) & _addressed(function))
    ]


def _made(function: ast.FunctionDef) -> set[str]:
    """Names of arrays that come from numpy, and of parts of them."""
    made: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            source = ast.unparse(node.value)
            if "np.empty" in source or "np.zeros" in source or "np.ones" in source or _root(node.value) in made:
                made |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return made


def _addressed(function: ast.FunctionDef) -> set[str]:
    return {
        _root(node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == "data" and ast.unparse(node.value).endswith(".ctypes")
    }


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_nobody_takes_the_address_of_an_array_of_his_own() -> None:
    found = {path.name: own_addresses(path.read_text()) for path in FOLDER.glob("*.py")}
    assert len(found) > 10 and not any(found.values()), found


def test_control_such_an_address_is_found() -> None:
    assert own_addresses(BROKEN) == ["product: part"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_1", "BF16", "integers", "panels"])
def test_products_at_once_do_not_share_room(kind: str) -> None:
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", AT_ONCE, kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.split() == ["0"], (done.returncode, done.stdout, done.stderr[-800:])
