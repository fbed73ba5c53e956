"""The tests of mutation share the scripts that are changed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # for `parent`
