"""Configurations of agents."""


def agent_config_fields(config):
    return {"agent": config.agent}
