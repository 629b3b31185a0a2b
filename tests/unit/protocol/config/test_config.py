"""The schema: every refusal says file, line, key, value and fix; derived values are as worked by hand."""

from pathlib import Path

import pytest
import yaml

from protocol.config.loader import dump_config, load_config
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, ExitCode

MINIMAL = """\
run_dir: runs/x
model:
  path: models/base
dataset:
  path: data.jsonl
rewards:
  functions:
    - function: rewards.py:exact
"""
NEXT = MINIMAL.count("\n") + 1  # the line that appended text starts at
EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("**/*.yaml"))


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("run.yaml")


def load(path: Path, text: str = MINIMAL, overrides: list[str] | None = None) -> RunConfig:
    path.write_text(text)
    return load_config(str(path), overrides)


def refusal(path: Path, text: str = MINIMAL, overrides: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, text, overrides)
    assert caught.value.exit_code == ExitCode.CONFIG == 78
    return str(caught.value)


def test_the_minimal_file_and_its_defaults(run_yaml: Path) -> None:
    config = load(run_yaml)
    assert config.run_dir == "runs/x"
    assert config.seed == 42
    assert config.model.dtype == "bfloat16"
    assert config.dataset.prompt_column == "prompt"
    assert config.rewards.functions[0].name == "exact"
    assert config.lora == {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
    assert config.engine == config.trainer == {}
    assert (config.pipeline.groups_per_step, config.sampling.num_generations) == (16, 8)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load(path: Path) -> None:
    load_config(str(path))


# What follows from other values.


def test_derived_values_by_hand(run_yaml: Path) -> None:
    config = load(run_yaml, overrides=["pipeline.groups_per_step=6", "sampling.num_generations=4", "lora.r=9"])
    assert config.completions_per_step == 24
    assert config.max_lora_rank == 16
    assert config.max_loras == 3  # max_staleness 1: versions n, n - 1, and the one being loaded
    assert config.control_endpoint == f"ipc://{Path.cwd()}/runs/x/control.ipc"
    assert config.blob_endpoint == f"ipc://{Path.cwd()}/runs/x/control.ipc.blobs"
    assert config.checkpoints_dir == Path("runs/x/checkpoints")


@pytest.mark.parametrize(
    ("rank", "served"),
    [
        (1, 1),
        (2, 8),
        (8, 8),
        (9, 16),
        (16, 16),
        (17, 32),
        (33, 64),
        (65, 128),
        (129, 256),
        (257, 320),
        (321, 512),
        (512, 512),
    ],
)
def test_max_lora_rank(run_yaml: Path, rank: int, served: int) -> None:
    assert load(run_yaml, overrides=[f"lora.r={rank}"]).max_lora_rank == served


def test_what_lora_leaves_out_keeps_our_default(run_yaml: Path) -> None:
    config = load(run_yaml, MINIMAL + "lora: {target_modules: [q_proj]}\n")
    assert config.lora == {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj"]}
    assert config.max_lora_rank == 16
    assert load(run_yaml, overrides=["lora.r=8"]).lora == {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"}


@pytest.mark.parametrize(("staleness", "slots"), [(0, 2), (1, 3), (4, 6), (64, 66)])
def test_max_loras(run_yaml: Path, staleness: int, slots: int) -> None:
    assert load(run_yaml, overrides=[f"pipeline.max_staleness={staleness}"]).max_loras == slots


def test_the_slots_of_an_adaptive_staleness_are_those_of_its_greatest(run_yaml: Path) -> None:
    for text, limits, slots in (("", (1, 4), 6), ("  auto_staleness: [0, 9]\n", (0, 9), 11)):
        config = load(run_yaml, MINIMAL + "pipeline:\n  max_staleness: auto\n" + text)
        assert config.pipeline.max_staleness == "auto"
        assert config.pipeline.auto_staleness == limits
        assert config.max_loras == slots == config.pipeline.staleness_limit + 2
        assert load(run_yaml, dump_config(config)) == config
    assert load(run_yaml, overrides=["pipeline.auto_staleness=[2, 8]"]).max_loras == 3, "a number is not moved"


def test_what_new_sections_do_when_nobody_asks(run_yaml: Path) -> None:
    config = load(run_yaml)
    assert (config.replay.mode, config.replay.min_size, config.replay.max_size) == ("fifo", 16, 256)
    assert (config.reroll.max_attempts, config.reroll.reward) == (2, None)
    assert (config.advantage.baseline, config.advantage.overlong_buffer_tokens) == ("group", 0)
    assert (config.correction.preset, config.correction.ratio_min, config.correction.ratio_max) == (
        "token_truncate",
        None,
        None,
    )


def test_bounds_that_may_just_be_met(run_yaml: Path) -> None:
    config = load(
        run_yaml,
        overrides=[
            "replay.min_size=8",
            "replay.max_size=8",
            "pipeline.auto_staleness=[3, 3]",
            "reroll.reward=exact",
            "advantage.overlong_buffer_tokens=256",
        ],
    )
    assert config.replay.min_size == config.replay.max_size == 8
    assert config.pipeline.auto_staleness == (3, 3)
    assert config.reroll.reward == "exact"


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


# What is refused, word by word.

UNKNOWN_AND_BAD = [
    # text after the minimal file, message
    (
        "pipeline:\n  max_stalenes: 2\n",
        f"run.yaml:{NEXT + 1}: pipeline.max_stalenes: unknown key `max_stalenes`; did you mean `max_staleness`?",
    ),
    ("pipelin: {}\n", f"run.yaml:{NEXT}: pipelin: unknown key `pipelin`; did you mean `pipeline`?"),
    (
        "correction: {zzz: 1}\n",
        f"run.yaml:{NEXT}: correction.zzz: unknown key `zzz`; valid: preset, ratio_min, ratio_max, token_veto, "
        "probability_difference_max",
    ),
    (
        "      wieght: 2\n",
        f"run.yaml:{NEXT}: rewards.functions.0.wieght: unknown key `wieght`; did you mean `weight`?",
    ),
    (
        "pipeline:\n\n  # a comment\n  groups_per_step: many\n",
        f"run.yaml:{NEXT + 3}: pipeline.groups_per_step: Input should be a valid integer, unable to parse string as an "
        "integer (got 'many')",
    ),
    (
        "pipeline: {groups_per_step: 0}\n",
        f"run.yaml:{NEXT}: pipeline.groups_per_step: Input should be greater than or equal to 1 (got 0)",
    ),
    (
        "pipeline: {groups_per_step: true}\n",
        f"run.yaml:{NEXT}: pipeline.groups_per_step: expected a number, not a boolean (got True)",
    ),
    (
        "pipeline: {groups_per_step: 2.5}\n",
        f"run.yaml:{NEXT}: pipeline.groups_per_step: Input should be a valid integer, got a number with a fractional part "
        "(got 2.5)",
    ),
    (
        "pipeline: {max_staleness: -1}\n",
        f"run.yaml:{NEXT}: pipeline.max_staleness: expected an integer from 0 to 64, or `auto` (got -1)",
    ),
    (
        "pipeline:\n  max_staleness: soon\n",
        f"run.yaml:{NEXT + 1}: pipeline.max_staleness: expected an integer from 0 to 64, or `auto` (got 'soon')",
    ),
    (
        "pipeline: {max_staleness: true}\n",
        f"run.yaml:{NEXT}: pipeline.max_staleness: expected a number, not a boolean (got True)",
    ),
    (
        "pipeline: {max_staleness: [1, 4]}\n",
        f"run.yaml:{NEXT}: pipeline.max_staleness: expected an integer from 0 to 64, or `auto` (got [1, 4])",
    ),
    (
        "pipeline:\n  max_staleness: auto\n  auto_staleness: 4\n",
        f"run.yaml:{NEXT + 2}: pipeline.auto_staleness: expected two integers from 0 to 64 (got 4)",
    ),
    (
        "pipeline: {auto_staleness: [1]}\n",
        f"run.yaml:{NEXT}: pipeline.auto_staleness: expected two integers from 0 to 64 (got [1])",
    ),
    (
        "pipeline: {auto_staleness: [1, 2, 3]}\n",
        f"run.yaml:{NEXT}: pipeline.auto_staleness: expected two integers from 0 to 64 (got [1, 2, 3])",
    ),
    (
        "pipeline: {auto_staleness: [1, 65]}\n",
        f"run.yaml:{NEXT}: pipeline.auto_staleness: expected two integers from 0 to 64 (got 65)",
    ),
    (
        "pipeline: {auto_staleness: [4, 1]}\n",
        f"run.yaml:{NEXT}: pipeline.auto_staleness: the least staleness comes first (got [4, 1])",
    ),
    (
        "replay:\n  min_size: 300\n",
        f"run.yaml:{NEXT}: replay: min_size=300 is above max_size=256, so no group could ever stand in: lower min_size or "
        "raise max_size",
    ),
    (
        "replay: {max_times_sampled: 1}\n",
        f"run.yaml:{NEXT}: replay.max_times_sampled: Input should be greater than or equal to 2 (got 1)",
    ),
    (
        "replay: {sampler: random}\n",
        f"run.yaml:{NEXT}: replay.sampler: Input should be 'fifo', 'freshest' or 'prioritized' (got 'random')",
    ),
    (
        "reroll: {fail_threshold: 1, solved_threshold: 1}\n",
        f"run.yaml:{NEXT}: reroll: fail_threshold must be below solved_threshold",
    ),
    (
        "reroll: {reward: exakt}\n",
        "run.yaml:1: reroll.reward: 'exakt' is not one of rewards.functions: exact",
    ),
    (
        "reroll: {max_share: 1}\n",
        f"run.yaml:{NEXT}: reroll.max_share: Input should be less than 1 (got 1)",
    ),
    (
        "advantage: {overlong_buffer_tokens: 257}\n",
        "run.yaml:1: advantage.overlong_buffer_tokens=257 is more than sampling.max_completion_length=256",
    ),
    (
        "correction: {ratio_min: 2, ratio_max: 2}\n",
        f"run.yaml:{NEXT}: correction: ratio_min must be below ratio_max",
    ),
    (
        "correction: {ratio_min: low}\n",
        f"run.yaml:{NEXT}: correction.ratio_min: Input should be a valid number, unable to parse string as a number "
        "(got 'low')",
    ),
    (
        "pipeline: {stall_timeout_s: .inf}\n",
        f"run.yaml:{NEXT}: pipeline.stall_timeout_s: Input should be a finite number (got inf)",
    ),
    (
        "pipeline: {lease_timeout_s: 1.0e+10}\n",
        f"run.yaml:{NEXT}: pipeline.lease_timeout_s: Input should be less than or equal to 1000000000 (got 10000000000.0)",
    ),
    (
        "correction: {ratio_max: .nan}\n",
        f"run.yaml:{NEXT}: correction.ratio_max: Input should be a finite number (got nan)",
    ),
    (
        "sampling: {temperature: 0}\n",
        f"run.yaml:{NEXT}: sampling.temperature: Input should be greater than 0 (got 0)",
    ),
    (
        "sampling: {num_generations: 1}\n",
        f"run.yaml:{NEXT}: sampling.num_generations: Input should be greater than or equal to 2 (got 1)",
    ),
    ("seed: [1]\n", f"run.yaml:{NEXT}: seed: Input should be a valid integer"),
    (
        "seed: null\nsampling: 3\n",
        f"run.yaml:{NEXT + 1}: sampling: Input should be a valid dictionary or instance of SamplingSection (got 3)",
    ),
    (
        "observability: {log_level: loud}\n",
        f"run.yaml:{NEXT}: observability.log_level: Input should be 'debug', 'info', 'warning' or 'error' (got 'loud')",
    ),
    (
        "observability: {progress: maybe}\n",
        f"run.yaml:{NEXT}: observability.progress: Input should be a valid boolean, unable to interpret input (got 'maybe')",
    ),
    (
        "    - function: other.py:exact\n",
        "run.yaml:7: rewards.functions: two reward functions are called 'exact': metrics need different names; give one a `name`",
    ),
    (
        "    - function: exact\n",
        f"run.yaml:{NEXT}: rewards.functions.1.function: expected `module:function` or `path/to/file.py:function` "
        "(got 'exact')",
    ),
    (
        "    - function: rewards.py:not a name\n",
        f"run.yaml:{NEXT}: rewards.functions.1.function: expected `module:function` or `path/to/file.py:function` "
        "(got 'rewards.py:not a name')",
    ),
    (
        "sampling:\n  top_p: 0.9\n  top_k: 50\n",
        f"run.yaml:{NEXT}: sampling: top_p=0.9, top_k=50 changes the sampling distribution in a way the trainer does not "
        "reproduce, so importance ratios would be biased. Remove it, or set sampling.accept_biased_ratios=true",
    ),
    (
        "trainer: {per_device_train_batch_size: 24}\n",
        f"run.yaml:{NEXT}: trainer.per_device_train_batch_size: `per_device_train_batch_size` is set by Slipstream and cannot "
        "be given here; set pipeline.trainer_tokens_per_micro_batch instead",
    ),
    (
        "transport: {heartbeat_interval_s: 4, heartbeat_timeout_s: 6}\n",
        f"run.yaml:{NEXT}: transport: heartbeat_timeout_s must be at least twice heartbeat_interval_s",
    ),
    (
        "transport: {max_message_bytes: 1000000}\n",
        f"run.yaml:{NEXT}: transport: max_message_bytes must be at least twice blob_chunk_bytes",
    ),
    (
        "transport: {endpoint: 'tcp://0.0.0.0:5557'}\n",
        f"run.yaml:{NEXT}: transport.endpoint: 0.0.0.0 can be reached from other hosts, so it needs keys. Set "
        "transport.keys=keys after `rl-keys generate trainer`, `rl-keys generate PRODUCER` and `rl-keys authorize PRODUCER` "
        "(docs/security.md), or use 127.0.0.1 (got 'tcp://0.0.0.0:5557')",
    ),
    (
        "transport: {endpoint: 'tcp://127.0.0.1:1', blob_endpoint: 'tcp://127.0.0.1:1'}\n",
        "run.yaml:1: transport.endpoint and transport.blob_endpoint are both tcp://127.0.0.1:1; change one",
    ),
]


@pytest.mark.parametrize(
    ("added", "message"), UNKNOWN_AND_BAD, ids=[message.split(": ")[1] for _, message in UNKNOWN_AND_BAD]
)
def test_refusals(run_yaml: Path, added: str, message: str) -> None:
    assert refusal(run_yaml, MINIMAL + added) == message


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://*:5557",
        "tcp://10.0.0.7:5557",
        "tcp://trainer.example:5557",
        "tcp://127.0.0.1.example.com:5557",
        "tcp://[::]:5557",
    ],
)
@pytest.mark.parametrize("key", ["endpoint", "blob_endpoint"])
def test_a_routable_endpoint_needs_keys(run_yaml: Path, key: str, endpoint: str) -> None:
    message = refusal(run_yaml, overrides=[f"transport.{key}={endpoint!r}"])
    assert message.startswith(
        f"--set transport.{key}: {endpoint[6:-5]} can be reached from other hosts, so it needs keys"
    )
    config = load_config(str(run_yaml), [f"transport.{key}={endpoint!r}", "transport.keys=keys"])
    assert getattr(config.transport, key) == endpoint


@pytest.mark.parametrize("key", ["keys", "identity"])
def test_an_empty_name_is_no_name(run_yaml: Path, key: str) -> None:
    message = refusal(run_yaml, overrides=[f"transport.{key}=' '"])
    assert message == f"--set transport.{key}: expected a name, or nothing at all (got ' ')"


@pytest.mark.parametrize(
    "endpoint",
    [
        "udp://127.0.0.1:5557",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65535",
        "tcp://127.0.0.1:",
        "ipc://",
        "here",
    ],
)
def test_an_endpoint_of_another_form_is_refused(run_yaml: Path, endpoint: str) -> None:
    message = refusal(run_yaml, overrides=[f"transport.endpoint={endpoint!r}"])
    assert message == f"--set transport.endpoint: expected `ipc:///path` or `tcp://HOST:PORT` (got {endpoint!r})"


@pytest.mark.parametrize("section", ["run_dir", "model", "dataset"])
def test_what_is_required(run_yaml: Path, section: str) -> None:
    values = yaml.safe_load(MINIMAL)
    del values[section]
    assert refusal(run_yaml, yaml.safe_dump(values)) == f"run.yaml:1: {section}: required, but not given"


def test_what_is_required_in_a_section_names_the_section_s_line(run_yaml: Path) -> None:
    assert refusal(run_yaml, MINIMAL.replace("  path: models/base", "  dtype: float32")) == (
        "run.yaml:2: model.path: required, but not given"
    )


def test_an_empty_section_is_as_good_as_none(run_yaml: Path) -> None:
    assert load(run_yaml, MINIMAL + "engine:\nsampling:\nlora:\n") == load(run_yaml)
    assert refusal(run_yaml, MINIMAL.replace("run_dir: runs/x", "run_dir:")) == (
        "run.yaml:1: run_dir: required, but not given"
    )


def test_all_problems_are_reported_at_once(run_yaml: Path) -> None:
    text = MINIMAL.replace("run_dir: runs/x\n", "") + "pipeline:\n  groups_per_step: 0\n  sync_intervall: 1\nseed: x\n"
    assert refusal(run_yaml, text, ["sampling.temperature=hot"]).splitlines() == [
        "run.yaml:1: run_dir: required, but not given",
        "run.yaml:11: seed: Input should be a valid integer, unable to parse string as an integer (got 'x')",
        "--set sampling.temperature: Input should be a valid number, unable to parse string as a number (got 'hot')",
        "run.yaml:9: pipeline.groups_per_step: Input should be greater than or equal to 1 (got 0)",
        "run.yaml:10: pipeline.sync_intervall: unknown key `sync_intervall`; did you mean `sync_interval`?",
    ]


# Sections that belong to a library.


@pytest.mark.parametrize(
    ("section", "key", "hint"),
    [
        ("engine", "model", "; set model.path instead"),
        ("engine", "dtype", "; set model.dtype instead"),
        ("engine", "max_lora_rank", "; set lora.r instead"),
        ("engine", "max_loras", "; set pipeline.max_staleness instead"),
        ("engine", "tensor_parallel_size", "; set --gpu 0,1 instead"),
        ("engine", "enable_lora", ""),
        ("engine", "logprobs_mode", ""),
        ("engine", "lora_target_modules", "; set lora.target_modules instead"),
        ("engine", "override_generation_config", "; set sampling instead"),
        ("engine", "runner", ""),
        ("engine", "skip_tokenizer_init", ""),
        ("engine", "trust_remote_code", "; set model.trust_remote_code instead"),
        ("sft", "trust_remote_code", "; set model.trust_remote_code instead"),
        ("trainer", "trust_remote_code", "; set model.trust_remote_code instead"),
        ("trainer", "use_cpu", "; set --gpu cpu instead"),
        ("trainer", "output_dir", "; set run_dir instead"),
        ("trainer", "num_generations", "; set sampling.num_generations instead"),
        ("trainer", "top_p", "; set sampling.top_p instead"),
        ("trainer", "generation_kwargs", ""),
        ("trainer", "use_vllm", ""),
        ("trainer", "vllm_mode", ""),
        ("trainer", "vllm_importance_sampling_mode", ""),
    ],
)
def test_what_slipstream_sets_itself_is_refused(run_yaml: Path, section: str, key: str, hint: str) -> None:
    message = f"{section}.{key}: `{key}` is set by Slipstream and cannot be given here{hint}"
    text = MINIMAL + f"{section}:\n  # comment\n  {key}: 1\n"
    assert refusal(run_yaml, text) == f"run.yaml:{NEXT + 2}: {message}"
    assert refusal(run_yaml, overrides=[f"{section}.{key}=1"]) == f"--set {message}"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("logits_processors", "edits what is sampled"),
        ("watermark_config", "edits what is sampled"),
        ("diffusion_config", "does not sample token by token"),
        ("hf_overrides", "changes the model in the engine only; change the model's config.json"),
        ("model_weights", "changes the model in the engine only; set model.path"),
        ("tokenizer_revision", "changes the tokenizer in the engine only; set model.revision"),
    ],
)
def test_engine_arguments_that_falsify_log_probs_are_refused(run_yaml: Path, key: str, reason: str) -> None:
    message = f"engine.{key}: `{key}` {reason}, so importance ratios would be wrong; remove it"
    assert refusal(run_yaml, MINIMAL + f"engine:\n  # comment\n  {key}: 1\n") == f"run.yaml:{NEXT + 2}: {message}"
    assert refusal(run_yaml, overrides=[f"engine.{key}=1"]) == f"--set {message}"


def test_replicas_within_an_engine_are_refused(run_yaml: Path) -> None:
    message = (
        "engine.data_parallel_size: `data_parallel_size: 2` is refused: vLLM answers for its first replica alone, so nobody "
        "could tell whether the others took up a policy. Start one rl-producer for each replica, with its own --gpu, instead"
    )
    assert refusal(run_yaml, MINIMAL + "engine:\n  data_parallel_size: 2\n") == f"run.yaml:{NEXT + 1}: {message}"
    assert "engine.data_parallel_rank" in refusal(run_yaml, MINIMAL + "engine: {data_parallel_rank: 0}\n")
    assert load(run_yaml, MINIMAL + "engine: {data_parallel_size: 1}\n").engine == {"data_parallel_size": 1}


@pytest.mark.parametrize("value", ["0", "-1", "two", "true"])
def test_a_pipeline_has_a_number_of_parts(run_yaml: Path, value: str) -> None:
    said = refusal(run_yaml, MINIMAL + f"engine: {{pipeline_parallel_size: {value}}}\n")
    assert "engine.pipeline_parallel_size: `pipeline_parallel_size` must be a positive integer, got" in said


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("r: 513", "lora.r: `r: 513` cannot be served: vLLM's largest LoRA rank is 512"),
        ("r: 0", "lora.r: `r` must be a positive integer, got 0"),
        ("r: many", "lora.r: `r` must be a positive integer, got 'many'"),
        ("r: true", "lora.r: `r` must be a positive integer, got True"),
        ("use_dora: true", "lora.use_dora: `use_dora: True` cannot be served by vLLM; remove it"),
        ("bias: all", "lora.bias: `bias: all` cannot be served by vLLM; remove it"),
        ("lora_bias: true", "lora.lora_bias: `lora_bias: True` cannot be served by vLLM; remove it"),
        (
            "modules_to_save: [head]",
            "lora.modules_to_save: `modules_to_save: ['head']` cannot be served by vLLM; remove it",
        ),
        (
            "init_lora_weights: pissa",
            "lora.init_lora_weights: `init_lora_weights: pissa` cannot be served by vLLM; remove it",
        ),
        ("rank_pattern: {q: 600}", "lora.rank_pattern: `rank_pattern: {'q': 600}` cannot be served by vLLM; remove it"),
    ],
)
def test_lora_options_that_vllm_cannot_serve_are_refused(run_yaml: Path, option: str, message: str) -> None:
    assert refusal(run_yaml, f"{MINIMAL}lora:\n  target_modules: all-linear\n  {option}\n") == (
        f"run.yaml:{NEXT + 2}: {message}"
    )


def test_lora_options_that_vllm_can_serve_are_kept(run_yaml: Path) -> None:
    options = {
        "r": 8,
        "use_dora": False,
        "bias": "none",
        "modules_to_save": None,
        "use_rslora": True,
        "lora_dropout": 0.0,
    }
    options |= {"init_lora_weights": "gaussian", "rank_pattern": {}, "target_modules": ["q_proj", "v_proj"]}
    assert load(run_yaml, MINIMAL + yaml.safe_dump({"lora": options})).lora == {"lora_alpha": 32} | options


def test_sampling_that_biases_ratios_needs_its_switch(run_yaml: Path) -> None:
    for key, value in (("top_p", 0.9), ("top_k", 50), ("min_p", 0.05)):
        assert f"sampling: {key}={value} changes" in refusal(run_yaml, overrides=[f"sampling.{key}={value}"])
        config = load(run_yaml, overrides=[f"sampling.{key}={value}", "sampling.accept_biased_ratios=true"])
        assert getattr(config.sampling, key) == value


# The file itself.


def test_a_missing_file(run_yaml: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("absent.yaml")
    assert str(caught.value) == "absent.yaml: no such file. Give one with --config; examples/ has some to start from"


def test_a_folder_and_a_binary_file(run_yaml: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\.: cannot be read: .*Is a directory"):
        load_config(".")
    run_yaml.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"^run\.yaml: cannot be read: .*utf-8"):
        load_config("run.yaml")


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "just words", "42"])
def test_a_file_that_is_no_mapping(run_yaml: Path, text: str) -> None:
    assert refusal(run_yaml, text) == "run.yaml: expected a mapping with sections such as `model:` and `dataset:`"


@pytest.mark.parametrize(
    "text",
    [
        "model: [",
        "model:\n\tpath: x",
        "seed: *nowhere",
        "seed: !!python/object/apply:os.getcwd []",
        "seed: 2024-13-45",  # PyYAML raises ValueError
        "seed: !!timestamp x",  # PyYAML raises AttributeError
        "seed: " + "[" * 600,  # PyYAML raises RecursionError
        "seed: &loop [*loop]",
        "? [a, b]\n: 1",
        "? {a: b}\n: 1",
    ],
)
def test_a_file_that_is_no_yaml(run_yaml: Path, text: str) -> None:
    assert refusal(run_yaml, text).startswith("run.yaml: not valid YAML: ")


def test_a_key_given_twice_is_refused(run_yaml: Path) -> None:
    """YAML would keep the last one without a word."""
    assert (
        refusal(run_yaml, MINIMAL + "seed: 1\nseed: 2\n")
        == f"run.yaml:{NEXT + 1}: `seed` is given twice, first in line {NEXT}"
    )
    assert refusal(run_yaml, MINIMAL + "trainer:\n  beta: 0.1\n  loss_type: dapo\n  beta: 0.2\n") == (
        f"run.yaml:{NEXT + 3}: `beta` is given twice, first in line {NEXT + 1}"
    )
    assert "`weight` is given twice" in refusal(run_yaml, MINIMAL + "      weight: 1\n      weight: 2\n")
    assert "`a` is given twice" in refusal(run_yaml, MINIMAL + "trainer: {a: 1, a: 2}\n")


def test_merge_keys_and_anchors_work(run_yaml: Path) -> None:
    text = MINIMAL + "trainer: &t {learning_rate: 0.1}\nsft:\n  <<: *t\n  <<: {max_steps: 16}\n  max_length: 8\n"
    assert load(run_yaml, text).sft == {"learning_rate": 0.1, "max_steps": 16, "max_length": 8}


def test_a_key_that_is_no_string(run_yaml: Path) -> None:
    assert refusal(run_yaml, MINIMAL + "1: 2\n") == f"run.yaml:{NEXT}: 1: Keys should be strings (got 1)"


# Overrides.


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("pipeline.max_staleness=2", "pipeline", "max_staleness", 2),
        ("sampling.temperature=0.7", "sampling", "temperature", 0.7),
        ("sampling.temperature=7e-1", "sampling", "temperature", 0.7),
        ("dataset.shuffle=false", "dataset", "shuffle", False),
        ("dataset.name=main", "dataset", "name", "main"),
        ("dataset.name=", "dataset", "name", None),
        ("dataset.name=null", "dataset", "name", None),
        ("dataset.name=a=b", "dataset", "name", "a=b"),
        (
            "dataset.chat_template_kwargs={enable_thinking: false}",
            "dataset",
            "chat_template_kwargs",
            {"enable_thinking": False},
        ),
        ("dataset.chat_template_kwargs.depth=3", "dataset", "chat_template_kwargs", {"depth": 3}),
    ],
)
def test_overrides(run_yaml: Path, override: str, section: str, key: str, value: object) -> None:
    got = getattr(getattr(load(run_yaml, overrides=[override]), section), key)
    assert got == value
    assert type(got) is type(value)


def test_overrides_of_library_sections_go_deep_and_the_last_wins(run_yaml: Path) -> None:
    config = load(
        run_yaml,
        MINIMAL + "trainer:\nengine: {max_model_len: 64}\n",
        [
            "seed=1",
            "seed=2",
            "trainer.learning_rate=1e-5",
            "trainer.lr_scheduler_kwargs.num_cycles=2",
            "trainer.report_to=[tensorboard]",
            "engine.max_model_len=128",
            "lora.r=4",
            "rewards.functions=[{function: 'a.b:c', weight: 2}]",
        ],
    )
    assert config.seed == 2
    assert config.trainer == {
        "learning_rate": "1e-5",  # YAML 1.1 has no such float; protocol.config.library_section makes it one
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "report_to": ["tensorboard"],
    }
    assert config.engine == {"max_model_len": 128}
    assert config.lora == {"r": 4, "lora_alpha": 32, "target_modules": "all-linear"}
    assert [(f.name, f.weight) for f in config.rewards.functions] == [("c", 2.0)]


@pytest.mark.parametrize("override", ["seed", "", "=1", ".seed=1", "model..path=x", "model.=x"])
def test_an_override_of_another_form_is_refused(run_yaml: Path, override: str) -> None:
    assert refusal(run_yaml, overrides=[override]) == (
        f"--set {override}: expected section.key=value, e.g. --set pipeline.max_staleness=2"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=[", "--set seed=[: the value is not valid YAML: "),
        ("seed=2024-13-45", "--set seed=2024-13-45: the value is not valid YAML: month must be in 1..12"),
        ("run_dir.x=1", "--set run_dir.x=1: `run_dir` is not a section"),
        ("rewards.functions.0.weight=1", "--set rewards.functions.0.weight=1: `functions` is not a section"),
        ("seed=x", "--set seed: Input should be a valid integer, unable to parse string as an integer (got 'x')"),
        ("model.pth=x", "--set model.pth: unknown key `pth`; did you mean `path`?"),
        ("model={pth: x, path: y}", "--set model.pth: unknown key `pth`; did you mean `path`?"),
        ("trainr.beta=1", "--set trainr: unknown key `trainr`; did you mean `trainer`?"),
        (
            "pipeline.max_staleness=soon",
            "--set pipeline.max_staleness: expected an integer from 0 to 64, or `auto` (got 'soon')",
        ),
        (
            "pipeline.auto_staleness=[a, 65]",
            "--set pipeline.auto_staleness: expected two integers from 0 to 64 (got 'a')\n"
            "--set pipeline.auto_staleness: expected two integers from 0 to 64 (got 65)",
        ),
        (
            "pipeline.sync_interval=0",
            "--set pipeline.sync_interval: Input should be greater than or equal to 1 (got 0)",
        ),
    ],
)
def test_a_bad_override_is_named(run_yaml: Path, override: str, message: str) -> None:
    assert refusal(run_yaml, overrides=[override]).startswith(message)


def test_a_transform_names_a_place_and_a_function(run_yaml: Path) -> None:
    assert load(run_yaml, overrides=["dataset.transform=gsm8k.py:to_prompt"]).dataset.transform == "gsm8k.py:to_prompt"
    assert refusal(run_yaml, overrides=["dataset.transform=to_prompt"]) == (
        "--set dataset.transform: expected `module:function` or `path/to/file.py:function` (got 'to_prompt')"
    )


def test_a_bad_value_of_the_file_can_be_overridden(run_yaml: Path) -> None:
    assert load(run_yaml, MINIMAL + "seed: x\n", ["seed=3"]).seed == 3


# The resolved file.


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


def test_a_configuration_cannot_be_changed_after_the_checks(run_yaml: Path) -> None:
    config = load(run_yaml)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.pipeline.max_staleness = 9  # type: ignore[misc]


# Evaluation.


def evaluating(run_yaml: Path, text: str) -> str:
    return refusal(run_yaml, f"{MINIMAL}evaluation:\n  dataset: {{path: held-out.jsonl}}\n{text}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("  num_completions: 4\n", "num_completions=4 at temperature 0 would all be the same"),
        ("  temperature: 1.0\n  pass_k: 2\n", "pass_k=2 needs at least so many num_completions, not 1"),
        ("  temperature: 1.0\n  num_completions: 2\n  pass_k: 2\n", "pass_k=2 needs a threshold"),
        ("  metric: exactt\n", "evaluation.metric: 'exactt' is not one of reward, "),
    ],
)
def test_an_evaluation_that_cannot_be_scored_is_refused(run_yaml: Path, text: str, words: str) -> None:
    assert words in evaluating(run_yaml, text)


def test_an_evaluation_takes_one_lora_slot_which_training_does_not_ask_for(run_yaml: Path) -> None:
    plain = load(run_yaml)
    held_out = "evaluation:\n  dataset: {path: held-out.jsonl}\n  temperature: 1.0\n  threshold: 0.5\n"
    config = load(run_yaml, MINIMAL + held_out)
    assert config.evaluation is not None
    assert (plain.max_loras, config.max_loras) == (plain.training_loras, plain.training_loras + 1)
    assert config.training_loras == plain.training_loras
    assert config.evaluation.score_name == "pass@1 reward>=0.5"
