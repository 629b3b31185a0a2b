"""What the newest policy thinks of a group: the numbers of its model, in a child process, or why they are not known."""

import asyncio
import json
import os
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer

from protocol.wire.codec import encode
from protocol.wire.digests import base_model_digest, tokenizer_digest
from replay.journal.tables import Entry
from replay.journal.writer import Journal
from replay.lease_ids import Key, LeaseId
from replay.prompts.rerolls import Grade
from tests.unit.tools.view.test_view_server import BASE, TOKEN
from tests.view_run import message, write_tokenizer
from tools.journal.content import ContentReader
from tools.view.scores.kept import KeptScores, ScoredBy, Scores
from tools.view.scores.policy import NoPolicyError
from tools.view.scores.questions import Policy
from tools.view.server.app import application
from tools.view.server.viewer import Viewer

GROUP, TEMPERATURE = "0-3-0-1-s", 0.7
MOST = 3


def write_run(run: Path, model: Path) -> Viewer:
    """A run with one group and the checkpoint of step 3, which made version 3."""
    lease = LeaseId(Key(0, 3, 0), 1, "s")
    group = message(Tokenizer.from_file(str(model / "tokenizer.json")), lease, 2, [0.0, 1.0, 1.0])
    facts = {
        "run_id": "scores", "model_path": str(model), "base_model_digest": base_model_digest(model),
        "tokenizer_digest": tokenizer_digest(model), "model_dtype": "float32", "trust_remote_code": "false",
        "sampling": json.dumps({"temperature": TEMPERATURE}), "reward_names": '["correct"]', "reward_weights": "[1.0]",
    }  # fmt: skip
    checkpoint = run / "checkpoints" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "adapter_config.json").write_text("{}")
    (checkpoint / "pipeline_state.json").write_text('{"step": 3, "run_id": "scores"}')
    with closing(Journal(run / "journal.sqlite")) as journal:
        journal.note_facts(facts)
        for version in range(4):
            journal.note_policy(version, version, "0" * 64)
        grade = Grade("mixed", 3, 2)
        journal.append([Entry(lease, "p", 2, "accepted", 2 / 3, grade, len(group.completion_ids) // 4, encode(group))])
    return Viewer(run)


@pytest.fixture
def viewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Viewer:
    """Of a run whose model has no weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tokenizer(tmp_path / "model")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    return write_run(tmp_path / "run", tmp_path / "model")


def ask(viewer: Viewer) -> str:
    """Why it is not known; empty if it is."""

    async def asked() -> str:
        try:
            await viewer.compute_scores(GROUP)
        except NoPolicyError as error:
            return str(error)
        finally:
            await viewer.scorer.close()
        return ""

    return asyncio.run(asked())


def page(viewer: Viewer, colour: str) -> str:
    return client_of(viewer).get(f"/group?id={GROUP}&colour={colour}").text


def client_of(viewer: Viewer) -> TestClient:
    result = TestClient(application(viewer, TOKEN), BASE)
    result.get(f"/?token={TOKEN}")
    return result


@pytest.mark.long
def test_ratios_and_entropies_are_those_of_the_model(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.integration.models import random_adapter

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    viewer = write_run(tmp_path / "run", tiny_model)
    random_adapter(tiny_model, tmp_path / "run" / "checkpoints" / "checkpoint-3")
    assert "<button data-compute" in page(viewer, "ratio")
    monkeypatch.setattr("tools.view.scores.scorer.IDLE_S", 0.01)
    start, started = viewer.scorer._children.start, []
    monkeypatch.setattr(
        viewer.scorer._children, "start", lambda *what, **how: started.append(start(*what, **how)) or started[-1]
    )

    async def ask_and_wait() -> None:
        await viewer.compute_scores(GROUP)
        assert await started[0].process.exited(60) is not None, "it is idle"
        assert viewer.scorer._child is None
        await viewer.scorer.close()

    asyncio.run(ask_and_wait())
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    model = PeftModel.from_pretrained(model, viewer.run.folder / "checkpoints" / "checkpoint-3").double().eval()
    with viewer.journal() as reader:
        content = ContentReader(reader).read(reader.row(GROUP))  # type: ignore[arg-type]
    assert content is not None
    group, prompt = content.group, content.group.prompt_ids.tolist()
    logprobs, entropies = [], []
    for record in group.records:
        ids = group.completion_ids[record].tolist()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        p = (logits / TEMPERATURE).softmax(-1)
        logprobs += p[range(len(ids)), ids].log().tolist()
        entropies += (-(p * p.log()).sum(-1)).tolist()
    (file,) = (tmp_path / "cache").rglob("*-scores.sqlite")
    assert file.stat().st_mode & 0o777 == 0o600
    ratios = np.exp(np.array(logprobs) - group.logprobs)
    shown = page(viewer, "ratio")
    found = re.findall(r'class="(\w+)" title="[^"]*log-prob now (\S+), ratio (\S+), entropy ([^"]+)"', shown)
    order = [2, 1, 0]  # by reward: the later of two equal ones first
    rows = [n for one in order for n in range(*group.records[one].indices(group.num_tokens)) if group.is_sampled[n]]
    assert len(found) == len(rows) > 100
    bounds = [0.5, 0.8, 0.95, 1.05, 1.25, 2.0]
    for n, (kind, logprob, ratio, entropy) in zip(rows, found, strict=True):
        assert float(logprob) == pytest.approx(logprobs[n], abs=2e-4)
        assert float(entropy) == pytest.approx(entropies[n], abs=2e-4)
        if np.isnan(ratios[n]):
            assert (kind, ratio) == ("unscored", "nan")
        else:
            assert float(ratio) == pytest.approx(ratios[n], rel=1e-3, abs=1e-4)
            assert (
                min(abs(ratios[n] - bound) for bound in bounds) < 1e-3
                or kind == f"q{np.searchsorted(bounds, ratios[n])}"
            )
    assert "Under policy version 3 (of step 3), computed here on the CPU at temperature 0.7" in shown
    assert "<button" not in shown
    os.utime(tmp_path / "run" / "checkpoints" / "checkpoint-3" / "adapter_config.json", (1, 1))
    shown = page(viewer, "entropy")
    assert "entropy, nats" in shown
    assert "Policy version 3 (of step 3) is newer" in shown, "there are other weights now"


@pytest.mark.long
def test_other_models_are_asked_for_their_logits_and_find_the_same(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools.view.scores import child
    from tools.view.scores.questions import Policy, Question

    model = child.load(Policy(str(tiny_model), "float32", "", ""))
    question = Question(np.array([3, 4], "<i4").tobytes(), np.array([5, 6, 7, 8, 9], "<i4").tobytes(), [2, 3], 0.5)
    plain = child.scores(model, question)
    monkeypatch.setattr(child, "is_plain", lambda model: False)
    other = child.scores(model, question)
    for one, same in ((plain.logprobs, other.logprobs), (plain.entropies, other.entropies)):
        np.testing.assert_allclose(np.frombuffer(one, "<f4"), np.frombuffer(same, "<f4"), rtol=1e-4, atol=1e-5)


def change(viewer: Viewer, **facts: str) -> None:
    with closing(Journal(viewer.run.folder / "journal.sqlite")) as journal:
        journal.note_facts(facts)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"trust_remote_code": "true"}, "runs no code that comes with a model"),
        ({"model_path": "/gone"}, "the base model is not here (/gone)"),
        ({"base_model_digest": "other"}, "is not the run's base model"),
        ({"sampling": "{}"}, "does not say how its groups were sampled"),
    ],
)
def test_what_is_missing_is_said(viewer: Viewer, facts: dict[str, str], says: str) -> None:
    change(viewer, **facts)
    assert says in ask(viewer)
    if "sampling" in facts:
        assert says in page(viewer, "entropy")


def test_without_a_checkpoint_or_memory_nothing_is_loaded(viewer: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.view.scores.policy._BESIDE_BYTES", 2**60)
    assert re.search("needs up to .* of memory here, and .* are free", ask(viewer))
    (viewer.run.folder / "checkpoints" / "checkpoint-3" / "pipeline_state.json").unlink()
    assert "has no checkpoint yet" in ask(viewer)
    assert "has no checkpoint yet" in page(viewer, "ratio")
    answer = client_of(viewer).get("/scores?id=gone")
    assert answer.json() == {"problem": "It is not known: the group is not in the journal any more."}
    with closing(Journal(viewer.run.folder / "journal.sqlite")) as journal:
        journal.query("UPDATE bodies SET frame = x'00'")
    assert "is damaged (checksum)" in client_of(viewer).get(f"/scores?id={GROUP}").json()["problem"]


@pytest.mark.parametrize(
    ("module", "limits", "says"),
    [
        ("tests.gone", {}, "the child process was lost: its process ended (exit status 1)"),
        ("tools.view.scores.child", {"LONGEST_S": 0.0}, "it took longer than 0 s and was ended"),
        ("tools.view.scores.child", {"bytes": -1}, "of memory and was ended"),
    ],
)
def test_a_child_that_is_lost_slow_or_too_large_is_ended(
    viewer: Viewer, monkeypatch: pytest.MonkeyPatch, module: str, limits: dict[str, float], says: str
) -> None:
    start = viewer.scorer._children.start
    monkeypatch.setattr(viewer.scorer._children, "start", lambda _, *arguments, **how: start(module, *arguments, **how))
    if "LONGEST_S" in limits:
        monkeypatch.setattr("tools.view.scores.scorer.LONGEST_S", 0.0)
    if "bytes" in limits:
        monkeypatch.setattr("tools.view.server.viewer.loadable", lambda newest, facts: (Policy("", "", "", ""), -1))
    assert says in ask(viewer)


def test_the_newest_groups_are_kept_and_a_damaged_file_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.view.scores.kept.MOST", MOST)
    kept, by = KeptScores(tmp_path / "index.sqlite"), ScoredBy("3-1", 3, 3, 0.5)
    scores = Scores(np.array([-0.5, -1], "<f4"), np.array([0.5, 0], "<f4"))
    assert kept.find("0", 2) is None
    for number in range(MOST + 2):
        kept.add(str(number), by, scores)
    kept.add("4", by._replace(key="4-1"), scores)
    assert kept.find("1", 2) is None
    found = kept.find("4", 2)
    assert found is not None
    assert (found[0].key, found[1].logprobs.tolist()) == ("4-1", [-0.5, -1.0]), "what was computed last"
    assert scores.ratios(np.array([-0.5, np.nan], "<f4")).tolist() == pytest.approx([1.0, np.nan], nan_ok=True)
    assert Scores(np.array([0.0]), np.array([0.0])).ratios(np.array([-1e5])) == pytest.approx(np.exp(80.0))
    assert kept.find("4", 3) is None, "of another group"
    kept._path.write_bytes(b"no database " * 100)
    assert kept.find("4", 2) is None
    with pytest.raises(Exception, match="not a database"):
        kept.add("4", by, scores)
    kept.add("4", by, scores)
    assert kept.find("4", 2) is not None


def test_who_asks_meanwhile_is_told_so(viewer: Viewer) -> None:
    viewer.scorer._busy = True
    assert "another group is being computed" in ask(viewer)
