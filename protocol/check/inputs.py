"""The inputs that a configuration names on this machine: model, rows, functions, packages.

Guarantee: it is looked at and not run, in milliseconds. Each mistake has the key that names what is wrong. What needs a library,
a network or user's code is listed as not looked at.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from protocol.check.columns import Columns, columns_of, files_of
from protocol.check.sizes import module_problems, size_problems
from protocol.check.user_code import (
    argument_problems,
    near_file,
    plain_function,
    problem_of,
    returned_columns,
    takes_one,
)
from protocol.config.data import DatasetSection
from protocol.config.functions import REWARD_ARGUMENTS, is_plugin
from protocol.config.mistakes import Collected, Mistake, Place, dotted
from protocol.config.places import ROW_FILES, row_file_ending, working_in
from protocol.config.rewards import RewardFunction
from protocol.config.run import RunConfig
from protocol.config.section import nearest
from protocol.config.trainer_keys import TRACKERS, package_of_optimizer
from protocol.errors import DatasetError
from protocol.wire.model_check import adapter_problems, base_problems
from protocol.wire.model_source import folder_on_disk

_TRY = "slipstream reward try"


class Inputs:
    """Looks at the inputs of a configuration, in its folder. `not_looked_at` is filled meanwhile."""

    def __init__(self, collected: Collected) -> None:
        self.config: RunConfig = collected.made
        self._depends = collected.depends
        self.not_looked_at: list[str] = []

    def mistakes(self) -> Iterator[Mistake]:
        """Yield all that is wrong, but with what depends on a value that was left out."""
        folder = self.config.folder
        if not os.path.isdir(folder):
            yield Mistake(("folder",), f"there is no folder {folder}; name another one")
            return
        with working_in(folder):
            mistakes = list(self._all())
        yield from (mistake for mistake in mistakes if not self._depends(mistake.key))

    def _all(self) -> Iterator[Mistake]:
        yield from self._of_model()
        sources = [source for place, section in self._datasets() for source in self._of_sources(place, section)]
        for mistakes, _ in sources:
            yield from mistakes
        yield from self._of_rewards([columns for _, columns in sources])
        yield from self._of_named_columns([columns for _, columns in sources])
        yield from self._of_environments()
        yield from self._of_packages()
        self.not_looked_at += [
            "rows beyond the first 100, what a transform makes of them, and their prompts in tokens: slipstream inspect",
            f"what rewards say: {_TRY}",
            "what vLLM, TRL and PEFT say of values together, weights and memory: the start",
        ]

    def _of_model(self) -> Iterator[Mistake]:
        model, place = self.config.model, ("model", "path")
        try:
            folder = folder_on_disk(model.path, model.revision)
        except OSError as error:
            yield Mistake(place, f"no model can have this name: {error.strerror}")
            return
        if folder.is_dir():
            is_whole = os.path.isdir(model.path)  # and not a part of what the hub has
            for problem in base_problems(folder, trust_remote_code=model.trust_remote_code) if is_whole else ():
                yield Mistake(place, problem)
            yield from size_problems(self.config, folder)
            yield from module_problems(self.config.lora_section, folder)
        elif os.path.isabs(model.path):
            yield Mistake(place, f"there is no folder {model.path}{near_file(Path(model.path))}")
        elif model.path:
            self.not_looked_at.append(f"model.path: {model.path} is of the hub; there is no folder {folder.absolute()}")
            yield from size_problems(self.config, None)
        adapter = self.config.lora_section.get("init_from")
        if isinstance(adapter, str) and os.path.isabs(adapter):
            for problem in (
                adapter_problems(Path(adapter)) if os.path.isdir(adapter) else [f"there is no folder {adapter}"]
            ):
                yield Mistake(("lora", "init_from"), problem)

    def _datasets(self) -> Iterator[tuple[Place, DatasetSection]]:
        if not self.config.environment.atropos:
            yield ("dataset",), self.config.dataset
        if self.config.evaluation is not None:
            yield ("evaluation", "dataset"), self.config.evaluation.dataset

    def _of_sources(self, place: Place, section: DatasetSection) -> Iterator[tuple[list[Mistake], Columns | None]]:
        """Yield the mistakes of each source, and the columns that its rows have beside the prompt; None: unknown."""
        sources: list[Any] = list(section.sources) or [section]
        for number, source in enumerate(sources):
            at = (*place, "sources", number) if section.sources else place
            mistakes: list[Mistake] = []
            read = self._columns(at, source, mistakes)
            made = read
            for key in ("filter", "transform"):
                if (spec := getattr(source, key)) is not None:
                    mistakes += _of_function((*at, key), spec)
                    function = plain_function(spec)
                    if function is not None and not takes_one(function):
                        mistakes.append(Mistake((*at, key), f"{spec} is called with a row, and must take one argument"))
                    if key == "transform":
                        made = returned_columns(function) if function is not None else None
            if source.blocks is not None:
                made = None
            for key in ("prompt_column", "answer_column"):
                name = getattr(source, key)
                if name is not None and made is not None and name not in made:
                    owner = f"what {source.transform} makes" if source.transform else source.path
                    has = nearest(name, list(made), f"it has {', '.join(made)}")
                    mistakes.append(Mistake((*at, key), f"{owner} has no column `{name}`; {has}", DatasetError))
            yield mistakes, None if made is None else made.without(source.prompt_column)

    def _columns(self, at: Place, source: Any, mistakes: list[Mistake]) -> Columns | None:
        path = source.path
        if source.reasoning_gym is not None:
            return Columns(frozenset({"prompt", "answer", "entry"}))
        if not path:
            return None
        files, place = files_of(path), (*at, "path")
        if not files and (os.path.isabs(path) or row_file_ending(path)):
            mistakes.append(Mistake(place, f"there is no file {path}{near_file(Path(path))}", DatasetError))
        elif not files:
            self.not_looked_at.append(f"{dotted(place)}: {path} is a name of the hub: {_TRY}")
        elif files[0].is_file() and not row_file_ending(files[0].name):
            mistakes.append(Mistake(place, f"{path} must end in one of {', '.join(ROW_FILES)}", DatasetError))
        elif files[0].is_file() and not any(file.stat().st_size for file in files):
            mistakes.append(Mistake(place, f"{path} is empty", DatasetError))
        else:
            columns = columns_of(files)
            if columns is None:
                self.not_looked_at.append(f"{dotted(place)}: the columns of {path}: {_TRY}")
            return columns
        return None

    def _of_rewards(self, known: list[Columns | None]) -> Iterator[Mistake]:
        columns = [one for one in known if one is not None]
        for number, function in enumerate(self.config.rewards.functions):
            place = ("rewards", "functions", number)
            everywhere = function.environments is None and len(columns) == len(known)
            if function.model is not None and os.path.isabs(function.model) and not os.path.isdir(function.model):
                yield Mistake(
                    (*place, "model"), f"there is no folder {function.model}{near_file(Path(function.model))}"
                )
            if function.function is None:
                continue
            if not is_plugin(function.function):
                yield from _of_function((*place, "function"), function.function)
                yield from self._of_arguments(
                    (*place, "function"), function.function, columns if everywhere else [None]
                )
            elif everywhere:
                yield from _of_column(place, function, columns)

    def _of_arguments(self, place: Place, spec: str, columns: Sequence[Columns | None]) -> Iterator[Mistake]:
        function = plain_function(spec)
        given = {*REWARD_ARGUMENTS, *(["reasoning_tokens"] if self.config.rewards.reads_thinking else [])}
        problems = (
            [problem for column in columns for problem in argument_problems(function, given, column)]
            if function
            else []
        )
        for problem in dict.fromkeys(problems):
            yield Mistake(place, f"{spec}: {problem}")

    def _of_named_columns(self, known: list[Columns | None]) -> Iterator[Mistake]:
        """Yield the columns that other sections name and that rows of the dataset do not have."""
        of_dataset = known[: len(self.config.dataset.sources) or 1] if not self.config.environment.atropos else []
        named: list[tuple[Place, Any]] = [(("loss", "weights_column"), self.config.loss.weights_column)]
        limits = self.config.sampling.max_completion_length_column
        named.append((("sampling", "max_completion_length_column"), limits))
        named += [(("sft", key), self.config.sft.get(key)) for key in ("completion_column", "messages_column")]
        for place, name in named:
            for one in of_dataset:
                if isinstance(name, str) and one is not None and name not in one:
                    has = nearest(name, list(one), f"they have {', '.join(one) or 'only the prompt'}")
                    yield Mistake(place, f"rows of the dataset have no column `{name}`; {has}", DatasetError)
                    break

    def _of_environments(self) -> Iterator[Mistake]:
        alone: list[tuple[Place, Any]] = [(("environment",), self.config.environment)]
        for place, section in [*alone, *((("environments", n), one) for n, one in enumerate(self.config.environments))]:
            if section.factory is not None and not is_plugin(section.factory):
                yield from _of_function((*place, "factory"), section.factory)

    def _of_packages(self) -> Iterator[Mistake]:
        for section, values in (("trainer", self.config.trainer), ("sft", self.config.sft)):
            chosen = values.get("report_to") or []
            for name in [chosen] if isinstance(chosen, str) else chosen if isinstance(chosen, list) else []:
                place = (section, "report_to")
                if name not in (*TRACKERS, "none", "all"):
                    hint = nearest(str(name), [*TRACKERS], f"it knows {', '.join(TRACKERS)}")
                    yield Mistake(place, f"{name!r} is no tracker of transformers; {hint}")
                elif (package := TRACKERS.get(name)) and not any(map(importlib.util.find_spec, package.split())):
                    yield Mistake(
                        place, f"{name} is not installed here: pip install {package.split()[0]}; or remove it"
                    )
            optimizer = values.get("optim")
            needed = package_of_optimizer(optimizer) if isinstance(optimizer, str) else None
            if needed and importlib.util.find_spec(needed[0]) is None:
                said = f"{optimizer} needs {needed[1]}, which is not installed here; install it, or use adamw_torch"
                yield Mistake((section, "optim"), said)


def _of_function(place: Place, spec: str) -> Iterator[Mistake]:
    if (problem := problem_of(spec)) is not None:
        yield Mistake(place, problem)


def _of_column(place: Place, function: RewardFunction, columns: list[Columns]) -> Iterator[Mistake]:
    """Yield that a built-in reward reads a column that rows do not have."""
    name = getattr(function.settings, "column", None)
    for names in columns:
        if name is not None and name not in names:
            has = nearest(name, list(names), f"they have {', '.join(names) or 'only the prompt'}")
            key = (*place, "options", "column") if "column" in function.options else (*place, "function")
            said = f"{function.function} reads the column `{name}`, which rows do not have; set options.column"
            yield Mistake(key, f"{said}; {has}")
            return
