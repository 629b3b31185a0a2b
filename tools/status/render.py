"""The view on a terminal: whether it learns, who waits for whom, what to do, every producer.

Guarantee: pure; it fits any width from 80 columns on; a row whose numbers nobody shows is left out; nothing that came over
the wire is taken for markup or moves the cursor.
"""

import time
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tools.status.text import bar, duration, percent, rate, shortened, sparkline
from tools.status.view import ProducerView, TrainerView, View
from tools.status.warnings import Warned
from tools.tables import printable, size

NARROWEST = 80
_WIDEST = 120
_LABEL = 10

Row = tuple[str, Text]


def render(view: View, warned: Sequence[Warned], width: int) -> RenderableType:
    """
    Args:
        width: of the terminal, in characters.
    """
    width = min(_WIDEST, max(NARROWEST, width))
    content = width - 4 - _LABEL - 2
    parts: list[RenderableType] = []
    parts.append(_section(_learning(view.trainer, view.rewards, content)))
    if view.trainer is not None:
        parts.append(_section(_pipeline(view.trainer, content)))
    parts.append(_warnings(warned))
    if view.producers:
        parts.append(_producers(view.producers, width))
    shown = [part for part in parts if not (isinstance(part, Table) and not part.row_count)]
    spaced = [piece for part in shown for piece in (part, Text())][:-1]
    clock = time.strftime("%H:%M:%S", time.localtime(view.at)) if view.at else ""
    return Panel(
        Group(*spaced), title=_title(view.trainer), subtitle=Text(clock, "dim"), width=width, box=box.HORIZONTALS,
        border_style="cyan", title_align="left", subtitle_align="right",
    )  # fmt: skip


def _title(trainer: TrainerView | None) -> Text:
    title = Text("rl-status", "bold")
    if trainer is not None and trainer.run:
        title.append(f" · run {printable(trainer.run)}", "not bold")
    if trainer is not None and trainer.release:
        title.append(f" · release {printable(trainer.release)}", "not bold")
    return title


def _section(rows: Iterator[Row]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=_LABEL, style="cyan", no_wrap=True)
    table.add_column()
    for label, content in rows:
        table.add_row(label, content)
    return table


def _learning(trainer: TrainerView | None, rewards: dict[int, float], width: int) -> Iterator[Row]:
    if trainer is not None and trainer.step is not None and trainer.max_steps:
        left = "" if not trainer.eta_s else f", about {duration(trainer.eta_s)} left"
        share = trainer.step / trainer.max_steps
        yield "step", _barred(share, width, f"{trainer.step:,} of {trainer.max_steps:,}{left}", "green")
    if rewards:
        numbers = f"  {rewards[max(rewards)]:.3f}"
        if trainer is not None and trainer.reward_std is not None:
            numbers += f" ± {trainer.reward_std:.3f}"
        steps = f"  steps {min(rewards)}-{max(rewards)}"
        line = sparkline(list(rewards.values()), width - len(numbers) - len(steps))
        yield "reward", Text.assemble((line, "green"), (numbers, "bold"), (steps, "dim"))
    if trainer is None:
        return
    if len(trainer.rewards_by_function) > 1:
        yield from _row("", {printable(name): _plain(value) for name, value in trainer.rewards_by_function.items()})
    yield from _row(
        "learning",
        {"loss": _plain(trainer.loss), "gradient": _plain(trainer.gradient_norm), "entropy": _plain(trainer.entropy)},
    )
    yield from _row(
        "off-policy",
        {"effective samples": _percent(trainer.effective_sample_share), "KL": _plain(trainer.sampling_kl)},
    )
    yield from _row(
        "rollouts",
        {
            "zero signal": _percent(trainer.zero_signal_share),
            "cut off": _percent(trainer.truncated_share),
            "mean length": None
            if trainer.completion_length_mean is None
            else f"{trainer.completion_length_mean:,.0f} tokens",
        },
    )
    done = None
    if trainer.evaluation_prompts:
        done = f"{trainer.evaluation_prompts_done or 0:,} of {trainer.evaluation_prompts:,} prompts"
    version = "last" if trainer.evaluation_version is None else f"version {trainer.evaluation_version}"
    yield from _row(
        "held out",
        {version: _plain(trainer.evaluation_score), "best": _plain(trainer.evaluation_best_score), "now": done},
    )


def _pipeline(trainer: TrainerView, width: int) -> Iterator[Row]:
    if trainer.wait_share is not None:
        of = "since its start" if trainer.rates_since_start else f"in the last {duration(trainer.rates_over_s)}"
        now = f", now for {duration(trainer.waiting_now_s)}" if (trainer.waiting_now_s or 0.0) >= 1 else ""
        text = f"trainer {percent(trainer.wait_share)} {of}{now}"
        yield "waits", _barred(trainer.wait_share, width, text, "yellow" if trainer.wait_share > 0.5 else "green")
    if trainer.staleness_mean is not None and trainer.max_staleness is not None:
        text = f"mean {trainer.staleness_mean:.1f}, max {trainer.staleness_max}, bound {trainer.max_staleness} versions"
        yield "staleness", _barred(trainer.staleness_mean / max(1, trainer.max_staleness), width, text, "blue")
    if trainer.step is not None:
        version = "" if trainer.policy_version is None else f"version {trainer.policy_version} published · "
        ago = "no step yet"
        if trainer.since_last_step_s is not None:
            ago = f"last step {duration(trainer.since_last_step_s)} ago, one in {duration(trainer.step_pace_s)}"
        yield "trainer", Text(f"{version}{ago}")
    yield from _row(
        "tokens",
        {
            "generated": _rate(trainer.tokens_generated_per_s),
            "trained": _rate(trainer.tokens_trained_per_s),
        },
        values_first=True,
    )
    yield from _row(
        "groups",
        {
            "leased": _whole(trainer.leases_out),
            "ready": _whole(trainer.groups_ready),
            "replayable": _whole(trainer.groups_replayable),
            "rerolls waiting": _whole(trainer.rerolls_waiting),
        },
        values_first=True,
    )
    received = {printable(name).replace("_", " "): count for name, count in trainer.groups_received.items()}
    if received:
        received["trained"] = trainer.groups_trained or 0
    shown = ("accepted", "no signal", "stale", "trained")
    yield from _row("answers", _counted(received, always=shown), values_first=True)
    yield from _row("trouble", _counted(_troubles(trainer)), values_first=True)
    if trainer.journal_bytes is not None and trainer.disk_used_share is not None:
        commits = "" if trainer.journal_commit_s is None else f", commits {duration(trainer.journal_commit_s)}"
        limit = "" if trainer.disk_limit_share is None else f", limit {percent(trainer.disk_limit_share)}"
        text = f"journal {size(trainer.journal_bytes)}{commits} · disk {percent(trainer.disk_used_share)} full{limit}"
        yield "storage", Text(text)


def _troubles(trainer: TrainerView) -> dict[str, int]:
    failed = {f"leases {printable(reason).replace('_', ' ')}": count for reason, count in trainer.leases_failed.items()}
    return failed | {
        "went stale": trainer.groups_went_stale or 0,
        "dead letters": trainer.dead_letters or 0,
        "quarantined": trainer.groups_quarantined or 0,
        "frames refused": trainer.frames_refused or 0,
        "connections refused": sum(trainer.connections_refused.values()),
        "NaN steps": trainer.nonfinite_steps or 0,
    }


def _warnings(warned: Sequence[Warned]) -> RenderableType:
    if not warned:
        return Text("nothing to complain about", "green")
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="bold yellow", no_wrap=True)
    table.add_column()
    for warning in warned:
        table.add_row("▲", Text.assemble((f"{printable(warning.text)}: ", "bold"), warning.cure))
    return table


def _producers(producers: Sequence[ProducerView], width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, width=width - 4, header_style="cyan")
    table.add_column("producer", ratio=1, no_wrap=True)
    for name in ("version", "lag", "wait·gen·score·ack", "tokens", "idle", "swap"):
        table.add_column(name, justify="right", no_wrap=True)
    for producer in producers:
        shown = Text(shortened(printable(producer.name), width - 62))
        if producer.error is not None:
            table.add_row(shown, Text("gone", "bold red"))
            continue
        version = producer.policy_version
        cells = (
            "-" if version is None or version < 0 else f"v{version}",
            _whole(producer.lag) or "-",
            _stages(producer.leases),
            rate(producer.tokens_per_s),
            _percent(producer.idle_share) or "-",
            duration(producer.swap_last_s or producer.swap_mean_s),
        )
        table.add_row(shown, *cells)
    return table


def _stages(leases: dict[str, int]) -> str:
    if list(leases) == ["held"]:
        return f"{leases['held']} held"
    return " · ".join(str(count) for count in leases.values()) or "-"


def _barred(share: float, width: int, text: str, style: str) -> Text:
    done, rest = bar(share, max(12, min(40, width - 48)))
    return Text.assemble((done, style), (rest, "dim"), f"  {text}")


def _row(label: str, values: dict[str, str | None], *, values_first: bool = False) -> Iterator[Row]:
    known = {name: value for name, value in values.items() if value is not None}
    if known:
        yield label, _listed(known, values_first=values_first)


def _listed(values: dict[str, str], *, values_first: bool = False) -> Text:
    line = Text()
    for name, value in values.items():
        pair = [(value, "bold"), (name, "")]
        line = Text.assemble(line, " · " if line else "", *_spaced(pair if values_first else pair[::-1]))
    return line


def _spaced(pair: list[tuple[str, str]]) -> list[tuple[str, str] | str]:
    return [pair[0], " ", pair[1]]


def _counted(counts: dict[str, int], always: tuple[str, ...] = ()) -> dict[str, str | None]:
    return {name: f"{count:,}" for name, count in counts.items() if count or name in always}


def _percent(share: float | None) -> str | None:
    return None if share is None else percent(share)


def _rate(per_second: float | None) -> str | None:
    return None if per_second is None else rate(per_second)


def _plain(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


def _whole(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"
