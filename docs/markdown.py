"""Rows and tables of the pages that are generated."""

from collections.abc import Iterator


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def reserved(keys: dict[str, str | None]) -> Iterator[str]:
    yield row("key", "decided by")
    yield "|---|---|"
    for key, owner in keys.items():
        yield row(f"`{key}`", " and ".join(f"`{part}`" for part in owner.split(" and ")) if owner else "fixed")
    yield ""
