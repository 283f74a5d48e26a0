"""Web page for merging models: `actmat ui` locally, or a Space on the hub. Only `page` and `serving` need Gradio."""
