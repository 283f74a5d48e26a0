"""The file that a Space of the hub runs."""

from actmat_app.serving import launch

if __name__ == "__main__":
    launch()
