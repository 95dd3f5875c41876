"""Which packages made a file."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of packages, in this order; those that are not installed are left out.

    >>> list(installed_versions(["numpy", "no-such-package"]))
    ['numpy']
    """
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
