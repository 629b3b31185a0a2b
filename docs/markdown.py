"""Rows and tables of the pages that are generated."""

from collections.abc import Iterator, Mapping


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def grouped(header: tuple[str, ...], keys: Mapping[str, str | tuple[str, ...]]) -> Iterator[str]:
    """A table with one row for all keys of which the same is said."""
    yield row(*header)
    yield "|" + "---|" * len(header)
    same: dict[tuple[str, ...], list[str]] = {}
    for key, said in keys.items():
        same.setdefault((said,) if isinstance(said, str) else said, []).append(f"`{key}`")
    yield from (row(", ".join(names), *said) for said, names in same.items())
    yield ""


def reserved(keys: dict[str, str | None]) -> Iterator[str]:
    owners = {
        key: " and ".join(f"`{part}`" for part in owner.split(" and ")) if owner else "fixed"
        for key, owner in keys.items()
    }
    yield from grouped(("keys", "decided by"), owners)
