"""A number is to be doubled, until it is right or three turns are over."""

import os
from contextlib import asynccontextmanager
from types import SimpleNamespace

from openai import AsyncOpenAI
from pydantic import BaseModel

DEFAULTS = {"numbers": 3, "rewards_length": False, "task": None}


class Data(BaseModel):
    number: int
    prompt: str
    system_prompt: str = "Only numbers."


class Task:
    def __init__(self, data, config):
        self.data = data

    @classmethod
    def data_type(cls):
        return Data


class Taskset:
    bounded = True

    def __init__(self, config):
        self.config = config

    @classmethod
    def task_type(cls):
        return Task

    def __iter__(self):
        for number in range(self.config.numbers):
            yield Task(Data(number=number, prompt=f"double {number}"), None)


class Doubling:
    def __init__(self, config):
        self.config = config
        self.taskset = Taskset(config.taskset)

    @asynccontextmanager
    async def serving(self):
        yield

    def slots(self, task):
        return [task]

    async def run_slot(self, slot, context):
        client, data = context.client, slot.data
        messages = [{"role": "system", "content": data.system_prompt}, {"role": "user", "content": data.prompt}]
        answers: list[str] = []
        async with AsyncOpenAI(
            base_url=client.base_url, api_key=os.environ[client.api_key_var], default_headers=client.headers
        ) as policy:
            try:
                while len(answers) < 3 and (not answers or str(2 * data.number) not in answers[-1]):
                    messages += [{"role": "user", "content": "no, again"}] if answers else []
                    said = await policy.chat.completions.create(model=context.model, messages=messages)
                    answers.append(said.choices[0].message.content or "")
                    messages.append({"role": "assistant", "content": answers[-1]})
            except Exception as error:
                problem = SimpleNamespace(type=type(error).__name__, message=str(error))
                return SimpleNamespace(ok=False, errors=[problem], traces=[])
        solved = float(str(2 * data.number) in answers[-1])
        score = float(sum(map(len, answers))) if self.taskset.config.rewards_length else solved
        trace = SimpleNamespace(
            agent=SimpleNamespace(name="agent", trainable=True),
            errors=[],
            rewards={"solved": SimpleNamespace(score=score)},
            reward=score,
            metrics={"turns": float(len(answers))},
        )
        return SimpleNamespace(ok=True, errors=[], traces=[trace])
