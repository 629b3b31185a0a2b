"""What is refused: every refusal says file, line, key, value and fix."""

from pathlib import Path

import pytest
import yaml

from protocol.config.loader import load_config
from tests.unit.protocol.config.files import MINIMAL, NEXT, load, refusal

TABLE = (Path(__file__).parent / "refusals.txt").read_text().split("\n\n")[1:]
CASES = [tuple(case.rstrip("\n").split("\n=> ")) for case in TABLE]


@pytest.mark.parametrize(("added", "said"), CASES, ids=[said.split(": ")[1] for _, said in CASES])
def test_refusals(run_yaml: Path, added: str, said: str) -> None:
    line, _, message = said.partition(":")
    number = NEXT + int(line) if line.startswith("+") else int(line)
    assert refusal(run_yaml, f"{MINIMAL}{added}\n") == f"run.yaml:{number}:{message}"


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


@pytest.mark.parametrize(
    ("section", "key", "hint"),
    [
        ("engine", "model", "; set model.path instead"),
        ("engine", "enable_lora", ""),
        ("sft", "trust_remote_code", "; set model.trust_remote_code instead"),
        ("trainer", "use_cpu", "; set --gpu cpu instead"),
        ("trainer", "generation_kwargs", ""),
        ("trainer", "vllm_mode", ""),
    ],
)
def test_what_slipstream_sets_itself_is_refused(run_yaml: Path, section: str, key: str, hint: str) -> None:
    message = f"{section}.{key}: `{key}` is set by Slipstream and cannot be given here{hint}"
    text = MINIMAL + f"{section}:\n  # comment\n  {key}: 1\n"
    assert refusal(run_yaml, text) == f"run.yaml:{NEXT + 2}: {message}"
    assert refusal(run_yaml, overrides=[f"{section}.{key}=1"]) == f"--set {message}"


def test_engine_arguments_that_falsify_log_probs_are_refused(run_yaml: Path) -> None:
    message = "engine.hf_overrides: `hf_overrides` changes the model in the engine only; change the model's config.json"
    said = f"{message}, so importance ratios would be wrong; remove it"
    assert refusal(run_yaml, MINIMAL + "engine:\n  hf_overrides: 1\n") == f"run.yaml:{NEXT + 1}: {said}"


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
