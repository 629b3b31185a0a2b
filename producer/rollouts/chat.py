"""A conversation with tools, as the model's chat template writes it.

Guarantee: what the model sampled is never tokenized again. The tokens of a tool result are those that the template adds after
the model's turn; where the template writes the history before that turn differently than it did, there are no such tokens, and
the whole conversation is to begin as a new record.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from producer.engine_contract import ToolCall, ToolParser
from producer.groups import LeaseFailure, common_length
from producer.rollouts.prompts import PromptFormat
from protocol.errors import ConfigError
from protocol.wire.messages import unknown_token

Messages = list[dict[str, Any]]

_SENTINEL = "7351"
_CHARACTERS = 16  # of a text, for each token that the model takes, that are read first


class Continuation(NamedTuple):
    """Continuation of a conversation after a turn of the model."""

    text: str  # all of it, as the template writes it, up to where the model is to go on
    token_ids: list[int] | None  # what comes after the tokens that the model sampled; None: the history was rewritten


@dataclass
class ChatFormat(PromptFormat):
    """The chat template with the tools of one environment: their JSON schemas, and what finds calls of them."""

    tools: list[dict[str, Any]]
    parser: ToolParser | None
    key: str = "environment"  # of its section

    def check(self) -> None:
        """Raise ConfigError if the template has no place for tools or their results."""
        if not self.tools:
            return
        name = self.tools[0]["function"]["name"]
        asked: Messages = [{"role": "user", "content": ""}]
        answered = [*asked, assistant_message("", [(name, {})], 0), tool_message(name, _SENTINEL, 0)]
        try:
            fits = _SENTINEL in self._render(answered) and name in self._render(asked)
            problem = "leaves out the tools or their results"
        except Exception as error:  # a template is a program of the model's author and raises whatever it likes
            fits, problem = False, f"refuses a conversation with tools: {type(error).__name__}: {error}"
        if not fits:
            raise ConfigError(
                f"{self.key}.factory: it has tools, and the chat template of model.path {problem}; take a model whose template "
                "renders `tools`, `tool_calls` and messages of role `tool`"
            )

    def prompt(self, messages: Messages) -> str:
        """Render the text from which the model goes on. Raises LeaseFailure if the template refuses the messages."""
        try:
            return self._render(messages)
        except Exception as error:
            raise LeaseFailure(
                "bad_prompt", f"the chat template refused the messages: {type(error).__name__}: {error}"
            ) from error

    def parse(self, token_ids: list[int]) -> tuple[str, list[ToolCall]]:
        """Content and calls of a turn, given without its end-of-turn token."""
        return (self.text(token_ids), []) if self.parser is None else self.parser.parse(token_ids)

    def text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def token_ids(self, text: str) -> list[int]:
        """Return the tokens of a text; of one that has more than twice as many as the model takes, the first ones. All tokens of
        what an environment may return can take minutes and gigabytes. Raises LeaseFailure for a token that the model does not
        have."""
        size = _CHARACTERS * self.max_model_len
        while True:
            ids: list[int] = self.tokenizer(text[:size], add_special_tokens=False)["input_ids"]
            if size >= len(text) or len(ids) > 2 * self.max_model_len:
                break
            size *= 4
        if problem := unknown_token(self.tokenizer, ids, self.vocab_size):
            raise LeaseFailure("bad_prompt", f"the conversation {problem}")
        return ids

    def end_of_turn(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))

    def go_on(self, before: str, messages: Messages, num_answers: int, end_of_turn: str) -> Continuation:
        """The conversation after a turn of the model, which it ended with `end_of_turn`, and after the last `num_answers` of
        the messages, which answer it. `before` is what it went on from, as the template wrote it. Raises LeaseFailure as
        `prompt`."""
        after = self.prompt(messages)
        if not after.startswith(before):
            return Continuation(after, None)
        # The first place where another answer would read differently is behind the end of the turn.
        other = list(messages)
        place = len(messages) - num_answers
        content = str(other[place]["content"])
        other[place] = other[place] | {"content": "2" if content.startswith("1") else "1"}
        upto = common_length(after, self.prompt(other))
        ends = (
            after.rfind(end, len(before), upto) + len(end) for end in (end_of_turn, self.tokenizer.eos_token) if end
        )
        end = next((end for end in ends if end > len(before)), None)
        if end is None:
            return Continuation(after, None)
        turn, whole = self.token_ids(after[len(before) : end]), self.token_ids(after[len(before) :])
        if whole[: len(turn)] == turn:
            return Continuation(after, whole[len(turn) :])
        return Continuation(after, self.token_ids(after[end:]))

    def _render(self, messages: Messages) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools or None,
                add_generation_prompt=True,
                tokenize=False,
                **self.chat_template_kwargs,
            )
        )


def assistant_message(content: str, calls: list[tuple[str, dict[str, Any]]], first: int) -> dict[str, Any]:
    """A turn of the model. `first` is the number of its first call in the episode."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": _call_id(first + place), "type": "function", "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(calls)
        ]
    return message


def tool_message(name: str, content: str | list[Any], number: int) -> dict[str, Any]:
    """Make the message with the result of call `number` of the episode."""
    return {"role": "tool", "name": name, "content": content, "tool_call_id": _call_id(number)}


def _call_id(number: int) -> str:
    return f"{number:09}"  # some templates insist on nine characters
