"""No file imports another that imports it, by however many steps; what only type checkers read does not count."""

from graphlib import CycleError, TopologicalSorter

import pytest

grimp = pytest.importorskip("grimp")


def circle(imports: dict[str, set[str]]) -> list[str]:
    """The files of one circle, the first of them twice; none where there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def all_imports() -> dict[str, set[str]]:
    graph = grimp.build_graph("forerun", exclude_type_checking_imports=True, cache_dir=None)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def test_no_circles() -> None:
    assert circle(all_imports()) == []


def test_control_a_circle_is_seen() -> None:
    imports = all_imports()
    imports["forerun.math.scaled"] = imports["forerun.math.scaled"] | {"forerun.kernels.scaled"}
    assert {"forerun.math.scaled", "forerun.kernels.scaled"} <= set(circle(imports))
