"""Tasksets that come with verifiers."""
