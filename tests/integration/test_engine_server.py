"""A producer as the client of a real `vllm serve`: exact, and through the death of the server."""

import asyncio
import json
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from producer.engine_contract import Completion
from producer.policies.loader import DownloadedPolicy
from protocol.config.operation import TOLERANCES
from protocol.wire.messages import PolicyInfo, Sampling
from slipstream_extras.engine_server.engine import server_engine
from tests.integration.engines import run_config
from tests.integration.models import build_model, random_adapter, reference_logprobs
from tests.integration.pair import Daemon, end_well
from tests.integration.test_pair import REWARD, read_steps, versions_trained_on, write_run
from tests.integration.vllm_server import VllmServer
from tests.policies import received_probe, registry_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PROMPT, PROBED = [5, 6, 7, 8, 9], [5, 6, 7, 8, 9, *range(3, 43)] * 2
SAMPLING = Sampling(num_generations=4, max_completion_length=24, temperature=0.7)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("server")
    with ExitStack() as stack:
        yield VllmServer(build_model("qwen2", folder / "model"), folder, stack)


def test_log_probs_and_swaps_are_exact_and_a_policy_that_is_not_the_trainer_s_is_refused(
    server: VllmServer, tmp_path: Path
) -> None:
    server.wait_until_ready()
    model = build_model("qwen2", tmp_path / "model")
    section = {"url": server.url, "adapter_dir": str(tmp_path / "shared"), "answer_timeout_s": 120.0}
    config = run_config(model, tmp_path / "run", engine={}, engine_server=section)

    def downloaded(version: int, probed: int) -> DownloadedPolicy:
        """`version`, with the probe of `probed`."""
        blob, digest = random_adapter(model, tmp_path / f"peft-{version}", seed=version)
        if not (tmp_path / f"peft-{probed}").is_dir():
            random_adapter(model, tmp_path / f"peft-{probed}", seed=probed)
        base, policed = (
            reference_logprobs(model, folder, PROBED[:1], PROBED[1:], 1.0)
            for folder in (None, tmp_path / f"peft-{probed}")
        )
        policy = PolicyInfo(version, digest, len(blob))
        return DownloadedPolicy(policy, blob, 0.0, received_probe(PROBED, base.tolist(), policed.tolist()))

    def worst(completions: list[Completion], version: int) -> float:
        peft = tmp_path / f"peft-{version}"
        expected = [reference_logprobs(model, peft, PROMPT, one.token_ids, 0.7) for one in completions]
        pairs = zip(completions, expected, strict=True)
        return max((torch.tensor(one.logprobs) - values).abs().max().item() for one, values in pairs)

    async def check() -> None:
        async with server_engine(config) as engine:
            await engine.warm_up()
            registry = registry_of(engine.weights, tmp_path, tolerance=TOLERANCES["float32"])
            for version in (1, 2):
                assert await registry.publish(downloaded(version, version))
            assert not await registry.publish(downloaded(3, 4)), "the server does not compute v4"
            with registry.pin() as adapter:
                completions = await engine.generate(PROMPT, SAMPLING, adapter)
            assert {version for one in completions for version in one.token_versions} == {2}
            assert all(len(one.token_ids) == 24 for one in completions if one.truncated)
            assert worst(completions, 2) < 1e-3
            assert worst(completions, 1) > 0.1, "the swap changed nothing"
            offered = await engine.servers.all[0].api.models()
            assert len([card for card in offered if card.parent]) == 1, "v1 and v3 are unloaded"

    asyncio.run(check())
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_server_goes_on_with_the_final_policy(server: VllmServer, short_dir: Path, daemons: list[Daemon]) -> None:
    server.wait_until_ready()
    section = {"url": server.url, "adapter_dir": str(short_dir / "shared"), "answer_timeout_s": 120.0}
    rows = [{"prompt": f"{i}+1="} for i in range(8)]
    options = {"max_steps": 2, "save_steps": 100, "learning_rate": 1e-3}
    config = str(write_run(short_dir, "qwen2", rows, REWARD, engine_server=section, trainer=options))
    without_engine = ("--config", config, "--set", "engine={}")
    producer = Daemon("producer.app.cli", short_dir / "producer.log", *without_engine)
    trainer = Daemon("consumer.app.cli", short_dir / "trainer.log", *without_engine)
    daemons += [producer, trainer]
    end_well(trainer, producer)
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as answer:
        offered = {card["id"]: card["root"] for card in json.load(answer)["data"] if card["parent"]}
    assert offered == {"final": str(short_dir / "shared" / "final")}
    served, trained = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (Path(offered["final"]), short_dir / "run" / "adapter")
    )
    assert served.keys() == trained.keys()
    assert all(torch.equal(served[name], trained[name].to(served[name].dtype)) for name in served)


def test_a_run_goes_on_when_its_server_is_killed_and_starts_empty(
    server: VllmServer, short_dir: Path, daemons: list[Daemon]
) -> None:
    """Every token that was trained has the log-prob that the checkpoint of its version gives it."""
    server.wait_until_ready()
    section = {"url": server.url, "adapter_dir": str(short_dir / "shared"), "answer_timeout_s": 120.0}
    rows = [{"prompt": f"{i}+1="} for i in range(40)]
    trainer_section = {"max_steps": 100_000, "save_steps": 1, "save_total_limit": 100_000, "learning_rate": 1e-4}
    pipeline = {"max_staleness": 1}
    config = str(
        write_run(short_dir, "qwen2", rows, REWARD, engine_server=section, trainer=trainer_section, pipeline=pipeline)
    )
    without_engine = ("--config", config, "--set", "engine={}")
    producer = Daemon("producer.app.cli", short_dir / "producer.log", *without_engine)
    trainer = Daemon("consumer.app.cli", short_dir / "trainer.log", *without_engine)
    daemons += [producer, trainer]
    trainer.wait_for(r"step 2/", beside=producer)
    server.kill()
    producer.wait_for(r"the server at \S+ .*; waiting for it")
    assert not [one for one in producer.family() if "EngineCore" in " ".join(one.cmdline())]
    server.start()
    producer.wait_for(r"is ready, with [123] policies")
    reached = len(read_steps(short_dir))
    trainer.wait_for(rf"step {reached + 4}/", beside=producer)
    for daemon in (trainer, producer):
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.end() == 0, daemon.last_words

    steps = read_steps(short_dir)
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["counts"]["trained"] == len(steps) * 4
    assert max(max(versions) for versions in versions_trained_on(short_dir)) > reached
    assert list((short_dir / "shared").iterdir()) == []
    assert "Traceback" not in producer.output
