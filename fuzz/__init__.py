"""A fuzzer of everything that reads what others wrote; `python -m fuzz --minutes 10`, see `fuzz.harness`."""
