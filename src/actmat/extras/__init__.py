"""Parts beyond the core: each plugs in by entry points, as those of other distributions do (`actmat.plugins`)."""
