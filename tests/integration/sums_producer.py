"""`rl-producer` with a stand-in for vLLM that answers the sums of reasoning-gym: every second completion is right.

Run as `python -m tests.integration.sums_producer` with the arguments of `rl-producer`.
"""

import re
from typing import Any

from transformers import AutoTokenizer

from producer.app import cli
from producer.engine_contract import Completion
from tests.scripted_engine import EngineWithoutWeights, digests, put_in_place


class Engine(EngineWithoutWeights):
    tokenizer: Any = None

    async def generate(self, prompt_ids, sampling, adapter, cut):
        question = re.findall(r"[-+]?\d+", self.tokenizer.decode(prompt_ids).replace(" ", ""))
        result = sum(map(int, question))
        return [self._answer(result + number % 2, adapter.version) for number in range(sampling.num_generations)]

    def _answer(self, number, version):
        ids = self.tokenizer(f"<answer>{number}</answer>", add_special_tokens=False)["input_ids"]
        return Completion(ids, [-0.5] * len(ids), False, [version] * len(ids))


def engine(config, _):
    made = Engine(config, **digests(config), reward_names=list(config.reward_names))
    made.tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    return made


if __name__ == "__main__":
    put_in_place(engine)
    cli.main()
