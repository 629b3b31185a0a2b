"""Summary of a run, from the files that the daemons leave behind: steps.jsonl and producer-*.jsonl."""

import statistics
from pathlib import Path
from typing import Any

from slipstream.run_reader import STEPS, RunReader

WINDOW = 10  # steps averaged for the first and the last reward
LEAST = {"eval_after": 0.9, "eval_gain": 0.25, "reward_gain": 0.0, "policy_versions": 20, "overlap_efficiency": 0.8}


def summarize(run_dir: Path, *, eval_before: float, eval_after: float, wall_s: float) -> dict[str, Any]:
    """The numbers of docs/operations.md, "The demo's summary". Times in seconds unless named otherwise."""
    run = RunReader(run_dir)
    steps, timelines = run.lines(STEPS), run.timelines()
    swaps = [event for timeline in timelines for event in timeline if event["event"] == "swap"]
    last = [[event for event in timeline if event["event"] in ("stats", "stop")][-1] for timeline in timelines]
    begin, end = steps[0]["t"], steps[-1]["t"]  # steady state: from the end of the first step to the end of the last
    training_busy = sum(step["step_s"] for step in steps[1:])
    generation_busy = max(busy_between(timeline, begin, end) for timeline in timelines)
    milliseconds = sorted(swap["ms"] for swap in swaps)
    return {
        "reward_first": statistics.fmean(step["reward"] for step in steps[:WINDOW]),
        "reward_last": statistics.fmean(step["reward"] for step in steps[-WINDOW:]),
        "eval_before": eval_before,
        "eval_after": eval_after,
        "steps": steps[-1]["step"],
        "policy_versions": len({swap["version"] for swap in swaps}),
        "groups_trained": steps[-1]["counts"]["trained"],
        "tokens_generated": sum(event["tokens"] for event in last),
        "wall_s": wall_s,
        "steady_state_s": end - begin,
        "trainer_wait_s": sum(step["wait_s"] for step in steps[1:]),
        "training_busy_s": training_busy,
        "generation_busy_s": generation_busy,
        "producer_idle_s": sum(event["idle_s"] for event in last),
        "overlap_efficiency": max(generation_busy, training_busy) / (end - begin),
        "swap_p50_ms": percentile(milliseconds, 0.50),
        "swap_p99_ms": percentile(milliseconds, 0.99),
        "staleness_mean": statistics.fmean(step["staleness/mean"] for step in steps),
    }


def shortfalls(summary: dict[str, Any]) -> list[str]:
    """Name what is below `LEAST`; a gain is the last value less the first one."""
    gains = {
        "eval_gain": summary["eval_after"] - summary["eval_before"],
        "reward_gain": summary["reward_last"] - summary["reward_first"],
    }
    found = summary | gains
    return [
        f"{name} is {found[name]:.3g}, at least {least} was expected"
        for name, least in LEAST.items()
        if not found[name] >= least
    ]


def busy_between(timeline: list[dict[str, Any]], begin: float, end: float) -> float:
    """Seconds of generation between two points of time, by linear interpolation of the producer's running total."""
    points = [(event["t"], event["busy_s"]) for event in timeline if "busy_s" in event]

    def at(t: float) -> float:
        before = max((p for p in points if p[0] <= t), default=points[0])
        after = min((p for p in points if p[0] >= t), default=points[-1])
        if after[0] == before[0]:
            return before[1]
        return before[1] + (after[1] - before[1]) * (t - before[0]) / (after[0] - before[0])

    return at(end) - at(begin)


def percentile(ordered: list[float], share: float) -> float:
    """The nearest-rank percentile of a sorted list."""
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


def table(summary: dict[str, Any]) -> str:
    width = max(map(len, summary))
    rows = [
        f"  {name:<{width}}  {value:>10.3f}" if isinstance(value, float) else f"  {name:<{width}}  {value:>10}"
        for name, value in summary.items()
    ]
    return "\n".join(["", *rows, ""])


def plot(run_dir: Path) -> None:
    """RUN_DIR/reward.png: reward and staleness over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = RunReader(run_dir).lines(STEPS)
    numbers = [step["step"] for step in steps]
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(8, 5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    rewards = [step["reward"] for step in steps]
    smooth = [statistics.fmean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rewards))]
    upper.plot(numbers, rewards, color="tab:blue", alpha=0.3, linewidth=1)
    upper.plot(numbers, smooth, color="tab:blue", linewidth=2, label=f"mean reward of {WINDOW} steps")
    upper.set_ylabel("reward of new completions")
    upper.legend(loc="lower right")
    upper.grid(alpha=0.3)
    lower.fill_between(
        numbers, [step["staleness/max"] for step in steps], step="mid", alpha=0.2, color="tab:orange", label="max"
    )
    lower.plot(numbers, [step["staleness/mean"] for step in steps], color="tab:orange", label="mean")
    lower.set_ylabel("staleness (versions)")
    lower.set_xlabel("optimizer step")
    lower.legend(loc="upper right")
    lower.grid(alpha=0.3)
    figure.savefig(run_dir / "reward.png", dpi=120)
    pyplot.close(figure)
