"""A `ServerEngine` on scripted servers, and adapters for it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from producer.engine_contract import Adapter, Completion
from protocol.config.run import RunConfig
from protocol.wire.messages import Sampling
from slipstream_extras.engine_server.engine import ServerEngine, server_engine
from tests.scripted_vllm_server import Flags, ScriptedVllmServer

PROMPT = [5, 6, 7]
PROBE = [4, 9, 2, 11, 3]
ROWS = [PROBE, [9, 9, 4, 2, 7]]
SAMPLING = Sampling(num_generations=3, max_completion_length=6, temperature=0.7)


@asynccontextmanager
async def servers(count: int = 1, **flags: Any) -> AsyncIterator[list[ScriptedVllmServer]]:
    async with AsyncExitStack() as stack:
        started = []
        for _ in range(count):
            server = await ScriptedVllmServer(Flags(**flags)).start()
            stack.push_async_callback(server.kill)
            started.append(server)
        yield started


def config_of(folder: Path, started: list[ScriptedVllmServer], **section: Any) -> RunConfig:
    """Its model is made in `folder`."""
    model = folder / "small"
    if not model.is_dir():
        model.mkdir()
        (model / "config.json").write_text('{"model_type": "llama"}')
        (model / "tokenizer.json").write_text("{}")
        layer = {"model.layers.0.self_attn.q_proj.weight": np.zeros((6, 4), np.float32)}
        save_file(layer, model / "model.safetensors")
    places = {"url": [server.url for server in started], "adapter_dir": str(folder / "adapters")}
    values: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(model), "dtype": "float32"},
        "dataset": {"path": "unused"},
        "rewards": {"functions": [{"function": "unused:reward"}]},
        "sampling": {"max_completion_length": 6},
        "lora": {"r": 8},
        "engine_server": places | section,
    }
    return RunConfig.model_validate(values)


@asynccontextmanager
async def running(folder: Path, started: list[ScriptedVllmServer], **section: Any) -> AsyncIterator[ServerEngine]:
    async with server_engine(config_of(folder, started, **section)) as engine:
        await engine.warm_up()
        yield engine


def adapter(folder: Path, version: int) -> Adapter:
    """As `PolicyLoader` unpacks one."""
    path = folder / "unpacked" / f"v{version}"
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text('{"r": 8}')
    (path / "adapter_model.safetensors").write_bytes(f"weights of version {version}".encode())
    return Adapter(version, f"v{version}", version, path)


async def publish(engine: ServerEngine, policy: Adapter) -> list[float]:
    await engine.weights.verify(None, [PROBE])
    await engine.weights.load(policy)
    (scored,) = await engine.weights.verify(policy, [PROBE])
    assert scored.sampled == pytest.approx(scored.rescored, abs=1e-9)
    engine.weights.activate(policy)
    return scored.logprobs


def probe_of(server: ScriptedVllmServer, policy: Adapter | None, row: list[int] = PROBE) -> list[float]:
    """What a trainer would say of a policy, or of the base."""
    name = server.flags.model if policy is None else "reference"
    if policy is not None:
        server.adapters[name] = str(policy.path)
    values = [float(server.logprobs(name, row[:n], 1.0)[row[n]]) for n in range(1, len(row))]
    server.adapters.pop("reference", None)
    return values


def check_exact(server: ScriptedVllmServer, policy: Adapter, completions: list[Completion]) -> None:
    """Every token has the log-prob that this policy gave it at the temperature of `SAMPLING`."""
    server.adapters["reference"] = str(policy.path)
    assert len(completions) == SAMPLING.num_generations
    for completion in completions:
        assert completion.token_versions == [policy.version] * len(completion.token_ids)
        for place, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            expected = server.logprobs("reference", PROMPT + completion.token_ids[:place], SAMPLING.temperature)
            assert abs(expected[token] - logprob) < 1e-9
    del server.adapters["reference"]
