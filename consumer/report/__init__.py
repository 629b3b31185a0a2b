"""What a run says about itself: the report of a step, sampled rollouts, Prometheus metrics.

Guarantee: A number is computed once and shown in the same way everywhere; a full disk costs lines and nothing else. Training
and the wiring may enter.
"""
