"""Fast tests without models: the unit part stays under a minute."""
