"""The reward `math_verify`: whether a mathematical answer is equivalent to the right one.

Guarantee: that of `producer.rewards.builtin`. math-verify interrupts itself by SIGALRM, which a worker's main thread allows.
"""

from collections.abc import Callable
from typing import Any

from producer.rewards.builtin.texts import Results, with_answers
from protocol.config.sections.builtin_rewards import MathVerify
from protocol.errors import ConfigError


def math_verify(options: MathVerify) -> Callable[..., Results]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError(
            f"rewards.functions: builtin math_verify needs the package math-verify ({error}); pip install 'slipstream[math]'"
        ) from error

    def score(text: str, answer: Any) -> float:
        right = _parsed(str(answer))
        if not right:
            raise ValueError(f"column {options.column!r} has no mathematics: {answer!r:.80}")
        found = parse(text, parsing_timeout=options.time_s, raise_on_error=True)
        return float(verify(right, found, timeout_seconds=options.time_s, raise_on_error=True))

    def _parsed(answer: str) -> Any:
        """An answer may be bare LaTeX, which math-verify finds between dollar signs only."""
        limit = {"parsing_timeout": options.time_s, "raise_on_error": True}
        return parse(answer, **limit) or parse(f"${answer}$", **limit)

    return with_answers(options.column, score)
