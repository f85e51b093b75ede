"""The Python blocks of docs/jax-notes.md run, and their assertions hold on the installed jax: the
notes cannot rot."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_recipe_of_the_notes_runs(tmp_path):
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "jax-notes.md").read_text(), re.M | re.S
    )
    assert len(blocks) >= 7
    script = tmp_path / "notes.py"
    script.write_text("\n\n".join(blocks))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
