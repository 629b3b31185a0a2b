"""The subcommands of `slipstream journal`, which read a run's journal, also while the trainer is running.

Guarantee: no subcommand changes the journal, and `--help` imports no heavy library.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protocol.errors import ExitCode
from replay.journal.schema import STATES, GroupFilter
from slipstream.options import LARGEST, Function, Group, Range, json_option, named_run, run_option

if TYPE_CHECKING:
    from replay.journal.reader import JournalReader

VERDICTS = ("failed", "solved", "mixed", "unscored")  # as in replay.rerolls, which this command need not import
_WHOLE = click.IntRange(0, LARGEST)
_FILTERS = (
    ("--version", "versions", Range(_WHOLE), "policy version that generated the group"),
    ("--step", "steps", Range(_WHOLE), "optimizer step that trains the group for the first time"),
    ("--state", "state", click.Choice(STATES), "what became of it"),
    ("--reward", "rewards", Range(click.FLOAT), "mean reward, such as 0.5:1"),
    ("--prompt", "prompt_id", _WHOLE, "number of the prompt in the dataset"),
    ("--verdict", "verdict", click.Choice(VERDICTS), "the verdict of the judging reward on its completions"),
    ("--replays", "replays", Range(_WHOLE), "how often it was replayed"),
)
"""Options that choose groups, with the fields of `GroupFilter`."""


@click.group(cls=Group)
@run_option()
def journal() -> None:
    """Read the journal of a run, also while it goes on."""


@contextmanager
def _opened() -> "Iterator[JournalReader]":
    from slipstream.run_reader import RunReader

    with closing(RunReader(named_run().path()).journal()) as reader:
        yield reader


def _filters(function: Function) -> Function:
    for flag, field, kind, text in reversed(_FILTERS):
        function = click.option(flag, field, type=kind, help=text)(function)
    return function


@journal.command()
@run_option()
@json_option
def stats(as_json: bool) -> None:
    """Count groups, steps, policies and failures."""
    from slipstream.journal.stats import stats

    with _opened() as reader:
        stats(reader, as_json=as_json)


@journal.command("list")
@run_option()
@_filters
@click.option("--limit", type=_WHOLE, default=50, show_default=True, help="the newest N, 0 for all")
@json_option
def list_groups(limit: int, as_json: bool, **wanted: Any) -> None:
    """List groups, one per line, newest last."""
    from slipstream.journal.views import list_groups

    with _opened() as reader:
        list_groups(reader.rows(GroupFilter(**wanted), limit), as_json=as_json)


@journal.command()
@run_option()
@click.argument("group", metavar="ID")
@click.option("--tokens", is_flag=True, help="every token with its log-prob")
def show(group: str, tokens: bool) -> None:
    """Show one group: prompt, completions, rewards, log-probs."""
    from slipstream.journal.show import show

    with _opened() as reader:
        show(reader, group, every_token=tokens)


def _export_file(context: click.Context, parameter: click.Parameter, value: str) -> Path:
    if not value.endswith((".jsonl", ".parquet")):
        raise click.BadParameter(f"expected a name that ends in .jsonl or .parquet (got {value!r})")
    return Path(value)


@journal.command()
@run_option()
@_filters
@click.option("--limit", type=_WHOLE, default=0, show_default=True, help="the newest N, 0 for all")
@click.option(
    "--to", metavar="FILE", required=True, callback=_export_file, help="FILE.jsonl or FILE.parquet, one row per group"
)
def export(limit: int, to: Path, **wanted: Any) -> None:
    """Write groups with their tokens, log-probs and rewards to a file."""
    from slipstream.journal.export import export

    with _opened() as reader:
        export(reader, GroupFilter(**wanted), limit, to)


@journal.command()
@run_option()
@click.option("--to", metavar="FOLDER", required=True, type=click.Path(path_type=Path), help="a new folder")
def backup(to: Path) -> None:
    """Copy journal and newest checkpoint; a trainer can go on from the copy."""
    from slipstream.journal.backup import backup

    with _opened() as reader:
        backup(reader, to)


@journal.command()
@run_option()
def verify() -> ExitCode:
    """Read everything, report what is wrong, and exit with 74 if anything is."""
    from slipstream.journal.verify import verify

    with _opened() as reader:
        return verify(reader)


@journal.command()
@run_option()
@json_option
def quarantine(as_json: bool) -> None:
    """List quarantined groups and frames, and dead letters, with reasons."""
    from slipstream.journal.views import quarantine

    with _opened() as reader:
        quarantine(reader, as_json=as_json)


@journal.command()
@run_option()
@click.argument("step", type=_WHOLE)
def lineage(step: int) -> None:
    """List the groups that made a step, and the policy that it made."""
    from slipstream.journal.views import lineage

    with _opened() as reader:
        lineage(reader, step)
