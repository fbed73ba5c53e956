"""The tests of the zoo share a small one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
