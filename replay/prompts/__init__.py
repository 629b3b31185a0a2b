"""The prompts of a run and their leases: ledger, rerolls, failure budgets, staleness.

Guarantee: A prompt is with at most one producer at a time, and none is lost, whoever fails. The buffer, the journal and the
trainer's intake may enter.
"""
