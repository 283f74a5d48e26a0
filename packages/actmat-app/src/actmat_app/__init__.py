"""A page to merge models: `actmat ui` on your machine, or a Space of the hub. Only `page` and `serving` need Gradio."""
