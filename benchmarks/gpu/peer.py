"""One merge by mergekit: `python peer.py CONFIGURATION OUT DEVICE`."""

import json
import sys
from pathlib import Path

from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions

if __name__ == "__main__":
    file, out, device = sys.argv[1:]
    text = Path(file).read_text(encoding="utf-8")
    options = MergeOptions(device=device, lazy_unpickle=True, low_cpu_memory=device != "cpu", write_model_card=False)
    run_merge(MergeConfiguration.model_validate(json.loads(text)), out, options, text)
