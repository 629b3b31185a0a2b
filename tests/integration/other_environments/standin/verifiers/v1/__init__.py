"""Clients and models."""

from typing import NamedTuple


class EvalClientConfig(NamedTuple):
    base_url: str
    api_key_var: str
    headers: dict[str, str]


class ModelContext(NamedTuple):
    model: str
    client: EvalClientConfig
