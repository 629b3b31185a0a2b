"""The forms of the `dataset:` section, and what is refused of them."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.config.data import DatasetSection


def refusal(**values: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        DatasetSection(**values)
    return str(caught.value.errors()[0]["msg"]).removeprefix("Value error, ")


def test_one_dataset_is_one_source() -> None:
    section = DatasetSection(path="a.jsonl", split="test", transform="m:f")
    assert list(section.all_sources) == ["dataset"]
    source = section.all_sources["dataset"]
    assert (source.path, source.split, source.transform, source.weight) == ("a.jsonl", "test", "m:f", None)


def test_several_are_named_by_their_places() -> None:
    section = DatasetSection(sources=[{"path": "a.jsonl"}, {"path": "b.jsonl", "split": "test"}])
    assert {key: source.path for key, source in section.all_sources.items()} == {
        "dataset.sources[0]": "a.jsonl",
        "dataset.sources[1]": "b.jsonl",
    }


def test_a_source_has_the_name_that_it_is_given_or_that_its_path_ends_in() -> None:
    paths = ["data/sums.easy.jsonl", "openai/gsm8k", "/data/of 2026", "rows.d/", "v1.5", "x" * 80]
    names = ["sums.easy", "gsm8k", "of-2026", "rows.d", "v1.5", "x" * 64]
    assert DatasetSection(sources=[{"path": path} for path in paths]).source_names == tuple(names)
    section = DatasetSection(sources=[{"path": "a.jsonl", "name": "easy"}, {"path": "a.jsonl"}])
    assert section.source_names == ("easy", "a")
    assert DatasetSection(path="a.jsonl").source_names == ()


@pytest.mark.parametrize(
    "sources",
    [
        [{"path": "x/a.jsonl"}, {"path": "y/a.csv"}],
        [{"path": "a.jsonl", "name": "b"}, {"path": "b.jsonl"}],
        [{"path": "a.jsonl", "name": "b"}, {"path": "c.jsonl", "name": "b"}],
    ],
)
def test_two_sources_of_one_name_are_refused(sources: list[dict[str, str]]) -> None:
    assert "`sources`" in refusal(sources=sources)
    assert "`name`" in refusal(sources=sources)


def test_a_name_that_is_no_label_is_refused() -> None:
    for name in ("", "a/b", "a b", "x" * 65):
        assert "letters" in refusal(sources=[{"path": "a.jsonl", "name": name}])


def test_what_is_printed_can_be_read_again() -> None:
    for section in (DatasetSection(path="a.jsonl"), DatasetSection(sources=[{"path": "a.jsonl", "weight": 2}])):
        assert DatasetSection.model_validate(section.model_dump(mode="json")) == section


def test_refusals() -> None:
    assert refusal() == "`path`: required, unless `reasoning_gym` or `sources` are given"
    assert (
        refusal(path="a", streaming=True) == "`streaming` needs `max_rows`, the number of rows to take from the stream"
    )
    sources = [{"path": "a"}, {"path": "b"}]
    assert refusal(path="c", sources=sources).startswith("`path` cannot be given beside `sources`")
    assert refusal(split="test", sources=sources).startswith("`split` cannot be given beside `sources`")
    mixed = [{"path": "a", "weight": 1}, {"path": "b"}]
    assert refusal(sources=mixed) == "`sources`: give every one a weight, or none"
    assert refusal(sources=[{"path": "a", "weight": 0}]) == "Input should be greater than 0"
    assert refusal(path="a", filter="task") == "expected `module:function` or `path/to/file.py:function`"


def test_refusals_of_a_curriculum() -> None:
    def of(*levels: int | None, **curriculum: Any) -> dict[str, Any]:
        sources = [{"path": f"{number}", "level": level} for number, level in enumerate(levels)]
        return {"sources": sources, "curriculum": curriculum}

    section = DatasetSection(**of(0, 0, None, 1, 2)).curriculum
    assert section is not None
    assert (section.window, section.up, section.down, section.rehearse) == (32, 0.7, None, 0.1)
    for levels in ((1, 2), (0, 2), (1, 0), (0, 1, 0)):
        assert "out of order" in refusal(**of(*levels)), levels
    assert "two levels" in refusal(**of(0, 0))
    assert "two levels" in refusal(**of(None))
    assert "two levels" in refusal(path="a", curriculum={})
    assert "curriculum" in refusal(sources=[{"path": "a", "level": 0}])
    assert "below up" in refusal(**of(0, 1, up=0.5, down=0.5))
    assert "greater" in refusal(**of(0, 1, window=0))


def test_refusals_of_reasoning_gym() -> None:
    sums = {"reasoning_gym": "chain_sum", "size": 9}
    assert DatasetSection(**sums).all_sources["dataset"].size == 9
    assert "size" in refusal(reasoning_gym="chain_sum")
    assert "greater" in refusal(**sums | {"size": 0})
    assert "`path`" in refusal(**sums, path="a")
    assert "`split`" in refusal(**sums, split="test")
    assert "`size`" in refusal(path="a", size=3)
    assert "`config`" in refusal(sources=[{"path": "a", "config": {"max_terms": 3}}])
    assert "`reasoning_gym`" in refusal(sources=[{"weight": 1}])
    assert "`reasoning_gym`" in refusal(**sums, sources=[sums])
