"""`slipstream sft` that ends before its adapter is whole leaves nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from consumer.learn.model import load_model
from protocol.errors import ConfigError, DatasetError, DeviceError
from protocol.gpu.weights import weights_of
from slipstream import sft as sft
from slipstream.sft import training_rows
from tests.integration.models import byte_bpe_tokenizer, reference_logprobs
from tests.unit.consumer.builders import run_config
from tests.unit.consumer.trl_reference import slipstream_trainer


def run(
    folder: Path,
    model: Path,
    dtype: str = "float32",
    options: Any = (),
    *,
    resume: bool = False,
    rows: int = 1,
    **sections: Any,
) -> Path:
    folder.mkdir(exist_ok=True)
    texts = [json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) + "\n" for number in range(1, 1 + rows)]
    (folder / "train.jsonl").write_text("".join(texts))
    config = run_config(folder, model, dtype, sft={"completion_column": "answer"} | dict(options), **sections)
    sft.run(config, [], to=folder / "sft", resume=resume)
    return folder / "sft"


def cut_off_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    write = sft._Lines.on_log

    def cut(self: Any, args: Any, state: Any, *others: Any, **named: Any) -> None:
        if state.global_step == step:
            raise KeyboardInterrupt
        write(self, args, state, *others, **named)

    monkeypatch.setattr(sft._Lines, "on_log", cut)


SAVED = {"max_steps": 6, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2}


@pytest.mark.long
@pytest.mark.parametrize("lora", [{"lora_dropout": 0.3}, None])
def test_a_training_that_was_cut_off_ends_with_the_same_weights(
    lora: dict[str, Any] | None, tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(folder: Path, resume: bool = False, **others: Any) -> Path:
        return run(folder, one_layer_model, "bfloat16", SAVED | others, resume=resume, rows=7, lora=lora)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    made(whole)
    assert sorted(file.name for file in whole.iterdir()) == ["sft", "train.jsonl"]
    with pytest.raises(ConfigError, match="--resume: there is no checkpoint"):
        made(cut, resume=True)
    with monkeypatch.context() as patch:
        cut_off_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            made(cut)
    assert sorted(file.name for file in cut.iterdir()) == ["sft-checkpoints", "train.jsonl"]
    with pytest.raises(ConfigError, match="checkpoint-4 of a training that was cut off"):
        made(cut)
    with pytest.raises(ConfigError, match="other rows or of another model"):
        made(cut, resume=True, learning_rate=0.5)
    made(cut, resume=True, logging_steps=2)
    [weights] = whole.glob("sft/*model.safetensors")
    expected, found = load_file(weights), load_file(cut / "sft" / weights.name)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert sorted(file.name for file in cut.iterdir()) == ["sft", "train.jsonl"]


def built(monkeypatch: pytest.MonkeyPatch, folder: Path, model: Path, rows: int = 1, **options: Any) -> Any:
    """The trainer, before its first step."""
    trainers: list[Any] = []

    def end(self: Any, **_: Any) -> None:
        trainers.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(sft.WarmStartTrainer, "train", end)
    with pytest.raises(KeyboardInterrupt):
        run(folder, model, options=options, rows=rows)
    return trainers[0]


def rates_of(trainer: Any) -> dict[str, float]:
    trainer.create_optimizer()
    rates = {id(each): group["lr"] for group in trainer.optimizer.param_groups for each in group["params"]}
    return {name: rates[id(each)] for name, each in trainer.model.named_parameters() if each.requires_grad}


def test_lora_plus_trains_the_matrices_b_faster(
    tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plus = rates_of(built(monkeypatch, tmp_path / "plus", one_layer_model, learning_rate=1e-4, loraplus_lr_ratio=16))
    assert {round(rate, 9) for name, rate in plus.items() if "lora_B" in name} == {1.6e-3}
    assert {rate for name, rate in plus.items() if "lora_A" in name} == {1e-4}
    assert set(rates_of(built(monkeypatch, tmp_path / "plain", one_layer_model, learning_rate=1e-4)).values()) == {1e-4}
    with pytest.raises(ConfigError, match=r"sft\.loraplus_lr_ratio: with `lora: null`"):
        run(tmp_path / "whole", one_layer_model, "bfloat16", {"loraplus_lr_ratio": 16}, lora=None)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_packed_batches_count_rows(
    tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"per_device_train_batch_size": 8, "packing": True, "max_length": 15}
    trainer = built(monkeypatch, tmp_path / "run", one_layer_model, rows=32, **options)
    sequences = len(trainer.train_dataset)
    assert 8 < sequences < 32
    assert trainer.args.per_device_train_batch_size == round(8 * sequences / 32)
    assert trainer.rows_per_step == pytest.approx(8, rel=0.2)
    assert len(trainer.get_train_dataloader()) == pytest.approx(4, abs=1)
    assert f"packed in {sequences} sequences of at most 15 tokens" in "".join(capsys.readouterr())


@pytest.mark.long
def test_positions_that_length_scales_are_those_of_the_engine(
    tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dynamic"
    shutil.copytree(one_layer_model, folder)
    config = json.loads((folder / "config.json").read_text())
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": scaled}))
    model = built(monkeypatch, tmp_path, folder).model
    ids, longest = torch.arange(8)[None], int(config["max_position_embeddings"])
    positions = torch.stack([torch.arange(8), torch.arange(2 * longest - 8, 2 * longest)])
    with torch.no_grad():
        together = model(ids.expand(2, 8), position_ids=positions).logits
        torch.testing.assert_close(together[:1], model(ids).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.long
def test_parameters_that_are_not_named_stay_as_they_were(tmp_path: Path, one_layer_model: Path) -> None:
    options = {"max_steps": 2, "learning_rate": 0.1}
    made = run(tmp_path / "run", one_layer_model, "bfloat16", options, lora=None, trainable=["*.mlp.*"])
    before, after = (load_model(folder, dtype=torch.bfloat16).state_dict() for folder in (one_layer_model, made))
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    with pytest.raises(ConfigError, match=r"^trainable: .*'nothing'"):
        run(tmp_path / "other", one_layer_model, "bfloat16", options, lora=None, trainable=["nothing"])


@pytest.mark.long
def test_whole_weights_make_a_model_that_a_run_starts_from(tmp_path: Path, one_layer_model: Path) -> None:
    options = {"max_steps": 20, "learning_rate": 1e-2}
    made = run(tmp_path / "run", one_layer_model, "bfloat16", options, lora=None)
    assert {weight.bits for weight in weights_of(made)} == {16}
    with (
        safe_open(made / "model.safetensors", "pt") as written,
        safe_open(one_layer_model / "model.safetensors", "pt") as given,
    ):
        assert set(written.keys()) == set(given.keys()), "a head that is the embeddings is written once"
    before, after = (reference_logprobs(each, None, [3, 4], [5, 6], 1.0) for each in (one_layer_model, made))
    assert (after - before).abs().max() > 0.1
    config = run_config(tmp_path / "run", made, "bfloat16", lora=None)
    trainer = slipstream_trainer(config, made)
    assert all(each.requires_grad for each in trainer.model.parameters())


@pytest.mark.long
def test_modules_beside_an_adapter_train_in_float32(tmp_path: Path, one_layer_model: Path) -> None:
    lora = {"use_dora": True, "modules_to_save": ["norm"]}
    made = run(tmp_path / "run", one_layer_model, "bfloat16", {"max_steps": 2, "learning_rate": 1e-4}, lora=lora)
    saved = load_file(made / "adapter_model.safetensors")
    assert {each.dtype for each in saved.values()} == {torch.float32}
    norm = saved["base_model.model.model.norm.weight"]
    assert (norm != 1).any(), "steps that bfloat16 would lose"
    with pytest.raises(ConfigError, match=r"^lora.init_lora_weights: olora"):
        run(tmp_path / "other", one_layer_model, "bfloat16", lora={"init_lora_weights": "olora"})


def test_a_training_that_fails_leaves_nothing(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(config: Any, model_folder: Path, arguments: Any, *_: Any) -> Any:
        begun = Path(arguments.output_dir) / ".partial" / "checkpoint-1"
        begun.mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(sft, "train", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", tiny_model)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["train.jsonl"]


def test_messages_reach_the_trainer_as_they_are(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(**arguments: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    parts = [{"type": "text", "text": "2031-01-05"}]
    rows = [
        {"prompt": [{"role": "user", "content": content}], "answer": [answer]}
        for content, answer in (("1", call(x=1)), (parts, call(y="007", z=0.5)))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained: list[dict[str, Any]] = []

    def keep(config: Any, model_folder: Path, arguments: Any, lora: Any, given: Any, *_: Any) -> Any:
        trained.extend(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(sft, "train", keep)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", tiny_model, dataset={"path": str(tmp_path / "rows.jsonl")})
    assert trained == [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]


def test_rows_are_shuffled_as_those_of_the_run(tmp_path: Path) -> None:
    def order(**options: Any) -> str:
        config = run_config(tmp_path, dataset={"path": "rows.jsonl", "shuffle": False}, **options)
        return str(sft.build_sft_arguments(config, tmp_path, on_gpu=False).train_sampling_strategy)

    assert order() == "sequential"
    assert order(sft={"train_sampling_strategy": "random"}) == "random"
    plain = run_config(tmp_path, dataset={"path": "rows.jsonl"})
    assert sft.build_sft_arguments(plain, tmp_path, on_gpu=False).train_sampling_strategy == "random"


def test_several_gpus_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(DeviceError, match="--gpu 0,1: slipstream sft, a short warm start, trains on one GPU"):
        sft.run(run_config(tmp_path, tiny_model), [0, 1], to=tmp_path / "sft")


def test_a_thinking_model_without_thoughts_in_its_rows_is_named(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The template writes no thought itself unless thinking is off."""
    tokenizer = byte_bpe_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
    )

    def warned(completion: list[dict[str, str]], **template: bool) -> bool:
        caplog.clear()
        rows = [(ASK, {"completion": ANSWER}), (ASK, {"completion": completion})]
        config = run_config(
            tmp_path, tiny_model, dataset={"path": str(tmp_path / "train.jsonl"), "chat_template_kwargs": template}
        )
        sft.check_thoughts(made(*rows), Rows(*rows), tokenizer, config)
        return "it would learn not to think" in caplog.text

    assert warned(ANSWER)
    assert not warned(ANSWER, enable_thinking=False)
    assert not warned([{"role": "assistant", "content": "<think>1 and 1</think>2"}])
    assert not warned([{"role": "assistant", "content": "2", "reasoning_content": "1 and 1"}])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert not warned(ANSWER)


ASK = [{"role": "user", "content": "1+1="}]
ANSWER = [{"role": "assistant", "content": "2"}]


class Rows:
    """A prompt dataset."""

    def __init__(self, *rows: tuple[Any, dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, prompt_id: int) -> tuple[Any, dict[str, Any]]:
        return self._rows[prompt_id]

    def place(self, prompt_id: int) -> str:
        return f"row {prompt_id} of train.jsonl"


def made(*rows: tuple[Any, dict[str, Any]], **section: Any) -> list[dict[str, Any]]:
    return list(training_rows(Rows(*rows), section))


def refused(*rows: tuple[Any, dict[str, Any]], **section: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        made(*rows, **section)
    return str(caught.value)


def test_texts() -> None:
    assert made(("1+1=", {"completion": "2", "n": 1})) == [{"prompt": "1+1=", "completion": "2"}]
    assert made(("1+1=", {"answer": "2"}), completion_column="answer") == [{"prompt": "1+1=", "completion": "2"}]


def test_messages_take_a_text_or_messages() -> None:
    expected = [{"prompt": ASK, "completion": ANSWER}]
    assert made((ASK, {"completion": "2"})) == made((ASK, {"completion": ANSWER})) == expected


def test_whole_conversations() -> None:
    row = (ASK, {"messages": ASK + ANSWER})
    assert made(row, messages_column="messages") == [{"prompt": ASK, "completion": ANSWER}]
    for messages in (ASK, ANSWER, "1+1=2", None):
        message = refused((ASK, {"messages": messages}), messages_column="messages")
        assert message.startswith("row 0 of train.jsonl: sft.messages_column: 'messages' must be a list of messages")


def test_no_completion() -> None:
    assert refused(("a", {"completion": "b"}), ("c", {"answer": "d"})) == (
        "row 1 of train.jsonl: sft.completion_column: there is no column 'completion'; beside the prompt there are 'answer'"
    )
    assert refused(("a", {"completion": ""})).endswith("must be a text that is not empty, got ''")
    assert refused(("a", {"completion": ANSWER})).startswith(
        "row 0 of train.jsonl: sft.completion_column: 'completion' must"
    )
    assert "must be a text or a list of messages that is not empty, got 2" in refused((ASK, {"completion": 2}))


def test_forms_are_not_mixed() -> None:
    assert refused(("a", {"completion": "b"}), (ASK, {"completion": "2"})) == (
        "row 1 of train.jsonl: rows before have prompts of another form; text and messages cannot be mixed"
    )


THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if think is not defined or think %}<think>{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("answer", "template", "warned"),
    [("2", {}, True), ("1 and 1</think>2", {}, False), ("2", {"think": False}, False)],
)
def test_a_completion_outside_of_the_thought_that_the_template_opens_is_named(
    tmp_path: Path,
    tiny_model: Path,
    caplog: pytest.LogCaptureFixture,
    answer: str,
    template: dict[str, bool],
    warned: bool,
) -> None:
    tokenizer = byte_bpe_tokenizer()
    tokenizer.chat_template = THINKING
    dataset = {"path": str(tmp_path / "train.jsonl"), "chat_template_kwargs": template}
    config = run_config(tmp_path, tiny_model, dataset=dataset)
    rows = [(ASK, {"completion": text}) for text in ("5</think>2", answer, answer)]
    sft.check_thoughts(made(*rows), Rows(*rows), tokenizer, config)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warned
    assert all(message.startswith("row 1 of train.jsonl: ") for message in messages)
