"""`python -m deploy.demo_model.data.fetch ARCHIVES`: downloads what `sources.tsv` names, with pip and apt-get.

Wheels only, so nothing of a package runs. What is already there is not fetched again. Debian packages need a Debian 12
host with its package lists up to date. Not here: reading the archives.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from deploy.demo_model.data.sources import Source, read_sources


def command(source: Source, folder: Path) -> list[str]:
    """What downloads one archive into the folder that it runs in."""
    if source.registry == "debian":
        return ["apt-get", "download", "-q", f"{source.name}={source.version}"]
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    return [sys.executable, "-m", "pip", "download", *options, f"{source.name}=={source.version}"]


def main() -> None:
    """The command; ends with code 1 when something could not be fetched."""
    parser = argparse.ArgumentParser(prog="python -m deploy.demo_model.data.fetch", description=__doc__)
    parser.add_argument("archives", type=Path)
    folder = parser.parse_args().archives.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    missing = [s for s in read_sources() if not (folder / s.file).is_file()]
    failed = [s.name for s in missing if subprocess.run(command(s, folder), cwd=folder, check=False).returncode]
    print(f"{len(missing) - len(failed)} fetched, {len(failed)} failed {failed or ''}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
