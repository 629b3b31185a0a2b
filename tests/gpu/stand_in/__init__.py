"""A GPU that is the host: `cuda.install()` gives torch one, `driver.install()` gives NVML and nvidia-smi some.

Guarantee: what Python does with a GPU is real: devices of tensors, dispatch, autograd, autocast, pinned memory, memory that is
counted and runs out, and the errors of all this. Speed, kernels, streams side by side, NCCL and CUDA graphs are not.
"""
