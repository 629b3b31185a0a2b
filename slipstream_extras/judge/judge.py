"""The judge's side: a test whose names are those of a program in another sandbox.

Guarantee: the mark is written only after the last line of the test, whatever the program answers. The test gets plain values
from the program, and objects (`ProgramObject`) that ask the program whenever the test uses them. Such an object is equal to
no plain value and does not calculate with one: a number is a number, or the test fails. A test that uses a name of Python
which the program has redefined fails.

Nothing checks what the program answers about its own objects: the results of their methods, and how two of them compare.

This runs in the judge's sandbox: it imports nothing but the standard library and what else is in `slipstream_extras.judge`.
"""

import builtins
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from slipstream_extras.judge.program_side import BINARY
from slipstream_extras.judge.values import ChannelEndedError, Peer, importable, imported, is_shared

_FAILED = 1
_FORWARDED = "getattr setattr iter next len str repr hash neg getitem setitem delitem enter"


class Remote(Peer):
    """The program, seen from the test."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._objects: dict[int, Any] = {}
        self._callbacks: list[Callable[..., Any]] = []
        self.names = frozenset(self.receive()["names"])

    def do(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Return the program's answer. If the program has ended or sent an invalid message, the test ends here, whatever it
        would catch."""
        given = [self.encode(argument) for argument in arguments]
        named = {name: self.encode(argument) for name, argument in named.items()}
        message = {"operation": operation, "arguments": given, "named": named}
        try:
            return self._value(self.ask(message, "callback", self._called_back), arguments)
        except ChannelEndedError as error:
            _fail(error)

    def _value(self, answer: dict[str, Any], arguments: tuple[Any, ...]) -> Any:
        if answer["printed"]:
            sys.stdout.write(answer["printed"])
        if "raised" in answer:
            raise self._error(answer) from None
        for place, changed in answer.get("changed", {}).items():
            _change(arguments[int(place)], self.decode(changed))
        return self.decode(answer["value"])

    def _error(self, answer: dict[str, Any]) -> BaseException:
        kind, arguments = self.decode(answer["raised"]), self.decode(answer["arguments"])
        try:
            error = kind(*arguments)
        except Exception:
            error = RuntimeError(*arguments)
        if not isinstance(error, BaseException) or isinstance(error, ChannelEndedError):
            raise ChannelEndedError(f"it raised {error!r:.80}")
        if isinstance(error, _ProgramError):
            error.program_error = self.decode(answer["error"])
        return error

    def _called_back(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"value": self.encode(self._callbacks[message["callback"]](*self.decode(message["arguments"])))}
        except Exception as error:
            kind = importable(type(error)) or importable(RuntimeError)
            return {"raised": kind, "arguments": self.encode([str(argument) for argument in error.args])}

    async def _awaited(self, coroutine: "ProgramObject") -> Any:
        return self.do("await", coroutine)

    def refer(self, value: Any) -> list[Any]:
        if type(value) is ProgramObject:
            return ["object", object.__getattribute__(value, "_number")]
        if isinstance(value, type) and issubclass(value, _ProgramError):
            return ["object", value.number]
        if (reference := importable(value)) is not None:
            return reference
        if callable(value) and hasattr(value, "__code__"):
            self._callbacks.append(value)
            return ["callback", len(self._callbacks) - 1]
        raise TypeError(
            f"a {type(value).__name__} of the test's cannot be handed to the program; hand it plain data or a function"
        )

    def resolve(self, reference: list[Any]) -> Any:
        match reference:
            case ["import", str(), str()] if is_shared(reference):
                return imported(reference)
            case ["callback", int(number)]:
                return self._callbacks[number]
            case ["object", int(number)]:
                return self._objects.setdefault(number, ProgramObject(self, number))
            case ["coroutine", int(number)]:
                return self._awaited(ProgramObject(self, number))
            case ["exception", int(number), str(name), base]:
                if number not in self._objects:
                    above = self.decode(base)
                    bases = (above,) if issubclass(above, _ProgramError) else (_ProgramError, above)
                    self._objects[number] = type(name, bases, {"number": number, "__module__": "__main__"})
                return self._objects[number]
        raise ChannelEndedError(f"it sent {reference!r:.80}")


class ProgramObject:
    """An object of the program. Every operation of a test on it is a request to the program."""

    _remote: Remote
    _number: int

    def __init__(self, remote: Remote, number: int) -> None:
        object.__setattr__(self, "_remote", remote)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._remote.do("call", self, *arguments, **named)

    def __bool__(self) -> bool:
        return self._remote.do("bool", self) is True

    def __exit__(self, *_: object) -> None:
        self._remote.do("exit", self)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is ProgramObject and self._remote.do("isinstance", value, self) is True


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: ProgramObject, *arguments: Any) -> Any:
        return self._remote.do(name, self, *arguments)

    return method


def _between_two(name: str) -> Callable[[ProgramObject, Any], Any]:
    def method(self: ProgramObject, other: Any) -> Any:
        return self._remote.do(name, self, other) if type(other) is ProgramObject else NotImplemented

    return method


for _name in _FORWARDED.split():
    setattr(ProgramObject, f"__{_name}__", _forwarded(_name))
for _name in BINARY:
    setattr(ProgramObject, f"__{_name.rstrip('_')}__", _between_two(_name))


class _ProgramError(Exception):
    """Base of the exceptions that the program defines. `program_error`: the one that was raised."""

    number: int
    program_error: ProgramObject

    def __getattr__(self, name: str) -> Any:
        if name == "program_error":
            raise AttributeError(name)
        return getattr(self.program_error, name)


class Names(dict[str, Any]):
    """The test's own names, and the program's for those that the test does not have."""

    def __init__(self, remote: Remote) -> None:
        super().__init__(__name__="__main__")
        self._remote = remote

    def __missing__(self, name: str) -> Any:
        if name not in self._remote.names:
            raise KeyError(name)
        if hasattr(builtins, name):
            raise AssertionError(f"the program has a {name} of its own, so the result of Python's own is unknown")
        value = self._remote.do("name", name)
        if type(value) is ProgramObject:
            self[name] = value
        return value


def _change(argument: Any, value: Any) -> None:
    """Change an argument as the program has changed it."""
    if isinstance(argument, list | bytearray):
        argument[:] = value
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(value)


def run(descriptor: int, test: str, mark: str) -> NoReturn:
    try:
        names = Names(Remote(descriptor))
        exec(compile(test, "test.py", "exec"), names)  # noqa: S102 - the purpose of the judge
    except BaseException as error:
        _fail(error)
    sys.stdout.flush()
    os.write(1, mark.encode())
    os._exit(0)


def _fail(error: BaseException) -> NoReturn:
    os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
    os._exit(_FAILED)
