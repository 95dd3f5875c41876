"""List the packages of the wheel; `pyproject.toml` contains all other settings.

`datasets_scripts`, `metrics` and `recipes` are installed inside `modeling_supclap`, because top-level packages with
these names would collide with a user's modules. The links in `modeling_supclap` are not used here, because git does not
create links on Windows. The build fails if one of the folders is missing. The studies are not installed.
"""

from setuptools import find_namespace_packages, setup

FOLDERS = ("datasets_scripts", "metrics", "recipes")

links = [f"modeling_supclap.{folder}*" for folder in FOLDERS]
packages = find_namespace_packages(include=["modeling_supclap*"], exclude=links)
for folder in FOLDERS:
    packages.append(f"modeling_supclap.{folder}")
    for name in find_namespace_packages(folder, exclude=["studies*", "configs*"]):
        packages.append(f"modeling_supclap.{folder}.{name}")

setup(packages=packages, package_dir={f"modeling_supclap.{folder}": folder for folder in FOLDERS})
