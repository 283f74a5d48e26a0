"""The same merges by several tools: what they cost, how exact they are, what they refuse, what faults leave behind.

A tool joins by one file, `with_NAME.py`: what pip installs, its methods, and how it merges.
"""
