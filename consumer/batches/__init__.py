"""From groups to tensors: advantages, padding or packing, micro-batches.

Guarantee: What a micro-batch holds depends on the cut batch and the recipe alone. The trainer and the reports may enter.
"""
