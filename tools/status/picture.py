"""The view as an SVG, for documents.

Guarantee: the file fetches nothing, so that it looks the same wherever it is shown; the text stays text.
"""

import io
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import TerminalTheme

from protocol.errors import ConfigError

PICTURE_WIDTH = 100
_THEME = TerminalTheme(
    (13, 17, 23),
    (201, 209, 217),
    [
        *((72, 79, 88), (255, 123, 114), (86, 211, 100), (227, 179, 65)),
        *((121, 192, 255), (210, 168, 255), (86, 212, 221), (201, 209, 217)),
    ],
)
_FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; font-weight: bold }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix" xml:space="preserve">
{matrix}
</g>
</g>
</svg>
"""


def save_picture(content: RenderableType, file: Path) -> None:
    """
    Raises:
        ConfigError: `file` cannot be written.
    """
    console = Console(
        record=True, width=PICTURE_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(content)
    picture = console.export_svg(title="rl-status", theme=_THEME, code_format=_FORMAT, unique_id="rl-status")
    try:
        file.write_text("".join(f"{line.rstrip()}\n" for line in picture.splitlines()), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--svg {file}: {error.strerror or error}") from error
