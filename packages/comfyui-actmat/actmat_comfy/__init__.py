"""ComfyUI nodes for merging with actmat. Only `host` and `nodes` need ComfyUI."""
