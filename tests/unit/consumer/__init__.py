"""Tests of the package `consumer`."""
