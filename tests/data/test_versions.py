"""Which packages are installed, and which is asked for but is not."""

from importlib.metadata import version

from modeling_supclap.datasets_scripts.versions import installed_versions


def test_installed_packages_in_the_order_asked_for():
    found = installed_versions(["torch", "no-such-package", "numpy"])
    assert list(found.items()) == [("torch", version("torch")), ("numpy", version("numpy"))]
