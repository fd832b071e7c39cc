"""The list of archives: registry, package, version, licence. `sources.tsv` is that list.

`python -m deploy.demo_model.data.sources ARCHIVES` writes the list anew from wheels and Debian packages in a folder,
leaving out every wheel whose metadata does not name a permissive licence. Licences of Debian packages are those of
their upstream, by hand (`DEBIAN`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from deploy.demo_model.data.choose import families, permissive
from deploy.demo_model.data.documents import read_wheel

LIST = Path(__file__).with_name("sources.tsv")
DEBIAN = {
    "libpython3.11-minimal": "PSF-2.0", "libpython3.11-stdlib": "PSF-2.0", "python3.11-doc": "PSF-2.0",
    "postgresql-doc-15": "PostgreSQL", "apache2-doc": "Apache-2.0", "python-aiohttp-doc": "Apache-2.0",
    "python-cryptography-doc": "Apache-2.0 OR BSD-3-Clause", "python-requests-doc": "Apache-2.0",
    "python-tornado-doc": "Apache-2.0", "python-xarray-doc": "Apache-2.0",
} | dict.fromkeys(
    (
        "python-astropy-doc", "python-celery-doc", "python-click-doc", "python-dask-doc", "python-distributed-doc",
        "python-django-doc", "python-djangorestframework-doc", "python-flask-doc", "python-h5py-doc",
        "python-jinja2-doc", "python-pandas-doc", "python-scipy-doc", "python-skimage-doc", "python-sklearn-doc",
        "python-statsmodels-doc", "python-sympy-doc", "python-werkzeug-doc",
    ),
    "BSD-3-Clause",
) | dict.fromkeys(
    ("python-attr-doc", "python-django-allauth-doc", "python-sqlalchemy-doc", "twisted-doc"), "MIT"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """An archive of the corpus."""

    registry: str  # "pypi" or "debian"
    name: str
    version: str
    licence: str
    file: str

    def find(self, archives: Path) -> Path:
        """The fetched archive; FileNotFoundError where it is missing."""
        path = archives / self.file
        if not path.is_file():
            raise FileNotFoundError(f"{path}: not fetched")
        return path


def read_sources(path: Path = LIST) -> list[Source]:
    """The list in its order."""
    return [Source(*line.split("\t")) for line in path.read_text().splitlines() if line and line[0] != "#"]


def found(archives: Path) -> Iterable[Source]:
    """What a folder holds and may be used, Debian's first."""
    for path in sorted(archives.glob("*.deb")):
        name, version = path.name.split("_")[:2]
        if name in DEBIAN:
            yield Source("debian", name, unquote(version), DEBIAN[name], path.name)
    for path in sorted(archives.glob("*.whl")):
        wheel = read_wheel(path)
        if permissive(wheel.licence):
            yield Source("pypi", wheel.name, wheel.version, families(wheel.licence), path.name)


def main() -> None:
    """Writes the list."""
    parser = argparse.ArgumentParser(prog="python -m deploy.demo_model.data.sources", description=__doc__)
    parser.add_argument("archives", type=Path)
    options = parser.parse_args()
    lines = ["# registry\tpackage\tversion\tlicence\tfile"]
    lines += ["\t".join((s.registry, s.name, s.version, s.licence, s.file)) for s in found(options.archives)]
    LIST.write_text("\n".join(lines) + "\n")
    print(f"{LIST}: {len(lines) - 1} archives")


if __name__ == "__main__":
    main()
