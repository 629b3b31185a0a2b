"""A valid file: its defaults, and the values that follow from others, as worked by hand."""

from pathlib import Path

import pytest
import yaml

from protocol.config.loader import RESOLVED_FILE, dump_config, load_config, write_resolved
from protocol.config.trainer_keys import DEFAULTS as TRAINER_DEFAULTS
from tests.unit.protocol.config.files import MINIMAL, load

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("**/*.yaml"))


def test_the_minimal_file_and_its_defaults(run_yaml: Path) -> None:
    config = load(run_yaml)
    assert (config.run_dir, config.seed, config.rewards.names) == (str(Path("runs/x").absolute()), 42, ("exact",))
    assert config.lora == {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
    assert config.engine == {}
    assert config.trainer == TRAINER_DEFAULTS
    assert (config.pipeline.groups_per_step, config.sampling.num_generations) == (16, 8)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load(path: Path) -> None:
    load_config(str(path))


def test_derived_values_by_hand(run_yaml: Path) -> None:
    config = load(run_yaml, overrides=["pipeline.groups_per_step=6", "sampling.num_generations=4", "lora.r=9"])
    assert config.completions_per_step == 24
    assert config.max_lora_rank == 16
    assert config.max_loras == 3  # max_staleness 1: versions n, n - 1, and the one being loaded
    assert config.control_endpoint == f"ipc://{Path.cwd()}/runs/x/control.ipc"
    assert config.blob_endpoint == f"ipc://{Path.cwd()}/runs/x/control.ipc.blobs"
    assert config.checkpoints_dir == Path("runs/x/checkpoints").absolute()


def test_a_rank_is_served_by_the_smallest_that_holds_it(run_yaml: Path) -> None:
    served = {1: 1, 2: 8, 8: 8, 9: 16, 17: 32, 33: 64, 65: 128, 129: 256, 257: 320, 321: 512, 512: 512}
    for rank, smallest in served.items():
        assert load(run_yaml, overrides=[f"lora.r={rank}"]).max_lora_rank == smallest


def test_what_lora_leaves_out_keeps_our_default(run_yaml: Path) -> None:
    config = load(run_yaml, MINIMAL + "lora: {target_modules: [q_proj]}\n")
    assert config.lora == {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj"]}
    assert config.max_lora_rank == 16
    assert load(run_yaml, overrides=["lora.r=8"]).lora == {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"}


def test_what_trainer_leaves_out_keeps_our_default_and_is_shown(run_yaml: Path) -> None:
    config = load(run_yaml, MINIMAL + "trainer: {max_steps: 9, save_steps: 7}\n")
    assert config.trainer == TRAINER_DEFAULTS | {"max_steps": 9, "save_steps": 7}
    shown = yaml.safe_load(dump_config(load(run_yaml)))
    assert shown["trainer"]["learning_rate"] == 2e-4
    assert shown["trainer"]["save_steps"] == 50


def test_all_weights_train_at_trls_learning_rate(run_yaml: Path) -> None:
    for trainer in ("", "trainer: {max_steps: 9}\n"):
        config = load(run_yaml, MINIMAL + "lora: null\n" + trainer)
        assert config.trainer["learning_rate"] == 1e-6
        assert config.trainer["save_steps"] == 50
    assert load(run_yaml, MINIMAL + "lora: null\ntrainer: {learning_rate: 3.0e-6}\n").trainer["learning_rate"] == 3e-6


def test_what_the_file_leaves_to_trl_is_shown_with_trls_value(run_yaml: Path) -> None:
    lines = dump_config(load(run_yaml, MINIMAL + "trainer: {beta: 0.01}\n")).splitlines()
    assert "# trainer.max_grad_norm: 1.0" in lines
    assert not any(line.startswith(("# trainer.beta", "# trainer.learning_rate")) for line in lines)


def test_bounds_that_may_just_be_met(run_yaml: Path) -> None:
    overrides = ["replay.min_size=8", "replay.max_size=8"]
    load(run_yaml, overrides=[*overrides, "reroll.reward=exact", "advantage.overlong_buffer_tokens=256"])


@pytest.mark.parametrize(
    ("overrides", "control", "blob"),
    [
        (["endpoint=tcp://127.0.0.1:5557"], "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        (["endpoint=tcp://[::1]:5557"], "tcp://[::1]:5557", "tcp://[::1]:5558"),
        (["endpoint=tcp://localhost:65534"], "tcp://localhost:65534", "tcp://localhost:65535"),
        (["endpoint=ipc:///tmp/a.ipc"], "ipc:///tmp/a.ipc", "ipc:///tmp/a.ipc.blobs"),
        (
            ["endpoint=ipc:///tmp/a.ipc", "blob_endpoint=tcp://127.0.0.1:7000"],
            "ipc:///tmp/a.ipc",
            "tcp://127.0.0.1:7000",
        ),
    ],
)
def test_endpoints(run_yaml: Path, overrides: list[str], control: str, blob: str) -> None:
    config = load(run_yaml, overrides=[f"transport.{override}" for override in overrides])
    assert (config.control_endpoint, config.blob_endpoint) == (control, blob)


def test_the_resolved_file_loads_as_the_same_run(run_yaml: Path) -> None:
    config = load(
        run_yaml, MINIMAL + "trainer: {learning_rate: 1e-5, run_name: 'ä'}\n", ["pipeline.max_staleness=3", "lora.r=12"]
    )
    text = dump_config(config)
    assert load(run_yaml, text) == config
    assert text.endswith(
        "# completions per step: 128\n"
        f"# control endpoint: ipc://{Path.cwd()}/runs/x/control.ipc\n"
        f"# blob endpoint: ipc://{Path.cwd()}/runs/x/control.ipc.blobs\n"
        "# engine max_loras: 5\n# engine max_lora_rank: 16\n"
    )
    assert "run_name: ä" in text


def test_the_folder_of_a_run_has_its_configuration_for_its_owner_alone(run_yaml: Path, tmp_path: Path) -> None:
    config = load(run_yaml, overrides=[f"run_dir={tmp_path}", "lora.r=12"])
    write_resolved(load(run_yaml, overrides=[f"run_dir={tmp_path}"]))
    write_resolved(config)
    file = tmp_path / RESOLVED_FILE
    assert load_config(str(file)) == config
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_configuration_cannot_be_changed_after_the_checks(run_yaml: Path) -> None:
    config = load(run_yaml)
    with pytest.raises(ValueError, match="frozen"):
        config.pipeline.max_staleness = 9  # type: ignore[misc]


def test_an_evaluation_takes_one_lora_slot_which_training_does_not_ask_for(run_yaml: Path) -> None:
    plain = load(run_yaml)
    held_out = "evaluation:\n  dataset: {path: held-out.jsonl}\n  temperature: 1.0\n  threshold: 0.5\n"
    config = load(run_yaml, MINIMAL + held_out)
    assert config.evaluation is not None
    assert (plain.max_loras, config.max_loras) == (plain.training_loras, plain.training_loras + 1)
    assert config.training_loras == plain.training_loras
    assert config.evaluation.score_name == "pass@1 reward>=0.5"
