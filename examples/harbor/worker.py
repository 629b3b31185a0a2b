"""Plays trials of Harbor as a run's episodes: `python worker.py http://ADDRESS --places 2 --sandbox docker`. Needs `harbor` and
nothing of Slipstream. With `--rows TASKS` it prints a dataset of the tasks in this folder instead."""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

NO_COST = {"input_cost_per_token": 0.0, "output_cost_per_token": 0.0}


async def play(root: str, task: dict[str, Any], episode: str, options: argparse.Namespace) -> float:
    """Run a trial whose agent asks this episode's URL, and return the verifier's reward."""
    info = NO_COST | {"max_input_tokens": options.max_tokens, "max_output_tokens": task["max_tokens"]}
    asked: dict[str, Any] = {"api_base": f"{root}/episodes/{episode}/v1", "model_info": info}
    asked |= {"enable_summarize": False, "record_terminal_session": False}
    place = "import_path" if ":" in options.sandbox else "type"
    config = TrialConfig(
        task=TaskConfig(path=Path(task["columns"]["task"])),
        trial_name=episode,
        trials_dir=Path(options.trials),
        agent=AgentConfig(name=options.agent, model_name="hosted_vllm/policy", kwargs=asked),
        environment=EnvironmentConfig(**{place: options.sandbox}),
    )
    result = await (await Trial.create(config)).run()
    if result.verifier_result is None or not result.verifier_result.rewards:
        raise RuntimeError(f"no reward: {result.exception_info and result.exception_info.exception_message}")
    return float(result.verifier_result.rewards["reward"])


async def work(root: str, options: argparse.Namespace) -> None:
    """Take one task after the other, and play all its episodes at once."""
    async with httpx.AsyncClient(base_url=f"{root}/v1", timeout=90) as http:

        async def finish(task: dict[str, Any], episode: str) -> None:
            try:
                reward = {"solved": await play(root, task, episode, options)}
                (await http.post(f"/rollouts/{episode}/reward", json=reward)).raise_for_status()
            except Exception as error:  # a sandbox that fails, or a reward that is refused, costs its episode
                reason = f"{type(error).__name__}: {error}"
                await http.post(f"/rollouts/{episode}/failure", json={"reason": reason})

        while True:
            answer = (await http.post("/rollouts", json={"wait_s": 30})).raise_for_status()
            if answer.status_code == 200:
                task = answer.json()
                await asyncio.gather(*(finish(task, episode) for episode in task["episodes"]))


async def main(options: argparse.Namespace) -> None:
    await asyncio.gather(*(work(options.address, options) for _ in range(options.places)))


def rows(folder: Path) -> None:
    for file in sorted(folder.glob("*/instruction.md")):
        print(json.dumps({"prompt": file.read_text(), "task": str(file.parent.resolve())}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", nargs="?")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--places", type=int, default=1, help="tasks at once; each has a sandbox for each episode")
    parser.add_argument("--agent", default="terminus-2")
    parser.add_argument("--sandbox", default="docker", help="a type of Harbor, or module:Class")
    parser.add_argument("--trials", default="trials")
    parser.add_argument("--max-tokens", type=int, default=32768, help="engine.max_model_len, less an answer")
    chosen = parser.parse_args()
    rows(chosen.rows) if chosen.rows else asyncio.run(main(chosen))
