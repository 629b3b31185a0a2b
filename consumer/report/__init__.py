"""The report of a run: its steps, sampled rollouts, Prometheus metrics, and the batch of a step that was not finite.

Guarantee: a number is computed once and shown in the same way everywhere; a full disk costs lines and nothing else. The app
may enter.
"""
