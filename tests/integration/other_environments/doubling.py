"""A taskset of verifiers of several turns: a number is to be doubled, until it is right or three turns are over.

The policy is asked in this process, through verifiers' own interception, so that no harness program has to be installed.
"""

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["DoublingEnv", "DoublingHarness", "DoublingTaskset"]


class DoublingData(vf.TaskData):
    number: int


class DoublingTask(vf.Task[DoublingData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def solved(self, trace: vf.Trace) -> float:
        return float(str(2 * self.data.number) in trace.assistant_messages[-1].content)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class DoublingConfig(vf.TasksetConfig):
    numbers: int = 3


class DoublingTaskset(vf.Taskset[DoublingTask, DoublingConfig]):
    def load(self):
        for number in range(self.config.numbers):
            data = DoublingData(prompt=f"double {number}", system_prompt="Only numbers.", number=number)
            yield DoublingTask(data, self.config.task)


class DoublingEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class DoublingEnv(vf.Env[DoublingEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.terminated or str(2 * task.data.number) in segment.last_reply:
                    break
                segment = await interaction.turn("no, again")


class DoublingHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
