"""The benchmarks of the wire run and count what they say; how fast is theirs to tell."""

import json
from pathlib import Path

import pytest

from benchmarks import scale, wire

pytestmark = pytest.mark.integration


def test_scale_finds_every_acknowledged_group_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for pause in ("_IDLE_S", "_SETTLE_S", "_DOWN_S"):
        monkeypatch.setattr(wire, pause, 0.2)
    monkeypatch.setattr(scale, "_RAW_S", 0.2)
    out = tmp_path / "scale.json"
    scale.main(["--out", str(out), "--seconds", "0.5", "--repeat", "1", "--producers", "9", "--offered", "100"])
    (case,) = json.loads(out.read_text())["cases"]
    assert case["producers"] == 9
    assert 0 < case["groups_per_s"][1] < 400
    assert 0 < case["ack_p50_ms"][1] <= case["ack_p99_ms"][1]
    assert 0 < case["back_s"][1] < 60, "the producers are back after the trainer was killed"
    assert case["refused"] == [0, 0, 0]
    assert "| 9 | 100/s |" in capsys.readouterr().out
