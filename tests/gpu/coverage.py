"""Which lines that only a GPU makes run are run by `tests/gpu`: `python -m tests.gpu.coverage [arguments of pytest]`.

Guarantee: a line counts if it calls torch.cuda, is under a condition that asks for a GPU, or is of a function that calls
torch.cuda in any case. Lines are noted in every process that the tests start. The command
lists what was missed, and fails below 95 %.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("consumer", "producer", "protocol", "slipstream/sft", "slipstream/export")
LEAST = 0.95
_ASKS = ("is_cuda", "on_gpu", "_on_gpu", "cuda")
_TRACER = """
import json, os, sys, threading
_lines = {name: set(lines) for name, lines in json.load(open(os.environ["GUARDED_LINES"])).items()}
_out = os.open(os.environ["SEEN_LINES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def _on_call(frame, event, argument):
    left = _lines.get(frame.f_code.co_filename)
    if not left:
        return None
    def on_line(frame, event, argument):
        if event == "line" and frame.f_lineno in left:
            left.discard(frame.f_lineno)
            os.write(_out, json.dumps([frame.f_code.co_filename, frame.f_lineno]).encode() + b"\\n")
        return on_line
    return on_line

threading.settrace(_on_call)
sys.settrace(_on_call)
"""
"""What `sitecustomize` runs at the start of every process."""


def guarded_lines(source: str) -> set[int]:
    """The lines with a statement that only a GPU makes run."""
    found, without = set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If):
            without |= {node.lineno, *_lines(node.body)} if _asks_for_none(node.test) else set()
            found |= _lines(node.body if _asks_for_gpu(node.test) else [])
            found |= _lines(node.orelse if _asks_for_none(node.test) else [])
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and _calls_cuda(node):
            found |= _lines([node])
        if isinstance(node, ast.FunctionDef) and any(
            _calls_cuda(each) for each in node.body if not hasattr(each, "body")
        ):
            found |= _lines(node.body)
        for block in _blocks(node):
            for number, statement in enumerate(block):
                ends = isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return | ast.Raise)
                if isinstance(statement, ast.If) and ends and _asks_for_none(statement.test):
                    found |= _lines(block[number + 1 :])
    return found - without


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def _lines(statements: Iterable[ast.stmt]) -> set[int]:
    """The first lines of the statements and of those within them."""
    return {
        node.lineno
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.stmt) and not _is_docstring(node)
    }


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _words(node: ast.AST) -> set[str]:
    return {
        getattr(each, "id", None) or getattr(each, "attr", None) or str(getattr(each, "value", ""))
        for each in ast.walk(node)
    }


def _asks_for_none(test: ast.expr) -> bool:
    """Whether the condition holds where there is no GPU."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _asks_for_gpu(test.operand)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_asks_for_none, test.values))
    differs = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq)
    return differs and "cuda" in _words(test)


def _asks_for_gpu(test: ast.expr) -> bool:
    return bool(_words(test) & set(_ASKS)) and not _asks_for_none(test)


def _calls_cuda(node: ast.stmt) -> bool:
    return any(
        isinstance(each, ast.Call) and ast.unparse(each.func).startswith("torch.cuda.") for each in ast.walk(node)
    )


def main(arguments: list[str]) -> int:
    files = [file for package in PACKAGES for file in sorted((REPOSITORY / package).rglob("*.py"))]
    guarded = {str(file): sorted(lines) for file in files if (lines := guarded_lines(file.read_text()))}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "sitecustomize.py").write_text(_TRACER)
        (place / "guarded.json").write_text(json.dumps(guarded))
        seen_file = place / "seen"
        seen_file.touch()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "GUARDED_LINES": str(place / "guarded.json"),
            "SEEN_LINES": str(seen_file),
        }
        command = [sys.executable, "-m", "pytest", "-q", *(arguments or ["-n", "2", "tests/gpu"])]
        code = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode
        seen = {(name, line) for name, line in map(json.loads, seen_file.read_text().splitlines())}
    wanted = {(name, line) for name, lines in guarded.items() for line in lines}
    for name, line in sorted(wanted - seen):
        text = Path(name).read_text().splitlines()[line - 1].strip()
        print(f"missed {Path(name).relative_to(REPOSITORY)}:{line}: {text}")
    share = len(wanted & seen) / len(wanted)
    print(f"{len(wanted & seen)} of {len(wanted)} lines that only a GPU makes run: {share:.1%}")
    return code or int(share < LEAST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
