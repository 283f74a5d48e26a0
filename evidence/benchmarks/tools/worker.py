"""One merge in one tool's environment: `python worker.py NAME REQUEST`, the arguments of its `merge` as JSON."""

import importlib
import json
import sys

if __name__ == "__main__":
    importlib.import_module(f"with_{sys.argv[1]}").merge(**json.loads(sys.argv[2]))
