"""The model that learns: options, loading, batches as micro-batches, forward pass, loss, optimizer steps, checkpoints.

Guarantee: a step is taken once, on exactly the batch that was selected, also when the process is killed in its middle. Every
formula names its source and agrees in float64 with a second implementation in the tests. It knows no socket and no journal.
"""
