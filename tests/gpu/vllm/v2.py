"""A plugin of pytest (`-p tests.gpu.vllm.v2`): vLLM's CPU engine on Model Runner V2, its Triton kernels interpreted."""

from tests.gpu.stand_in import interpreter
from tests.gpu.vllm import cuda_platform

cuda_platform.use_model_runner_v2()
interpreter.install()
