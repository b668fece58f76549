"""The layers of the code, one way only: an import against the arrow fails here."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "flash_vision"
ALLOWED = {
    "ops": {"ops"},
    "layers": {"ops", "layers"},
    "models": {"ops", "layers", "models"},
    "data": {"data"},
    "profiling": {"ops", "profiling"},
    "train": {"train", "data"},
    "dense": {"dense", "train", "data"},
    "lab": {"ops", "layers", "models", "data", "profiling", "train", "lab"},
}


def imported_parts(file):
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "flash_vision" and len(parts) > 1 and (PACKAGE / parts[1]).is_dir():
                yield parts[1]


def test_every_folder_of_the_package_has_its_place():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(ALLOWED)


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_imports_follow_the_arrows(folder):
    for file in (PACKAGE / folder).rglob("*.py"):
        wrong = set(imported_parts(file)) - ALLOWED[folder]
        assert not wrong, f"{file.relative_to(PACKAGE)} imports {sorted(wrong)}"
