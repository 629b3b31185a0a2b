"""From an address to a configuration in force, and every reason why a host cannot join."""

import os
from argparse import Namespace
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from protocol.config.functions import load_function
from protocol.config.run import RunConfig
from protocol.errors import BundleError, ConfigError
from slipstream_extras.bundle.bundle import Requirement, digest_of
from slipstream_extras.bundle.joining import joined
from tests.unit.slipstream_extras.bundle.bundle_server import CONFIG, bundle_of, served


@pytest.fixture
def here(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is given; the trainer's socket is beside it."""
    monkeypatch.chdir(short_dir)
    return short_dir


def arguments(here: Path, *overrides: str, **changes: Any) -> Namespace:
    given = {"connect": f"ipc://{here}/control.ipc", "keys": None, "model": None, "wait": 30.0}
    return Namespace(**given | changes, overrides=list(overrides))


def test_the_run_s_files_are_the_working_directory_while_it_lasts(stack: ExitStack, here: Path) -> None:
    data = bundle_of()
    served(stack, here, data)
    with joined(arguments(here)) as (config, digest):
        folder = Path.cwd()
        assert digest == digest_of(data)
        assert {path.name for path in folder.iterdir()} == {"run.yaml", "rewards.py"}
        assert load_function(config.rewards.functions[0].place, "rewards.functions")() == [1.0]
        assert (config.control_endpoint, config.blob_endpoint) == (
            f"ipc://{here}/control.ipc",
            f"ipc://{here}/control.ipc.blobs",
        )
        assert Path(config.run_dir) == folder.parent / "run"
        assert config.model.path == "org/model"
    assert Path.cwd() == here
    assert not folder.parent.exists()
    assert {path.name for path in here.iterdir() if path.suffix == ".py"} == set()


def test_this_host_s_values_go_first_and_begin_where_the_command_was_given(stack: ExitStack, here: Path) -> None:
    (here / "base").mkdir()
    (here / "serve.key").touch()
    judged = CONFIG.replace("rewards.py:exact}", "rewards.py:exact}, {name: judge}")
    served(stack, here, bundle_of(judged, host_keys=["model.path", "rewards.functions.1.model", "serve.api_key_file"]))
    judge = "rewards.functions.1.model=base"
    given = (
        judge,
        "run_dir=own \N{GRINNING FACE} run",
        "serve.api_key_file=serve.key",
        "engine.download_dir=null",
        "seed=9",
    )
    with joined(arguments(here, *given, model="base")) as (config, _):
        assert config.run_dir == f"{here}/own \N{GRINNING FACE} run"
        assert config.model.path == f"{here}/base"
        assert config.serve.api_key_file == f"{here}/serve.key"
        assert config.seed == 9
        assert config.rewards.functions[1].model == f"{here}/base"
    with joined(arguments(here, judge, "model.path=other/name", "serve.api_key_file=null")) as (config, _):
        assert config.model.path == "other/name", "a hub name stays one"


def test_a_key_that_is_each_host_s_own_is_asked_for(stack: ExitStack, here: Path) -> None:
    served(stack, here, bundle_of(host_keys=["model.path", "rewards.functions.0.model"]))
    with pytest.raises(ConfigError) as caught, joined(arguments(here)):
        pass
    assert str(caught.value) == (
        "the trainer's configuration names places of its own host; give those of this host:\n"
        "  --model FOLDER\n  --set rewards.functions.0.model=..."
    )
    with (
        pytest.raises(ConfigError, match="--model nowhere: there is no such folder"),
        joined(arguments(here, model="nowhere")),
    ):
        pass


def test_a_package_that_this_host_lacks_is_named(stack: ExitStack, here: Path) -> None:
    served(stack, here, bundle_of(requirements=[Requirement("nobody_has_this", "nobody-has", "1.2", "rewards.py")]))
    lacks = r"lacks what the run's own files import:\n  rewards.py imports nobody_has_this.*1\.2"
    with pytest.raises(BundleError, match=lacks), joined(arguments(here)):
        pass
    assert Path.cwd() == here


def test_a_configuration_that_this_release_refuses_is_named_by_its_line(stack: ExitStack, here: Path) -> None:
    served(stack, here, bundle_of(CONFIG + "later: {key: 1}\n"))
    with pytest.raises(ConfigError, match=r"run\.yaml:5: later: unknown key `later`"), joined(arguments(here)):
        pass


def test_whatever_ends_it_the_folder_goes(stack: ExitStack, here: Path) -> None:
    served(stack, here, bundle_of())
    seen: list[RunConfig] = []
    with suppress(KeyboardInterrupt), joined(arguments(here)) as (config, _):
        seen.append(config)
        raise KeyboardInterrupt
    assert not os.path.exists(os.path.dirname(seen[0].run_dir))
