"""The test packages. They are packages so that `tests.unit.protocol` can never stand in for `protocol` itself."""
