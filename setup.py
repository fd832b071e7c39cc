"""Builds the native libraries; everything else about the package stands in pyproject.toml.

They are plain shared objects with a C ABI, loaded with ctypes. Without a C++ compiler the installation still
succeeds (`optional`), and loading says what to install.
"""

from pathlib import Path

from setuptools import Extension, setup

FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-pthread", "-Wall"]
# Python's own flags often bring -fwrapv, with which the experts' loops over bytes take a tenth longer out of cache.
FLAGS_OF = {"lanes.native": ["-fno-wrapv"]}


def native(package: str, name: str) -> Extension:
    """One library from all C++ files of a package's folder."""
    folder = Path(package.replace(".", "/"))
    return Extension(
        f"{package}.{name}",
        sources=sorted(str(p) for p in folder.glob("*.cpp")),
        depends=sorted(str(p) for p in folder.glob("*.h")),
        extra_compile_args=FLAGS + FLAGS_OF.get(package, []),
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,
    )


LIBRARIES = {
    "lanes.native": "libexperts",
    "shared_experts.native": "libquantise",
    "shared_experts.native_rows": "librows",
}

setup(ext_modules=[native(package, name) for package, name in LIBRARIES.items()])
