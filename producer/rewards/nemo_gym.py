"""The `/verify` of a resources server of NeMo Gym, as a reward.

Guarantee: a completion is one request, with the row as it is in NeMo Gym's file and the completion in the form of OpenAI's
responses. A completion that the server does not score, or calls no valid measurement (`mask_sample`), has no reward.
"""

import asyncio
import json
from typing import Any

import msgspec

from producer.rewards.http_reward import HttpReward, failed
from producer.rewards.messages import Job, Scores
from producer.rewards.worker import checked
from protocol.errors import UNREADABLE, UNSENDABLE

_TASK = "task"  # the column in which `slipstream environment rows` writes a row


class _Verified(msgspec.Struct):
    reward: float
    mask_sample: bool = False


class NemoGymReward(HttpReward):
    """A resources server, asked for each completion of a group at once."""

    async def scores(self, job: Job) -> Scores:
        try:
            row = json.loads(task) if isinstance(task := job.columns.get(_TASK), str) else job.columns
            asked = {"responses_create_params": {"input": _messages(job.prompt, "user")}} | row
            bodies = [msgspec.json.encode(asked | {"response": _response(said)}) for said in job.completions]
        except (*UNSENDABLE, KeyError, AttributeError) as error:
            return failed(f"cannot be sent this group: {error}", "invalid", is_final=True)
        answers = await asyncio.gather(*map(self.posted, bodies))
        found = [_worth(answer) for answer in answers]
        if all(isinstance(answer, Scores) for answer in answers):
            return next(answer for answer in answers if isinstance(answer, Scores))
        return checked(found, job)


def _worth(answer: bytes | Scores) -> float | Exception | None:
    if isinstance(answer, Scores):
        return RuntimeError(answer.problem)
    try:
        verified = msgspec.json.decode(answer, type=_Verified)
    except UNREADABLE as error:
        return ValueError(f'sent another answer than {{"reward": ...}}: {error}')
    return None if verified.mask_sample else verified.reward


def _messages(said: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": said}] if isinstance(said, str) else said


def _response(completion: Any) -> dict[str, Any]:
    output = [item for message in _messages(completion, "assistant") for item in _items(message)]
    return {
        "id": "response", "created_at": 0.0, "model": "policy", "object": "response",
        "output": [item | {"id": f"item_{number}", "status": "completed"} for number, item in enumerate(output)],
        "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
    }  # fmt: skip


def _items(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the items of a message of the policy or of a tool; the form has none for what others say in between."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message.get("tool_call_id", ""), "output": text}]
    if message["role"] != "assistant":
        return []
    part = {"type": "output_text", "text": text, "annotations": []}
    said = {"type": "message", "role": "assistant", "content": [part]}
    calls = [
        {"type": "function_call", "call_id": call.get("id", ""), "name": call["function"]["name"],
         "arguments": json.dumps(call["function"]["arguments"])}
        for call in message.get("tool_calls") or ()
    ]  # fmt: skip
    return [said, *calls] if text or not calls else calls
