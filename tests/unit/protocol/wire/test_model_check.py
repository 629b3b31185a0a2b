"""Faults in the files of a model, each of which names its file before a library is asked to load it."""

import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from protocol.errors import ConfigError
from protocol.wire.model_check import adapter_problems, base_problems, model_problems
from protocol.wire.model_source import checked, resolve_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 988097824\n"
CONFIG: dict[str, Any] = {"model_type": "llama", "vocab_size": 4, "hidden_size": 2, "num_hidden_layers": 2}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORMS = [f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1)]
TENSORS = {EMBEDDING: np.zeros((4, 2), np.float32), HEAD: np.ones((4, 2), np.float32)} | {
    name: np.ones(2, np.float32) for name in NORMS
}
TEMPLATE = "{% for m in messages %}{% generation %}{{ m.content | tojson }}{% endgeneration %}{% break %}{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def shard(model: Path) -> Path:
    """Give the model two files with an index, which is returned."""
    (model / "model.safetensors").unlink()
    places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(TENSORS)}
    for part in set(places.values()):
        save_file({name: TENSORS[name] for name, place in places.items() if place == part}, model / part)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return index


def pickle(model: Path) -> Path:
    (model / "model.safetensors").unlink()
    with zipfile.ZipFile(model / "pytorch_model.bin", "w") as archive:
        archive.writestr("model/data.pkl", b"0" * 500)
    return model / "pytorch_model.bin"


def cut(file: Path, share: float = 0.5) -> None:
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


def with_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"base_model.model.q.lora_A.weight": np.ones((1, 2), np.float32)}, folder / "adapter_model.safetensors")


def test_whole_models_pass_in_every_form(model: Path) -> None:
    assert list(base_problems(model)) == []
    (model / "README.md").write_text(POINTER)
    (model / "pytorch_model.bin").write_text(POINTER)  # not read, so not needed
    (model / "tokenizer.model").write_text(POINTER)
    (model / "consolidated.safetensors").write_bytes(save(TENSORS))
    assert list(base_problems(model)) == []
    shard(model)
    assert list(base_problems(model)) == []
    for file in model.glob("*.safetensors*"):
        file.unlink()
    (model / "model.safetensors").touch()
    pickle(model)
    assert list(base_problems(model)) == []


Spoil = Callable[[Path], object]
FAULTS: dict[str, tuple[Spoil, str, str]] = {
    "pointer": (lambda m: (m / "model.safetensors").write_text(POINTER), "model.safetensors", "git lfs pull"),
    "pointer for the tokenizer": (
        lambda m: (m / "tokenizer.json").write_text(POINTER),
        "tokenizer.json",
        "git lfs pull",
    ),
    "pointer for the configuration": (lambda m: (m / "config.json").write_text(POINTER), "config.json", "git lfs pull"),
    "pointer for a shard": (
        lambda m: (shard(m), (m / "part-1.safetensors").write_text(POINTER)),
        "part-1.safetensors",
        "git lfs pull",
    ),
    "cut in the header": (lambda m: cut(m / "model.safetensors", 0.2), "model.safetensors", "cut off"),
    "cut in the tensors": (lambda m: cut(m / "model.safetensors", 0.95), "model.safetensors", "cut off"),
    "cut to four bytes": (lambda m: (m / "model.safetensors").write_bytes(b"abcd"), "model.safetensors", "no file of"),
    "page of a server": (
        lambda m: (m / "model.safetensors").write_text("<!DOCTYPE html><html>Not found</html>"),
        "model.safetensors",
        "no file of",
    ),
    "damaged header": (
        lambda m: (m / "model.safetensors").write_bytes(struct.pack("<Q", 9) + b'{"a": []}'),
        "model.safetensors",
        "damaged",
    ),
    "longer than its header": (
        lambda m: (m / "model.safetensors").write_bytes(save(TENSORS) + b"0"),
        "model.safetensors",
        "longer",
    ),
    "empty": (lambda m: (m / "model.safetensors").write_bytes(b""), "model.safetensors", "empty"),
    "folder in place of the weights": (
        lambda m: ((m / "model.safetensors").unlink(), (m / "model.safetensors").mkdir()),
        "model.safetensors",
        "folder",
    ),
    "link to nothing": (
        lambda m: ((m / "config.json").unlink(), (m / "config.json").symlink_to("../blobs/gone")),
        "config.json",
        "link",
    ),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "", "no weights"),
    "weights of another name": (
        lambda m: (m / "model.safetensors").rename(m / "weights.safetensors"),
        "",
        "model.safetensors.index.json, too",
    ),
    "second weights": (
        lambda m: (m / "model.fp16.safetensors").write_bytes(save(TENSORS)),
        "model.fp16.safetensors",
        "loaded by vLLM",
    ),
    "missing shard": (
        lambda m: (shard(m), (m / "part-0.safetensors").unlink()),
        "model.safetensors.index.json",
        "part-0.safetensors",
    ),
    "missing shard beside the whole": (
        lambda m: (shard(m), (m / "part-0.safetensors").unlink(), save_file(TENSORS, m / "model.safetensors")),
        "model.safetensors.index.json",
        "part-0.safetensors",
    ),
    "shard of another download": (
        lambda m: (shard(m), save_file({EMBEDDING: TENSORS[EMBEDDING]}, m / "part-0.safetensors")),
        "model.safetensors.index.json",
        NORMS[0],
    ),
    "index that is no JSON": (lambda m: shard(m).write_text("{"), "model.safetensors.index.json", "JSON"),
    "index without files": (lambda m: shard(m).write_text("{}"), "model.safetensors.index.json", "weight_map"),
    "index of another folder": (
        lambda m: shard(m).write_text('{"weight_map": {"a": "../other/model.safetensors"}}'),
        "model.safetensors.index.json",
        "beside it",
    ),
    "cut archive of torch": (lambda m: cut(pickle(m)), "pytorch_model.bin", "cut off"),
    "pointer for an archive of torch": (lambda m: pickle(m).write_text(POINTER), "pytorch_model.bin", "git lfs pull"),
    "no JSON": (lambda m: (m / "config.json").write_text("{"), "config.json", "JSON"),
    "no object": (lambda m: (m / "config.json").write_text("[]"), "config.json", "JSON object"),
    "nested too deep": (lambda m: (m / "config.json").write_text("[" * 100_000), "config.json", "JSON"),
    "no UTF-8": (lambda m: (m / "config.json").write_bytes(b'{"a": "\xff"}'), "config.json", "JSON"),
    "no type of model": (lambda m: (m / "config.json").write_text("{}"), "config.json", "model_type"),
    "generation that is no JSON": (
        lambda m: (m / "generation_config.json").write_text("{,"),
        "generation_config.json",
        "JSON",
    ),
    "tokenizer that is cut": (
        lambda m: (m / "tokenizer.json").write_text('{"model": "' + 2**20 * "a"),
        "tokenizer.json",
        "cut off",
    ),
    "configuration of the tokenizer": (
        lambda m: (m / "tokenizer_config.json").write_text(""),
        "tokenizer_config.json",
        "empty",
    ),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), "", "no tokenizer"),
    "pointer for an older tokenizer": (
        lambda m: ((m / "tokenizer.json").unlink(), (m / "tokenizer.model").write_text(POINTER)),
        "tokenizer.model",
        "git lfs pull",
    ),
    "template": (
        lambda m: (m / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}"),
        "chat_template.jinja",
        "line 2",
    ),
    "template with an unknown filter": (
        lambda m: (m / "chat_template.jinja").write_text("{{ messages | to_jsn }}"),
        "chat_template.jinja",
        "to_jsn",
    ),
    "template of an older tokenizer": (
        lambda m: (m / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}'),
        "tokenizer_config.json",
        "line 1",
    ),
    "one of several templates": (
        lambda m: (m / "tokenizer_config.json").write_text(
            '{"chat_template": [{"name": "default", "template": "a"}, {"name": "tools", "template": "{% if"}]}'
        ),
        "tokenizer_config.json",
        "line 1",
    ),
    "base and adapter": (with_adapter, "", "lora.init_from"),
    "base in two files and adapter": (lambda m: (shard(m), with_adapter(m)), "", "lora.init_from"),
    "adapter alone": (
        lambda m: ((m / "config.json").unlink(), (m / "model.safetensors").unlink(), with_adapter(m)),
        "",
        "set model.path to the base",
    ),
    "no quantized weights": (
        lambda m: (m / "config.json").write_text(
            json.dumps(CONFIG | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
        ),
        "config.json",
        "quantization_config",
    ),
    "another vocabulary": (
        lambda m: (m / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 5})),
        "config.json",
        "vocab_size: 5, and the weights have 4",
    ),
    "another width": (
        lambda m: (m / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 3})),
        "config.json",
        "hidden_size: 3, and the weights have 2",
    ),
    "more layers": (
        lambda m: (m / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3})),
        "config.json",
        "num_hidden_layers: 3, and the weights have 2",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_sentence_with_its_file(model: Path, fault: str) -> None:
    spoil, file, key_word = FAULTS[fault]
    spoil(model)
    with pytest.raises(ConfigError) as caught:
        resolve_model(str(model))
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"model.path: {model / file} ")
    assert key_word in line


def test_all_faults_are_said_at_once(model: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).write_text(POINTER)
    assert len(list(base_problems(model))) == 2


def test_a_file_that_this_user_or_this_disk_does_not_give(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def refused(error: OSError) -> Callable[..., Any]:
        def open_(path: Path, *arguments: Any, **options: Any) -> Any:
            if path.name == "model.safetensors":
                raise error
            return opened(path, *arguments, **options)

        return open_

    for error, fix in (
        (PermissionError(13, "Permission denied"), "the user"),
        (OSError(5, "Input/output error"), "disk"),
    ):
        monkeypatch.setattr(Path, "open", refused(error))
        [problem] = base_problems(model)
        assert problem.startswith(f"{model}/model.safetensors cannot be read: {os.strerror(error.errno or 0)}; ")
        assert fix in problem


def test_files_of_a_models_own_stand_in_for_tokenizer_and_type(model: Path) -> None:
    (model / "config.json").write_text('{"auto_map": {"AutoConfig": "own.Config"}}')
    (model / "tokenizer.json").unlink()
    (model / "own.py").touch()
    assert len(list(base_problems(model))) == 2
    assert list(base_problems(model, trust_remote_code=True)) == []


def test_sizes_that_a_quantized_or_another_embedding_has_are_no_faults(model: Path) -> None:
    tensors = TENSORS | {
        EMBEDDING: np.zeros((4, 1), np.int32),
        "visual.embed_tokens.weight": np.zeros((9, 2), np.float32),
    }
    save_file(tensors, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "text_config": CONFIG}))
    assert list(base_problems(model)) == []


def test_the_model_of_a_reward_may_have_an_adapter_beside_it(model: Path) -> None:
    with_adapter(model)
    assert list(model_problems(model)) == []


@pytest.mark.parametrize(
    ("spoil", "file", "key_word"),
    [
        (lambda a: (a / "adapter_config.json").unlink(), "adapter_config.json", "missing"),
        (lambda a: (a / "adapter_config.json").write_text(POINTER), "adapter_config.json", "git lfs pull"),
        (lambda a: (a / "adapter_config.json").write_text("{"), "adapter_config.json", "JSON"),
        (lambda a: (a / "adapter_model.safetensors").unlink(), "adapter_model.safetensors", "missing"),
        (lambda a: (a / "adapter_model.safetensors").write_text(POINTER), "adapter_model.safetensors", "git lfs pull"),
        (lambda a: cut(a / "adapter_model.safetensors"), "adapter_model.safetensors", "cut off"),
        (
            lambda a: (a / "adapter_model.safetensors").rename(a / "adapter_model.bin"),
            "adapter_model.bin",
            "safetensors",
        ),
    ],
)
def test_faults_of_an_adapter(tmp_path: Path, spoil: Spoil, file: str, key_word: str) -> None:
    with_adapter(tmp_path)
    assert checked(tmp_path, adapter_problems(tmp_path)) == tmp_path
    spoil(tmp_path)
    [problem] = adapter_problems(tmp_path)
    assert problem.startswith(f"{tmp_path / file} ")
    assert key_word in problem
