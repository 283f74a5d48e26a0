"""Entry point of a Space on the hub."""

from actmat_app.serving import launch

if __name__ == "__main__":
    launch()
