"""From a folder to a bundle, and what it needs of a host."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from protocol.config.loader import load_config
from protocol.config.run import RunConfig
from protocol.errors import BundleError
from slipstream_extras.bundle.bundle import Requirement, decode, differing, digest_of, missing, requirements
from slipstream_extras.bundle.packing import pack
from tests.plugins import install
from tests.unit.protocol.config.files import MINIMAL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    (tmp_path / "rewards.py").write_text("import helper, yaml, nobody_has_this\n")
    (tmp_path / "helper.py").write_text("")
    (tmp_path / ".env").write_text("SECRET=1\n")
    (tmp_path / "notes.py").write_text("TOKEN = 'hf_abc'\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(**sections: Any) -> RunConfig:
    Path("run.yaml").write_text(yaml.safe_dump(yaml.safe_load(MINIMAL) | sections))
    return load_config("run.yaml")


def test_a_bundle_has_the_configuration_and_the_files_that_are_imported(folder: Path) -> None:
    bundle = decode(pack(config(), folder))
    assert [file.name for file in bundle.files] == ["helper.py", "rewards.py", "run.yaml"]
    assert bundle.host_keys == []
    assert bundle.requirements == [
        Requirement("nobody_has_this", "nobody_has_this", "", "rewards.py"),
        Requirement("yaml", "PyYAML", version("PyYAML"), "rewards.py"),
    ]


def test_a_producer_needs_the_package_of_a_plugin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(folder / "installed", "counting", {"slipstream.rewards": {"counts": "counting:counts"}})
    monkeypatch.syspath_prepend(str(folder / "installed"))
    rewards: dict[str, Any] = {
        "functions": [{"function": "counts", "options": {"limit": 3}}, {"function": "exact_match"}]
    }
    bundle = decode(pack(config(rewards=rewards), folder))
    assert bundle.requirements == [Requirement("counting", "counting", "1.0", "rewards.functions.0")]
    rewards["functions"][0]["options"] = {"api_key": "sk-1"}
    with pytest.raises(BundleError, match=r"rewards\.functions\.0\.options\.api_key looks like a secret"):
        pack(config(rewards=rewards), folder)


@pytest.mark.long
def test_its_digest_changes_with_what_producers_need_and_with_nothing_else(folder: Path) -> None:
    """What the trainer alone reads restarts no producer."""
    before = digest_of(pack(config(), folder))
    (folder / "notes.py").write_text("")
    assert digest_of(pack(config(trainer={"max_steps": 9}, replay={"mode": "signal"}, seed=42), folder)) != before, (
        "seed"
    )
    others = config(trainer={"max_steps": 9}, replay={"mode": "signal"}, dataset={"path": "x", "max_rows": 1})
    assert digest_of(pack(others, folder)) == before
    assert digest_of(pack(config(sampling={"num_generations": 16}), folder)) != before
    (folder / "helper.py").write_text("# another\n")
    assert digest_of(pack(config(), folder)) != before


def test_a_taskset_of_verifiers_comes_along_if_the_folder_has_it(folder: Path) -> None:
    (folder / "my_tasks.py").write_text("import verifiers, helper\n")
    section: dict[str, Any] = {"agent": "verifiers", "options": {"id": "me/my-tasks@1.2"}}
    sections: dict[str, Any] = {"rewards": {"functions": []}, "serve": {"enabled": True}}
    bundle = decode(pack(config(environment=section, **sections), folder))
    assert [file.name for file in bundle.files] == ["helper.py", "my_tasks.py", "run.yaml"]
    assert [one.module for one in bundle.requirements] == ["verifiers"]
    section["options"]["python"] = "venv/bin/python"
    bundle = decode(pack(config(environment=section, **sections), folder))
    assert bundle.requirements == [], "they are for that Python"
    assert bundle.host_keys == ["environment.options.python"]
    section["options"] = {"id": "installed-tasks"}
    assert [file.name for file in decode(pack(config(environment=section, **sections), folder)).files] == ["run.yaml"]


@pytest.mark.parametrize(
    "sections",
    [
        {"environment": {"agent": "atropos"}, "rewards": {}, "dataset": {"chat_template_kwargs": {"a": 1}},
         "serve": {"enabled": True}, "trainer": {"max_steps": 7, "beta": 0.1}},
        {"rewards": {"functions": [{"posted": "score"}]}, "serve": {"enabled": True}},
        {
            "environment": {"agent": "nemo_gym", "options": {"url": "http://gym:1/run"}},
            "rewards": {},
            "serve": {"enabled": True, "port": 8000},
        },
        {"swap": {"mode": "merged"}, "evaluation": {"dataset": {"path": "held-out.jsonl"}, "metric": "exact"}},
        {"pipeline": {"max_staleness": 6}, "reroll": {"reward": "exact"}},
        {"lora": {"r": 4, "target_modules": ["lm_head"]}, "swap": {"probe_every": 0}},
    ],
    ids=["atropos", "posted", "nemo-gym", "merged", "staleness", "lm-head"],
)  # fmt: skip
def test_what_producers_get_is_a_configuration_that_asks_the_same_of_them(
    folder: Path, sections: dict[str, Any]
) -> None:
    ours = config(**sections)
    [text] = [file.content for file in decode(pack(ours, folder)).files if file.name == "run.yaml"]
    (folder / "theirs.yaml").write_bytes(text)
    theirs = load_config("theirs.yaml", ["model.path=base"])
    for name in (
        "reward_names",
        "posted_rewards",
        "max_loras",
        "max_lora_rank",
        "completions_per_step",
        "environment",
        "swap",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.evaluation is None, ours.trainer.get("max_steps", 0)) == (
        theirs.evaluation is None,
        theirs.trainer.get("max_steps", 0),
    )


def test_too_large_a_folder_is_no_bundle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream_extras.bundle.bundle.LARGEST_BUNDLE_BYTES", 200)
    (folder / "helper.py").write_text("#" * 300)
    with pytest.raises(BundleError, match="200 are allowed"):
        pack(config(), folder)


def test_what_a_host_lacks_is_named_with_the_trainer_s_version() -> None:
    needed = [
        Requirement("json", "json", "", "a.py"),
        Requirement("yaml", "PyYAML", "5.0", "a.py"),
        Requirement("nobody_has_this", "nobody-has", "1.2", "rewards.py"),
        Requirement("nor_this", "nor_this", "", "lib/b.py"),
        Requirement("", "", "", "c.py"),
    ]
    assert missing(needed) == [
        "rewards.py imports nobody_has_this, which is not installed here; the trainer's host has nobody-has 1.2: "
        "pip install 'nobody-has==1.2'",
        "lib/b.py imports nor_this, which is not installed here, nor on the trainer's host; install it here, or put it "
        "into the folder of the run's YAML file",
        "c.py imports , which is not installed here, nor on the trainer's host; install it here, or put it "
        "into the folder of the run's YAML file",
    ]


def test_nothing_is_imported_to_find_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "explosive.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert missing(requirements({"explosive": "a.py"})) == []
    assert "explosive" not in sys.modules


def test_another_version_is_told() -> None:
    ours = version("PyYAML")
    same, older, unknown, absent = (
        Requirement(module, package, said, "a.py")
        for module, package, said in (
            ("yaml", "PyYAML", ours),
            ("yaml", "PyYAML", "5.0"),
            ("yaml", "PyYAML", ""),
            ("no", "no", "1"),
        )
    )
    assert differing([same, unknown, absent]) == []
    assert differing([older]) == [f"a.py imports yaml: PyYAML is {ours} here and 5.0 on the trainer's host"]
