import pytest

from consumer.prompts.transform import Answer, Job, TransformProcess, answer


@pytest.fixture
def transformed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge rows in this process, for tests whose subject is not the other one; test_transformed_prompts.py starts that."""

    async def ask(process: TransformProcess, job: Job) -> Answer:
        return answer(process._reader, job)

    monkeypatch.setattr(TransformProcess, "_ask", ask)
