"""Episodes on the real vLLM engine with real environments: every stitched record is what transformers and PEFT score."""

import asyncio
import json

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from producer.engine.tool_calls import ToolCallParser
from producer.engine_contract import ToolCall
from producer.environments.pool import EnvironmentPool
from producer.groups import group_message
from producer.metrics import Counters
from producer.rollouts.admission import Admission
from producer.rollouts.chat import ChatFormat
from producer.rollouts.engine_access import EngineAccess, Progress
from producer.rollouts.in_flight import InFlight
from producer.rollouts.several_turns import PlayedRollouts
from protocol.config.rewards import EnvironmentSection
from protocol.errors import ConfigError
from protocol.wire.messages import PolicyInfo, Sampling
from replay.groups import GroupShape, RolloutGroup
from tests.integration.engines import LiveEngine, live_engine
from tests.integration.models import CHAT_TEMPLATE, build_model, reference_logprobs
from tests.policies import registry_of
from tests.scripted_trainer import lease

pytestmark = pytest.mark.integration

ENDS = [1, *range(60, 120)]  # ids of 61 of the model's 400 or so tokens end a turn, so that turns are short
SAMPLING = Sampling(num_generations=6, max_completion_length=120, temperature=1.0)


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    model = build_model("llama", folder / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS, "pad_token_id": 0}))
    with live_engine(model, folder) as engine:
        yield engine


class AlwaysBuys:
    """Whatever the model says is a call."""

    def parse(self, token_ids: list[int]) -> tuple[str, list[ToolCall]]:
        return f"{len(token_ids)} tokens", [ToolCall("buy", {"count": 1})]


def play(live: LiveEngine, folder, template: str, branch: int) -> RolloutGroup:
    """A group of one to three turns on version 1, which a swap to version 2 does not take away."""
    counters = Counters()
    tokenizer = AutoTokenizer.from_pretrained(live.model)
    tokenizer.chat_template = template
    section = EnvironmentSection(
        factory="tests.unit.producer.toys:Shop", reward_weight=1.0, max_turns=3, max_turn_tokens=60, max_concurrent=3,
        branch_after_turns=branch,
    )  # fmt: skip

    async def body() -> RolloutGroup:
        registry = registry_of(live.engine.weights, folder, counters)
        pool = EnvironmentPool(section)
        chat = ChatFormat(tokenizer, 256, {}, [], AlwaysBuys())
        in_flight = InFlight(live.engine, registry, counters, "finish")
        access = EngineAccess(registry, Admission(2, 6, lambda: None), in_flight)
        source = PlayedRollouts(access, section, pool, chat, counters, ("environment",))
        await registry.publish(live.downloaded(1))
        wanted = msgspec.structs.replace(
            lease(1), prompt=[{"role": "user", "content": "The sum"}], columns={"stock": 5}, sampling=SAMPLING
        )
        try:
            playing = asyncio.create_task(source.generate(wanted, Progress(wanted)))
            while not counters.turns:  # noqa: ASYNC110 - a counter has no event
                await asyncio.sleep(0.01)
            await registry.publish(live.downloaded(2))
            played = await playing
        finally:
            await pool.close()
            registry.start_session(PolicyInfo(0, "0" * 64, 0))
            await registry.unload_idle()
        assert counters.branched_groups == branch
        message = group_message("lease", played.episodes, played.own_rewards, 120, 0.0, 0.0)
        return GroupShape(6, 1, 120, len(tokenizer)).parse(message)

    return live.run(body())


@pytest.mark.parametrize(
    ("template", "forks", "branch"),
    [
        (CHAT_TEMPLATE, False, 0),
        ("<|system|>{{ messages | length }}<|end|>" + CHAT_TEMPLATE, True, 0),
        (CHAT_TEMPLATE, False, 1),
    ],
    ids=["stitched", "forked", "branched"],
)
def test_the_log_probs_of_every_record_are_those_of_transformers_and_peft(live, tmp_path, template, forks, branch):
    group = play(live, tmp_path, template, branch)
    assert group.num_completions == 6
    assert (len(group.records) > 6) == forks
    assert group.sampled is not None
    assert group.newest_version == group.policy_version == 1
    prompt = group.prompt_ids.tolist()
    assert AutoTokenizer.from_pretrained(live.model).decode(prompt).count("sold 1") == branch
    for tokens in group.records:
        ids, sampled = group.completion_ids[tokens].tolist(), group.is_sampled[tokens]
        expected = reference_logprobs(live.model, live.peft_folder(1), prompt, ids, 1.0).numpy()
        np.testing.assert_allclose(group.logprobs[tokens][sampled], expected[sampled], atol=1e-3)
    assert set(group.rewards[:, 0].tolist()) <= {np.float32(0.2 * sold) for sold in range(branch, 3)}
    assert group.rewards.max() > 0


def test_tool_calls_are_found_by_vllms_parser_of_that_name(live):
    tokenizer = AutoTokenizer.from_pretrained(live.model)
    tools = [{"type": "function", "function": {"name": "buy", "description": "", "parameters": {"type": "object"}}}]
    parser = ToolCallParser("hermes", tokenizer, tools)
    call = '<tool_call>{"name": "buy", "arguments": {"count": 2}}</tool_call>'

    def parsed(text: str) -> tuple[str, list[ToolCall]]:
        return parser.parse(tokenizer(text)["input_ids"])

    assert parsed(f"well {call}{call}") == ("well ", [ToolCall("buy", {"count": 2})] * 2)
    assert parsed("five") == ("five", [])
    assert parsed('<tool_call>{"name": "buy", "arguments": [2]}</tool_call>') == ("", [ToolCall("buy", None)])
    broken = '<tool_call>{"name": "buy", </tool_call>'
    assert parsed(broken) == (broken, [])
    text = '<|action_start|><|plugin|>{"name"<|action_end|>'  # at which vLLM's parser raises
    assert ToolCallParser("internlm", tokenizer, tools).parse(tokenizer(text)["input_ids"]) == (text, [])
    with pytest.raises(ConfigError, match=r"environment\.tool_parser: openai"):  # it cannot read anything
        ToolCallParser("openai", tokenizer, tools)
    with pytest.raises(ConfigError, match=r"vLLM has no parser 'hermse'; it has .*hermes"):
        ToolCallParser("hermse", tokenizer, tools)
