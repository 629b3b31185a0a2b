"""Both daemons of a run: which GPUs each gets, and how its progress reads in a line."""

from pathlib import Path

import pytest

from protocol.config.loader import load_config
from protocol.errors import ExitCode
from slipstream.cli import run
from slipstream.launch import Places, progress
from slipstream.status.reading import TrainerView, View
from tests.unit.protocol.config.files import MINIMAL

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


def test_a_wrong_file_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--config", str(tmp_path / "none.yaml")]) == ExitCode.CONFIG
    assert "none.yaml" in capsys.readouterr().err


def test_the_last_line_has_what_is_known() -> None:
    assert "starting" in progress(View(at=0.0, trainer=None, producers=[], silent={}))
    trainer = TrainerView(step=3, max_steps=40, reward=0.25, tokens_generated_per_s=1234.0, wait_share=0.5, eta_s=90.0)
    line = progress(View(at=0.0, trainer=trainer, producers=[], silent={}))
    assert all(part in line for part in ("step 3 of 40", "reward 0.250", "1,234 tokens/s", "50 %"))
