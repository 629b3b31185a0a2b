"""Plays an environment of the verifiers library.

Guarantee: the episode's own model calls, and nothing else, are what the policy is trained on; its rewards are those of the
environment's own scoring. Which of the library's two interfaces an environment has is found out: `load_environment` (before
verifiers 0.4), or a taskset (from 0.4 on).
"""

import importlib
import importlib.util
import re
import sys
from types import ModuleType
from typing import Any

from producer.environments.bridges.program import Environment, ProblemError

API_KEY_VARIABLE = "SLIPSTREAM_API_KEY"  # verifiers keeps such names from the programs that it runs


def load(settings: dict[str, Any]) -> Environment:
    """
    Args:
        settings: `id` and `arguments`, as in the configuration.

    Raises:
        ProblemError: there is no such environment, or no verifiers that knows it.
    """
    if importlib.util.find_spec("verifiers") is None:
        raise ProblemError(
            f"environment.verifiers.python: {sys.executable} has no verifiers; install it there, or name the Python that has it"
        )
    import verifiers

    name, arguments = settings["id"], settings["arguments"]
    is_before_4 = _release(verifiers.__version__) < (0, 4)
    module = _module(name)
    if hasattr(module, "load_environment"):
        if not is_before_4:
            raise ProblemError(
                f"environment.verifiers.id: {name} is an environment for verifiers before 0.4, and {sys.executable} has "
                f"{verifiers.__version__}; install a release before 0.4 there, or port it"
            )
        from producer.environments.bridges.verifiers_classic import ClassicEnvironment

        return ClassicEnvironment(name, arguments)
    if is_before_4:
        raise ProblemError(
            f"environment.verifiers.id: {name} has no load_environment, so it is for verifiers from 0.4 on, and "
            f"{sys.executable} has {verifiers.__version__}; install a newer release there"
        )
    from producer.environments.bridges.verifiers_taskset import TasksetEnvironment

    return TasksetEnvironment(name, arguments)


def _module(name: str) -> ModuleType:
    """Of an id such as `owner/gsm8k-v1@1.2`: verifiers' own tasksets come first."""
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


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
