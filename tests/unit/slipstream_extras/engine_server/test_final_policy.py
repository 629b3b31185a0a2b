"""Servers that are not ours serve the final policy after a run."""

import logging
from pathlib import Path

import pytest

from protocol.config.operation import EngineServerSection
from slipstream_extras.engine_server.engine import ServerEngine
from tests.scripted_vllm_server import ScriptedVllmServer
from tests.unit.producer.loop import asynchronous
from tests.unit.slipstream_extras.engine_server.running import adapter, probe_of, publish, running, servers


async def ends(folder: Path, started: list[ScriptedVllmServer], *versions: int, **section: str | None) -> None:
    engine: ServerEngine
    async with running(folder, started, **section) as engine:
        for version in versions:
            await publish(engine, adapter(folder, version))
        engine.note_end()


@asynchronous
async def test_servers_go_on_with_the_last_policy_of_the_last_run(tmp_path: Path) -> None:
    async with servers(2) as started:
        for versions in ((1, 2), (3,)):
            await ends(tmp_path, started, *versions)
            place = tmp_path / "adapters" / "final"
            assert [server.adapters for server in started] == [{"final": str(place)}] * 2
            text = (place / "adapter_model.safetensors").read_text()
            assert text == f"weights of version {versions[-1]}"
            assert [entry.name for entry in place.parent.iterdir()] == ["final"]


@asynchronous
async def test_they_serve_none_if_that_is_asked_for_or_the_run_is_not_finished(tmp_path: Path) -> None:
    async with servers() as started:
        await ends(tmp_path, started, 1, final_name=None)
        async with running(tmp_path, started) as engine:
            await publish(engine, adapter(tmp_path, 2))
        assert started[0].adapters == {}
        assert list((tmp_path / "adapters").iterdir()) == []


@asynchronous
async def test_a_model_of_somebody_else_keeps_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    other = adapter(tmp_path, 9)
    async with servers() as started:
        started[0].adapters["mine"] = str(other.path)
        await ends(tmp_path, started, 1, final_name="mine")
        assert started[0].adapters == {"mine": str(other.path)}
        assert "has another model of the name mine" in caplog.text
        assert probe_of(started[0], other)


def test_the_name_is_none_of_a_producers_own_folders() -> None:
    section = {"url": "http://localhost:8000", "adapter_dir": "/adapters"}
    for name in ("slipstream-1", "..", "a/b", "", "-x"):
        with pytest.raises(ValueError, match="final_name"):
            EngineServerSection.model_validate(section | {"final_name": name})
