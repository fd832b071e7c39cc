"""`expressway keys`: who may use the doors. A running server sees every change with its next request.

Not here: what the file may say beyond names and keys (tenants). Invariants: a key is shown once, when it is made, and
kept only as its hash; the file is replaced as a whole and never open to others.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from coordinator.config import default_tenants
from coordinator.errors import BadTenants
from coordinator.tenants import Tenants, hash_key

_SHOWN = 12  # characters of a key's hash that tell it from others

_file = click.option(
    "--tenants", "path", type=click.Path(path_type=Path), metavar="FILE", help="Default: that of `serve`."
)

_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.group()
def command() -> None:
    """Make, list and revoke keys. Once there is one, every request to the doors needs one."""


@command.command()
@click.argument("name")
@click.option("--priority", type=click.Choice(["interactive", "default", "batch"]), help="The best it may ask for.")
@_json
@_file
def add(name: str, priority: str | None, as_json: bool, path: Path | None) -> None:
    """Print a new key of tenant NAME, who is made if there is none."""
    path = path or default_tenants(dict(os.environ))
    tenants = _read(path)
    first = not any(each.get("keys") for each in tenants)
    entry = next((each for each in tenants if each.get("name") == name), None)
    if entry is None:
        entry = {"name": name, "keys": []}
        tenants.append(entry)
    if priority is not None:
        entry["priority"] = priority
    key = f"xw-{secrets.token_urlsafe(32)}"
    entry.setdefault("keys", []).append(hash_key(key))
    _write(path, tenants)
    print(json.dumps({"name": name, "key": key}) if as_json else key)
    if first:
        print("from now on every request to the doors needs a key: Authorization: Bearer KEY", file=sys.stderr)


@command.command("list")
@_json
@_file
def list_keys(as_json: bool, path: Path | None) -> None:
    """Show tenants and the beginnings of their keys' hashes."""
    path = path or default_tenants(dict(os.environ))
    tenants = _read(path)
    found = [
        {
            "name": each["name"],
            "priority": each.get("priority", "default"),
            "keys": [key.removeprefix("sha256:")[:_SHOWN] for key in each.get("keys", [])],
        }
        for each in tenants
    ]
    if as_json:
        print(json.dumps({"tenants": found}))
        return
    if not path.exists():
        print(f"no keys: a server that starts without {path} asks for none", file=sys.stderr)
    for entry in found:
        print(f"{entry['name']}  {entry['priority']}  {' '.join(entry['keys']) or '(no keys)'}")


@command.command()
@click.argument("name")
@click.option("--key", "beginning", metavar="HASH", help="Only the key whose hash begins so, as `list` shows it.")
@_json
@_file
def revoke(name: str, beginning: str | None, as_json: bool, path: Path | None) -> None:
    """Revoke the keys of tenant NAME."""
    path = path or default_tenants(dict(os.environ))
    tenants = _read(path)
    entry = next((each for each in tenants if each.get("name") == name), None)
    if entry is None:
        raise BadTenants(f"no tenant {name!r}")
    kept = [key for key in entry.get("keys", []) if beginning and not key.startswith(f"sha256:{beginning}")]
    gone = len(entry.get("keys", [])) - len(kept)
    if not gone:
        raise BadTenants(f"{name!r} has no such key")
    entry["keys"] = kept
    _write(path, tenants)
    print(json.dumps({"revoked": gone}) if as_json else f"{gone} key{'s' if gone > 1 else ''} revoked")
    if not any(each.get("keys") for each in tenants):
        print(f"no key is left: nobody may use the doors; without {path}, the next start needs none", file=sys.stderr)


def _read(path: Path) -> list[dict[str, Any]]:
    """The file's tenants, checked; none when there is no file."""
    if not path.exists():
        return []
    Tenants.load(path)
    found: list[dict[str, Any]] = json.loads(path.read_bytes())["tenants"]
    return found


def _write(path: Path, tenants: list[dict[str, Any]]) -> None:
    data = json.dumps({"tenants": tenants}, indent=1).encode()
    Tenants.parse(data)  # a server must be able to read it
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".tenants-")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
