"""Do estimates of the inputs, or lengths, that need no data make better merges than the average? On trained experts."""
