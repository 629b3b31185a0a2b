"""A process that imports the trainers, and says whether vLLM came along."""

import importlib
import sys

for name in ("consumer.learn.trainer", "slipstream.sft"):
    importlib.import_module(name)
print("with vLLM" if "vllm" in sys.modules else "without vLLM")
