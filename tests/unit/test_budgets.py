"""Budgets of the repository: they fall, and rise only with a sentence in CHANGELOG.md.

Guarantee: each number is computed from the code. The files on a walk are counted by `tests/integration/test_walks.py`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx

REPOSITORY = Path(__file__).parents[2]
CORE = ("protocol", "replay", "producer", "consumer", "slipstream")
LINES = {CORE: 50_340, ("slipstream_extras",): 13_790, ("tests", "campaigns"): 92_240, ("benchmarks",): 8_300}
NUM_CIRCLES = 0
NUM_WIDE_CLASSES = 14
NUM_SHORT_HELPERS = 474
WIDE = 12  # fields
SHORT = 10  # lines


def modules() -> Iterator[ast.Module]:
    for package in CORE:
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            yield ast.parse(file.read_text())


def num_lines(folders: tuple[str, ...]) -> int:
    files = (file for folder in folders for file in (REPOSITORY / folder).rglob("*.py"))
    return sum(file.read_text().count("\n") for file in files)


def test_lines() -> None:
    assert {folders: num_lines(folders) for folders in LINES if num_lines(folders) > LINES[folders]} == {}


def test_modules_import_each_other_in_circles_nowhere_else() -> None:
    """import-linter's layers look between rooms, and not inside one."""
    graph = grimp.build_graph(*CORE, cache_dir=None)
    imports = networkx.DiGraph(
        (importer, module) for importer in graph.modules for module in graph.find_modules_directly_imported_by(importer)
    )
    circles = [sorted(circle) for circle in networkx.strongly_connected_components(imports) if len(circle) > 1]
    assert len(circles) <= NUM_CIRCLES, circles


def num_fields(node: ast.ClassDef) -> int:
    """Count the fields of a dataclass or a named tuple; 0 for other classes."""
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
    decorators = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
    if not ("NamedTuple" in bases or decorators & {"dataclass", "dataclasses.dataclass"}):
        return 0
    return sum(isinstance(statement, ast.AnnAssign) for statement in node.body)


def test_value_types_are_narrow() -> None:
    wide = {
        node.name: num_fields(node)
        for module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef) and num_fields(node) > WIDE
    }
    assert len(wide) <= NUM_WIDE_CLASSES, wide


def short_helpers(module: ast.Module) -> list[str]:
    """Return the names of private functions of few lines that one place in the module names."""
    references = [
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(module)
        if isinstance(node, ast.Name | ast.Attribute)
    ]
    return [
        node.name
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("_")
        and (node.end_lineno or 0) - node.lineno < SHORT
        and references.count(node.name) == 1
    ]


def test_short_helpers_with_one_caller_become_fewer() -> None:
    assert sum(len(short_helpers(module)) for module in modules()) <= NUM_SHORT_HELPERS


def test_a_helper_with_one_caller_is_told_from_one_with_two() -> None:
    code = "def _one():\n    pass\ndef _two():\n    pass\ndef public():\n    _one(), _two(), _two()\n"
    assert short_helpers(ast.parse(code)) == ["_one"]
