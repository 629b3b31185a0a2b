"""Bounds of the mathematics, for whoever shows its numbers without torch."""

LOG_LIMIT = 80.0
"""Log-ratios, of tokens and of whole completions, are kept within ± this, so that the ratios are finite in float32."""
