"""A store of ranks that is a dictionary."""


class DictionaryStore:
    """What `consumer.ranks` uses of `torch.distributed.Store`, and as it behaves."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self._values.get(key, "") == expected:
            self._values[key] = desired
        return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        return self._values[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]
