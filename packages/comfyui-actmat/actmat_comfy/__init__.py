"""Nodes of ComfyUI for merges with actmat. `host` and `nodes` need ComfyUI, the other modules do not."""
