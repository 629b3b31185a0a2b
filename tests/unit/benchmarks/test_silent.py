"""Tests of the table of silent faults, and of the fault that a vLLM server gets."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.silent_producer import Fault
from benchmarks.silent_report import draw, noticed_by, smooth, table
from benchmarks.silent_server import loading_with

ONE: dict[str, Any] = {
    "task": "sums", "fault": "alpha is halved", "arm": "proof", "dtype": "float32", "refused": 6,
    "why": "the engine holds other numbers", "stopped_after": 8, "accuracy": 0.98, "rewards": [0.5, 0.7], "kl": [0.0, 0.2],
    "wrong_tokens": 0, "warnings": [],
}  # fmt: skip
SILENT = ONE | {"arm": "no proof", "refused": None, "why": None, "accuracy": 0.6, "wrong_tokens": 1200}


def test_a_row_has_what_each_arm_came_to() -> None:
    *_, row = table([ONE, SILENT]).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == ["sums", "alpha is halved"]
    assert cells[5] == "0.980"
    assert cells[6:10] == ["0.600", "0.60", "0.100", "1,200"]
    assert cells[10:] == ["-", "-", "-"]


def test_what_refused_is_told_by_its_reason() -> None:
    assert noticed_by(ONE) == "bits, v6"
    assert noticed_by(ONE | {"why": "log-probs of the probe differ"}) == "behaviour, v6"
    assert noticed_by(ONE | {"why": "found 96 tokens in the engine's prefix cache"}) == "behaviour, v6"
    assert noticed_by(SILENT) == "nothing"
    assert noticed_by(SILENT | {"warnings": ["merged weights have 0% of the update"]}) == "a warning"


def test_a_curve_is_smoothed_by_what_came_before() -> None:
    assert smooth([0.0, 1.0, 2.0], width=2) == [0.0, 0.5, 1.5]


@pytest.mark.long
def test_the_picture_has_every_arm(tmp_path: Path) -> None:
    healthy = ONE | {"fault": "none", "refused": None}
    draw([healthy, ONE, SILENT], tmp_path / "silent.png")
    assert 1000 < (tmp_path / "silent.png").stat().st_size < 100_000


@dataclass
class Loaded:
    loras: dict[str, Any] = field(default_factory=lambda: {"a.q_proj": scaled(), "a.down_proj": scaled()})


def scaled() -> SimpleNamespace:
    return SimpleNamespace(scaling=2.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "held"),
    [
        ("the base is served", {"a.q_proj": 0.0, "a.down_proj": 0.0}),
        ("alpha is halved", {"a.q_proj": 1.0, "a.down_proj": 1.0}),
        ("down_proj is missing", {"a.q_proj": 2.0}),
    ],
)
def test_a_server_loads_wrongly_from_the_first_version_on(fault: str, held: dict[str, float]) -> None:
    load = loading_with(Fault(fault, first=3), lambda *_: Loaded())
    before, after = (load(None, SimpleNamespace(lora_name=f"trl-policy-v{version}")) for version in (2, 3))
    assert {name: lora.scaling for name, lora in before.loras.items()} == {"a.q_proj": 2.0, "a.down_proj": 2.0}
    assert {name: lora.scaling for name, lora in after.loras.items()} == held


def test_a_fault_that_needs_an_old_adapter_keeps_the_last_right_one(tmp_path: Path) -> None:
    fault = Fault("another adapter is held", other=str(tmp_path / "old"), keeps_old=True, first=2)
    for version in range(4):
        folder = tmp_path / f"v{version}"
        folder.mkdir()
        (folder / "number").write_text(str(version))
        fault.note(SimpleNamespace(version=version, path=folder))  # type: ignore[arg-type]
    assert (tmp_path / "old" / "number").read_text() == "1"
    assert [(tmp_path / f"v{version}" / "fault").exists() for version in range(4)] == [False, False, True, True]
