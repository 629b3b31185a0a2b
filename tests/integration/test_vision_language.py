"""Text models of vision-language checkpoints: real vLLM computes what transformers and PEFT do, and a real pair trains one."""

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from consumer.learn.model import load_model, text_model
from protocol.wire.messages import Sampling
from protocol.wire.model_folder import vision_language
from slipstream import export as export
from tests.integration.engines import live_engine
from tests.integration.models import random_adapter
from tests.integration.pair import Daemon, run_pair
from tests.integration.test_pair import REWARD, read_steps, versions_trained_on, write_run
from tests.integration.vision_models import build_vision_model
from tests.unit.consumer.builders import run_config

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT = [4, 6, 8, 5, 9]
STAND_INS = str(Path(__file__).parents[1] / "stand_ins")


@pytest.fixture(autouse=True)
def torchvision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM imports it with the classes of models that see, in this process and in others."""
    if find_spec("torchvision") is None:
        monkeypatch.syspath_prepend(STAND_INS)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([STAND_INS, *filter(None, [os.environ.get("PYTHONPATH")])]))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]


def exported(folder: Path) -> Path:
    """A Gemma 3 that a run has trained before."""
    base = build_vision_model("gemma3", folder / "base")
    random_adapter(base, folder / "trained", rank=4, seed=9)
    export.run(run_config(folder, base), [], which=str(folder / "trained"), to=folder / "model", repository=None)
    return folder / "model"


def of_text_model(model: Path, adapter: Path | None, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Log-probs at temperature 1 of the text model under its head. Gemma 4 takes another token for that of an image, as a whole
    model of transformers, also where there is none; vLLM and the trainer do not."""
    whole = load_model(model, dtype=torch.bfloat16 if model.name == "qwen3_5" else torch.float32)
    whole = whole if adapter is None else PeftModel.from_pretrained(whole, adapter).get_base_model()
    with torch.no_grad():
        hidden = text_model(whole)(input_ids=torch.tensor([prompt + completion])).last_hidden_state
        logits = whole.get_output_embeddings()(hidden)[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.mark.parametrize(("family", "mode"), [("gemma3", "merged"), ("gemma4", "adapter"), ("qwen3_5", "adapter")])
def test_vllm_and_peft_agree(family: str, mode: str, tmp_path: Path) -> None:
    """Qwen3.5 in bfloat16, as vLLM on a CPU computes its linear attention."""
    model = exported(tmp_path) if family == "gemma3" else build_vision_model(family, tmp_path / family)
    dtype, tolerance = ("bfloat16", 0.5) if family == "qwen3_5" else ("float32", 1e-3)
    seen = vision_language(model)
    assert seen is not None
    scored = [*PROMPT, min(seen.placeholders), *PROMPT]  # without an image its token is one like any other
    with live_engine(model, tmp_path, dtype=dtype, swap={"mode": mode}) as live:

        async def body():
            adapter = live.adapter(1, 1)
            await live.engine.weights.load(adapter)
            assert live.engine.capabilities.placeholders == seen.placeholders
            scores = (await live.engine.weights.verify(adapter, [scored]))[0].logprobs
            live.engine.weights.activate(adapter)
            return scores, await live.engine.generate(PROMPT, Sampling(8, 24, 1.0), adapter)

        scores, completions = live.run(body())
    adapted = of_text_model(model, live.peft_folder(1), scored[:1], scored[1:])
    torch.testing.assert_close(torch.tensor(scores), adapted, rtol=0, atol=tolerance)
    assert (torch.tensor(scores) - of_text_model(model, None, scored[:1], scored[1:])).abs().max() > 2 * tolerance
    for completion in completions:
        adapted = of_text_model(model, live.peft_folder(1), PROMPT, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), adapted, rtol=0, atol=tolerance)


def test_a_pair_trains_the_text_model(short_dir: Path, daemons: list[Daemon]) -> None:
    """Every version was proved before it was served, and each group has the log-probs of the checkpoint that it names."""
    rows = [{"prompt": f"{number}+1="} for number in range(40)]
    sections = {"trainer": {"max_steps": 4, "save_steps": 1}, "swap": {"probe_every": 1}}
    sections["pipeline"] = {"max_staleness": 0}  # otherwise the run may end before its last version is live
    config = str(write_run(short_dir, "qwen2", rows, REWARD, **sections))
    shutil.rmtree(short_dir / "model")
    build_vision_model("qwen2_5_vl", short_dir / "model")
    run_pair(short_dir, config, daemons)
    assert [line["policy_version"] for line in read_steps(short_dir)] == list(range(4))
    assert "policy v3 is live" in daemons[0].output
    assert len(set().union(*versions_trained_on(short_dir))) > 1
