"""The endpoint's section: closed by default, and never open to other hosts without a key."""

import pytest
from pydantic import ValidationError

from protocol.config.operation import ServeSection
from protocol.config.run import RunConfig


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "gpu01", "::"])
def test_an_address_that_others_reach_needs_a_key(host):
    with pytest.raises(ValidationError, match=f"host: {host} can be reached from other hosts, so it needs a key"):
        ServeSection(enabled=True, host=host)
    assert ServeSection(enabled=True, host=host, api_key_file="serve.key").host == host
    assert not ServeSection(host=host).enabled


def test_the_engine_has_slots_for_clients_only_where_there_are_some():
    assert ServeSection().num_lora_slots == 0
    assert ServeSection(enabled=True).num_lora_slots == 4
    assert ServeSection(enabled=True, max_versions=5).num_lora_slots == 7


def test_posted_rewards_are_rewards_like_others():
    values = {
        "run_dir": "run",
        "model": {"path": "model"},
        "dataset": {"path": "data"},
        "rewards": {"functions": [{"posted": "solved"}, {"function": "rewards.py:brevity", "weight": 0.1}]},
    }
    config = RunConfig.model_validate(values | {"serve": {"enabled": True}})
    assert config.rewards.names == ("solved", "brevity")
    assert config.rewards.posted == ("solved",)
    assert config.computed_rewards.names == ("brevity",)
