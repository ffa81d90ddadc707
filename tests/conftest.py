import sys
from pathlib import Path

# The ranks get this path, too; so tests can import what they have in common.
sys.path.append(str(Path(__file__).parent))
