"""A memory that runs full under the policies of a host: each producer downloads for itself, and goes on sharing afterwards."""

import shutil
from pathlib import Path

import pytest

from protocol.runtime import scratch as shared_memory
from tests.faults.mounts import tmpfs
from tests.unit.slipstream_extras.relays.scripted_relay import BLOB, POLICY, made_cache, neighbours
from tests.unit.slipstream_extras.relays.test_sources import find, take

pytestmark = pytest.mark.integration


def test_a_full_memory_costs_a_download_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tmpfs(tmp_path / "memory", 1) as memory:
        monkeypatch.setattr(shared_memory, "ROOT", memory)
        cache = made_cache(memory, "host")
        first, second = neighbours(cache), neighbours(cache, "child-2-bb")
        claim = find(first).claim
        filler = memory / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(memory).free))
        assert take(first, claim), "it has the policy nevertheless"
        assert not cache.has(POLICY.digest)
        found = find(second)
        assert found.blob is None
        assert take(second, found.claim)
        filler.unlink()
        assert take(first, find(first).claim)
        assert find(second).blob == BLOB
