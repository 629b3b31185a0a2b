"""Tests of `rl-journal`."""
