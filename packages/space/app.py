"""The file that a space of the hub runs."""

from actmat_space.page import launch

if __name__ == "__main__":
    launch()
