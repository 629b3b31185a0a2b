"""`rl-producer` with a stand-in for vLLM: everything around the engine is real, and it starts within seconds.

Run as `python -m tests.integration.engineless_producer` with the arguments of `rl-producer`. Every completion is one token.
"""

from producer.app import cli
from producer.engine_contract import Completion
from tests.scripted_engine import EngineWithoutWeights, put_in_place


class Engine(EngineWithoutWeights):
    async def generate(self, prompt_ids, sampling, adapter, cut):
        return [Completion([5], [-0.5], False, [adapter.version]) for _ in range(sampling.num_generations)]


if __name__ == "__main__":
    put_in_place(lambda config, num_gpus: Engine(config))
    cli.main()
