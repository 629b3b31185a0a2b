"""Writes the rows of reasoning-gym into the run, in a process of its own: `python -m consumer.prompts.generated FD PLAN`.

Guarantee: `RUN_DIR/rows` has all rows of a source or none, and a file that is there is read at every later start, so a prompt's
number means the same row also under another release of reasoning-gym. It is imported in the child alone, whose hashes of text
are the same in each process. No question that is held out is among the rows to train, if both are written at one start.
"""

import asyncio
import dataclasses
import hashlib
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from protocol.config.data import DatasetSection, SourceSection
from protocol.config.run import RunConfig
from protocol.errors import DatasetError
from protocol.runtime.child import ChildEndedError, ChildProcess, ChildProcesses
from protocol.runtime.files import staged
from protocol.runtime.logs import Throttle
from protocol.runtime.worker_channel import WorkerChannel

logger = logging.getLogger(__name__)

ROWS = "rows"
"""The folder in `run_dir`."""

_SAY_EVERY_S = 10.0
_POLL_S = 0.25
_SEED, _HELD_OUT_SEED = 1, 1_000_000
_REFUSED = {"composite": "it mixes other sets; give each of them as a source of its own"}


class Plan(msgspec.Struct, frozen=True):
    """The rows of one source."""

    key: str
    name: str
    size: int
    seed: int
    config: dict[str, Any]
    difficulty: int | None
    template: str
    is_held_out: bool
    folder: str = ""
    file: str = ""  # NAME-RELEASE-DIGEST.jsonl in the folder, if it is there

    @property
    def digest(self) -> str:
        """16 hex digits that change with all that decides the rows, but for the release."""
        settings = msgspec.structs.replace(self, key="", folder="", file="")
        return hashlib.sha256(msgspec.json.encode(settings, order="deterministic")).hexdigest()[:16]

    @classmethod
    def of(cls, key: str, source: SourceSection, folder: Path) -> "Plan":
        is_held_out = key.startswith("evaluation.")
        seed = (_HELD_OUT_SEED if is_held_out else _SEED) if source.seed is None else source.seed
        assert source.reasoning_gym is not None
        assert source.size is not None
        plan = cls(
            key, source.reasoning_gym, source.size, seed, source.config, source.difficulty, source.template, is_held_out,
            str(folder),
        )  # fmt: skip
        found = next(folder.glob(f"*-{plan.digest}.jsonl"), "")
        return msgspec.structs.replace(plan, file=str(found))


class Report(msgspec.Struct, frozen=True):
    """Progress with one source, or why its rows cannot be written."""

    key: str
    rows: int
    file: str = ""  # that has them all
    problem: str = ""


def with_rows(config: RunConfig, check: Callable[[], None] = lambda: None) -> RunConfig:
    """Return the configuration with the `path` of each source of reasoning-gym; write the rows that are not there. `check` is
    called while it waits, and may raise. Raise DatasetError for a set, a key or a value that reasoning-gym does not take."""
    folder = Path(config.run_dir) / ROWS
    evaluation = config.evaluation
    sections = {"": config.dataset} | ({"evaluation.": evaluation.dataset} if evaluation else {})
    plans = [
        Plan.of(prefix + key, source, folder)
        for prefix, section in sections.items()
        for key, source in section.all_sources.items()
        if source.reasoning_gym is not None
    ]
    if not plans:
        return config
    files = {plan.key: plan.file for plan in plans}
    missing = [plan for plan in plans if not plan.file]
    if any(plan.is_held_out for plan in missing) and any(plan.file and not plan.is_held_out for plan in plans):
        logger.warning("rows to train were written before those held out, and may have some of their questions")
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        files |= asyncio.run(_write_all(missing, check))
    changes: dict[str, Any] = {"dataset": _placed(config.dataset, files, "")}
    if evaluation is not None:
        dataset = _placed(evaluation.dataset, files, "evaluation.")
        changes["evaluation"] = evaluation.model_copy(update={"dataset": dataset})
    return config.model_copy(update=changes)


def copy_rows(run_dir: Path, to: Path) -> None:
    """Copy the files of one run to another, which has none of them yet."""
    for file in (run_dir / ROWS).glob("*.jsonl"):
        (to / ROWS).mkdir(parents=True, exist_ok=True)
        with staged(to / ROWS / file.name) as partial:
            shutil.copy2(file, partial)


def _placed(section: DatasetSection, files: dict[str, str], prefix: str) -> DatasetSection:
    if not section.sources:
        return section.model_copy(update={"path": files.get(f"{prefix}dataset", section.path)})
    sources = [
        source.model_copy(update={"path": files.get(prefix + key, source.path)})
        for key, source in section.all_sources.items()
    ]
    return section.model_copy(update={"sources": sources})


async def _write_all(plans: list[Plan], check: Callable[[], None]) -> dict[str, str]:
    """Have the files written; return them by the keys of their sources."""
    children, files = ChildProcesses(Throttle(logger)), dict[str, str]()
    ordered = sorted(plans, key=lambda plan: not plan.is_held_out)
    try:
        encoded = msgspec.json.encode(ordered).decode()
        child = children.start(__name__, encoded, source="reasoning-gym", environment={"PYTHONHASHSEED": "0"})
        while len(files) < len(plans):
            report = await _next(child, check)
            if report.problem:
                raise DatasetError(f"{report.key}: {report.problem}")
            if report.file:
                files[report.key] = report.file
            text = "%s: wrote %d rows to %s" if report.file else "%s: wrote %d rows so far%s"
            logger.info(text, report.key, report.rows, report.file)
    except ChildEndedError as error:
        raise DatasetError(f"{ordered[len(files)].key}: the rows of reasoning-gym were not written: {error}") from error
    finally:
        await children.close()
    return files


async def _next(child: ChildProcess, check: Callable[[], None]) -> Report:
    task = asyncio.ensure_future(child.receive(Report))
    try:
        while not (await asyncio.wait({task}, timeout=_POLL_S))[0]:
            check()
        return task.result()
    finally:
        task.cancel()


# In the child


def made(plan: Plan) -> Any:
    """Make the data set of a plan. Raise DatasetError if reasoning-gym has no such set, settings or difficulty."""
    try:
        from reasoning_gym.factory import CURRICULA, DATASETS
    except ImportError as error:
        raise DatasetError(
            f"reasoning_gym needs the package reasoning-gym ({error}); install it in Slipstream's checkout: "
            "pip install '.[reasoning]'"
        ) from error
    if plan.name in _REFUSED:
        raise DatasetError(f"reasoning_gym={plan.name} is refused: {_REFUSED[plan.name]}")
    if plan.name not in DATASETS:
        near = ", ".join(get_close_matches(plan.name, DATASETS, n=3)) or ", ".join(sorted(DATASETS))
        raise DatasetError(f"reasoning-gym has no data set {plan.name!r}; its nearest names: {near}")
    make, settings = DATASETS[plan.name]
    known = {field.name for field in dataclasses.fields(settings)} - {"seed", "size"}
    for key in plan.config.keys() - known:
        near = ", ".join(get_close_matches(key, known, n=3)) or ", ".join(sorted(known))
        raise DatasetError(f"config: {plan.name} has no setting {key!r}; its nearest names: {near}")
    chosen = {}
    if plan.difficulty is not None:
        if plan.name not in CURRICULA:
            raise DatasetError(f"difficulty: {plan.name} has no curriculum in reasoning-gym; give `config` instead")
        curriculum = CURRICULA[plan.name]()
        levels = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1)
        if plan.difficulty >= levels:
            raise DatasetError(f"difficulty={plan.difficulty}: the curriculum of {plan.name} ends at {levels - 1}")
        curriculum.set_global_level(plan.difficulty)
        chosen = dataclasses.asdict(curriculum.generate_configuration())
    try:
        config = settings(**chosen | plan.config | {"seed": plan.seed, "size": plan.size})
        config.validate()
        return make(config=config)
    except Exception as error:
        raise DatasetError(f"config: {plan.name} does not take it: {type(error).__name__}: {error}") from error


def rows(plan: Plan, dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows: a chat prompt, the answer, and in `entry` what the reward needs: the item, and settings that are not the
    default."""
    settings, usual = dataclasses.asdict(dataset.config), dataclasses.asdict(type(dataset.config)())
    config = {key: value for key, value in settings.items() if value != usual[key] and key not in ("seed", "size")}
    for number in range(plan.size):
        try:
            item = dataset[number]
            entry = {name: item[name] for name in ("question", "answer", "metadata")} | {"config": config}
            encoded = json.dumps(entry)
        except Exception as error:
            raise DatasetError(f"{plan.name} raised on row {number}: {type(error).__name__}: {error}") from error
        try:
            text = plan.template.format(**item["metadata"] | {"question": item["question"]})
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            known = ", ".join(["question", *item["metadata"]])
            raise DatasetError(
                f"template: {plan.template!r} does not fit row {number} ({type(error).__name__}: {error}); it may name {known}"
            ) from error
        answer = item["answer"] if item["answer"] is None else str(item["answer"])
        yield {"prompt": [{"role": "user", "content": text}], "answer": answer, "entry": encoded}


def write(plan: Plan, held_out: set[str], say: Callable[[Report], None]) -> None:
    """Write the file of a plan, without what is held out. A held-out plan adds its questions to it."""
    dataset, count, said = made(plan), 0, time.monotonic()
    file = Path(plan.folder) / f"{plan.name}-{version('reasoning-gym')}-{plan.digest}.jsonl"
    with staged(file) as partial, open(partial, "x", encoding="utf-8") as stream:
        for row in rows(plan, dataset):
            question = json.loads(row["entry"])["question"]
            if plan.is_held_out:
                held_out.add(question)
            elif question in held_out:
                continue
            stream.write(json.dumps(row) + "\n")
            count += 1
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                say(Report(plan.key, count))
        if not count:
            raise DatasetError("all its questions are held out; give another seed, or another config")
    say(Report(plan.key, count, str(file)))


def main(descriptor: int, encoded: str) -> None:
    channel, held_out = WorkerChannel(descriptor), set[str]()
    for plan in msgspec.json.decode(encoded, type=list[Plan]):
        try:
            write(plan, held_out, channel.send)
        except (DatasetError, OSError) as error:
            channel.send(Report(plan.key, 0, problem=str(error)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
