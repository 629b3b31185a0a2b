"""Text models of vision-language checkpoints: real vLLM computes what transformers and PEFT do, and a real pair trains one."""

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from protocol.wire.messages import Sampling
from protocol.wire.model_folder import vision_language
from slipstream import export as export
from tests.integration.engines import live_engine
from tests.integration.models import random_adapter, reference_logprobs
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


@pytest.mark.parametrize(("family", "mode"), [("gemma3", "merged")])
def test_vllm_and_peft_agree(family: str, mode: str, tmp_path: Path) -> None:
    model = exported(tmp_path) if family == "gemma3" else build_vision_model(family, tmp_path / "model")
    seen = vision_language(model)
    assert seen is not None
    scored = [*PROMPT, min(seen.placeholders), *PROMPT]  # without an image its token is one like any other
    with live_engine(model, tmp_path, swap={"mode": mode}) as live:

        async def body():
            adapter = live.adapter(1, 1)
            await live.engine.weights.load(adapter)
            assert live.engine.capabilities.placeholders == seen.placeholders
            scores = (await live.engine.weights.verify(adapter, scored)).logprobs
            live.engine.weights.activate(adapter)
            return scores, await live.engine.generate(PROMPT, Sampling(8, 24, 0.9), adapter)

        scores, completions = live.run(body())
    expected = reference_logprobs(model, live.peft_folder(1), scored[:1], scored[1:], 1.0)
    torch.testing.assert_close(torch.tensor(scores), expected, rtol=0, atol=1e-3)
    assert (torch.tensor(scores) - reference_logprobs(model, None, scored[:1], scored[1:], 1.0)).abs().max() > 0.05
    for completion in completions:
        expected = reference_logprobs(model, live.peft_folder(1), PROMPT, completion.token_ids, 0.9)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-3)


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
