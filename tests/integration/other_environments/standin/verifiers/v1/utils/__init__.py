"""Loaders and other helpers."""
