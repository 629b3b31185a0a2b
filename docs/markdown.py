"""Rows and tables of the pages that are generated."""

from collections.abc import Iterator, Mapping


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def grouped(header: tuple[str, ...], keys: Mapping[str, str | tuple[str, ...]]) -> Iterator[str]:
    """Yield a table with one row for all keys that share their other cells."""
    yield row(*header)
    yield "|" + "---|" * len(header)
    same: dict[tuple[str, ...], list[str]] = {}
    for key, said in keys.items():
        same.setdefault((said,) if isinstance(said, str) else said, []).append(f"`{key}`")
    yield from (row(", ".join(names), *said) for said, names in same.items())
    yield ""


def reserved(keys: dict[str, str | None]) -> Iterator[str]:
    yield from grouped(("keys", "decided by"), {key: _owner(key, owner) for key, owner in keys.items()})


def _owner(key: str, owner: str | None) -> str:
    if owner is None:
        return "fixed"
    section, _, name = owner.rpartition(".")
    return f"the same key of `{section}`" if name == key and section else f"`{owner}`".replace(" and ", "` and `")
