"""See the package."""

from dataclasses import dataclass, field


@dataclass
class ClientConfig:
    api_base_url: str
    api_key_var: str
    extra_headers: dict[str, str] = field(default_factory=dict)
