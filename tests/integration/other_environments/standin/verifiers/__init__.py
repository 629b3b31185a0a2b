"""What `producer.environments.bridges.verifiers_classic` and `classic_doubling` use of verifiers 0.3.1, as that release has it
(`legacy/envs/environment.py`, `legacy/envs/multiturn_env.py`, `legacy/rubrics/rubric.py`, `legacy/utils/env_utils.py`), for
tests where it is not installed.
"""

import importlib
import inspect
import os

from openai import AsyncOpenAI

from verifiers.types import ClientConfig

__version__ = "0.3.1"


def load_environment(env_id, **env_args):
    module = importlib.import_module(env_id.replace("-", "_").split("/")[-1])
    return module.load_environment(**env_args)


def stop(method):
    method.stop = True
    return method


class Rubric:
    def __init__(self, funcs=None, weights=None):
        self.funcs, self.weights = list(funcs or []), list(weights or [])

    def add_metric(self, func, weight=0.0):
        self.funcs.append(func)
        self.weights.append(weight)

    async def score(self, state):
        values = {}
        for func in self.funcs:
            wanted = inspect.signature(func).parameters
            values[func.__name__] = await func(**{name: state[name] for name in wanted if name != "state"}, **(
                {"state": state} if "state" in wanted else {}
            ))  # fmt: skip
        reward = sum(weight * values[func.__name__] for func, weight in zip(self.funcs, self.weights, strict=True))
        return reward, values


class Environment:
    requires_group_rollouts = False

    def __init__(self, dataset, rubric):
        self.dataset, self.rubric = dataset, rubric

    def get_dataset(self):
        return self.dataset.add_column("example_id", list(range(len(self.dataset))))


class MultiTurnEnv(Environment):
    def __init__(self, max_turns=-1, **kwargs):
        super().__init__(**kwargs)
        self.max_turns = max_turns

    async def run_rollout(self, input, client, model, sampling_args):
        assert isinstance(client, ClientConfig)
        state = dict(input) | {"trajectory": []}
        stops = [getattr(self, name) for name in dir(self) if getattr(getattr(self, name), "stop", False)]
        messages = list(input["prompt"])
        async with AsyncOpenAI(
            base_url=client.api_base_url,
            api_key=os.environ[client.api_key_var],
            default_headers=client.extra_headers,
        ) as policy:
            try:
                while True:
                    said = await policy.chat.completions.create(model=model, messages=messages, **sampling_args)
                    completion = [{"role": "assistant", "content": said.choices[0].message.content}]
                    state["trajectory"].append({"prompt": messages, "completion": completion})
                    messages = messages + completion
                    if len(state["trajectory"]) >= self.max_turns or any([await check(state) for check in stops]):
                        break
                    messages = messages + await self.env_response(messages, state)
            except Exception as error:
                return {"reward": 0.0, "metrics": {}, "error": {"error": type(error).__name__, "message": str(error)}}
        state["completion"] = messages[len(input["prompt"]) :]
        reward, metrics = await self.rubric.score(state)
        return {"reward": reward, "metrics": metrics, "error": None}
