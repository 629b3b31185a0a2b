"""An engine whose layers are spread over two workers: swaps reach both, and one that reached only one is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from producer.engine.own_arguments import own_arguments
from producer.engine_contract import Adapter
from protocol.config.operation import TOLERANCES
from tests.integration.engines import LiveEngine, live_engine
from tests.integration.faulty_workers import FILE
from tests.integration.models import build_model
from tests.integration.test_engine import generate, probe, worst_difference
from tests.policies import registry_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["adapter", "merged"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # vLLM wants a NUMA node for each worker otherwise
        own = own_arguments
        faulty = "FaultyMerging" if request.param == "merged" else "FaultyLoading"
        extension = {"worker_extension_cls": f"tests.integration.faulty_workers.{faulty}"}
        patch.setattr("producer.engine.configuration.own_arguments", lambda *given: own(*given) | extension)
        model = build_model("qwen2", folder / "model")
        with live_engine(model, folder, num_workers=2, swap={"mode": request.param}) as engine:
            yield engine


FAULTS = {
    "a worker is left behind": "the policy did not reach worker 1 of the engine's 2",
    "a worker takes another": "are not those that were verified: CRC-32",
    "a worker has the other's part": "model.layers.1.mlp.gate_",
}
"""Faults of the second worker, and the reason of the refusal."""


def test_a_swap_reaches_both_workers_and_one_that_reached_one_is_refused(
    live: LiveEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = registry_of(live.engine.weights, tmp_path, tolerance=TOLERANCES["float32"])
    weights, load = live.engine.weights, live.engine.weights.load

    async def check() -> None:
        for version in (1, 2):
            assert await registry.publish(live.downloaded(version, probe(live, version)))
        completions = await generate(live, registry)
        assert {version for completion in completions for version in completion.token_versions} == {2}
        assert worst_difference(live, completions, 2, 1.0) < 1e-3
        assert worst_difference(live, completions, 1, 1.0) > 0.1, "the swap changed nothing"

        for fault in FAULTS:

            async def half(adapter: Adapter, fault: str = fault) -> None:
                (adapter.path / FILE).write_text(f"{fault}\n{live.peft_folder(2)}")
                await load(adapter)

            weights.load = half
            assert not await registry.publish(live.downloaded(3))
            weights.load = load
            completions = await generate(live, registry)
            assert worst_difference(live, completions, 2, 1.0) < 1e-3, "the version before serves on both workers"
        assert await registry.publish(live.downloaded(3, probe(live, 3)))

    with live.unloading(registry):
        live.run(check())
    for said in FAULTS.values():
        assert said in caplog.text
