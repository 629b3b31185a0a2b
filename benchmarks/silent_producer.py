"""`rl-producer` whose engine serves something else than it says, for `benchmarks.silent`.

Run as `python -m benchmarks.silent_producer` with the arguments of `rl-producer`; the variable SILENT is a `Fault` in JSON.

Guarantee: a fault is in what the engine holds or is asked, never in a proof. Without the proofs nothing is compared: neither
bits, nor the paths that workers tell, nor behaviour. Only this benchmark has that switch.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.switched_proof import SwitchedLoading
from producer.app import cli
from producer.engine.own_arguments import own_arguments
from producer.engine_contract import Adapter
from producer.policies.loader import PolicyLoader
from producer.rollouts.prompts import PromptFormat
from tests.integration.faulty_workers import FILE, FaultyLoading

VARIABLE = "SILENT"


@dataclass(frozen=True)
class Fault:
    """What is wrong from version `first` on.

    Args:
        of_workers: what a worker does with an adapter (`tests.integration.faulty_workers`); "" for nothing.
        other: folder of the adapter that it takes in place of the right one.
        keeps_old: a copy of the last right adapter is put there.
        base: folder of the model that the engine loads in place of the run's, from the start.
        before_prompts: what each prompt, which is text, has in front, from the start.
        workers: processes among which layers are split.
        stale_cache: the prefix cache does not tell versions apart, from the start.
        settings: values of the run that differ.
    """

    of_workers: str = ""
    other: str = ""
    keeps_old: bool = False
    base: str = ""
    before_prompts: str = ""
    workers: int = 1
    stale_cache: bool = False
    settings: Sequence[str] = ()
    first: int = 0
    proved: bool = True

    def put_in_cache(self) -> None:
        """Let prefix caches of this process, and of those that it forks, find what any version computed."""
        if self.stale_cache:
            from vllm.v1.core import kv_cache_utils

            cache: Any = kv_cache_utils
            cache._gen_lora_extra_hash_keys = lambda request: []

    def note(self, adapter: Adapter) -> None:
        """Before a load: keep a copy of the last right adapter, or tell the workers what to do with this one."""
        if adapter.version >= self.first and self.of_workers:
            (adapter.path / FILE).write_text(f"{self.of_workers}\n{self.other}")
        elif self.keeps_old:
            shutil.rmtree(self.other, ignore_errors=True)
            shutil.copytree(adapter.path, self.other)


class UnprovedLoading(FaultyLoading, SwitchedLoading):
    """A worker that says of every adapter that it is loaded."""

    def loading_start(self) -> None:
        super().loading_start()
        self.prove_by_bits(False)

    def loading_prepare(self, request: tuple[str, int, str], checksum: int | None) -> None:
        self._asked = request[2]
        super().loading_prepare(request, checksum)

    def loading_state(self) -> Any:
        state, said = super().loading_state()
        return state, self._asked if state == "done" else said


def put_in_place(fault: Fault) -> None:
    """Change this process, and the workers that it forks. Weights that are merged have no faults here."""
    from producer.engine import configuration, engine, weights

    class Weights(weights.AdapterWeights):
        async def load(self, adapter: Adapter) -> None:
            fault.note(adapter)
            await super().load(adapter)

    fault.put_in_cache()
    worker = "benchmarks.silent_producer.UnprovedLoading"
    if fault.proved:
        worker = "tests.integration.faulty_workers.FaultyLoading"

    def changed(*given: Any) -> dict[str, Any]:
        ours = own_arguments(*given)
        loads = {"worker_extension_cls": worker} if ours["enable_lora"] else {}
        return ours | loads | ({"model": fault.base} if fault.base else {})

    arguments: Any = configuration
    arguments.own_arguments = changed
    engines: Any = engine
    engines.AdapterWeights = Weights
    if fault.workers > 1:
        of_any = engine.VllmEngine
        engines.VllmEngine = lambda config, _: of_any(config, fault.workers)
    if fault.before_prompts:
        prompts: Any = PromptFormat
        encode = prompts.encode
        prompts.encode = lambda own, prompt, room: encode(own, fault.before_prompts + prompt, room)
    if not fault.proved:
        loader: Any = PolicyLoader
        loader._verify = _believe


async def _believe(*_: Any) -> None:
    """Judge nothing."""


if __name__ == "__main__":
    put_in_place(Fault(**json.loads(os.environ[VARIABLE])))
    cli.main()
