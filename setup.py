"""Packages of the distribution: portattn, with backends/ and quirks/ as its parts, which pyproject.toml cannot say."""

from setuptools import find_packages, setup

PARTS = ("backends", "quirks")

setup(
    packages=[
        *find_packages(include=["portattn", "portattn.*"]),
        *(f"portattn.{name}" for name in find_packages(include=[*PARTS, *(f"{part}.*" for part in PARTS)])),
    ]
)
