"""Child processes: how one is started, spoken to, watched and ended.

Guarantee: A child ends with its daemon, however that ends, and leaves nothing of what it started. Whoever runs code of a
user's, or a helper of its own, enters through `child` or `kept`.
"""
