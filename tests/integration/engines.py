"""Real engines for tests: one per module, on an asyncio loop of its own, with tiny local models."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from producer.engine_contract import Adapter
from producer.policies.loader import DownloadedPolicy
from producer.policies.probe import ReceivedProbe
from producer.policies.registry import AdapterRegistry
from protocol.config.run import RunConfig
from protocol.wire import adapter_blob, weight_patch
from protocol.wire.messages import PolicyInfo
from tests.integration.forked_cores import forked_cores
from tests.integration.models import random_adapter, random_patch

Result = TypeVar("Result")

NUM_BLOCKS = 512
"""Of 128 tokens, and room for all that a test asks for at once. As many as fit in a GiB take half a second to clear."""


def run_config(model: Path, run_dir: Path, dtype: str = "float32", **sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model": {"path": str(model), "dtype": dtype},
        "dataset": {"path": "unused"},
        "rewards": {"functions": [{"function": "unused:reward"}]},
        "sampling": {"num_generations": 4, "max_completion_length": 16},
        "lora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        "engine": {
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 64,
            "num_gpu_blocks_override": NUM_BLOCKS,
        },
    }
    return RunConfig.model_validate(values | sections)


def check_engine_section(config: RunConfig) -> None:
    """Let vLLM validate `engine:` against the model's configuration, without loading weights."""
    from producer.engine.configuration import build_vllm_config, model_folder
    from producer.engine.own_arguments import num_parts

    build_vllm_config(config, model_folder(config), num_gpus=num_parts(config))


class LiveEngine:
    """A started engine of so many worker processes, and random policies for its model: adapters, or patches with `lora` None, and
    the folders that have the same for transformers. `run` executes coroutines on the engine's loop."""

    def __init__(self, model: Path, folder: Path, num_workers: int = 1, **sections: Any) -> None:

        from producer.engine.engine import VllmEngine

        self.model = model
        self.folder = folder
        self.config = run_config(model, folder / "run", **sections)
        self.unpack = (weight_patch if self.config.weights == "full" else adapter_blob).unpack
        self.loop = asyncio.new_event_loop()
        self.engine = self.run(self._start(VllmEngine, num_workers))
        self._published: dict[int, tuple[Path, bytes, str]] = {}

    async def _start(self, factory: Any, num_workers: int) -> Any:
        with forked_cores():
            engine = factory(self.config, num_workers)
        await engine.warm_up()
        return engine

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(work)

    def peft_folder(self, version: int) -> Path:
        """Return the folder of the adapter, or of the patched checkpoint."""
        return self._made(version)[0]

    def policy(self, version: int) -> tuple[PolicyInfo, bytes]:
        _, blob, digest = self._made(version)
        return PolicyInfo(version, digest, len(blob)), blob

    def downloaded(self, version: int, probe: ReceivedProbe | None = None) -> DownloadedPolicy:
        return DownloadedPolicy(*self.policy(version), 0.0, probe)

    def adapter(self, version: int, number: int) -> Adapter:
        """Version `version`, unpacked from its blob as adapter `number` of the engine, not loaded yet."""
        _, blob, digest = self._made(version)
        path = self.folder / f"adapter-{number}"
        checksum = self.unpack(blob, digest, path)
        return Adapter(version, f"v{version}-{number}", number, path, checksum)

    def _made(self, version: int) -> tuple[Path, bytes, str]:
        if version not in self._published:
            folder = self.folder / f"peft-{version}"
            make = random_patch if self.config.weights == "full" else random_adapter
            self._published[version] = (folder, *make(self.model, folder, seed=version))
        return self._published[version]

    @contextmanager
    def unloading(self, registry: AdapterRegistry) -> Iterator[AdapterRegistry]:
        """Whenever `run` runs something, what was let go is unloaded. In the end all is."""
        task = self.loop.create_task(registry.unload_released())
        yield registry
        registry.start_session(PolicyInfo(0, "0" * 64, 0))
        self.run(self._unloaded(registry))
        task.cancel()
        self.run(asyncio.wait([task]))

    async def _unloaded(self, registry: AdapterRegistry) -> None:
        await registry.unload_idle()
        async with asyncio.timeout(60):
            while getattr(self.engine.weights, "loaded_ids", ()):  # noqa: ASYNC110 - of an unloading that has begun, which no event says
                await asyncio.sleep(0.01)

    def close(self) -> None:
        self.engine.shutdown()
        self.run(asyncio.sleep(0.1))
        self.loop.close()


def on_engine(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs on the loop of its fixture `live`."""

    @functools.wraps(test)
    def run(live: LiveEngine, **named: Any) -> None:
        live.run(test(live, **named))

    return run


@contextmanager
def live_engine(model: Path, folder: Path, **sections: Any):
    engine = LiveEngine(model, folder, **sections)
    try:
        yield engine
    finally:
        engine.close()
