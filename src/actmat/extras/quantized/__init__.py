"""Codecs of quantized weights."""
