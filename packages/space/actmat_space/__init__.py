"""A page on the hub that merges adapters: plan, merge, report, download, push. The page itself is in `page`."""

from actmat_space.asking import Form, Found, look_up, parse_adapters
from actmat_space.jobs import Jobs
from actmat_space.limits import Limits

__all__ = ["Form", "Found", "Jobs", "Limits", "look_up", "parse_adapters"]
