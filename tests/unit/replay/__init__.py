"""Tests of the package `replay`."""
