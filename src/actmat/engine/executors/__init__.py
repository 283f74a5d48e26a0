"""Where units run: one file per executor. An executor decides nothing but that; `base.Executor` is the contract."""
