"""`rl-producer` with a stand-in for vLLM that says a digit in each turn, or calls the tool `look` where there are tools.

Run as `python -m tests.integration.playing_producer` with the arguments of `rl-producer`.
"""

import itertools
from typing import Any

from producer.app import cli
from producer.engine_contract import Completion, ToolCall
from tests.scripted_engine import EngineWithoutWeights, digests, put_in_place

END, ZERO = 1, 3  # of the tokenizer of `tests.integration.models`


class Looks:
    """Takes an even digit for a call, and an odd one for an answer."""

    def parse(self, token_ids: list[int]) -> tuple[str, list[ToolCall]]:
        digit = token_ids[0] - ZERO
        return str(digit), [ToolCall("look", {"at": f"door {digit}"})] if digit % 2 == 0 else []


class Engine(EngineWithoutWeights):
    max_num_seqs = 16
    digits = itertools.cycle([3, 0, 7, 4, 1, 8, 5, 2, 9, 6])

    async def generate(self, prompt_ids: Any, sampling: Any, adapter: Any, cut: Any) -> list[Completion]:
        versions = [adapter.version] * 2
        return [
            Completion([ZERO + next(self.digits), END], [-0.5] * 2, False, versions)
            for _ in range(sampling.num_generations)
        ]

    def tool_parser(self, name: str, tokenizer: Any, tools: list[dict[str, Any]]) -> Looks:
        assert [tool["function"]["name"] for tool in tools] == ["look"]
        return Looks()


if __name__ == "__main__":
    put_in_place(lambda config, _: Engine(config, **digests(config), reward_names=list(config.reward_names)))
    cli.main()
