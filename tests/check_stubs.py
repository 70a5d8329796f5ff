"""Compares `cluster/pb` with what `proto/*.proto` generates today; `--write` regenerates it."""

from __future__ import annotations

import filecmp
import re
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "cluster" / "pb"


def generate(folder: Path) -> None:
    """Writes the stubs for every proto file into `folder`."""
    sources = [str(path) for path in sorted((ROOT / "proto").glob("*.proto"))]
    well_known = str(resources.files("grpc_tools") / "_proto")
    plugins = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"-I{ROOT / 'proto'}",
        f"-I{well_known}",
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
        *(f"--{kind}_out={folder}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    for path in [*folder.glob("*_pb2_grpc.py"), *folder.glob("*_pb2_grpc.pyi")]:  # the generated import is absolute; ours live in a package
        text = path.read_text()
        path.write_text(re.sub(r"^import (\w+_pb2) as", r"from cluster.pb import \1 as", text, flags=re.MULTILINE))


def main() -> None:
    if "--write" in sys.argv[1:]:
        generate(TARGET)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        names = sorted(path.name for path in Path(folder).iterdir())
        _, differing, missing = filecmp.cmpfiles(folder, TARGET, names, shallow=False)
    if differing or missing:
        raise SystemExit(f"cluster/pb differs from proto/: {', '.join(differing + missing)}; run `make proto`")
    print(f"cluster/pb matches proto/ ({len(names)} files)")


if __name__ == "__main__":
    main()
