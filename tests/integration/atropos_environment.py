"""An environment as Atropos has them, which knows nothing of Slipstream: a digit in an answer is worth a point.

`python atropos_environment.py serve --env.rollout_server_url ... --openai.base_url ...`, where `atroposlib` is installed.
"""

import itertools

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup  # type: ignore[import-not-found]


class Digits(BaseEnv):
    name = "digits"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        server = APIServerConfig(
            model_name="policy", server_type="vllm", base_url="http://localhost:8000/v1", api_key="x"
        )
        return BaseEnvConfig(group_size=4, use_wandb=False, steps_per_eval=-1, max_token_length=32), [server]

    async def setup(self) -> None:
        self.numbers = itertools.cycle(range(40))

    async def get_next_item(self) -> str:
        return f"{next(self.numbers)}+1="

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(prompt=item, n=self.config.group_size, max_tokens=16, temperature=1.0)
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup()
        group["tokens"] = [node.tokens for node in nodes]
        group["masks"] = [node.masked_tokens for node in nodes]
        group["inference_logprobs"] = [node.logprobs for node in nodes]
        group["scores"] = [float(sum(map(str.isdigit, node.full_text[len(item) :]))) for node in nodes]
        return group, []

    async def evaluate(self, *args, **kwargs) -> None:
        pass


if __name__ == "__main__":
    Digits.cli()
