"""Tests of programs, run by the judge: every usual form of a test works, and no program talks itself through one."""

import asyncio
import functools
import gc
import os
import time

import pytest

from slipstream_extras.judge.code import passes
from slipstream_extras.judge.sandbox import Limits, Sandbox
from tests.processes import NewProcesses
from tests.unit.producer.cancellation import cancel_at_each_wait
from tests.unit.producer.loop import until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("bubblewrap")]


@functools.cache
def sandbox() -> Sandbox:
    return Sandbox(Limits(time_s=20))


HONEST = {
    "a function": ("def add(a, b=1): return a + b", "assert add(1, 2) == 3 and add(1) == 2 and add(b=4, a=1) == 5"),
    "check(candidate), as HumanEval has it": (
        "def add(a, b):\n    return a + b",
        "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert abs(candidate(0.1, 0.2) - 0.3) < 1e-6\ncheck(add)",
    ),
    "containers and values": (
        "from collections import Counter, deque\nfrom decimal import Decimal\ndef same(x): return x\n"
        "def count(x): return Counter(x)",
        "import datetime, decimal, math\n"
        "for x in ([1, (2, 'é')], {1: {2}}, {'a': None}, b'x', 2**100, float('inf'), 3j, frozenset({1}), '\\ud800', True,\n"
        "          datetime.date(2026, 1, 2), decimal.Decimal('1.10'), range(3), ()):\n"
        "    assert same(x) == x and type(same(x)) is type(x), x\n"
        "assert math.isnan(same(float('nan'))) and count('aab') == {'a': 2, 'b': 1}",
    ),
    "a class, LeetCode's way": (
        "class Solution:\n    def twoSum(self, nums, target):\n        seen = {}\n        for i, n in enumerate(nums):\n"
        "            if target - n in seen:\n                return [seen[target - n], i]\n            seen[n] = i",
        "assert Solution().twoSum([2, 7, 11], 9) == [0, 1]",
    ),
    "objects with operators, attributes and items": (
        "class V:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return V(s.x + o.x)\n"
        "    def __eq__(s, o): return s.x == o.x\n"
        "    def __lt__(s, o): return s.x < o.x\n    def __hash__(s): return s.x\n    def __len__(s): return s.x\n"
        "    def __getitem__(s, i): return s.x * i\n    def __repr__(s): return f'V({s.x})'\n"
        "    def __iter__(s): return iter(range(s.x))\n",
        "a, b = V(1), V(2)\nassert a + b == V(3) and a != b and a < b and sorted([b, a])[0] == a and max(a, b) is b\n"
        "assert len(b) == 2 and b[3] == 6 and list(b) == [0, 1] and 1 in b and repr(b) == 'V(2)' and {a: 1}[V(1)] == 1\n"
        "a.x = 7\nassert a.x == 7 and isinstance(a, V) and not isinstance(3, V) and hasattr(a, 'x') and not hasattr(a, 'y')",
    ),
    "arguments changed in place": (
        "def work(l, d, s):\n    l.sort(); d['k'] = l; s.clear()",
        "l, d, s = [3, 1], {}, {1}\nassert work(l, d, s) is None\nassert (l, d, s) == ([1, 3], {'k': [1, 3]}, set())",
    ),
    "exceptions": (
        "class Mine(ValueError):\n    def __init__(s, text, code):\n        super().__init__(text, code)\n        s.code = code\n"
        "class Worse(Mine): pass\ndef fail(how):\n    if how == 'key': raise KeyError('k')\n    raise Worse('no', 5)",
        "try:\n    fail('key')\nexcept KeyError as error:\n    assert error.args == ('k',)\nelse:\n    assert False\n"
        "try:\n    fail('')\nexcept Mine as error:\n"
        "    assert isinstance(error, ValueError) and type(error) is Worse and error.code == 5\n"
        "else:\n    assert False",
    ),
    "generators, coroutines and functions of the test's": (
        "def count(n):\n    yield from range(n)\nasync def later(x): return x + 1\ndef apply(f, x): return [f(y) for y in x]",
        "import asyncio\nassert list(count(3)) == [0, 1, 2] and next(count(1)) == 0\nassert asyncio.run(later(1)) == 2\n"
        "assert apply(lambda x: x * 2, [1, 2]) == [2, 4] and apply(len, ['abc']) == [3]\n"
        "def bad(x): raise ZeroDivisionError('by the test')\ntry:\n    apply(bad, [1])\nexcept ZeroDivisionError:\n    pass\n"
        "else:\n    assert False",
    ),
    "what it prints": (
        "def greet(name): print('hello', name)",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    greet('you')\n"
        "assert out.getvalue() == 'hello you\\n'\ngreet('again')",
    ),
    "globals of the program, and what it imports": (
        "import math, os\nfrom typing import List\nMOD = 7\ncalls = 0\nINNER = {'a': [1]}\ndef f():\n    global calls\n"
        "    calls += 1",
        "f(); f()\n"
        "assert calls == 2 and MOD == 7 and math.gcd(4, 6) == 2 and INNER['a'] == [1] and os.path.join('a', 'b') == 'a/b'\n"
        "def g(x: List[int]): return x\nassert g([1]) == [1]",
    ),
    "comprehensions and functions of the test see the program's names": (
        "def square(x): return x * x",
        "def all_of(n): return [square(i) for i in range(n)]\n"
        "assert all_of(3) == [0, 1, 4] and all(square(i) >= i for i in range(3))",
    ),
    "a program with a main part": ("def f(): return 1\nif __name__ == '__main__':\n    print(f())", "assert f() == 1"),
}
WRONG = {
    "a wrong answer": ("def add(a, b): return a - b", "assert add(1, 2) == 3"),
    "no such function": ("x = 1", "assert add(1, 2) == 3"),
    "a program that fails": ("def add(a, b): '''", "assert True"),
    "an exception": ("def add(a, b): raise ValueError", "assert add(1, 2) == 3"),
    "a test that leaves early": ("def f(): return 1", "import sys\nsys.exit(0)"),
}
PRINTS_ALL = "for d in range(1, 64):\n    try: os.write(d, TEXT)\n    except OSError: pass\n"
ADD = "assert add(1, 2) == 3"
CHEATS = {
    "it leaves in time": ("import os, sys\nos._exit(0)", ADD),
    "it leaves in the call": ("import os\ndef add(a, b): os._exit(0)", ADD),
    "it raises SystemExit": ("def add(a, b): raise SystemExit(0)", ADD),
    "it dies where the test expects some exception": (
        "import os\ndef add(a, b): os._exit(0)",
        "try:\n    add('a', 2)\nexcept BaseException:\n    pass",
    ),
    "it is equal to everything": (
        "class All:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    __hash__ = None\n"
        "def add(a, b): return All()",
        ADD,
    ),
    "its numbers calculate for it": (
        "class N(float):\n    def __sub__(s, o): return 0.0\n    __rsub__ = __add__ = __sub__\n"
        "    def __eq__(s, o): return True\n"
        "    def __hash__(s): return 0\n    def __lt__(s, o): return True\n    def __abs__(s): return 0.0\n"
        "def add(a, b): return N(0)",
        "assert abs(add(1, 2) - 3.0) < 1e-6",
    ),
    "its object calculates for it": (
        "class N:\n    def __sub__(s, o): return 0.0\n    __rsub__ = __sub__\n    def __abs__(s): return 0.0\n"
        "def add(a, b): return N()",
        "assert abs(add(1, 2) - 3.0) < 1e-6",
    ),
    "its list compares for it": (
        "class L(list):\n    def __eq__(s, o): return True\n    __hash__ = None\ndef add(a, b): return L()",
        "assert add(1, 2) == [3]",
    ),
    "it takes names of Python": (
        "all = lambda _: True\ndef add(a, b): return 0",
        "assert all(add(i, i) == 2 * i for i in range(9))",
    ),
    "it takes names of Python for the test to call": (
        "abs = lambda x: 0\ndef add(a, b): return 0",
        "assert abs(add(1, 2) - 3) < 1",
    ),
    "it changes Python": (
        "import builtins\nbuiltins.all = lambda _: True\nbuiltins.len = lambda _: 3\ndef add(a, b): return 0",
        "assert all(add(i, i) == 2 * i for i in range(9)) and len([]) == 3",
    ),
    "its text becomes the judge's code": (
        "import os\nfrom builtins import exec as decode\ndef encode(x): return 'import os; os._exit(0)'",
        "assert decode(encode('x')) == 'x'",
    ),
    "it gives the judge a function to call": ("from os import _exit as add", "add(0)\nassert False"),
    "it raises what ends the judge": (
        "import json, os\ndef send(m): os.write(3, json.dumps(m).encode() + b'\\n')\n"
        "def add(a, b):\n    send({'raised': ['import', 'os', '_exit'], 'arguments': ['list', [0]], 'printed': ''})",
        ADD,
    ),
    "it writes to the channel": (
        "import os\nTEXT = b'{}\\n' * 9\ndef add(a, b):\n    " + PRINTS_ALL.replace("\n", "\n    "),
        ADD,
    ),
    "it finds the judge by patching what it shares with it": (
        "import gc, sys\nfor m in list(sys.modules.values()):\n    for n in ('encode', 'importable', 'is_shared'):\n"
        "        if hasattr(m, n): setattr(m, n, lambda *a: ['import', 'builtins', 'print'])\ndef add(a, b): return 0",
        ADD,
    ),
}
SEEN = """
import gc, os, sys
def seen():
    found, frame = [], sys._getframe()
    while frame:
        found += [repr(frame.f_globals), repr(frame.f_locals), repr(frame.f_code.co_consts)]
        frame = frame.f_back
    found += [x for x in gc.get_objects() if isinstance(x, (str, list, dict, tuple))]
    found += [repr(vars(m)) for m in list(sys.modules.values())] + [sys.argv, dict(os.environ), sys.orig_argv]
    for folder in ("/tmp", "/proc/self", "/proc/1", "/dev", "."):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            try:
                found.append(open(os.path.join(folder, name), "rb").read(2**20))
            except OSError:
                pass
    found.append(os.read(0, 2**20))
    return "\\n".join(map(str, found))
"""


def verdict(source: str, test: str) -> bool:
    return asyncio.run(passes(sandbox(), source, test))


@pytest.mark.parametrize("name", HONEST)
def test_a_right_program_passes(name: str) -> None:
    assert verdict(*HONEST[name])


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_does_not(name: str) -> None:
    assert not verdict(*WRONG[name])


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_passes(name: str) -> None:
    assert not verdict(*CHEATS[name])


def test_a_program_sees_nothing_of_its_test() -> None:
    """In memory, frames, files, arguments, environment or standard input."""
    parts = "text = seen()\nassert len(text) > 1000\nimport re\nassert not re.search(r'\\b[0-9a-f]{32}\\b', text)\n"
    assert verdict(SEEN, parts + "assert 'only-in-the-test' not in text")
    assert not verdict(SEEN + "note = 'only-in-the-test'", parts + "assert 'only-in-the-test' not in text")


def test_what_cannot_be_handed_over_is_said() -> None:
    test = (
        "class Own: pass\ntry:\n    f(Own())\nexcept TypeError as error:\n    assert 'a Own of the test' in str(error)"
    )
    assert verdict("def f(x): return 1", test)


def test_a_program_that_stays_is_ended_with_its_test() -> None:
    stays = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\ndef f(): return 1"
    began, started = time.monotonic(), NewProcesses()
    assert verdict(stays, "assert f() == 1")
    assert time.monotonic() - began < 15
    assert started.alive() == []


def test_nothing_is_left_wherever_a_verdict_is_cancelled() -> None:
    gc.collect()  # what tests before left would be closed meanwhile
    before, started = len(os.listdir("/proc/self/fd")), NewProcesses()

    async def body() -> None:
        async def one() -> None:
            assert await passes(sandbox(), "def f(): return 1", "assert f() == 1")

        assert await cancel_at_each_wait(one, lambda: None) > 0
        await until(lambda: not started.alive())

    asyncio.run(body())
    assert len(os.listdir("/proc/self/fd")) == before
