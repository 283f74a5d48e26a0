"""Codecs of quantised weights."""
