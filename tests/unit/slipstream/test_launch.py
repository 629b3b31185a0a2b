"""Both daemons of a run: which GPUs each gets, and how its progress reads in a line."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from protocol.config.loader import dump_config, load_config
from protocol.errors import ConfigError, ExitCode
from protocol.gpu.cards import sharing_of
from protocol.gpu.memory import CONTEXT, GIB, needs_of
from slipstream import launch
from slipstream.cli import run
from slipstream.launch import Launch, Places, progress
from slipstream.status.reading import TrainerView, View
from tests.unit.protocol.config.files import MINIMAL
from tests.unit.protocol.gpu.models import run_of, write_model

pytestmark = pytest.mark.usefixtures("own_logging")


@pytest.mark.parametrize(
    ("count", "overrides", "named", "expected", "shared"),
    [
        (0, [], {}, ("cpu", "cpu"), False),
        (1, [], {}, ("0", "0"), True),
        (2, [], {}, ("0", "1"), False),
        (8, [], {}, ("0", "1"), False),
        (4, [], {"producer": "0,1"}, ("0,1", "2"), False),
        (2, [], {"trainer": "0"}, ("1", "0"), False),
        (2, ["pipeline.gpu=turns"], {"trainer": "1"}, ("1", "1"), True),
        (2, ["pipeline.gpu=shared"], {}, ("0", "0"), True),
        (2, [], {"producer": "1", "trainer": "0"}, ("1", "0"), False),
        (2, [], {"producer": "1", "trainer": "1"}, ("1", "1"), True),
        (2, [], {"producer": "cpu", "trainer": "cpu"}, ("cpu", "cpu"), False),
        (4, [], {"trainer": "1,2,3"}, ("0", "1,2,3"), False),
    ],
)
def test_each_side_has_a_gpu_where_there_are_two(
    tmp_path: Path, count: int, overrides: list[str], named: dict[str, str], expected: tuple[str, str], shared: bool
) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    places = Places.of(load_config(str(tmp_path / "run.yaml"), overrides), count, **named)
    assert tuple(places) == expected
    assert places.are_shared is shared


def test_a_server_of_its_own_leaves_the_first_gpu_to_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    server = ["engine_server.url=http://127.0.0.1:8000", "engine_server.adapter_dir=/tmp/adapters"]
    places = Places.of(load_config(str(tmp_path / "run.yaml"), server), 1)
    assert tuple(places) == ("cpu", "0")


def one_gpu(monkeypatch: pytest.MonkeyPatch, total: int) -> None:
    """Let this machine have one GPU of so many bytes."""
    gpu = SimpleNamespace(total_bytes=total)
    monkeypatch.setattr(launch, "visible_gpus", lambda _: [gpu])
    monkeypatch.setattr(launch, "known_gpu", lambda choice: gpu if choice == "0" else None)


def test_one_gpu_is_shared_where_both_fit_and_else_used_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer needs some kilobytes, the engine 1.5 GiB; two contexts take 1.5 GiB, and 3 % are left."""
    folder = write_model(tmp_path / "model")
    config = run_of(folder, pipeline={})
    file = str(tmp_path / "run.yaml")
    Path(file).write_text(dump_config(config))
    trainer, engine = needs_of(config, folder)

    enough = int(1.01 * (trainer.least + engine.least + 2 * CONTEXT) / 0.97)
    one_gpu(monkeypatch, enough)
    planned = Launch.of(file)
    assert "pipeline.gpu=shared" in planned.trainer
    assert "pipeline.gpu=shared" in planned.producer
    one_gpu(monkeypatch, 10**9)
    with pytest.raises(ConfigError, match=r"pipeline.gpu: .*shared has no room.*turns has no room"):
        Launch.of(file)
    named = Launch.of(file, ["pipeline.gpu=turns"])
    assert all("pipeline.gpu=turns" in command and "pipeline.gpu=shared" not in command for command in named[1:])
    monkeypatch.setattr(launch, "known_gpu", lambda _: None)
    assert "pipeline.gpu=shared" in Launch.of(file).trainer


def test_a_run_is_in_turns_where_one_side_fits_alone(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    config = run_of(folder, pipeline={"trainer_tokens_per_micro_batch": 2**22})
    trainer, engine = needs_of(config, folder)
    assert trainer.least > GIB
    both, larger = trainer.least + engine.least, max(trainer.least, engine.least)
    chosen = [
        sharing_of(config, int((needs + 2 * CONTEXT) / 0.9)) for needs in (both, int(1.1 * larger))
    ]  # the engine may have 90 % of the GPU
    assert [sharing for sharing, _ in chosen] == ["shared", "turns"]
    assert "shared has no room" in chosen[1][1]


def test_a_wrong_file_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--config", str(tmp_path / "none.yaml")]) == ExitCode.CONFIG
    assert "none.yaml" in capsys.readouterr().err


def test_the_last_line_has_what_is_known() -> None:
    assert "starting" in progress(View(at=0.0, trainer=None, producers=[], silent={}))
    trainer = TrainerView(step=3, max_steps=40, reward=0.25, tokens_generated_per_s=1234.0, wait_share=0.5, eta_s=90.0)
    line = progress(View(at=0.0, trainer=trainer, producers=[], silent={}))
    assert all(part in line for part in ("step 3 of 40", "reward 0.250", "1,234 tokens/s", "50 %"))
