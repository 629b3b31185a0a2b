"""The files of a model or an adapter, looked at before a library loads them.

Guarantee: it reads headers, small files and the ends of large ones, so it takes milliseconds for any model, and no library of
models is imported. Every problem names its file and the fix. What has none may still be refused by the library that loads it.
"""

import json
import os
import re
import stat
import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from protocol.errors import access_fix
from protocol.wire.chat_template import template_problem

Problems = Iterator[str]
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_ADAPTER_TENSORS = "adapter_model.safetensors"
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")  # one of these says the tokens
_JSON_BESIDE = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_OLDER_TOKENIZERS = ("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model")  # not read beside tokenizer.json
_POINTER = b"version https://git-lfs.github.com/spec/"
_AGAIN = "download it again"
_LONGEST_HEADER = 100 * 2**20  # bytes, as safetensors itself has it
_PARSED_BYTES = 2**20  # of larger JSON the ends are looked at
_LENGTH = struct.Struct("<Q")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_QUANTIZERS = ("bitsandbytes", "gptq", "awq", "fp8", "compressed-tensors", "mxfp4")
SENSES = ("vision", "visual", "image", "video", "audio", "speech", "multi_modal")
"""Parts of the names of what sees or hears: of sections in config.json, and of weights in files of every age."""

_WHOLE_NUMBERS = {"F64", "F32", "F16", "BF16", "BOOL"}  # the types of weights that are not quantized


def base_problems(folder: Path, *, trust_remote_code: bool = False) -> Problems:
    """Yield what is wrong with the files of a run's base model, one sentence for each file. vLLM reads some that transformers
    does not, and the other way round."""
    if os.path.lexists(folder / ADAPTER_CONFIG):
        if os.path.lexists(folder / CONFIG):
            fix = "merge it, or move its two files to a folder of their own and set lora.init_from to that"
            yield f"{folder} has an adapter beside the base ({ADAPTER_CONFIG}), which only one of both daemons would load; {fix}"
        else:
            fix = "set model.path to the base that it was trained on, and lora.init_from to this folder"
            yield f"{folder} is an adapter of PEFT and has no base; {fix}"
        return
    yield from model_problems(folder, trust_remote_code=trust_remote_code)
    if os.path.lexists(folder / WHOLE) and not os.path.lexists(folder / INDEX):
        for file in sorted(folder.glob("*.safetensors")):
            if file.name != WHOLE and not file.name.startswith("consolidated"):
                yield f"{file} would be loaded by vLLM and not by transformers, which reads {WHOLE}; move it elsewhere"


def model_problems(folder: Path, *, trust_remote_code: bool = False) -> Problems:
    """Yield what is wrong with the files by which transformers loads a model and its tokenizer."""
    problem, config = _json_object(folder / CONFIG)
    if problem is not None:
        yield problem
        return
    if not isinstance(config.get("model_type"), str) and not (trust_remote_code and config.get("auto_map")):
        yield f'{folder / CONFIG} names no "model_type", so its architecture is unknown; take the file that came with the weights'
    yield from _of_weights(folder, config)
    yield from _of_tokenizer(folder, trust_remote_code)


def adapter_problems(folder: Path) -> Problems:
    """Yield what is wrong with the two files of an adapter of PEFT."""
    problem, _ = _json_object(folder / ADAPTER_CONFIG)
    if problem is not None:
        yield problem
    if not os.path.lexists(folder / _ADAPTER_TENSORS) and os.path.lexists(folder / "adapter_model.bin"):
        yield f"{folder}/adapter_model.bin is not read; save the adapter as safetensors"
    else:
        yield from _of_safetensors([folder / _ADAPTER_TENSORS])[0]


def checkpoint_problems(folder: Path) -> Problems:
    """Yield which files that transformers writes into a checkpoint are not whole."""
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":
            yield from _of_safetensors([file])[0]
        elif file.suffix in (".pt", ".pth", ".bin"):
            yield from _of_pickled([file])
        elif file.suffix == ".json" and (problem := _json_object(file)[0]) is not None:
            yield problem


def read_header(file: Path) -> dict[str, Any]:
    """Return the tensors that the header of a safetensors file names, each with `dtype`, `shape` and `data_offsets`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no such header, is cut off, or is longer than the header says.
    """
    with file.open("rb") as stream:
        size, start = os.fstat(stream.fileno()).st_size, stream.read(_LENGTH.size)
        [length] = _LENGTH.unpack(start) if len(start) == _LENGTH.size else [0]
        if not 2 <= length <= _LONGEST_HEADER:
            raise ValueError(f"is no file of safetensors; {_AGAIN}")
        if size < _LENGTH.size + length:
            raise ValueError(f"is cut off in its header after {size} bytes; {_AGAIN}")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            ends = [int(end) for _, end in (tensor["data_offsets"] for tensor in header.values())]
            if not all(
                isinstance(tensor["dtype"], str) and isinstance(tensor["shape"], list) for tensor in header.values()
            ):
                raise TypeError("dtype or shape")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"has a damaged header of safetensors; {_AGAIN}") from error
    whole = _LENGTH.size + length + max(ends, default=0)
    if size != whole:
        what = "is cut off" if size < whole else "is longer than it should be"
        raise ValueError(f"{what}: it has {size} bytes, and its header says {whole}; {_AGAIN}")
    return header


def _of_weights(folder: Path, config: dict[str, Any]) -> Problems:
    chosen = config.get("transformers_weights")
    names = [str(chosen)] if chosen else [WHOLE, INDEX, _PICKLED, _PICKLED_INDEX]
    there = [folder / name for name in names if os.path.lexists(folder / name)]
    if not there:
        fix = f"download {INDEX}, too" if any(folder.glob("*.safetensors")) else "download them"
        yield f"{folder} has no weights that transformers finds ({', '.join(names)}); {fix}"
        return
    if (folder / INDEX) in there[1:2]:  # transformers takes the one, and vLLM the other
        yield from _of_index(folder / INDEX)[0]
    file = there[0]
    if file.suffix == ".json":
        problems, headers = _of_index(file)
    elif file.suffix == ".bin":
        problems, headers = _of_pickled([file]), {}
    else:
        problems, headers = _of_safetensors([file])
    yield from problems
    if headers and not problems:
        yield from _of_config(folder / CONFIG, config, headers)


def _of_index(index: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the problems of an index and of the files that it names, and their headers."""
    problem, content = _json_object(index)
    if problem is not None:
        return [problem], {}
    places = content.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        return [f'{index} has no "weight_map" with the files of the weights; {_AGAIN}'], {}
    names = sorted(set(places.values()))
    if outside := [name for name in names if Path(name).name != name]:
        return [f"{index} names {outside[0]}, which is not a file beside it; {_AGAIN}"], {}
    files = [index.with_name(name) for name in names]
    if missing := [file.name for file in files if not os.path.lexists(file)]:
        shown = ", ".join(missing[:4])
        return [f"{index} names {len(files)} files, of which {len(missing)} are not there: {shown}; download them"], {}
    if all(name.endswith(".bin") for name in names):
        return _of_pickled(files), {}
    problems, headers = _of_safetensors(files)
    if not problems and (absent := places.keys() - headers.keys()):
        file = places[weight := min(absent)]
        problems = [
            f"{index} says that {weight} is in {file}, and it is not; the two are of different downloads: take both anew"
        ]
    return problems, headers


def _of_safetensors(files: Iterable[Path]) -> tuple[list[str], dict[str, Any]]:
    problems, headers = [], dict[str, Any]()
    for file in files:
        if (problem := _unreadable(file)) is not None:
            problems.append(problem)
            continue
        try:
            headers |= read_header(file)
        except ValueError as error:
            problems.append(f"{file} {error}")
        except OSError as error:
            problems.append(_no_access(file, error))
    return problems, headers


def _of_pickled(files: Iterable[Path]) -> list[str]:
    """Return which files of torch are not whole. They are archives of zip; those of very old releases are not looked at."""
    problems = []
    for file in files:
        if (problem := _unreadable(file)) is not None:
            problems.append(problem)
        elif _ends(file)[0].startswith(b"PK") and not zipfile.is_zipfile(file):
            problems.append(f"{file} is cut off; {_AGAIN}")
    return problems


def _of_config(file: Path, config: dict[str, Any], headers: dict[str, Any]) -> Problems:
    """Yield the sizes of the configuration that the shapes of the weights are not of."""
    text = config.get("text_config") or config
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    if method in _QUANTIZERS and {tensor["dtype"] for tensor in headers.values()} <= _WHOLE_NUMBERS:
        yield (
            f"{file} says that the weights are quantized ({method}), and they are not; remove its quantization_config, or take "
            "the quantized weights"
        )
    weights = {name: tensor["shape"] for name, tensor in headers.items() if is_of_text_model(name) and tensor["shape"]}
    layers = [int(layer[1]) for name in weights if (layer := _LAYER.search(name))]
    sizes = [("num_hidden_layers", max(layers) + 1)] if layers else []
    for key, end in (("vocab_size", ".embed_tokens.weight"), ("hidden_size", ".layers.0.input_layernorm.weight")):
        sizes += [(key, shape[0]) for name, shape in weights.items() if name.endswith(end) and _is_plain(headers[name])]
    for key, size in sizes:
        said = text.get(key) if isinstance(text, dict) else None
        if isinstance(said, int) and (said > size if key == "num_hidden_layers" else said != size):
            yield f"{file} says {key}: {said}, and the weights have {size}; take configuration and weights of one model"


def _is_plain(tensor: dict[str, Any]) -> bool:
    return tensor["dtype"] in _WHOLE_NUMBERS


def _of_tokenizer(folder: Path, trust_remote_code: bool) -> Problems:
    if not any(any(folder.glob(name)) for name in _TOKENIZERS) and not (trust_remote_code and any(folder.glob("*.py"))):
        yield f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)}); copy the files of the model's tokenizer into it"
    templates: list[tuple[Path, Any]] = []
    fast = folder / "tokenizer.json"
    for file in map(folder.joinpath, _JSON_BESIDE):
        if os.path.lexists(file):
            problem, content = _json_object(file)
            if problem is not None:
                yield problem
            templates.append((file, content.get("chat_template")))
    for file in [fast] if os.path.lexists(fast) else map(folder.joinpath, _OLDER_TOKENIZERS):
        if os.path.lexists(file):
            problem = _json_object(file)[0] if file.suffix == ".json" else _unreadable(file)
            if problem is not None:
                yield problem
    for file in (folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))):
        if os.path.lexists(file):
            if (problem := _unreadable(file, may_be_empty=True)) is not None:
                yield problem
            else:
                templates.append((file, file.read_text(encoding="utf-8", errors="replace")))
    for file, template in templates:
        if (problem := template_problem(template)) is not None:
            yield f"{file} has a chat template that Jinja refuses: {problem}; correct it"


def _json_object(file: Path) -> tuple[str | None, dict[str, Any]]:
    """Return what is wrong with a file of JSON, or what is in it; nothing of a large one, of which only the ends are seen."""
    if (problem := _unreadable(file)) is not None:
        return problem, {}
    try:
        if file.stat().st_size > _PARSED_BYTES:
            start, end = _ends(file)
            whole = start.lstrip().startswith(b"{") and end.rstrip().endswith(b"}")
            return (None if whole else f"{file} is cut off, or no JSON; {_AGAIN}"), {}
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        return _no_access(file, error), {}
    except (ValueError, RecursionError) as error:
        return f"{file} cannot be read as JSON: {error}; correct it, or {_AGAIN}", {}
    return (None, content) if isinstance(content, dict) else (f"{file} is not a JSON object; {_AGAIN}", {})


def _unreadable(file: Path, *, may_be_empty: bool = False) -> str | None:
    """Return why a library could not read this file; None where it can begin to."""
    try:
        mode = file.stat().st_mode
        if not stat.S_ISREG(mode):
            return f"{file} is a folder, not a file; {_AGAIN}" if stat.S_ISDIR(mode) else f"{file} is not a file"
        start = _ends(file)[0]
    except FileNotFoundError:
        what = "is a link to a file that is not there" if file.is_symlink() else "is missing"
        return f"{file} {what}; {_AGAIN}"
    except OSError as error:
        return _no_access(file, error)
    if start.startswith(_POINTER):
        return (
            f"{file} is a pointer of Git LFS and not the file itself; run `git lfs pull` in {file.parent}, or {_AGAIN}"
        )
    return None if start or may_be_empty else f"{file} is empty; {_AGAIN}"


def _ends(file: Path) -> tuple[bytes, bytes]:
    with file.open("rb") as stream:
        start = stream.read(64)
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - 64))
        return start, stream.read(64)


def _no_access(file: Path, error: OSError) -> str:
    return f"{file} cannot be read: {error.strerror}; {access_fix(error)}"


def is_of_text_model(weight: str) -> bool:
    """Return whether a weight of this name in a checkpoint's file is not one of what sees or hears."""
    return not any(sense in weight for sense in SENSES)
