"""What we rely on in the libraries that we pin, so that an upgrade fails here first."""
