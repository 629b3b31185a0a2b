"""A server that does not fit is refused, with the flag that has to change."""

import asyncio
import logging
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from protocol.errors import ConfigError, EngineError, ExitCode
from slipstream_extras.engine_server.engine import server_engine
from tests.scripted_vllm_server import ScriptedVllmServer, refusal
from tests.unit.producer.loop import asynchronous, until
from tests.unit.slipstream_extras.engine_server.running import config_of, running, servers


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"model": "/models/large"},
            "serves /models/large, and the run trains .*/small: start it with `vllm serve .*/small`",
        ),
        ({"model": "/models/large"}, "set engine_server.model=/models/large"),
        ({"max_model_len": 6}, "takes 6 tokens, and the run needs 7: give it --max-model-len 7 or more"),
        ({"enable_lora": False}, "give it --enable-lora$"),
        ({"allow_updates": False}, "set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"),
        ({"max_lora_rank": 4}, r"does not take lora.r=8 \(.*\): give it --max-lora-rank 8"),
        ({"max_loras": 2}, r"computes 2 adapters at once, .* needs 3: give it --max-loras 3"),
        ({"applies_adapters": False}, "loads adapters and does not apply them"),
        ({"logprobs_mode": "raw_logprobs"}, "give it --logprobs-mode processed_logprobs"),
        ({"logprobs_mode": "raw_logits"}, "give it --logprobs-mode processed_logprobs"),
        ({"max_logprobs": 5}, "give it --max-logprobs 8"),
        ({"api_key": "secret"}, r"refuses the key.*engine_server.key_file"),
    ],
)
@asynchronous
async def test_a_wrong_flag_is_named(tmp_path: Path, flags: dict[str, Any], said: str) -> None:
    async with servers(**flags) as started:
        with pytest.raises(EngineError, match=f"engine_server: the server at {started[0].url} .*{said}") as caught:
            async with running(tmp_path, started):
                pass
        assert caught.value.exit_code == ExitCode.ENGINE == 69
        assert started[0].adapters == {}
    assert list((tmp_path / "adapters").iterdir()) == []


ABSURD = 'vllm:lora_requests_info{max_lora="' + "9" * 5000 + '"} 1.0'
METRICS = {"without it": lambda: None, "none": lambda: refusal(404, "max"), "absurd": lambda: web.Response(text=ABSURD)}


@pytest.mark.parametrize("metrics", METRICS)
@asynchronous
async def test_one_that_fits_says_what_is_assumed_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, metrics: str
) -> None:
    caplog.set_level(logging.INFO)
    async with servers(max_loras=None) as started:
        started[0].answers["/metrics"].append(METRICS[metrics])
        await check_what_is_assumed(tmp_path, started, caplog)


async def check_what_is_assumed(
    tmp_path: Path, started: list[ScriptedVllmServer], caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, started) as engine:
        assert engine.capabilities.facts.max_model_len == 64
        assert engine.capabilities.max_num_seqs == 256
        assert engine.outage() is None
    assert "--dtype float32" in caplog.text
    assert "--max-loras of 3 or more for each producer" in caplog.text


@asynchronous
async def test_a_folder_that_the_server_does_not_see_is_refused_with_the_path_it_looked_at(tmp_path: Path) -> None:
    async with servers() as started:
        with pytest.raises(EngineError, match=r"it looked at /elsewhere/slipstream-\w+/trial-0. Mount the folder"):
            async with running(tmp_path, started, server_adapter_dir="/elsewhere"):
                pass


@asynchronous
async def test_the_same_folder_and_model_may_have_other_names_there(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "adapters")
    async with (
        servers(model="/data/xyz") as started,
        running(tmp_path, started, model="/data/xyz", server_adapter_dir=str(tmp_path / "link")) as engine,
    ):
        assert engine.servers.ready


@asynchronous
async def test_what_is_no_vllm_is_refused(tmp_path: Path) -> None:
    async with servers() as started:
        started[0].answers["/health"] = deque([lambda: web.Response(status=404, text="<h1>Not here</h1>")])
        with pytest.raises(EngineError, match=r"is no vLLM server \(<h1>Not here</h1> \(status 404\)\)"):
            async with running(tmp_path, started):
                pass


@asynchronous
async def test_one_that_starts_later_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with servers() as started:
        (server,) = started
        config = config_of(tmp_path, started)
        await server.kill()
        async with server_engine(config) as engine:
            warming_up = asyncio.create_task(engine.warm_up())
            await until(lambda: "cannot be reached" in (engine.outage() or ""))
            server.answers["/health"] = deque([lambda: refusal(500, "starting"), lambda: refusal(503, "starting")])
            await server.start()
            await warming_up
            assert engine.outage() is None
    assert f"the server at {server.url} cannot be reached" in caplog.text


def test_a_model_without_a_fitting_layer_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with servers() as started:
            config = config_of(tmp_path, started)
            lora = config.lora | {"target_modules": ["c_attn"]}
            async with server_engine(config.model_copy(update={"lora": lora})) as engine:
                await engine.warm_up()

    with pytest.raises(ConfigError, match=r"no file of weights .* has a linear layer that lora.target_modules"):
        asynchronous(run)()
