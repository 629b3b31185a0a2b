"""What `slipstream_extras.environments.verifiers` uses of verifiers 0.4.0, as that release has it, for tests where it is
not installed. Its one taskset is `doubling`, which plays as `doubling.py` beside this folder does with the real library.
"""

__version__ = "0.4.0"
