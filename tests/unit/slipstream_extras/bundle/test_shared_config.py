"""What producers get of a configuration: what they read, and nothing that is the trainer's host's own."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from protocol.config.loader import load_config
from protocol.config.run import RunConfig
from protocol.errors import BundleError
from slipstream_extras.bundle.packing import ALL, SHARED, share
from slipstream_extras.bundle.sources import RunSources
from tests.unit.replay.builders import memory_folder

REPOSITORY = Path(__file__).parents[4]
EVERYTHING: dict[str, Any] = {
    "run_dir": "/home/me/run",
    "seed": 7,
    "model": {"path": "org/model", "revision": "main", "dtype": "float32"},
    "dataset": {
        "path": "/home/me/data.jsonl",
        "transform": "rows.py:row",
        "answer_column": "answer",
        "chat_template_kwargs": {"enable_thinking": False, "suffix": "/no_think"},
    },
    "rewards": {
        "functions": [
            {"function": "rewards.py:exact", "weight": 2.0},
            {"model": "org/judge"},
            {"url": "https://judge/score", "options": {"headers_env": {"Authorization": "JUDGE_TOKEN"}}},
        ],
        "num_workers": 3,
    },
    "environment": {"factory": "environment.py:Calculator", "tool_parser": "hermes", "reward_weight": 0.5},
    "sampling": {"num_generations": 4},
    "pipeline": {"groups_per_step": 8, "max_staleness": 3, "lease_timeout_s": 60.0},
    "replay": {"mode": "signal"},
    "loss": {"ce_coef": 0.0},
    "swap": {"probe_every": 4},
    "serve": {"enabled": True, "host": "0.0.0.0", "api_key_file": "/home/me/serve.key"},
    "transport": {
        "endpoint": "tcp://10.0.0.5:5557",
        "keys": "/home/me/keys",
        "identity": "x",
        "blob_chunk_bytes": 2048,
    },
    "observability": {"log_level": "debug", "metrics_host": "10.0.0.5", "trainer_metrics_port": 1},
    "evaluation": {"dataset": {"path": "/home/me/held.jsonl"}, "hold_swap_s": 9.0, "metric": "exact"},
    "lora": {"r": 8, "init_from": "/home/me/adapter"},
    "engine": {"max_model_len": 64, "hf_token": "hf_xyz", "download_dir": "/home/me/models"},
    "trainer": {"max_steps": 5, "report_to": "wandb"},
    "sft": {"hub_token": "hf_abc"},
}
FILES = ("rewards.py", "environment.py")


def shared(folder: Path, changes: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What producers get, and the keys that are left out."""
    values = EVERYTHING | changes
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    for name in FILES:
        (folder / name).write_text("")
    found = share(load_config(str(folder / "run.yaml")), RunSources(folder.resolve()))
    return found.values, found.host_keys


def refusal(folder: Path, changes: dict[str, Any]) -> str:
    with pytest.raises(BundleError) as caught:
        shared(folder, changes)
    return str(caught.value)


def test_producers_hear_that_the_weights_themselves_train(tmp_path: Path) -> None:
    full = {"lora": None, "model": {"path": "org/model", "dtype": "bfloat16"}, "swap": {}, "engine_server": None}
    values, _ = shared(tmp_path, full)
    assert values["lora"] is None


def test_producers_get_what_they_read_and_not_what_is_of_the_trainer_s_host(tmp_path: Path) -> None:
    values, host_keys = shared(tmp_path, {})
    assert values == {
        "run_dir": "run",
        "seed": 7,
        "model": {"path": "org/model", "revision": "main", "dtype": "float32"},
        "dataset": {
            "path": "of-the-trainer",
            "chat_template_kwargs": {"enable_thinking": False, "suffix": "/no_think"},
        },
        "rewards": {
            "functions": [
                {"function": "rewards.py:exact", "weight": 2.0, "name": "exact"},
                {"model": "org/judge", "name": "judge"},
                {
                    "url": "https://judge/score",
                    "name": "score",
                    "options": {"headers_env": {"Authorization": "JUDGE_TOKEN"}},
                },
            ],
            "num_workers": 3,
        },
        "environment": {"factory": "environment.py:Calculator", "tool_parser": "hermes", "reward_weight": 0.5},
        "sampling": {"num_generations": 4},
        "pipeline": {"groups_per_step": 8, "max_staleness": 3},
        "swap": {"probe_every": 4},
        "serve": {"enabled": True, "host": "0.0.0.0"},
        "transport": {"blob_chunk_bytes": 2048},
        "observability": {"log_level": "debug"},
        "evaluation": {"dataset": {"path": "of-the-trainer"}, "hold_swap_s": 9.0},
        "lora": {"r": 8, "target_modules": "all-linear"},
        "engine": {"max_model_len": 64},
    }
    assert host_keys == ["serve.api_key_file", "observability.metrics_host", "engine.download_dir"]


def test_a_producer_s_configuration_is_the_trainer_s_in_what_it_computes_with(tmp_path: Path) -> None:
    values, _ = shared(tmp_path, {"serve": {}})
    (tmp_path / "producer.yaml").write_text(yaml.safe_dump(values))
    ours, theirs = load_config(str(tmp_path / "run.yaml")), load_config(str(tmp_path / "producer.yaml"))
    for name in ("reward_names", "max_loras", "max_lora_rank", "completions_per_step", "rewards", "sampling", "swap"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"model": {"path": "/models/base"}}, ["model.path"]),
        ({"model": {"path": "./base"}}, ["model.path"]),
        ({"model": {"path": "base"}}, ["model.path"]),  # a folder there
        ({"rewards": {"functions": [{"function": "exact_match"}, {"model": "/judge"}]}}, ["rewards.functions.1.model"]),
        (
            {"rewards": {"functions": [{"function": "feature_matching", "options": {"model": "/base"}}]}},
            ["rewards.functions.0.options.model"],
        ),
        (
            {"rewards": {"functions": [{"function": "code", "options": {"python": "venv/bin/python"}}]}},
            ["rewards.functions.0.options.python"],
        ),
        ({"rewards": {"functions": [{"function": "code", "options": {"python": "python3"}}]}}, []),
        (
            {
                "environment": {
                    "agent": "verifiers",
                    "options": {"id": "x", "python": "/v/python", "arguments": {"a": {"b": "~/c"}, "n": 1}},
                },
                "serve": {"enabled": True},
            },
            ["environment.options.python", "environment.options.arguments.a"],
        ),
        (
            {
                "environment": {
                    "factory": "openenv",
                    "options": {"url": "http://h:1", "arguments": ["a"], "key_file": "/k"},
                }
            },
            ["environment.options.key_file"],
        ),
        ({"engine": {"speculative_config": {"model": "/draft"}}}, ["engine.speculative_config"]),
        ({"engine": {"x": ["file:/a"], "/b": {}}}, ["engine.x"]),
        (
            {"engine_server": {"url": "http://h:8000", "adapter_dir": "/a", "key_file": "k"}, "swap": {}},
            ["engine_server.adapter_dir", "engine_server.key_file"],
        ),
        (
            {
                "teachers": [
                    {"name": "t", "url": "http://h:1"},
                    {"name": "u", "url": "https://h:2", "key_file": "k", "ca_file": "c"},
                    {"name": "self", "prompt": "{solution}"},
                ],
                "distillation": {"mode": "advantage", "coef": 0.5},
            },
            ["teachers.1.key_file", "teachers.1.ca_file"],
        ),
    ],
)
def test_what_names_a_place_on_the_host_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], keys: list[str]
) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    host_free: dict[str, Any] = {"serve": {}, "observability": {}, "engine": {}, "evaluation": None, "environment": {}}
    _, host_keys = shared(tmp_path, host_free | changes)
    assert host_keys == keys


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rewards": {"functions": [{"url": "https://me:pass@judge/score"}]}}, "rewards.functions.0.url"),
        ({"rewards": {"functions": [{"url": "https://judge/score?n=1&api_key=abc"}]}}, "rewards.functions.0.url"),
        ({"environment": {"agent": "nemo_gym", "options": {"url": "http://me:pass@gym"}}}, "environment.options.url"),
        (
            {
                "environment": {
                    "agent": "verifiers",
                    "options": {"id": "x", "arguments": {"judge": [{"openai_api_key": "sk-1"}]}},
                }
            },
            "environment.options.arguments.judge.0.openai_api_key",
        ),
        ({"engine": {"load": {"Password": "x"}}}, "engine.load.Password"),
        *(
            (
                {
                    "environment": {
                        "agent": "verifiers",
                        "options": {"id": "x", "arguments": {"headers": {name: value}}},
                    }
                },
                f"environment.options.arguments.headers.{name}",
            )
            for name, value in {
                "Authorization": "x",
                "X-Api-Key": "x",
                "api-key": "x",
                "bearer": "x",
                "Cookie": "x",
                "accessToken": "x",
                "x-auth-token": "x",
                "Proxy-Authorization": "x",
                "anything": "Bearer 0123456789abc",
                "other": "sk-0123456789abcdefg",
            }.items()
        ),
        ({"engine": {"keys": {"api_keys": ["x"]}}}, "engine.keys.api_keys.0"),
        ({"engine": {"otlp_traces_endpoint": "http://me:pass@host"}}, "engine.otlp_traces_endpoint"),
    ],
)
def test_a_secret_is_no_part_of_a_bundle(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    serve = {"serve": {"enabled": True, "port": 8000}, "evaluation": None}
    said = refusal(tmp_path, serve | changes)
    assert said.startswith(f"{key} ")
    assert "are not sent to producers" in said
    assert not re.search("pass|abc|sk-1", said.partition(" ")[2].replace("passed", ""))


def test_words_that_only_sound_like_secrets_travel(tmp_path: Path) -> None:
    engine = {
        "max_num_batched_tokens": 64,
        "tokenizer_mode": "slow",
        "token": "",
        "auth": {"mode": 3},
        "url": "http://[",
        "monkey": "banana",
        "stop_tokens": ["<end>"],
        "motto": "bearer of good news",
        "task": "sk-learn",
    }
    values, _ = shared(tmp_path, {"engine": engine})
    assert values["engine"] == engine


FREE = st.recursive(
    st.one_of(st.integers(0, 9), st.sampled_from(["a", "/etc/x", "~/x", "file:///x", "x/y"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["a", "/b", "c"]), inner, max_size=2)
    ),
    max_leaves=5,
)


@pytest.mark.long
@given(
    engine=st.dictionaries(st.sampled_from(["x", "y", "z"]), FREE, max_size=3),
    model=st.sampled_from(["a/b", "/m", "~m"]),
)
def test_no_absolute_path_is_in_a_bundle(engine: dict[str, Any], model: str) -> None:
    with memory_folder() as folder:
        values, host_keys = shared(folder, {"engine": engine, "model": {"path": model}})
    del values["dataset"]
    assert not re.search(r"[\[ '\"](/|~|file:)", str(values))
    assert {key for key in engine if re.search(r"(^|[\[ '\"])(/|~|file:)", str(engine[key]))} == {
        key.removeprefix("engine.") for key in host_keys if key.startswith("engine.")
    }


def test_every_key_of_the_configuration_is_shared_or_left_for_a_reason() -> None:
    """Whoever adds a key decides here whether producers read it."""
    left = {
        "model": set(),
        "dataset": {
            *("path", "subset", "revision", "split", "streaming", "max_rows", "filter", "transform"),
            *("prompt_column", "answer_column", "blocks", "environment"),
            *("reasoning_gym", "size", "seed", "config", "difficulty", "template"),
            *("sources", "shuffle", "sampling", "curriculum", "max_prompt_tokens"),
        },
        "pipeline": {
            *("trainer_tokens_per_micro_batch", "fill", "sync_interval"),
            *("lease_timeout_s", "max_data_attempts", "max_infra_attempts", "data_backoff_s", "infra_backoff_s"),
            *("max_failed_share", "shard_base", "rank_silence_s", "gpu"),
        },
        "transport": {"keys", "identity", "endpoint", "blob_endpoint", "region", "relay_host"},
        "observability": {"progress", "trainer_metrics_port", "rollout_samples", "rollouts_max_bytes"},
        "evaluation": {
            *(
                "dataset",
                "every_versions",
                "before_training",
                "max_prompts",
                "num_completions",
                "temperature",
                "metric",
            ),
            *("threshold", "pass_k", "keep_best", "patience", "min_delta", "wait_s"),
        },
        "distillation": {"coef", "beta"},
    }
    whole = {
        "run_dir",
        "folder",
        "seed",
        "replay",
        "reroll",
        "advantage",
        "correction",
        "loss",
        "guards",
        "trainer",
        "checkpoints",
        "sft",
        "producers",
        "trainable",
    }
    assert set(RunConfig.model_fields) == set(SHARED) | whole
    for name, keys in left.items():
        annotation: Any = RunConfig.model_fields[name].annotation
        section = next(kind for kind in (annotation, *getattr(annotation, "__args__", ())) if _is_section(kind))
        assert set(section.model_fields) == keys | set(SHARED[name] or ()), name
    assert {name for name, keys in SHARED.items() if keys is not ALL} == {*left, "lora"}


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def test_producers_read_no_key_that_is_left_out() -> None:
    """By the text of the packages that a producer runs."""
    text = "".join(
        file.read_text() for room in ("producer", "protocol/runtime") for file in (REPOSITORY / room).rglob("*.py")
    )
    read = set(re.findall(r"config\.([a-z]+)\.([a-z_]+)", text))
    properties = {
        "on_swap",
        "names",
        "computed",
        "num_lora_slots",
        "num_top",
        "is_played_outside",
        "model_dump",
    }
    own = {("transport", key) for key in ("keys", "identity", "region", "relay_host")}  # of each host
    own.add(("pipeline", "gpu"))
    sections = {name: set(keys or ()) for name, keys in SHARED.items() if keys is not ALL}
    unread = {(name, key) for name, key in read - own if name in sections and key not in sections[name] | properties}
    assert ("model", "dtype") in read
    assert unread == set()
