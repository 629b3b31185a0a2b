"""A run as tables, for notebooks.

Guarantee: it only reads, while the run goes on or after its end. A table of groups has a bound; the files behind the others have
one.
"""

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from replay.journal.schema import GroupRow
    from slipstream.decoder import Decoder
    from slipstream.journal.content import Content
    from slipstream.run_reader import Line


class Run:
    """A run, live or finished.

    Args:
        folder: its `run_dir`.

    Raises:
        ConfigError: no daemon has worked there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from protocol.errors import ConfigError
        from slipstream.run_reader import RunReader

        self.folder = Path(folder)
        self._reader = RunReader(self.folder)
        if not self._reader.is_run():
            raise ConfigError(f"{self.folder}: no daemon has worked there; name the run_dir of the run's file")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def steps(self) -> "pd.DataFrame":
        """Return a row for each optimizer step, with the columns of `steps.jsonl`."""
        from slipstream.run_reader import STEPS

        return _table(self._reader.lines(STEPS), "step")

    def evaluations(self) -> "pd.DataFrame":
        """Return a row for each evaluation, with the columns of `evaluations.jsonl`."""
        from slipstream.run_reader import EVALUATIONS

        return _table(self._reader.lines(EVALUATIONS), "version")

    def groups(self, newest: int = 1_000) -> "pd.DataFrame":
        """Return a row for each completion of the newest groups.

        It has the group's row of the journal, `prompt`, `completion`, the weighted sum as `total`, and each reward as
        `rewards/NAME`. Texts are None where the run's tokenizer is not there.

        Raises:
            JournalError: there is no journal, or it cannot be read.
        """
        from replay.journal.schema import EVERY_GROUP
        from slipstream.decoder import find_decoder
        from slipstream.journal.content import ContentReader

        if newest < 1:
            raise ValueError(f"newest: expected a number of groups from 1 on (got {newest})")
        lines: list[Line] = []
        with closing(self._reader.journal()) as journal:
            facts, contents = journal.facts(), ContentReader(journal)
            decoder, _ = find_decoder(facts)
            for row in journal.rows(EVERY_GROUP, newest):
                if (content := contents.read(row)) is not None:
                    lines += _completions(row, content, facts, decoder)
        return _table(lines, "lease_id")

    def adapter(self, which: int | str = "last") -> Path:
        """Return the folder of an adapter, for `peft.PeftModel.from_pretrained`, or of a model (`lora: null`); `ConfigError` if
        there is none.

        Args:
            which: the step of a checkpoint, `last` or `best`.
        """
        from slipstream.adapters import choose_adapter

        return choose_adapter(self.folder, str(which))

    def status(self) -> dict[str, Any]:
        """Return what `slipstream status --once --json` prints."""
        from slipstream.status.warnings import as_dict
        from slipstream.status.watch import Watch

        return as_dict(Watch(self._reader, ()).look())


def _table(lines: "list[Line]", first: str) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame(lines) if lines else pd.DataFrame(columns=[first])


def _completions(row: "GroupRow", content: "Content", facts: dict[str, str], decoder: "Decoder | None") -> "list[Line]":
    from slipstream.journal.views import as_dict

    group = content.group
    totals, shared = content.totals(facts), as_dict(row)
    last = [group.completion_ids[group.last_record(number)].tolist() for number in range(group.num_completions)]
    texts: list[str | None] = [None] * (1 + len(last))
    if decoder is not None:
        texts = [*decoder.texts([group.prompt_ids.tolist(), *last])]
    return [
        shared
        | {"prompt": texts[0], "completion": texts[1 + number], "total": totals[number]}
        | {f"rewards/{name}": value for name, value in zip(content.reward_names, rewards, strict=True)}
        for number, rewards in enumerate(group.rewards.tolist())
    ]
