"""What the runs of `benchmarks.silent` say together: one table in Markdown, and one picture of the rewards."""

import statistics
from pathlib import Path
from typing import Any

Result = dict[str, Any]

PROOF, NO_PROOF, TRL = "proof", "no proof", "TRL"
_LAST = 10  # steps
_COLORS = ("#222222", "#c0392b", "#1f6fb4", "#e07b39", "#2e8b57", "#7d4fa3", "#8c6d31", "#d1609c", "#5f9ea0")


def table(results: list[Result]) -> str:
    """Return a row for each fault and format: what the proofs did, and what training without them, and by TRL, came to. Rewards
    and KL (of the sampler against the trainer) are means of the last steps."""
    rows = [
        "| task | fault | format | refused by | stopped after | accuracy, repaired | no proofs: accuracy | reward | KL "
        "| tokens of a wrong policy | TRL: accuracy | reward | KL |",
        f"|{'---|' * 13}",
    ]
    names = ("task", "fault", "dtype")
    for case in dict.fromkeys(tuple(one[name] for name in names) for one in results):
        of = {one["arm"]: one for one in results if tuple(one[name] for name in names) == case}
        cells = [*case, *_noticed(of.get(PROOF)), *_silent(of.get(NO_PROOF)), *_silent(of.get(TRL))[:3]]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def noticed_by(one: Result) -> str:
    """Name the proof that refused a version, if one did."""
    if one["refused"] is None:
        return "a warning" if one["warnings"] else "nothing"
    of_the_probe = ("log-probs", "prefix cache")
    return f"{'behaviour' if any(words in one['why'] for words in of_the_probe) else 'bits'}, v{one['refused']}"


def _noticed(one: Result | None) -> list[str]:
    if one is None:
        return ["-"] * 3
    return [noticed_by(one), f"{one['stopped_after']} steps", f"{one['accuracy']:.3f}"]


def _silent(one: Result | None) -> list[str]:
    if one is None:
        return ["-"] * 4
    reward, kl = (statistics.fmean(one[name][-_LAST:]) for name in ("rewards", "kl"))
    tokens = f"{one['wrong_tokens']:,}" if one["wrong_tokens"] else "-"
    return [f"{one['accuracy']:.3f}", f"{reward:.2f}", f"{kl:.3f}", tokens]


def smooth(values: list[float], width: int = 5) -> list[float]:
    """Return the mean of each value and of those before it, `width` at most."""
    return [statistics.fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def draw(results: list[Result], file: Path) -> None:
    """Draw the reward of rollouts over the steps, of the sums in float32: a column for each arm that has runs. The healthy run is
    black."""
    import matplotlib as mpl  # half a second
    from matplotlib import pyplot as plt

    mpl.use("Agg")
    shown = [one for one in results if (one["task"], one["dtype"]) == ("sums", "float32")]
    faults = list(dict.fromkeys(one["fault"] for one in shown))
    titles = {PROOF: "with the proofs, repaired", NO_PROOF: "without the proofs", TRL: "TRL's AsyncGRPOTrainer"}
    titles = {arm: title for arm, title in titles.items() if any(one["arm"] == arm for one in shown)}
    size = 3.2 * len(titles), 3.2
    figure, row = plt.subplots(1, len(titles), figsize=size, sharex=True, sharey=True, layout="constrained")
    for axes, (arm, title) in zip(row, titles.items(), strict=True):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("optimizer step")
        axes.grid(axis="y", alpha=0.25)
        for one in shown:
            is_healthy = one["fault"] == "none" and one["arm"] == (TRL if arm == TRL else PROOF)
            if is_healthy or (one["arm"] == arm and one["fault"] != "none"):
                color, width = _COLORS[faults.index(one["fault"])], 2.2 if is_healthy else 1.1
                axes.plot(smooth(one["rewards"]), color=color, linewidth=width, label=one["fault"])
    row[0].set_ylabel("reward of rollouts")
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(file, dpi=90)
    plt.close(figure)
