"""What it is worth that generation and training overlap: wall time per step at equal reward, one core standing for a device.

    python -m benchmarks.overlap --out runs/bench/overlap.json --plot runs/bench/overlap.png

Three arms with the same model, task, batch, steps, LoRA and sampling: (a) producer on core 0 and trainer on core 1, with
`max_staleness: 1`; (b) the same two processes in lockstep, `max_staleness: 0`; (c) TRL's own GRPOTrainer with transformers'
generation on both cores. Before them a short run in lockstep, with a LoRA in every layer, tells how many of the last layers
need one for training to take as long as generation.
"""

import argparse
import json
import os
from pathlib import Path

from benchmarks import overlap_arms, overlap_base
from benchmarks.overlap_arms import arm, balanced_layers, draw, length_statistics, ratio, table
from benchmarks.overlap_base import held_out_reward
from examples.folders import fresh_folder

FOLDER = Path("runs/bench/overlap")
BASE = Path("runs/bench/overlap-base")
_PILOT_STEPS, _PILOT_WARM_UP = 5, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=18, help="optimizer steps of every arm")
    parser.add_argument("--warm-up", type=int, default=4, help="of them, steps that are not timed")
    parser.add_argument("--layers", type=int, help="layers with a LoRA, in place of the pilot run")
    parser.add_argument("--staleness", type=int, default=1, help="`pipeline.max_staleness` of (a)")
    parser.add_argument("--arms", nargs="+", default=["pair", "lockstep", "trl"], help="(a) and (b) are always needed")
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", help="override of benchmarks/overlap.yaml"
    )
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--plot", type=Path, help="write the picture")
    options = parser.parse_args()

    overlap_base.build(BASE)
    fresh_folder(FOLDER)
    layers = options.layers or _calibrate(options.settings)
    settings = [*options.settings, f"trainer.max_steps={options.steps}", *_lora_layers(layers)]
    arms = {}
    for name in options.arms:
        print(f"{name}: {options.steps} steps ...", flush=True)
        if name == "trl":
            arms[name] = overlap_arms.trl(FOLDER / name, settings)
        else:
            arms[name] = overlap_arms.pair(
                FOLDER / name, settings, max_staleness=options.staleness if name == "pair" else 0
            )
    numbers = {name: arm(one.steps, options.warm_up, one.generating) for name, one in arms.items()}
    for name, one in arms.items():
        numbers[name]["held_out"] = held_out_reward(BASE, one.adapter, num_prompts=256)
    report = {
        "settings": settings,
        "lora_layers": layers,
        "staleness": options.staleness,
        "base_held_out": held_out_reward(BASE, None, num_prompts=256),
        "lengths": length_statistics(arms["pair"].lengths or []),
        "arms": numbers,
        "ratios": {name: ratio(one, numbers["pair"]) for name, one in numbers.items() if name != "pair"},
    }
    print(f"\n{table(report)}\n- held out before training: {report['base_held_out']:.3f}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(arms, numbers, options.warm_up, options.plot)


def _calibrate(settings: list[str]) -> int:
    print("pilot: how long generation and training take ...", flush=True)
    everywhere = _lora_layers(overlap_base.NUM_LAYERS)
    slowly = "trainer.learning_rate=1e-4"  # in every layer the run's own would soon change the lengths
    pilot_settings = [*settings, f"trainer.max_steps={_PILOT_STEPS}", slowly, *everywhere]
    pilot = overlap_arms.pair(FOLDER / "pilot", pilot_settings, max_staleness=0)
    numbers = arm(pilot.steps, _PILOT_WARM_UP, pilot.generating)
    layers = balanced_layers(numbers["generation_s"], numbers["training_s"], overlap_base.NUM_LAYERS)
    print(
        f"pilot: {numbers['generation_s']:.2f} s of generation and {numbers['training_s']:.2f} s of training a step; "
        f"a LoRA in the last {layers} of {overlap_base.NUM_LAYERS} layers balances them",
        flush=True,
    )
    return layers


def _lora_layers(count: int) -> list[str]:
    """A LoRA in the last `count` layers."""
    chosen = list(range(overlap_base.NUM_LAYERS - count, overlap_base.NUM_LAYERS))
    return [f"lora.layers_to_transform={chosen}"]


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    main()
