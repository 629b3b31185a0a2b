"""Versions of installed packages, for reports of bugs and model cards. The packages themselves are not imported."""


def installed_version(package: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # a tenth of the time of `--help`

    try:
        return version(package)
    except PackageNotFoundError:
        return None
