"""`python3 .ci/contents.py DIST`: wheel and sdist have every tracked file of the packages, and the wheel no other."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGES = ("zero/", "collectives/")


def main(folder: str) -> int:
    tracked = set(subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines())
    (wheel,), (sdist,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        packed = set(opened.namelist())
    with tarfile.open(sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    expected = {name for name in tracked if name.startswith(PACKAGES)}
    missing = {wheel: expected - packed, sdist: expected - source}
    foreign = {name for name in packed if not name.startswith(PACKAGES) and ".dist-info/" not in name}
    for file, names in missing.items():
        if names:
            print(f"{file.name} lacks {', '.join(sorted(names))}", file=sys.stderr)
    if foreign:
        print(f"{wheel.name} has {', '.join(sorted(foreign))}, which are of no package", file=sys.stderr)
    return 1 if foreign or any(missing.values()) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
