"""Plays an environment of the verifiers library.

Guarantee: the policy is trained on the episode's own model calls and on nothing else; its rewards are those of the
environment's own scoring. A release of verifiers before 0.4, or an environment made for one, is refused with the reason.
"""

import importlib
import importlib.util
import re
import sys
from types import ModuleType
from typing import Any

from producer.environments.bridges.program import ProblemError
from producer.environments.bridges.task_loop import Environment


def load(settings: dict[str, Any]) -> Environment:
    """Raises ProblemError if there is no such environment, or no verifiers that can play it.

    Args:
        settings: `id` and `arguments`, as in the configuration.
    """
    place = f"environment.verifiers.python: {sys.executable}"
    if importlib.util.find_spec("verifiers") is None:
        raise ProblemError(f"{place} has no verifiers; install it there, or name the Python that has it")
    import verifiers

    if tuple(map(int, re.findall(r"\d+", verifiers.__version__)[:2])) < (0, 4):
        raise ProblemError(f"{place} has verifiers {verifiers.__version__}; install 0.4 or newer there")
    name = settings["id"]
    if hasattr(_module(name), "load_environment"):
        raise ProblemError(f"environment.verifiers.id: {name} was made for verifiers before 0.4; port it to a taskset")
    from producer.environments.bridges.verifiers_taskset import TasksetEnvironment  # it imports verifiers

    return TasksetEnvironment(name, settings["arguments"])


def _module(name: str) -> ModuleType:
    """The module of an id such as `owner/gsm8k-v1@1.2`. It is looked for among verifiers' own tasksets first."""
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    for place in (f"verifiers.v1.tasksets.{module}", module):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise ProblemError(f"environment.verifiers.id: {name} cannot be imported: {error}") from error
    raise ProblemError(
        f"environment.verifiers.id: {sys.executable} has no module {module}; install the environment there, or start the "
        "producer in the directory of the module"
    )
