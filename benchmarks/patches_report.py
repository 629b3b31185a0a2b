"""Shows results of `benchmarks.patches`: a table in Markdown, one on paper for larger models, and a picture."""

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.variants_report import curves

Result = dict[str, Any]
BYTES = 2  # of an element
SIZES = {"7B": 7.6e9, "32B": 32.8e9}
"""Parameters of models that are called so: Qwen2.5's."""
_GBIT = (1, 10, 100)  # a second
_PRODUCERS = (1, 16)


class Version(NamedTuple):
    """One version, on the mean of its runs: the share of the elements that differ from the checkpoint's, and of the bytes of
    whole bf16 weights that its blob has; CPU seconds per GB of whole weights to copy, to make, and to read."""

    learning_rate: float
    step: int
    changed: float
    share: float
    take_s: float
    make_s: float
    read_s: float


def versions(results: list[Result]) -> list[Version]:
    """Return all versions, by learning rate and step."""
    found: dict[tuple[float, int], list[list[float]]] = defaultdict(list)
    for one in results:
        elements = one["num_elements"]
        num_bytes = BYTES * elements
        for each in one["versions"]:
            shares = [each["num_changes"] / elements, each["bytes"] / num_bytes]
            seconds = [each[name] / (num_bytes / 1e9) for name in ("take_cpu_s", "make_cpu_s", "read_cpu_s")]
            found[each["learning_rate"], each["step"]].append(shares + seconds)
    return [Version(*key, *map(fmean, zip(*rows, strict=True))) for key, rows in sorted(found.items())]


def table(results: list[Result]) -> str:
    rows = [
        "| learning rate | step | changed | patch, of the weights | CPU s per GB: copy | make | read |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    rows += [
        f"| {each.learning_rate:g} | {each.step} | {each.changed:.2%} | 1/{1 / each.share:.0f} "
        f"| {each.take_s:.2f} | {each.make_s:.2f} | {each.read_s:.2f} |"
        for each in versions(results)
    ]
    return "\n".join(rows)


def on_paper(of: Version) -> str:
    """Return the seconds until producers have a version of larger models: whole weights, sent one after the other and not even
    read from memory, beside patches of this share, which are copied, made, sent and read by one core each."""
    rows = [
        f"| model | Gbit/s | {' | '.join(f'whole, {count}' for count in _PRODUCERS)} "
        f"| {' | '.join(f'patch, {count}' for count in _PRODUCERS)} |",
        f"|---|---:|{'---:|' * (2 * len(_PRODUCERS))}",
    ]
    for name, parameters in SIZES.items():
        for gbit in _GBIT:
            whole = [sending_s(BYTES * parameters, gbit, count) for count in _PRODUCERS]
            patch = [patch_s(of, parameters, gbit, count) for count in _PRODUCERS]
            rows.append(f"| {name} | {gbit} | {' | '.join(f'{seconds:.1f}' for seconds in [*whole, *patch])} |")
    return "\n".join(rows)


def sending_s(num_bytes: float, gbit: float, producers: int) -> float:
    """Return the seconds to send this to each of the producers over one link of the trainer."""
    return producers * num_bytes * 8 / (gbit * 1e9)


def patch_s(of: Version, parameters: float, gbit: float, producers: int) -> float:
    """Return the seconds to copy, make, send and read a patch."""
    num_bytes = BYTES * parameters
    computing = (of.take_s + of.make_s + of.read_s) * num_bytes / 1e9
    return computing + sending_s(of.share * num_bytes, gbit, producers)


def draw(results: list[Result], curve_results: list[Result], file: Path) -> None:
    """Draw the size of patches over steps, and, where there are runs of `benchmarks.variants`, their accuracy over tokens."""
    import matplotlib as mpl  # half a second
    from matplotlib import pyplot as plt

    mpl.use("Agg")
    count = 2 if curve_results else 1
    figure, row = plt.subplots(1, count, figsize=(4.5 * count, 3.6), squeeze=False, layout="constrained")
    left, right = row[0][0], row[0][-1]
    found = versions(results)
    for number, rate in enumerate(sorted({each.learning_rate for each in found})):
        mine = [each for each in found if each.learning_rate == rate]
        steps = [each.step for each in mine]
        left.plot(steps, [each.share for each in mine], color=f"C{number}", marker=".", label=f"{rate:g}")
    left.set(xscale="log", yscale="log", xlabel="steps since the checkpoint", ylabel="bytes, of whole bf16 weights")
    left.legend(title="learning rate", fontsize=8, title_fontsize=8, frameon=False)
    left.grid(alpha=0.25)
    if curve_results:
        curves(right, curve_results, 2)
        right.set(xlabel="sampled tokens", ylabel="held-out accuracy")
        right.legend(fontsize=8, frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)
