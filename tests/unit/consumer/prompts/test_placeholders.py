"""A run without a dataset: credits for groups, which nothing acts on as if they were prompts."""

from consumer.link.probe import probe_rows
from consumer.prompts.dataset import Placeholders, open_prompts
from protocol.config.run import RunConfig
from tests.unit.replay.builders import ledger

RUN = {"run_dir": "run", "model": {"path": "model"}, "trainer": {"max_steps": 10}}
ATROPOS = RunConfig.model_validate(RUN | {"environment": {"agent": "atropos"}, "serve": {"enabled": True}})


def test_every_placeholder_can_be_leased(tmp_path):
    prompts = open_prompts(ATROPOS, tmp_path, lambda: None)
    assert isinstance(prompts, Placeholders)
    prompt, columns = prompts[len(prompts) - 1]
    assert prompt
    assert columns == {}
    book = ledger(len(prompts), shuffle=True, backoff_s=0.0)
    leases = [book.lease("p", version=0, policy_floor=0, now=0.0, deadline=1.0) for _ in range(100)]
    assert len({record.task.key.prompt_id for record in leases}) == 100
    book.leases.give_back(leases[7].lease_id)
    again = book.lease("p", version=0, policy_floor=0, now=0.0, deadline=1.0)
    assert (again.task.key, again.task.data_failures, again.task.infra_failures) == (leases[7].task.key, 0, 0)


def test_the_probe_of_a_swap_has_tokens():
    tokens = probe_rows(Placeholders(), lambda text: {"input_ids": list(text.encode())}, seed=42)
    assert len(set(tokens.ravel().tolist())) > 1
