"""Teachers: vLLM servers that score what the policy sampled.

Guarantee: `scores` returns a teacher's log-prob of every sampled token of a group, and of its likeliest tokens there, finite and
at most 0, or raises LeaseFailure: a teacher that is down, slow or wrong is never a zero. Each was found to have the policy's
vocabulary before it is asked, and again after it was lost. One with another, or that returns fewer of its likeliest tokens than
the run needs, ends the start of the producer. One that is down then is checked later.

A completion is scored by one request: vLLM returns the log-probs of the tokens of its prompt, at temperature 1.
"""

import asyncio
import logging
import random
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from producer.groups import LeaseFailure
from producer.rewards.pool import pause_s
from producer.rollouts.prompts import PromptFormat
from producer.rollouts.self_teacher import Score, SelfTeacher, TeacherObserver, of_records
from protocol.config.distillation import TeacherSection
from protocol.config.run import RunConfig
from protocol.errors import ConfigError
from protocol.http_client import (
    UNFIT,
    HttpClient,
    ServerBusyError,
    ServerLostError,
    ServerMismatchError,
    ServerRefusedError,
    open_session,
)
from protocol.wire.handshake import LOGPROBS_MODE
from protocol.wire.messages import Group, Lease
from slipstream_extras.engine_server.api import VllmApi

logger = logging.getLogger(__name__)

_TEXT = "The quick brown fox, 12345.678 = x**2;\n\tdef f(): return 'a'\n\n  Äpfel, où? Ωμέγα 東京 العربية 🦊 "
_SAMPLES = 512  # tokens of the vocabulary whose texts are in the probe
_LEAST, _MOST = -1e6, 1e-3  # vLLM's least is -9999, and rounding may take a log-prob above 0


class Vocabulary(NamedTuple):
    """The probe of a tokenizer: a text with its tokens, and the largest token."""

    text: str
    token_ids: list[int]
    largest: int

    @classmethod
    def of(cls, tokenizer: Any) -> "Vocabulary":
        largest = max(tokenizer.get_vocab().values())
        shown = [tokenizer.decode([token]) for token in range(0, largest + 1, max(1, largest // _SAMPLES))]
        text = _TEXT + " ".join([*shown, *tokenizer.all_special_tokens])
        return cls(text, tokenizer.encode(text, add_special_tokens=False), largest)


class Scores(NamedTuple):
    """A teacher's log-probs of T tokens, and of its k likeliest in their places, as in `Group`."""

    logprobs: NDArray[np.float32]  # (T,)
    top_ids: NDArray[np.int32]  # (T, k), -1 for tokens that the policy does not have
    top_logprobs: NDArray[np.float32]  # (T, k)

    def since(self, start: int) -> "Scores":
        return Scores(self.logprobs[start:], self.top_ids[start:], self.top_logprobs[start:])


class Teacher:
    """A server. `place` is its section in the file; it must take sequences of `min_model_len` tokens, and is asked for `top_k`
    likeliest ones."""

    def __init__(
        self, section: TeacherSection, place: str, min_model_len: int, top_k: int, observer: TeacherObserver
    ) -> None:
        self.section, self.place = section, place
        self._min_model_len, self._top_k, self._observer = min_model_len, top_k, observer
        assert section.url is not None
        self._session = open_session(section, place)
        self._api = VllmApi(HttpClient(self._session, section.url.rstrip("/"), section.timeout_s, place))
        self._places = asyncio.Semaphore(section.concurrency)
        self._model: str | None = None  # its name at the server; None: it is to be checked

    def __str__(self) -> str:
        return f"teacher {self.section.name} at {self.section.url}"

    async def close(self) -> None:
        await self._session.close()

    async def check(self, vocabulary: Vocabulary) -> str:
        """Return the name of its model. Raises ServerMismatchError if it cannot teach, ServerLostError if it does not answer, and
        ServerRefusedError if it fails."""
        if self._model is None:
            try:
                self._model = await self._inspect(vocabulary)
            except ServerRefusedError as error:
                if error.status >= 500:
                    raise
                raise ServerMismatchError(f"is no vLLM server ({error}): correct {self.place}.url") from error
        return self._model

    async def _inspect(self, vocabulary: Vocabulary) -> str:
        base = next((card for card in await self._api.models() if card.parent is None), None)
        if base is None or base.max_model_len is None:
            raise ServerMismatchError("offers no base model at /v1/models: it has to be a vLLM server for generation")
        if base.max_model_len < self._min_model_len:
            raise ServerMismatchError(
                f"takes {base.max_model_len} tokens, and a completion may need more than {self._min_model_len}: give it a larger "
                "--max-model-len"
            )
        theirs = await self._api.tokenize(base.id, vocabulary.text)
        if theirs != vocabulary.token_ids:
            pairs = enumerate(zip(theirs, vocabulary.token_ids, strict=False))
            first = next((place for place, (one, other) in pairs if one != other), "the last")
            raise ServerMismatchError(
                f"has another tokenizer than model.path: they read a text differently from token {first} on; take a teacher of "
                "the same vocabulary"
            )
        pair = [vocabulary.token_ids[0], vocabulary.largest]
        await self._probe(
            base.id,
            pair,
            0,
            f"does not score token {vocabulary.largest}, which model.path has",
            "take a teacher of the same vocabulary",
        )
        await self._probe(
            base.id,
            pair,
            self._top_k,
            f"does not return {self._top_k} tokens in a place (distillation.top_k)",
            f"give it --max-logprobs {self._top_k}, or lower distillation.top_k",
        )
        return base.id

    async def _probe(self, model: str, token_ids: list[int], top_k: int, problem: str, fix: str) -> None:
        """Score a few tokens. Raise ServerMismatchError with the problem if the server refuses that."""
        try:
            await self._scored(model, token_ids, top_k)
        except ServerRefusedError as error:
            if error.status not in UNFIT:
                raise
            raise ServerMismatchError(f"{problem} ({error}); {fix}") from error

    async def _scored(self, model: str, token_ids: list[int], top_k: int) -> Scores:
        """Return the log-probs of all these tokens but the first."""
        own, top_ids, top = await self._api.score_with_top(model, token_ids, top_k)
        for values in (own, top):
            if not ((values > _LEAST) & (values <= _MOST)).all():
                raise ServerMismatchError(f"returns log-probs that are none: give it --logprobs-mode {LOGPROBS_MODE}")
        return Scores(
            np.minimum(own, 0).astype(np.float32), top_ids.astype(np.int32), np.minimum(top, 0).astype(np.float32)
        )

    async def score(self, vocabulary: Vocabulary, token_ids: list[int], start: int) -> Scores:
        """Return the scores of these tokens from `start` on, which is at least 1. Raises LeaseFailure after all tries."""
        for attempt in range(self.section.retries + 1):
            if attempt > 0:
                await asyncio.sleep(pause_s(attempt))
            async with self._places:
                began = time.monotonic()
                try:
                    found = await self._scored(await self.check(vocabulary), token_ids, self._top_k)
                    return found.since(start - 1)
                except (ServerLostError, ServerRefusedError, ServerMismatchError) as error:
                    problem: Exception = error
                finally:
                    self._observer.teacher_called(self.section.name, time.monotonic() - began)
            status = problem.status if isinstance(problem, ServerRefusedError) else 0
            if status not in UNFIT and not isinstance(problem, ServerBusyError):
                self._model = None
            if isinstance(problem, ServerMismatchError) or 300 <= status < 500:
                break
        self._observer.teacher_failed(self.section.name)
        raise LeaseFailure("reward_failed" if status in UNFIT else "generation_failed", f"{self} {problem}")


class TeacherPool:
    """The teachers of a run. `read_with` comes first, and `use_engine` where the policy teaches itself."""

    def __init__(self, config: RunConfig, observer: TeacherObserver) -> None:
        assert config.distillation is not None
        self._column, self._top_k = config.distillation.teacher_column, config.distillation.num_top
        self._observer = observer
        self._sections = {section.name: section for section in config.teachers}
        self._own: dict[str, SelfTeacher] = {}
        # With a token of the prompt, and one that vLLM samples behind:
        least = config.sampling.max_completion_length + 2
        self._teachers = {
            section.name: Teacher(section, f"teachers.{number}", least, self._top_k, observer)
            for number, section in enumerate(config.teachers)
            if section.url is not None
        }
        self._vocabulary: Vocabulary

    async def read_with(self, tokenizer: Any) -> None:
        """Check all teachers. Raise ConfigError if one that answers cannot teach."""
        self._vocabulary = Vocabulary.of(tokenizer)
        if self._top_k > self._vocabulary.largest + 1:  # a vLLM server that is asked for more ends
            raise ConfigError(
                f"distillation.top_k: {self._top_k} tokens are more than the {self._vocabulary.largest + 1} of model.path's "
                "vocabulary; lower it"
            )
        await asyncio.gather(*(self._check(teacher) for teacher in self._teachers.values()))

    def use_engine(self, prompts: PromptFormat, score: Score) -> None:
        """Let the policy teach itself where the configuration says so."""
        self._own = {
            section.name: SelfTeacher(section, prompts, score, self._observer)
            for section in self._sections.values()
            if section.prompt is not None
        }

    async def close(self) -> None:
        for teacher in self._teachers.values():
            await teacher.close()

    async def _check(self, teacher: Teacher) -> None:
        try:
            await teacher.check(self._vocabulary)
        except ServerMismatchError as error:
            raise ConfigError(f"{teacher.place}: {teacher} {error}") from error
        except (ServerLostError, ServerRefusedError) as error:
            logger.warning("%s %s; it is asked again when it is needed", teacher, error)

    async def scores(self, lease: Lease, group: Group) -> dict[str, bytes]:
        """Return the fields of the group that its teacher fills. Raise LeaseFailure if there are no scores."""
        name = self._of(lease)
        if name in self._own:
            return {"teacher_logprobs": (await self._own[name].logprobs(lease, group)).astype("<f4").tobytes()}
        teacher = self._teachers[name]
        prompt = np.frombuffer(group.prompt_ids, "<i4").tolist()
        found = await of_records(group, lambda record: teacher.score(self._vocabulary, prompt + record, len(prompt)))
        logprobs, ids, top_logprobs = map(np.concatenate, zip(*found, strict=True))
        is_sampled = np.frombuffer(group.sampled, "?") if group.sampled else np.ones(len(logprobs), np.bool_)
        is_none = (ids > self._vocabulary.largest) | ~is_sampled[:, None]
        return {
            "teacher_logprobs": np.where(is_sampled, logprobs, 0).astype("<f4").tobytes(),
            "teacher_top_ids": np.where(is_none, -1, ids).astype("<i4").tobytes(),
            "teacher_top_logprobs": np.where(is_none, 0, top_logprobs).astype("<f4").tobytes(),
        }

    def _of(self, lease: Lease) -> str:
        """Return the teacher of a prompt: the one that its row names, or one drawn by weight, another in another attempt."""
        if self._column is None:
            draw = random.Random(f"{lease.prompt_id} {lease.attempt}")  # noqa: S311 - no secret
            return draw.choices(list(self._sections), [section.weight for section in self._sections.values()])[0]
        name = str(lease.columns.get(self._column))
        if name not in self._sections:
            raise LeaseFailure(
                "bad_prompt",
                f"distillation.teacher_column: column {self._column} has {name[:64]!r}, and teachers are "
                f"{', '.join(self._sections)}",
            )
        return name
