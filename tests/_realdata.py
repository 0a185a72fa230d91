"""Real market files, which the project does not hold: a folder named by FOXHUNT_TEST_DATA, or one of shared files beside the checkout."""
import os
from pathlib import Path

import pytest


def real(name: str = "") -> Path:
    "The file or folder `name` among the real data; the test is skipped where it is missing."
    here = os.environ.get("FOXHUNT_TEST_DATA")
    folder = Path(here) if here else Path(__file__).parents[2] / "shared" / "data"
    path = folder / name
    if not path.exists(): pytest.skip(f"real data {name or folder.name} is not here (set FOXHUNT_TEST_DATA)")
    return path
