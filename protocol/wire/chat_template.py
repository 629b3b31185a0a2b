"""Chat templates of tokenizers: whether Jinja takes them, before a tokenizer is loaded.

Guarantee: what transformers compiles passes, and nothing of a template runs.
"""

from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """The tag by which transformers finds the tokens of assistants."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it as a variable of instances

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_problem(given: Any) -> str | None:
    """Return why Jinja refuses a chat template, or one of those that a tokenizer's configuration lists; None if it does not."""
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, "jinja2.ext.loopcontrols"])
    listed = (
        [entry.get("template") for entry in given if isinstance(entry, dict)] if isinstance(given, list) else [given]
    )
    for template in listed:
        try:
            environment.compile(template if isinstance(template, str) else "")
        except TemplateSyntaxError as error:
            return f"line {error.lineno}: {error.message}"
    return None
