"""Policies that come as a file of this host.

Guarantee: a file is read and verified on a thread of its own, so that the link goes on; whatever is wrong with it, the answer
is None and nothing else happens.
"""

import logging
import threading
from collections.abc import Callable

from protocol.files.shared_memory import UnusableFileError, read_offered
from protocol.wire.adapter_blob import BlobError, verify
from protocol.wire.messages import PolicyInfo

logger = logging.getLogger(__name__)


def read_in_background(policy: PolicyInfo, path: str, done: Callable[[str, bytes | None], None]) -> None:
    """
    Args:
        done: is called on that thread with the policy's digest and its content, or None.
    """

    def read() -> None:
        content = None
        try:
            content = read_offered(path, policy.num_bytes)
            verify(content, policy.digest)
        except (UnusableFileError, BlobError) as error:
            content = None
            logger.info("policy v%d comes over the wire, its file cannot be used: %s", policy.version, error)
        done(policy.digest, content)

    threading.Thread(target=read, name="shared-file", daemon=True).start()
