"""Code that all suites share: cached stages, progress, merging, scores, tables, the study.

An experiment is a chain of stages. Every stage writes into `cache.Cache` under a key that holds all that determines its
result, so that an interrupted run goes on where it stopped and a changed option never returns an old number.
"""
