"""Which parts of the tree may import which."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import sglang.srt.autotune as autotune

FOLDER = Path(autotune.__file__).parent
SUBSYSTEM = "sglang.srt.autotune"


def engine_imports(path: Path) -> Iterator[str]:
    """The modules of this tree that a file imports, at its top or later, those of the subsystem left out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.split(".")[0] == "sglang" and not f"{name}.".startswith(f"{SUBSYSTEM}."):
                yield name


def test_the_stage_imports_nothing_of_the_engine_that_it_tunes():
    files = [path for path in FOLDER.rglob("*.py") if "bench" not in path.relative_to(FOLDER).parts]
    assert len(files) > 50
    found = {str(path.relative_to(FOLDER)): names for path in files if (names := list(engine_imports(path)))}
    assert found == {}


def test_an_import_of_the_engine_is_seen_in_the_bench_which_measures_one():
    assert any(list(engine_imports(path)) for path in (FOLDER / "bench").glob("*.py"))
