"""Commands that this distribution adds to `actmat`: entry points of the group `actmat.commands`."""
