"""The tests of the zoo share a small one."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # for `small_zoo`
