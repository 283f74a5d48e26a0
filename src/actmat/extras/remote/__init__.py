"""Remote storage: files by ranges over HTTP and fsspec, uploads."""
