"""The view on a terminal: whether the run learns, who waits for whom, what to do, and every producer.

Guarantee: pure; the view fits any width from 80 columns on; a row without known numbers is left out; nothing that came over the
wire is taken for markup or moves the cursor.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.status.reading import ProducerView, TrainerView, View
from slipstream.status.warnings import Warned
from slipstream.tables import clock, duration, percent, printable, rate, shortened, size, sparkline, three_digits, whole

NARROWEST = 80
_WIDEST = 120
_LABEL = 10
_LONGEST_SOURCE = 14

_TURNS = {
    "trainer": "with the trainer since {}",
    "producers": "with the producers since {}",
    "changing": "producers leave it since {}",
}

Row = tuple[str, RenderableType]
Value = tuple[str, Any, Callable[[Any], str]]
"""A name, its value, and how that is written. A value that is None is not shown."""


def render(view: View, warned: Sequence[Warned], width: int) -> RenderableType:
    width = min(_WIDEST, max(NARROWEST, width))
    content = width - 4 - _LABEL - 2
    trainer = view.trainer or TrainerView()
    sections = [_section(_learning(trainer, view.rewards, content)), _section(_pipeline(trainer, content))]
    parts: list[RenderableType] = [section for section in sections if section.row_count]
    if view.ended:
        parts.insert(0, Text(f"{view.ended.text}, {clock(view.ended.at)}", "bold"))
    if dead := [printable(one.text) for one in warned if one.name == "dead_reward"]:
        parts.insert(0, Text("\n".join(dead), "bold red"))
    parts.append(_warnings(warned))
    if trainer.source_groups:
        parts.append(_sources(trainer))
    if trainer.environment_leases:
        parts.append(_environments(trainer))
    if trainer.rank_step_s:
        parts.append(_ranks(trainer))
    if view.producers:
        parts.append(_producers(view.producers, width))
    if any(producer.tokens_per_step is not None for producer in view.producers):
        parts.append(_engines(view.producers))
    spaced = [piece for part in parts for piece in (part, Text())][:-1]
    now = time.strftime("%H:%M:%S", time.localtime(view.at)) if view.at else ""
    return Panel(
        Group(*spaced), title=_title(trainer), subtitle=Text(now, "dim"), width=width, box=box.HORIZONTALS,
        border_style="cyan", title_align="left", subtitle_align="right",
    )  # fmt: skip


def _title(trainer: TrainerView) -> Text:
    title = Text("slipstream status", "bold")
    for name, value in (("run", trainer.run), ("release", trainer.release)):
        if value:
            title.append(f" · {name} {printable(value)}", "not bold")
    return title


def _section(rows: Iterator[Row]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=_LABEL, style="cyan", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _learning(trainer: TrainerView, rewards: dict[int, float], width: int) -> Iterator[Row]:
    if trainer.step is not None and trainer.max_steps:
        left = "" if not trainer.eta_s else f", about {duration(trainer.eta_s)} left"
        share = trainer.step / trainer.max_steps
        yield "step", _barred(share, width, f"{trainer.step:,} of {trainer.max_steps:,}{left}", "green")
    if rewards:
        spread = "" if trainer.reward_std is None else f" ± {trainer.reward_std:.3f}"
        numbers, steps = f"  {rewards[max(rewards)]:.3f}{spread}", f"  steps {min(rewards)}-{max(rewards)}"
        line = sparkline(list(rewards.values()), width - len(numbers) - len(steps))
        yield "reward", Text.assemble((line, "green"), (numbers, "bold"), (steps, "dim"))
    if len(trainer.rewards_by_function) > 1:
        yield from _row(
            "", *((printable(name), value, three_digits) for name, value in trainer.rewards_by_function.items())
        )
    yield from _row(
        "learning",
        ("loss", trainer.loss, three_digits),
        ("gradient", trainer.gradient_norm, three_digits),
        ("entropy", trainer.entropy, three_digits),
        ("teachers' gain", trainer.teacher_logprob_gain, three_digits),
    )
    yield from _row(
        "off-policy",
        ("effective samples", trainer.effective_sample_share, percent),
        ("KL", trainer.sampling_kl, three_digits),
    )
    yield from _row(
        "rollouts",
        ("zero signal", trainer.zero_signal_share, percent),
        ("cut off", trainer.truncated_share, percent),
        ("mean length", trainer.completion_length_mean, "{:,.0f} tokens".format),
    )
    version = "last" if trainer.evaluation_version is None else f"version {trainer.evaluation_version}"
    done = f"{trainer.evaluation_prompts_done or 0:,} of {{:,}} prompts"
    yield from _row(
        "held out",
        (version, trainer.evaluation_score, three_digits),
        ("best", trainer.evaluation_best_score, three_digits),
        ("now", trainer.evaluation_prompts or None, done.format),
    )


def _pipeline(trainer: TrainerView, width: int) -> Iterator[Row]:
    if trainer.wait_share is not None:
        of = "since its start" if trainer.rates_since_start else f"in the last {duration(trainer.rates_over_s)}"
        now = f", now for {duration(trainer.waiting_now_s)}" if (trainer.waiting_now_s or 0.0) >= 1 else ""
        text = f"trainer {percent(trainer.wait_share)} {of}{now}"
        yield "waits", _barred(trainer.wait_share, width, text, "yellow" if trainer.wait_share > 0.5 else "green")
    if (side := trainer.gpu_side) is not None:
        now = _TURNS.get(side, printable(side)).format(duration(trainer.gpu_turn_age_s))
        of_all = sum(trainer.gpu_turn_s.values()) or 1.0
        shares = (f"{name} {percent(trainer.gpu_turn_s.get(name, 0.0) / of_all)}" for name in ("trainer", "producers"))
        yield "GPU", Text(f"{now} · {', '.join(shares)}")
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
        ("generated", trainer.tokens_generated_per_s, rate),
        ("trained", trainer.tokens_trained_per_s, rate),
        values_first=True,
    )
    yield from _row(
        "groups",
        ("leased", trainer.leases_out, whole),
        ("ready", trainer.groups_ready, whole),
        ("replayable", trainer.groups_replayable, whole),
        ("rerolls waiting", trainer.rerolls_waiting, whole),
        values_first=True,
    )
    received = _named(trainer.groups_received)
    if received:
        received["trained"] = trainer.groups_trained or 0
    yield from _counted("answers", received, always=("accepted", "no signal", "stale", "trained"))
    yield from _counted("trouble", _troubles(trainer))
    if trainer.journal_bytes is not None and trainer.disk_used_share is not None:
        commits = "" if trainer.journal_commit_s is None else f", commits {duration(trainer.journal_commit_s)}"
        limit = "" if trainer.disk_limit_share is None else f", limit {percent(trainer.disk_limit_share)}"
        text = f"journal {size(trainer.journal_bytes)}{commits} · disk {percent(trainer.disk_used_share)} full{limit}"
        yield "storage", Text(text)


def _troubles(trainer: TrainerView) -> dict[str, int]:
    return _named(trainer.leases_failed, "leases ") | {
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


def _sources(trainer: TrainerView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="cyan")
    names = ("source", "trained", "no signal", "failed", "of batch", "reward", "success", "held out")
    for name in names:
        table.add_column(name, justify="left" if name == "source" else "right", no_wrap=True)
    for source, groups in trainer.source_groups.items():
        reward, held_out = trainer.source_reward.get(source), trainer.evaluation_source_score.get(source)
        table.add_row(
            shortened(printable(source), _LONGEST_SOURCE),
            *(whole(groups.get(outcome, 0)) for outcome in ("trained", "no_signal", "failed")),
            percent(trainer.source_batch_share.get(source)),
            "-" if reward is None else three_digits(reward),
            percent(trainer.source_success_share.get(source)),
            "-" if held_out is None else three_digits(held_out),
        )
    return table


def _environments(trainer: TrainerView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="cyan")
    names = ("environment", "leased", "trained", "no signal", "failed", "given up", "reward", "success")
    for name in names:
        table.add_column(name, justify="left" if name == "environment" else "right", no_wrap=True)
    for name, leases in trainer.environment_leases.items():
        groups, reward = trainer.environment_groups.get(name, {}), trainer.environment_reward.get(name)
        table.add_row(
            shortened(printable(name), _LONGEST_SOURCE),
            "skipped" if trainer.environment_skipped.get(name) else whole(leases),
            *(whole(groups.get(outcome, 0)) for outcome in ("trained", "no_signal", "failed", "dead_letters")),
            "-" if reward is None else three_digits(reward),
            percent(trainer.environment_success_share.get(name)),
        )
    return table


def _ranks(trainer: TrainerView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="cyan")
    for name in ("rank", "step", "waits for others", "tokens", "memory"):
        table.add_column(name, justify="left" if name == "rank" else "right", no_wrap=True)
    for rank, step_s in trainer.rank_step_s.items():
        table.add_row(
            printable(rank),
            duration(step_s),
            percent(trainer.rank_waiting_s.get(rank, 0.0) / step_s if step_s else None),
            whole(trainer.rank_tokens.get(rank)),
            size(trainer.rank_memory_bytes.get(rank, 0)),
        )
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
            whole(producer.lag),
            _stages(producer.leases),
            rate(producer.tokens_per_s),
            percent(producer.idle_share),
            duration(producer.swap_last_s or producer.swap_mean_s),
        )
        table.add_row(shown, *cells)
    return table


def _engines(producers: Sequence[ProducerView]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="cyan")
    for name in ("engine", "sequences a step", "tokens a step", "steps with a graph"):
        table.add_column(name, justify="left" if name == "engine" else "right", no_wrap=True)
    for producer in producers:
        if producer.tokens_per_step is not None:
            table.add_row(
                shortened(printable(producer.name), _LONGEST_SOURCE),
                whole(producer.sequences_per_step),
                whole(producer.tokens_per_step),
                percent(producer.graph_share),
            )
    return table


def _stages(leases: dict[str, int]) -> str:
    if list(leases) == ["held"]:
        return f"{leases['held']} held"
    return " · ".join(str(count) for count in leases.values()) or "-"


def _barred(share: float, width: int, text: str, style: str) -> Table:
    bar = ProgressBar(1.0, share, max(12, min(40, width - 48)), complete_style=style, finished_style=style)
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(bar, Text(text))
    return line


def _row(label: str, *values: Value, values_first: bool = False) -> Iterator[Row]:
    shown = [((form(value), "bold"), (name, "")) for name, value, form in values if value is not None]
    if shown:
        pairs = [pair if values_first else pair[::-1] for pair in shown]
        yield label, Text(" · ").join(Text.assemble(first, " ", second) for first, second in pairs)


def _counted(label: str, counts: dict[str, int], always: tuple[str, ...] = ()) -> Iterator[Row]:
    shown = [(name, count, whole) for name, count in counts.items() if count or name in always]
    return _row(label, *shown, values_first=True)


def _named(counts: Mapping[str, int], prefix: str = "") -> dict[str, int]:
    return {f"{prefix}{printable(name).replace('_', ' ')}": count for name, count in counts.items()}
