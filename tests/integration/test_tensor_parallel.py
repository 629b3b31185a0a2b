"""An engine whose layers are spread over two workers: swaps reach both, and one that reached only one is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from producer.engine.own_arguments import own_arguments
from producer.engine_contract import Adapter
from protocol.config.operation import TOLERANCES
from tests.integration.engines import LiveEngine, live_engine
from tests.integration.half_swapped import INSTEAD
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
        half = "HalfMerging" if request.param == "merged" else "HalfLoading"
        extension = {"worker_extension_cls": f"tests.integration.half_swapped.{half}"}
        patch.setattr("producer.engine.configuration.own_arguments", lambda *given: own(*given) | extension)
        model = build_model("qwen2", folder / "model")
        with live_engine(model, folder, num_workers=2, swap={"mode": request.param}) as engine:
            yield engine


def test_a_swap_reaches_both_workers_and_one_that_reached_one_is_refused(
    live: LiveEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = registry_of(live.engine.weights, tmp_path, tolerance=TOLERANCES["float32"])

    async def check() -> None:
        for version in (1, 2):
            assert await registry.publish(live.downloaded(version, probe(live, version)))
        completions = await generate(live, registry)
        assert {version for completion in completions for version in completion.token_versions} == {2}
        assert worst_difference(live, completions, 2, 1.0) < 1e-3
        assert worst_difference(live, completions, 1, 1.0) > 0.1, "the swap changed nothing"

        weights, load = live.engine.weights, live.engine.weights.load

        async def half(adapter: Adapter) -> None:
            (adapter.path / INSTEAD).write_text(str(live.peft_folder(2)))
            await load(adapter)

        weights.load = half
        assert not await registry.publish(live.downloaded(3, probe(live, 3)))
        weights.load = load
        completions = await generate(live, registry)
        assert worst_difference(live, completions, 2, 1.0) < 1e-3, "the version before goes on serving, on both workers"
        assert await registry.publish(live.downloaded(3, probe(live, 3)))

    with live.unloading(registry):
        live.run(check())
    assert "policy v3 is refused, v2 stays: log-probs of the probe differ by" in caplog.text
