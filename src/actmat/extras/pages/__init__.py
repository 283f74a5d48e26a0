"""HTML pages: the report of a merge, comparison of two."""
