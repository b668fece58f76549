"""Makes this folder's helper modules importable by its tests, and registers the models that fail on purpose."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
