"""Equal folders give equal digests; whatever changes tokens, weights or the chat template changes one."""

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from protocol.errors import ConfigError
from protocol.wire.model_folder import base_model_digest, tokenizer_digest
from protocol.wire.model_source import folder_on_disk, resolve_model

MIB = 2**20


def make_model(folder: Path, weights: bytes = b"weights", **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 64} | config))
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text('{"vocab": {"a": 0}}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}", "eos_token": "</s>"}')
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_the_digest_of_a_small_model_by_hand(model: Path) -> None:
    """Sixteen samples of a file that is smaller than one sample are sixteen times the file."""
    config = b'{"hidden_size": 64, "model_type": "qwen2"}'
    expected = hashlib.sha256(config + b"model.safetensors:7" + b"weights" * 16).hexdigest()
    assert base_model_digest(model) == expected


def test_equal_folders_have_equal_digests(model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "elsewhere" / "copy")
    (other / "README.md").write_text("a copy")
    assert base_model_digest(other) == base_model_digest(model)
    assert tokenizer_digest(other) == tokenizer_digest(model)


@pytest.mark.parametrize("key", ["transformers_version", "_name_or_path", "torch_dtype", "dtype"])
def test_where_a_model_was_saved_does_not_matter(model: Path, tmp_path: Path, key: str) -> None:
    assert base_model_digest(make_model(tmp_path / "other", **{key: "another"})) == base_model_digest(model)


def test_another_configuration_weight_file_name_or_size_is_another_model(model: Path, tmp_path: Path) -> None:
    variants = [
        model,
        make_model(tmp_path / "config", hidden_size=128),
        make_model(tmp_path / "weights", weights=b"WEIGHTS"),
        make_model(tmp_path / "size", weights=b"weights!"),
        make_model(tmp_path / "shards"),
        make_model(tmp_path / "name"),
    ]
    (tmp_path / "shards" / "model-2.safetensors").write_bytes(b"more")
    (tmp_path / "name" / "model.safetensors").rename(tmp_path / "name" / "other.safetensors")
    assert len({base_model_digest(variant) for variant in variants}) == len(variants)


@pytest.mark.long
def test_large_files_are_sampled_from_the_first_to_the_last_byte(tmp_path: Path) -> None:
    size = 40 * MIB
    model = make_model(tmp_path / "large")
    weights = model / "model.safetensors"
    with weights.open("wb") as stream:
        stream.truncate(size)
    digests = {base_model_digest(model)}
    seen = [0, MIB - 1, 39 * MIB // 15, 39 * MIB // 15 + MIB - 1, size - MIB, size - 1]
    for offset in seen:
        with weights.open("r+b") as stream:
            stream.seek(offset)
            stream.write(b"x")
        digests.add(base_model_digest(model))
        with weights.open("r+b") as stream:
            stream.seek(offset)
            stream.write(b"\0")
    assert len(digests) == 1 + len(seen)
    with weights.open("r+b") as stream:
        stream.seek(MIB)  # between the first sample and the second, which starts at 2.6 MiB
        stream.write(b"x")
    assert base_model_digest(model) in digests


def test_bin_weights_count_only_without_safetensors(model: Path) -> None:
    before = base_model_digest(model)
    (model / "pytorch_model.bin").write_bytes(b"old")
    assert base_model_digest(model) == before
    (model / "model.safetensors").unlink()
    assert base_model_digest(model) != before


def test_a_folder_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        base_model_digest(model)
    assert str(caught.value) == f"model.path: {model} has no weights (*.safetensors)"


@pytest.mark.parametrize("text", ["{", "", "[1]", "[" * 100_000], ids=["cut", "empty", "list", "nested"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_damaged_file_is_a_configuration_error(model: Path, name: str, text: str) -> None:
    (model / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"^model\.path: .*/{name} (cannot be read as JSON: |is not a JSON object)"):
        (base_model_digest if name == "config.json" else tokenizer_digest)(model)


@pytest.mark.parametrize("method", ["is_dir", "read_text", "open"])
def test_a_model_that_this_user_cannot_read_is_a_configuration_error(
    model: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def refused(path: Path, *_: object, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, method, refused)
    with pytest.raises(ConfigError, match=r"model\.path: .* cannot be read: Permission denied"):
        base_model_digest(resolve_model(str(model)))


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "special_tokens_map.json"],
)
def test_every_tokenizer_file_counts(model: Path, name: str) -> None:
    before, base = tokenizer_digest(model), base_model_digest(model)
    (model / name).write_text("{}")
    assert tokenizer_digest(model) != before
    assert base_model_digest(model) == base, "it is no part of the model"


def test_the_chat_template_counts_where_older_models_keep_it(model: Path) -> None:
    before = tokenizer_digest(model)
    (model / "tokenizer_config.json").write_text(
        '{"eos_token": "</s>", "chat_template": "{{ messages }}", "padding": 1}'
    )
    assert tokenizer_digest(model) == before, "neither order nor settings that decide no token"
    for changed in (
        '{"chat_template": "other", "eos_token": "</s>"}',
        '{"chat_template": "{{ messages }}", "eos_token": "x"}',
    ):
        (model / "tokenizer_config.json").write_text(changed)
        assert tokenizer_digest(model) != before


def test_a_local_folder_resolves_to_itself(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").write_bytes(save({"a": np.zeros(1, np.float32)}))
    assert resolve_model(str(model)) == model
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        resolve_model(str(tmp_path / "empty"))
    assert str(caught.value) == f"model.path: {tmp_path}/empty/config.json is missing; download it again"


def test_a_model_is_looked_for_on_this_machine_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    snapshot = make_model(cached / "snapshots" / "abc")
    assert [folder_on_disk(path, None) for path in (str(model), "org/name")] == [model, snapshot]
    for path in ("org/other", "../model", str(tmp_path / "nowhere")):
        assert folder_on_disk(path, None) == Path(path)
    assert folder_on_disk("org/name", "an-old-revision") == Path("org/name")


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "../model", "~/model", "runs/base/model"])
def test_a_path_that_can_only_be_a_folder_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        resolve_model(path)
    assert str(caught.value) == f"model.path: {path} does not exist"


def test_code_that_comes_with_a_model_is_part_of_it_where_it_is_run(model: Path) -> None:
    digests = (base_model_digest, tokenizer_digest)
    plain = [digest(model) for digest in digests]
    (model / "tokenization_own.py").write_text("SPLIT = ' '")
    assert [digest(model) for digest in digests] == plain, "nothing runs it"
    first = [digest(model, trust_remote_code=True) for digest in digests]
    (model / "tokenization_own.py").write_text("SPLIT = '_'")
    second = [digest(model, trust_remote_code=True) for digest in digests]
    assert len({*plain, *first, *second}) == 6
