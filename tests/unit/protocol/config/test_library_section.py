"""Sections of libraries, checked against stand-ins and against the real PEFT and TRL."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

import pytest

from protocol.config.library_section import build, for_library
from protocol.errors import ConfigError, DeviceError, ExitCode

if TYPE_CHECKING:
    from nowhere import Unresolvable  # type: ignore[import-not-found]


class Backend(enum.Enum):
    FLASH = "package.flash.Backend"
    EAGER = "package.eager.Backend"


class Opaque:
    """A class without a pydantic schema."""


@dataclass
class Nested:
    depth: int = 1


@dataclass
class Base:
    inherited: float = 0.0


@dataclass
class Options(Base):
    rate: float = 0.1
    count: int = 1
    flag: bool = False
    name: str = "x"
    mode: Literal["fast", "slow"] = "fast"
    maybe: Optional[int] = None  # noqa: UP045 - libraries write it so
    either: Union[str, list[str], None] = None  # noqa: UP007
    table: dict[str, Any] = field(default_factory=dict)
    table_or_text: "dict | str | None" = None
    nested: Nested = field(default_factory=Nested)
    backend: Backend | None = None
    opaque: Opaque | None = None
    hook: Callable[[int], int] | None = None
    unresolvable: "Unresolvable | None" = None

    def __post_init__(self) -> None:
        if self.count == 13:
            raise ValueError("13 is refused\nfor a reason")


def refusal(section: str, factory: Callable[..., Any], values: dict[str, Any], **ours: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(section, factory, values, **ours)
    assert caught.value.exit_code == ExitCode.CONFIG
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "built"),
    [
        ("rate", "1e-5", 1e-5),
        ("rate", 3, 3.0),
        ("inherited", "2.5", 2.5),
        ("count", 4, 4),
        ("count", "4", 4),
        ("count", 4.0, 4),
        ("flag", True, True),
        ("name", "y", "y"),
        ("mode", "slow", "slow"),
        ("maybe", None, None),
        ("maybe", 3, 3),
        ("either", "all-linear", "all-linear"),
        ("either", ["q", "v"], ["q", "v"]),
        ("either", None, None),
        ("table", {"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
        ("table_or_text", {"a": 1}, {"a": 1}),
        ("table_or_text", "text", "text"),
        ("nested", {"depth": 3}, Nested(3)),
        ("backend", "FLASH", Backend.FLASH),
        ("backend", "package.eager.Backend", Backend.EAGER),
        ("unresolvable", {"any": "thing"}, {"any": "thing"}),
    ],
)
def test_valid_values_arrive(key: str, value: object, built: object) -> None:
    got = getattr(build("engine", Options, {key: value}), key)
    assert got == built
    assert type(got) is type(built)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("rate", "abc", "expected a number (got 'abc')"),
        ("rate", [1], "expected a number (got [1])"),
        ("rate", None, "expected a number (got None)"),
        ("rate", True, "expected a number (got True)"),
        ("inherited", "abc", "expected a number (got 'abc')"),
        ("count", True, "expected a whole number (got True)"),
        ("count", 1.5, "expected a whole number (got 1.5)"),
        ("flag", "maybe", "expected `true` or `false` (got 'maybe')"),
        ("name", 3, "expected text (got 3)"),
        ("mode", "medium", "expected `fast` or `slow` (got 'medium')"),
        ("maybe", "x", "expected a whole number (got 'x')"),
        ("either", 3, "expected text or a list (got 3)"),
        ("table", "x", "expected a mapping (got 'x')"),
        ("backend", "TPU", "expected `package.flash.Backend` or `package.eager.Backend` (got 'TPU')"),
    ],
)
def test_wrong_types_are_refused(key: str, value: object, problem: str) -> None:
    """Also where another hint of the same class cannot be resolved, as in vLLM's."""
    assert refusal("engine", Options, {key: value}) == f"engine.{key}: {problem}"


def test_an_unknown_key_names_the_nearest() -> None:
    assert refusal("engine", Options, {"cuont": 1}) == "engine.cuont: unknown to tests.Options; did you mean `count`?"
    assert refusal("engine", Options, {"zzzzzz": 1}) == (
        "engine.zzzzzz: unknown to tests.Options; see the documentation of tests.Options"
    )


def test_what_the_library_itself_refuses() -> None:
    assert refusal("engine", Options, {"count": 13}) == "engine: refused by tests.Options: 13 is refused\nfor a reason"
    assert "multiple values" in refusal("engine", Options, {"count": 1}, count=2)


def test_ours_are_added_unchecked() -> None:
    opaque = Opaque()
    built = build("engine", Options, {"count": "2"}, opaque=opaque, rate="left alone")
    assert (built.count, built.opaque, built.rate) == (2, opaque, "left alone")


def test_a_plain_function_works_too() -> None:
    def factory(size: int, *, label: str = "a") -> tuple[int, str]:
        return size, label

    assert build("lora", factory, {"size": "3"}, label="b") == (3, "b")
    assert "expected a whole number" in refusal("lora", factory, {"size": "x"})


def test_a_gpu_that_fails_while_a_library_looks_at_it_is_no_wrong_section() -> None:
    import torch

    def factory() -> None:
        raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")

    with pytest.raises(DeviceError, match="busy or unavailable"):
        build("trainer", factory, {})


def test_long_errors_of_a_library_are_cut() -> None:
    def factory() -> None:
        raise RuntimeError("\n".join(map(str, range(100))))

    assert refusal("lora", factory, {}) == f"lora: refused by {__name__.partition('.')[0]}.factory: 0\n1\n2\n3\n4\n5"


# The real libraries. Importing them takes some seconds.


@pytest.mark.filterwarnings("ignore")
def test_a_section_of_peft() -> None:
    from peft import LoraConfig

    said = "lora.lora_alpha: expected a whole number (got"
    assert refusal("lora", LoraConfig, {"lora_alpha": "much"}).startswith(said)
    said = "lora: refused by peft.LoraConfig: When `layers_pattern` is specified, "
    assert refusal("lora", LoraConfig, {"layers_pattern": "layers"}).startswith(said)
    valid = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "gaussian", "task_type": "CAUSAL_LM"}
    built = build("lora", LoraConfig, valid)
    assert {key: getattr(built, key) for key in valid} == valid | {"target_modules": {"q_proj"}}


@pytest.mark.filterwarnings("ignore")
def test_a_section_of_trl(tmp_path: Path) -> None:
    from trl import GRPOConfig

    ours = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "num_generations": 8}
    for values, said in (
        ({"save_strategy": "sometimes"}, "trainer.save_strategy: expected `no`, `steps`, `epoch` or `best`"),
        ({"optim": "nope"}, "trainer.optim: expected `adamw_torch`, "),
        ({"loss_type": "dapp"}, "trainer.loss_type: expected `grpo`, "),
        ({"report_to": 3}, "trainer.report_to: expected text or a list"),
    ):
        assert refusal("trainer", GRPOConfig, values, **ours).startswith(said)
    for key, value, taken in (  # YAML 1.1 reads an unquoted `no` as false
        ("save_strategy", False, "no"),
        ("scale_rewards", False, "none"),
        ("scale_rewards", True, "group"),
        ("learning_rate", "1e-4", 1e-4),
        ("max_steps", "5", 5),
        ("warmup_steps", 0.1, 0.1),
    ):
        assert getattr(build("trainer", GRPOConfig, {key: value}, **ours), key) == taken


@pytest.mark.parametrize("values", [("lora", "init_from"), ("sft", "completion_column"), ("sft", "messages_column")])
def test_keys_of_ours_never_reach_the_library(values: tuple[str, str]) -> None:
    section, key = values
    assert for_library(section, {key: "text", "r": 4}) == {"r": 4}
