"""The program's side of the judge: runs the program, and executes the judge's operations on its objects.

Guarantee: none. The program shares this process and may change all of it, so the judge trusts nothing that it sends.

This runs in the program's sandbox: it imports nothing but the standard library and `slipstream_extras.judge.values`.
"""

import contextlib
import io
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from slipstream_extras.judge.values import ChannelEndedError, Peer, importable, imported, is_shared

BINARY = [
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and_",
    "or_",
    "xor",
]
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "await": lambda coroutine: _run(coroutine),
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager: manager.__exit__(None, None, None),
    **{each.__name__: each for each in (isinstance, getattr, setattr, iter, next, len, str, repr, bool, hash)},
    **{name: getattr(operator, name) for name in [*BINARY, "neg", "getitem", "setitem", "delitem"]},
}


class _Callback:
    """A function of the test's, which the judge calls."""

    def __init__(self, program: "Program", number: int) -> None:
        self._program = program
        self.number = number

    def __call__(self, *arguments: Any) -> Any:
        return self._program.call_back(self.number, arguments)


class Program(Peer):
    """The program's names and the objects that the judge has references to."""

    def __init__(self, descriptor: int, source: str) -> None:
        super().__init__(descriptor)
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        self._names = module.__dict__
        exec(compile(source, "main.py", "exec"), self._names)  # noqa: S102 - the purpose of the sandbox

    def serve(self) -> None:
        self.ask({"names": [name for name in self._names if not name.startswith("__")]}, "operation", self._done)

    def call_back(self, number: int, arguments: tuple[Any, ...]) -> Any:
        message = self.ask({"callback": number, "arguments": self.encode(arguments)}, "operation", self._done)
        if "raised" in message:
            raise self.decode(message["raised"])(*self.decode(message["arguments"]))
        return self.decode(message["value"])

    def _done(self, message: dict[str, Any]) -> dict[str, Any]:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                answer = self._do(message)
            except ChannelEndedError:
                raise
            except BaseException as error:
                kind = self.encode(type(error))
                answer = {"raised": kind, "arguments": self.encode(error.args), "error": self.refer(error)}
        return answer | {"printed": printed.getvalue()}

    def _do(self, message: dict[str, Any]) -> dict[str, Any]:
        operation, given = message["operation"], message["arguments"]
        arguments = [self.decode(item) for item in given]
        named = {name: self.decode(item) for name, item in message["named"].items()}
        value = (self._names.__getitem__ if operation == "name" else _OPERATIONS[operation])(*arguments, **named)
        changed = {}
        for place, argument in enumerate(arguments):
            if isinstance(argument, list | dict | set | bytearray) and (now := self.encode(argument)) != given[place]:
                changed[place] = now
        return {"value": self.encode(value), "changed": changed}

    def refer(self, value: Any) -> list[Any]:
        if isinstance(value, _Callback):
            return ["callback", value.number]
        if is_shared(reference := importable(value)):
            assert reference is not None
            return reference
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", number, value.__name__, self.encode(value.__base__)]
        return ["coroutine" if isinstance(value, types.CoroutineType) else "object", number]

    def resolve(self, reference: list[Any]) -> Any:
        match reference:
            case ["callback", number]:
                return _Callback(self, number)
            case ["import", *_]:
                return imported(reference)
            case [_, number, *_]:
                return self._objects[number]
        raise ChannelEndedError(str(reference))


def _run(coroutine: Any) -> Any:
    import asyncio  # takes a tenth of a second, which most programs do not need

    return asyncio.run(coroutine)


def run(descriptor: int, source: str) -> None:
    with contextlib.suppress(ChannelEndedError):
        Program(descriptor, source).serve()
    sys.stdout.flush()
    os._exit(0)
