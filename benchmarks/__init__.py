"""Measurements of the product's parts, run by hand. They print, write JSON and draw; no test depends on their numbers."""
