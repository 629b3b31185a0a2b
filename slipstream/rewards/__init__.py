"""`rl-reward`: tries a run's rewards on prompts and completions, without a daemon.

Guarantee: A score is computed by the code and in the processes that the producer uses. Nothing but its command line enters.
"""
