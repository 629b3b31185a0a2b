"""What both sides of the measurement agree on. Imports nothing heavy, so that producers start at once."""

from benchmarks.groups import SHAPE
from protocol.wire.handshake import LOGPROBS_MODE, TrainerNeeds
from protocol.wire.messages import EngineFacts

HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S = 1.0, 30.0
MAX_MESSAGE_BYTES = 64 * 2**20
ENGINE_FACTS = EngineFacts("0" * 64, "1" * 64, "float32", LOGPROBS_MODE, 8, 66, 1024, ["reward"])
NEEDS = TrainerNeeds("0" * 64, "1" * 64, "float32", 8, 66, SHAPE.max_completion_length, ("reward",))

DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
"""Of engine and trainer, by device: vLLM's LoRA kernels on CUDA take 16 bits only."""
ENGINE_SHARE: dict[str, dict[str, float]] = {"cpu": {}, "cuda": {"gpu_memory_utilization": 0.2}}
"""Of the GPU's memory, for each of three engines, or for one beside a trainer."""
