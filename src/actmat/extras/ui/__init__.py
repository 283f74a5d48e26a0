"""`actmat ui`: a page on this machine to choose inputs, see the plan, merge, watch and compare.

It writes recipes and calls the library, and can do nothing that the command line cannot.
"""
