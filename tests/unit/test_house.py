"""Rules of the house that no linter checks."""

import ast
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("protocol", "replay", "producer", "consumer", "slipstream", "slipstream_extras")
MODULES = sorted(file for package in PACKAGES for file in (REPOSITORY / package).rglob("*.py"))
EXAMPLES = sorted(file for folder in ("examples", "deploy") for file in (REPOSITORY / folder).rglob("*.py"))
LONGEST_MODULE = 500  # lines
LONGEST_FUNCTION = 60  # lines
MOST_ARGUMENTS = 8  # of a constructor, without self
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec"}
RUN_IN_A_SANDBOX = {
    "slipstream_extras.judge.judge",
    "slipstream_extras.judge.program_side",
}  # where the code that a model wrote is run
UNPICKLING = {("allow_pickle", True), ("weights_only", False)}  # of numpy.load and torch.load
FORBIDDEN = re.compile(rf"\b({'|'.join(FORBIDDEN_MODULES | FORBIDDEN_CALLS | {name for name, _ in UNPICKLING})})\b")


owners_of_packages = functools.cache(importlib.metadata.packages_distributions)


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def statements(file: Path) -> list[ast.AST]:
    """All of a module's, without their expressions, which are most of its nodes."""
    found: list[ast.AST] = [parsed(file)]
    for node in found:
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            found += inner if isinstance(inner := getattr(node, name, ()), list) else ()
    return found


def found_by(rule: Callable[[Path], Iterable[str]], files: Iterable[Path] = MODULES) -> list[str]:
    """Return what the rule finds in each module, with the module's name."""
    return [f"{file.relative_to(REPOSITORY)}: {broken}" for file in files for broken in rule(file)]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_dependency_shadows_our_generic_package_names(package: str) -> None:
    owners = set(owners_of_packages().get(package, ()))
    assert owners <= {"slipstream"}, f"{owners} also installs `{package}`; one of the two would never be imported"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_packages_under_test_are_the_ones_of_this_checkout(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert [Path(place).resolve() for place in spec.submodule_search_locations or ()] == [REPOSITORY / package]


def violations(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Import(names=names):
                found = {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module)):
                found = {module.partition(".")[0]}
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                yield f"line {node.lineno}: {name}()"
                continue
            case ast.keyword(arg=str(switch), value=ast.Constant(value=bool(value))) if (switch, value) in UNPICKLING:
                yield f"line {node.lineno}: {switch}={value}"
                continue
            case _:
                continue
        for module in sorted(found & FORBIDDEN_MODULES):
            yield f"line {node.lineno}: import of {module}"


@pytest.mark.long
def test_nothing_unpickles_or_evaluates() -> None:
    def unsafe(file: Path) -> list[str]:
        found = list(violations(ast.walk(parsed(file)))) if FORBIDDEN.search(file.read_text()) else []
        if ".".join(file.relative_to(REPOSITORY).with_suffix("").parts) in RUN_IN_A_SANDBOX:
            found = [violation for violation in found if not violation.endswith("exec()")]
        return found

    assert found_by(unsafe) == []


def test_what_runs_in_a_sandbox_is_imported_nowhere_else() -> None:
    """It is read as text. One of them may import another."""

    def imported(file: Path) -> set[str]:
        if file.parent == REPOSITORY / "slipstream_extras/judge":
            return set()
        return {node.module or "" for node in statements(file) if isinstance(node, ast.ImportFrom)} & RUN_IN_A_SANDBOX

    assert found_by(imported) == []


def test_the_scan_sees_what_it_forbids() -> None:
    bad = "import pickle\nfrom marshal import loads\nx = eval('1')\nexec('y = 1')\nspec.loader.exec_module(m)\n"
    bad += "load(f, weights_only=False)\n"
    assert list(violations(ast.walk(ast.parse(bad)))) == [
        "line 1: import of pickle",
        "line 2: import of marshal",
        "line 3: eval()",
        "line 4: exec()",
        "line 6: weights_only=False",
    ]


def test_modules_and_functions_stay_readable() -> None:
    def unreadable(file: Path) -> Iterator[str]:
        if (length := file.read_text().count("\n")) > LONGEST_MODULE:
            yield f"{length} lines"
        if len((ast.get_docstring(parsed(file)) or "").partition("\n")[0]) <= 20:
            yield "a module opens with what it guarantees"
        for each in statements(file):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                if (each.end_lineno or 0) - each.lineno >= LONGEST_FUNCTION:
                    yield f"{each.name} has more than {LONGEST_FUNCTION} lines"
                if each.name == "__init__" and num_arguments(each) > MOST_ARGUMENTS:
                    yield f"line {each.lineno}: more than {MOST_ARGUMENTS} arguments"

    assert found_by(unreadable) == []


def num_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1


ROOMS = sorted(file.parent for file in MODULES if file.name == "__init__.py" and file.parent.parent != REPOSITORY)


def test_a_room_opens_with_what_it_guarantees() -> None:
    inits = [room / "__init__.py" for room in ROOMS]
    assert [str(init) for init in inits if "Guarantee: " not in (ast.get_docstring(parsed(init)) or "")] == []


PAGES = [*sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "README.md"]
LONGEST_SENTENCE = 35  # words
MOST_WORDS, MOST_OF_A_PAGE, MOST_OF_README = 31_000, 2_500, 900
LONGEST_MEAN = 20  # words of a sentence, on each page
REFERENCES = ("configuration.md", "metrics.md")


def sentences(page: str) -> Iterator[str]:
    """The sentences of a page, without code, tables and headings."""
    for left_out in (r"^ *```.*?^ *```$", r"<!--.*?-->", r"^\|.*?$", r"^#.*?$", r"^ {4,}\S.*?$"):
        page = re.sub(left_out, "\n", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"^ *([-*]|\d+\.) ", "\n\n", page, flags=re.MULTILINE)
    page = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", page))
    for paragraph in re.split(r"\n\s*\n", page):
        yield from re.split(r"(?<=[.!?:;])[\])*\"']*\s+", paragraph.strip())


def words(text: str) -> int:
    return sum(1 for word in text.split() if re.search(r"\w", word))


def test_pages_are_short_and_so_are_their_sentences() -> None:
    lengths = {page.name: [words(each) for each in sentences(page.read_text()) if words(each)] for page in PAGES}
    texts = {page: page.read_text() for page in PAGES}
    long = [
        f"{page.name}: {each}"
        for page, text in texts.items()
        for each in sentences(text)
        if words(each) > LONGEST_SENTENCE
    ]
    long += [name for name, counts in lengths.items() if sum(counts) > LONGEST_MEAN * len(counts)]
    assert long == []


def test_pages_have_at_most_so_many_words() -> None:
    counts = {page.name: words(page.read_text()) for page in PAGES}
    readme = counts.pop("README.md")
    assert readme <= MOST_OF_README
    assert [name for name, count in counts.items() if count > MOST_OF_A_PAGE and name not in REFERENCES] == []
    assert sum(counts.values()) <= MOST_WORDS


FRAGMENT = re.compile(
    r"(?:Of|To|As|With|None|That|Those|What|Which|Where|One|Nobody|Whoever|How|Whether|Until|Its|It|Why|From|At|For|Who|If|When|By"
    r"|In|On|Only|Not|No|All|Every|Everything|Something|Nothing|This|Also|Two|Before|After|While)(?![\w-])"
)


@pytest.mark.long
def test_no_docstring_begins_with_a_fragment() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

    def fragments(file: Path) -> Iterator[str]:
        for node in statements(file):
            text = (ast.get_docstring(node) or "") if isinstance(node, kinds) else ""
            if FRAGMENT.match(text):
                yield text.partition("\n")[0]

    assert found_by(fragments, [*MODULES, *EXAMPLES]) == []
