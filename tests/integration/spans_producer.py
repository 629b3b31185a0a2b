"""`rl-producer` with a stand-in for vLLM whose completions are all four tokens.

Run as `python -m tests.integration.spans_producer` with the arguments of `rl-producer`.
"""

from producer.app import cli
from producer.engine_contract import Completion
from tests.scripted_engine import EngineWithoutWeights, digests, put_in_place


class Engine(EngineWithoutWeights):
    async def generate(self, prompt_ids, sampling, adapter, cut):
        versions = [adapter.version] * 4
        return [Completion([5, 6, 7, 8], [-0.5] * 4, False, versions) for _ in range(sampling.num_generations)]


if __name__ == "__main__":
    put_in_place(lambda config, _: Engine(config, **digests(config), reward_names=list(config.reward_names)))
    cli.main()
