"""The environment of `doubling.py` for verifiers before 0.4, and for the stand-in."""

import verifiers as vf


async def solved(completion, answer) -> float:
    return float(answer in completion[-1]["content"])


async def length(completion) -> float:
    return float(sum(len(message["content"]) for message in completion if message["role"] == "assistant"))


async def turns(state) -> float:
    return float(len(state["trajectory"]))


class Doubling(vf.MultiTurnEnv):
    @vf.stop
    async def is_solved(self, state) -> bool:
        steps = state["trajectory"]
        return bool(steps) and state["answer"] in steps[-1]["completion"][-1]["content"]

    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": "no, again"}]


def load_environment(numbers: int = 3, rewards_length: bool = False) -> vf.Environment:
    from datasets import Dataset

    rows = [
        {"prompt": [{"role": "user", "content": f"double {number}"}], "answer": str(2 * number)}
        for number in range(numbers)
    ]
    prompts = [{"role": "system", "content": "Only numbers."}]
    dataset = Dataset.from_list([{"prompt": prompts + row["prompt"], "answer": row["answer"]} for row in rows])
    rubric = vf.Rubric(funcs=[length if rewards_length else solved], weights=[1.0])
    rubric.add_metric(turns)
    return Doubling(dataset=dataset, rubric=rubric, max_turns=3)
