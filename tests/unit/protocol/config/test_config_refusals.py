"""What is refused: every refusal says file, line, key, value and fix."""

import math
from pathlib import Path

import pytest
import yaml

from protocol.config.loader import load_config
from tests.unit.protocol.config.files import MINIMAL, NEXT, load, refusal

TABLE = (Path(__file__).parent / "refusals.txt").read_text().split("\n\n")[1:]
CASES = [tuple(case.rstrip("\n").split("\n=> ")) for case in TABLE]


@pytest.mark.parametrize(("added", "said"), CASES, ids=[said.split(": ")[1] for _, said in CASES])
def test_refusals(run_yaml: Path, added: str, said: str) -> None:
    wanted = []
    for mistake in said.splitlines():
        line, _, message = mistake.partition(":")
        number = NEXT + int(line) if line.startswith("+") else int(line)
        wanted.append(f"run.yaml:{number}:{message}")
    assert refusal(run_yaml, f"{MINIMAL}{added}\n").splitlines() == wanted


@pytest.mark.parametrize(
    "endpoint",
    [f"tcp://{host}:5557" for host in ("*", "10.0.0.7", "trainer.example", "127.0.0.1.example.com", "[::]")],
)
@pytest.mark.parametrize("key", ["endpoint", "blob_endpoint"])
def test_a_routable_endpoint_needs_keys(run_yaml: Path, key: str, endpoint: str) -> None:
    message = refusal(run_yaml, overrides=[f"transport.{key}={endpoint!r}"])
    assert message.startswith(
        f"--set transport.{key}={endpoint!r}: {endpoint[6:-5]} can be reached from other hosts, so it needs keys"
    )
    config = load_config(str(run_yaml), [f"transport.{key}={endpoint!r}", "transport.keys=keys"])
    assert getattr(config.transport, key) == endpoint


def test_a_quantized_engine_has_no_tolerance_but_the_one_that_is_set(run_yaml: Path) -> None:
    fp8 = "engine.quantization=fp8"
    assert load(run_yaml, overrides=[fp8]).probe_tolerance == math.inf
    assert load(run_yaml, overrides=[fp8, "swap.probe_tolerance=3"]).probe_tolerance == 3.0
    assert load(run_yaml, overrides=[fp8]).probe_slack > load(run_yaml).probe_slack


def test_a_quantized_base_cannot_be_spread(run_yaml: Path) -> None:
    message = refusal(run_yaml, overrides=["model.quantization=nf4", "pipeline.shard_base=layers"])
    assert (
        "model.quantization: weights in nf4 cannot be spread over ranks and gathered again; set pipeline.shard_base=none"
        in message
    )


def test_a_quantized_base_cannot_leave_its_gpu(run_yaml: Path) -> None:
    message = refusal(run_yaml, overrides=["model.quantization=nf4", "pipeline.gpu=turns"])
    assert (
        "model.quantization: weights in nf4 stay on the GPU, and with pipeline.gpu=turns the trainer's leave it"
        in message
    )


def test_a_relay_that_other_hosts_can_reach_needs_keys(run_yaml: Path) -> None:
    message = refusal(run_yaml, overrides=["transport.relay_port=5600", "transport.relay_host=gpu01"])
    assert "relay_host: a relay that other hosts can reach needs keys" in message
    for keys in (["transport.relay_host=localhost"], ["transport.relay_host=gpu01", "transport.keys=keys"]):
        assert load_config(str(run_yaml), ["transport.relay_port=5600", *keys]).transport.relay_port == 5600


@pytest.mark.parametrize("name", ["eu west", "a/b", "[eu]", "x" * 129, ""])
@pytest.mark.parametrize("key", ["region", "relay_host"])
def test_a_place_is_a_plain_name_or_an_address(run_yaml: Path, key: str, name: str) -> None:
    assert "expected a name or an address" in refusal(run_yaml, overrides=[f"transport.{key}={name!r}"])


@pytest.mark.parametrize(
    "endpoint",
    ["udp://127.0.0.1:5557", *(f"tcp://127.0.0.1{port}" for port in ("", ":0", ":65535", ":")), "ipc://", "here"],
)
def test_an_endpoint_of_another_form_is_refused(run_yaml: Path, endpoint: str) -> None:
    message = refusal(run_yaml, overrides=[f"transport.endpoint={endpoint!r}"])
    assert (
        message
        == f"--set transport.endpoint={endpoint!r}: expected `ipc:///path` or `tcp://HOST:PORT` (got {endpoint!r})"
    )


@pytest.mark.parametrize("section", ["run_dir", "model", "dataset"])
def test_what_is_required(run_yaml: Path, section: str) -> None:
    values = yaml.safe_load(MINIMAL)
    del values[section]
    assert refusal(run_yaml, yaml.safe_dump(values)) == f"run.yaml:1: {section}: required, but not given"


def test_an_empty_section_is_as_good_as_none(run_yaml: Path) -> None:
    assert load(run_yaml, MINIMAL + "engine:\nsampling:\nlora:\n") == load(run_yaml)
    assert refusal(run_yaml, MINIMAL.replace("run_dir: runs/x", "run_dir:")) == (
        "run.yaml:1: run_dir: required, but not given"
    )


def test_all_problems_are_reported_at_once(run_yaml: Path) -> None:
    text = MINIMAL.replace("run_dir: runs/x\n", "") + "pipeline:\n  groups_per_step: 0\n  sync_intervall: 1\nseed: x\n"
    assert refusal(run_yaml, text, ["sampling.temperature=hot"]).splitlines() == [
        "run.yaml:1: run_dir: required, but not given",
        "run.yaml:9: pipeline.groups_per_step: expected a whole number >= 1 (got 0)",
        "run.yaml:10: pipeline.sync_intervall: unknown key `sync_intervall`; did you mean `sync_interval`?",
        "run.yaml:11: seed: expected a whole number >= 0 (got 'x')",
        "--set sampling.temperature=hot: expected a number > 0 and <= 100 (got 'hot')",
    ]


def test_keys_given_twice_are_one_round_with_all_else(run_yaml: Path) -> None:
    text = MINIMAL + "seed: 1\nseed: x\ntrainer:\n  beta: 0\n  beta: 1\n  use_cpu: true\n"
    assert [line.split(": ")[0] for line in refusal(run_yaml, text).splitlines()] == [
        f"run.yaml:{NEXT + line}" for line in (1, 1, 4, 5)
    ]


def test_a_section_whose_key_lacks_a_space_is_told_so(run_yaml: Path) -> None:
    """YAML takes it as one text, and sees no mistake."""
    said = refusal(run_yaml, MINIMAL + "pipeline:\n  max_staleness:2\n")
    assert said.startswith(f"run.yaml:{NEXT}: pipeline: expected a mapping; a space is missing after `max_staleness:`")


def test_one_replica_is_none(run_yaml: Path) -> None:
    assert load(run_yaml, MINIMAL + "engine: {data_parallel_size: 1}\n").engine == {"data_parallel_size": 1}


def test_a_refusal_inside_a_section_of_a_library_names_an_override_too(run_yaml: Path) -> None:
    said = "--set trainer.use_cpu=1: `use_cpu` is set by Slipstream and cannot be given here; set --gpu cpu instead"
    assert refusal(run_yaml, overrides=["trainer.use_cpu=1"]) == said


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
        assert f": {key}={value} changes" in refusal(run_yaml, overrides=[f"sampling.{key}={value}"])
        config = load(run_yaml, overrides=[f"sampling.{key}={value}", "sampling.accept_biased_ratios=true"])
        assert getattr(config.sampling, key) == value
