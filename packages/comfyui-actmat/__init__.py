"""Custom ComfyUI nodes that merge LoRA files and checkpoints with actmat; ComfyUI calls `comfy_entrypoint`."""

from __future__ import annotations

from typing import Any


async def comfy_entrypoint() -> Any:
    """Return the extension with all nodes; ComfyUI logs errors.

    Raises:
        ImportError: actmat is not installed in ComfyUI's Python.
    """
    import importlib.util

    if importlib.util.find_spec("actmat") is None:
        raise ImportError(
            "comfyui-actmat needs the package actmat, which is not installed in ComfyUI's Python. Fix: run "
            "`python -m pip install -r requirements.txt` in the folder of comfyui-actmat, with the Python that runs "
            "ComfyUI (python_embeded in the portable version)."
        )
    from .actmat_comfy.nodes import ActmatExtension

    return ActmatExtension()
