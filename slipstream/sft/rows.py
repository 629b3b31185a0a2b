"""Makes prompts with the completions that the model should learn out of the rows of a prompt dataset.

Guarantee: prompt and completion are both texts or both messages, and the same in every row. A row that cannot be used ends the
command, and the error has its number.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from protocol.errors import DatasetError
from protocol.wire.messages import is_conversational


class Prompts(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, prompt_id: int) -> tuple[Any, dict[str, Any]]: ...

    def place(self, prompt_id: int) -> str: ...


def training_rows(prompts: Prompts, section: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows `{"prompt": ..., "completion": ...}` for TRL, as the section `sft` says; `DatasetError` if a row has no completion,
    or one of another form than its prompt or the rows before."""
    form: type | None = None
    for prompt_id in range(len(prompts)):
        prompt, columns = prompts[prompt_id]
        where = prompts.place(prompt_id)
        if section.get("messages_column"):
            prompt, completion = _cut(columns, section["messages_column"], where)
        else:
            completion = _completion(prompt, columns, section.get("completion_column") or "completion", where)
        if form is not None and type(prompt) is not form:
            raise DatasetError(f"{where}: rows before have prompts of another form; text and messages cannot be mixed")
        form = type(prompt)
        yield {"prompt": prompt, "completion": completion}


def _cut(columns: dict[str, Any], name: str, where: str) -> tuple[Any, Any]:
    messages = columns.get(name)
    if messages is None or not is_conversational(messages) or len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise DatasetError(
            f"{where}: sft.messages_column: {name!r} must be a list of messages of which the last is the assistant's, got "
            f"{messages!r:.80}"
        )
    return messages[:-1], messages[-1:]


def _completion(prompt: Any, columns: dict[str, Any], name: str, where: str) -> Any:
    if name not in columns:
        raise DatasetError(
            f"{where}: sft.completion_column: there is no column {name!r}; beside the prompt there are "
            f"{', '.join(map(repr, columns)) or 'none'}"
        )
    completion = columns[name]
    if isinstance(completion, str) and completion:
        return completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]
    if is_conversational(completion) and not isinstance(prompt, str):
        return completion
    form = "a text" if isinstance(prompt, str) else "a text or a list of messages"
    raise DatasetError(
        f"{where}: sft.completion_column: {name!r} must be {form} that is not empty, got {completion!r:.80}"
    )
